"""The zoo of models at its tiny sizes: results and all gradients are ATen's, and what ATen serves is listed."""

import collections
import re

import pytest
import torch
from conftest import FULL

import tritonite
from tritonite.bench import models
from tritonite.bench.models.zoo import without_dropout
from tritonite.bench.run import provider
from tritonite.bench.timing import ATEN, TRITONITE
from tritonite.testing.tolerances import RTOL

pytest.importorskip("transformers")

NAMES = models.ZOOS["all"]
# tests/test_vision_models.py has models of images, with all gradients.
SLOW = ("convnext", "resnet", "unet", "vae", "whisper")
# Without the full set, models of a structure that another one has are left out.
ALIKE = ("llama", "mistral", "roberta", "phi")
TRIED = [name for name in NAMES if FULL or name not in (*SLOW, *ALIKE)]
# Overloads without device work: allocations, views, and reads by the host.
HOSTED = {"_local_scalar_dense", "_unsafe_view", "detach_", "empty.memory_format", "empty_like", "new_empty_strided"}
# Overloads that ATen serves, by model. The host reads the lengths of CTC, and calls the overload for lists. Layers
# that are left out, and masked spectra, are drawn on the host.
_CTC = ("_ctc_loss", "_ctc_loss_backward", "_use_cudnn_ctc_loss", "_use_miopen_ctc_loss")
LEFT = {"wav2vec2": {*(f"{name}.Tensor" for name in _CTC), "rand"}, "whisper": {"rand"}}


# On a GPU the optimiser counts its steps on the CPU, and inputs are copied from there.
_OF_THE_HOST = re.compile(r"tensors on cpu|\d+ of \d+ tensors on the CPU|a (tensor|result) on another device")


def left_to_aten(reasons):
    """Return the overloads of a GPU's work that ATen serves, given its reasons by overload."""
    return {name for name, found in reasons.items() if not all(map(_OF_THE_HOST.fullmatch, found))}


def workload(batch=1, **given):
    return models.Workload(torch.float32, batch, 6, tiny=True, every_gradient=True, **given)


def test_the_zoo_has_every_model():
    wanted = (
        "bert roberta llama qwen3 gemma3 mistral mixtral gpt2 phi t5 vit clip whisper wav2vec2 mamba resnet convnext"
    )
    assert set(NAMES) == {*wanted.split(), "unet", "vae"}
    assert set(NAMES) <= set(models.STEPS)


def distance(found, wanted):
    return float((found.double() - wanted.double()).abs().max() / wanted.double().abs().max())


@pytest.mark.parametrize("train", [False, True], ids=["forward", "train"])
@pytest.mark.parametrize("name", TRIED)
def test_a_model_agrees(name, train):
    # A contrastive loss of one pair is 0.
    for phase in models.phases(name, workload(2 if name == "clip" else 1), train):
        with torch.inference_mode(not train):
            wanted = phase.forward()
            phase.restore()
            with tritonite.use_gems(faster_only=False):
                report = tritonite.report(phase.forward)
            phase.restore()
        # Errors of a dozen layers of operators add up.
        assert wanted.abs().max() > 0 and distance(report.result, wanted) < 16 * RTOL[torch.float32]
        left = {each: counts.reasons for each, counts in report.operators.items() if counts.aten}
        assert left_to_aten(left) <= HOSTED | LEFT.get(name, set()), left


@pytest.mark.parametrize("train", [False, True] if FULL else [False], ids=lambda train: "train" if train else "forward")
def test_patched_and_compiled_models_agree(train):
    """The command's table has a row a pass, with the similarity of each form and what ATen serves."""
    providers = (ATEN, TRITONITE, provider("patched"), provider("compiled"))
    case = models.ModelCase("qwen3", workload(), train)
    result = list(models.measure([case], providers, 1))[-1]
    assert not result.failure, result.failure
    assert set(result.times) == {"aten", "tritonite", "patched", "compiled"}
    assert set(result.similarities) == {"tritonite", "patched", "compiled"}
    assert min(result.similarities.values()) > 0.99999
    reasons = collections.defaultdict(list)
    for name, reason, _ in result.unserved:
        reasons[name].append(reason)
    assert left_to_aten(reasons) <= HOSTED


def test_dropout_is_off_in_training():
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.MultiheadAttention(4, 2, dropout=0.25))
    without_dropout(model)
    assert model[0].p == 0.0 and model[1].dropout == 0.0
