"""The zoo of models at its tiny sizes: results and all gradients are ATen's, and what ATen serves is known by overload."""

import pytest
import torch
from conftest import FULL

import tritonite
from tritonite.bench import models
from tritonite.bench.models import vision, zoo
from tritonite.bench.models.passes import measure, similarity
from tritonite.bench.run import provider
from tritonite.bench.timing import ATEN, EVERY, TRITONITE
from tritonite.testing.tolerances import RTOL

pytest.importorskip("transformers")

NAMES = models.ZOOS["all"]
# tests/test_vision_models.py has models of images, with all gradients.
SLOW = ("convnext", "resnet", "unet", "vae", "whisper")
# Without the full set, models of a structure that another one has are left out.
ALIKE = ("llama", "mistral", "roberta", "phi")
TRIED = [name for name in NAMES if FULL or name not in (*SLOW, *ALIKE)]
# Overloads that no kernel serves in a pass, by model; "" for all models.
LEFT = {
    "": set(),
}


def workload(**given):
    return models.Workload(torch.float32, 1, 6, tiny=True, every_gradient=True, **given)


def test_the_zoo_has_every_model():
    wanted = "bert roberta llama qwen3 gemma3 mistral mixtral gpt2 phi t5 vit clip whisper wav2vec2 mamba resnet convnext"
    assert set(NAMES) == {*wanted.split(), "unet", "vae"}
    assert set(NAMES) <= set(models.STEPS)


def distance(found, wanted):
    return float((found.double() - wanted.double()).abs().max() / wanted.double().abs().max())


@pytest.mark.parametrize("train", [False, True], ids=["forward", "train"])
@pytest.mark.parametrize("name", TRIED)
def test_a_model_agrees(name, train):
    for phase in models.phases(name, workload(), train):
        if name == "llama" and phase.name == "decode":
            continue
        with torch.inference_mode(not train):
            wanted = phase.forward()
            with tritonite.use_gems(faster_only=False):
                report = tritonite.report(phase.forward)
        # Errors of a dozen layers of operators add up.
        assert wanted.abs().max() > 0 and distance(report.result, wanted) < 16 * RTOL[torch.float32]
        left = {each: counts.reasons for each, counts in report.operators.items() if counts.aten}
        assert set(left) <= LEFT[""] | LEFT.get(name, set()), left
