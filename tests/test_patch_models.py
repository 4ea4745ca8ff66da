"""Patched models of transformers: outputs, losses and gradients are those of the model before, on kernels."""

import copy
import importlib.util

import pytest
import torch
from conftest import FULL, covering
from tiny_models import MODELS, apart, inputs, make, replaced, trained

import tritonite
from tritonite.testing.tolerances import RTOL

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
BF16 = torch.bfloat16


def results(model, given):
    """Return the loss, the gradients, and what the model returns in evaluation, in float64."""
    output, gradients = trained(model, given)
    model.eval()
    with torch.no_grad():
        logits = model(**given).logits.double()
    model.train()
    return float(output.loss.detach()), gradients, logits


def distance(found, wanted):
    """Return distances of results: of losses, of gradients, of logits."""
    return (
        abs(found[0] - wanted[0]) / abs(wanted[0]),
        apart(found[1], wanted[1]),
        float((found[2] - wanted[2]).abs().max() / wanted[2].abs().max()),
    )


# Without the full set, models of a structure that another one has are left out.
ALIKE = {"mistral", "qwen2", "gemma", "mixtral", "t5"}
NAMES = [name for name in MODELS if FULL or name not in ALIKE]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.smoke] * (name == "llama")) for name in NAMES])
def test_a_patched_model_computes_what_it_did(name):
    model = make(name)
    given = inputs(name)
    wanted = results(model, given)
    report = tritonite.patch(model)
    assert report.counts == replaced(name), report
    tritonite.reset_stats()
    found = results(model, given)
    assert all(counts.launched + counts.replayed and not counts.declined for counts in tritonite.stats().values())
    assert tritonite.stats()
    # Errors of a dozen layers of operators add up.
    assert max(distance(found, wanted)) < 16 * RTOL[torch.float32]
    assert tritonite.unpatch(model) == sum(report.counts.values())
    after = results(model, given)
    assert after[0] == wanted[0] and torch.equal(after[2], wanted[2])


SIXTEEN = list(MODELS) if FULL else ["llama", "gemma2", "gpt2"]


@pytest.mark.parametrize("name", SIXTEEN)
def test_a_patched_model_in_bfloat16_is_as_exact_as_before(name):
    model = make(name, BF16)
    given = inputs(name, BF16)
    exact = results(copy.deepcopy(model).float(), {k: v.float() if v.dtype is BF16 else v for k, v in given.items()})
    before = distance(results(model, given), exact)
    report = tritonite.patch(model)
    assert report.counts == replaced(name), report
    for own, other in zip(distance(results(model, given), exact), before, strict=True):
        assert own < 2 * other + RTOL[BF16] / 4


@pytest.mark.parametrize("castings", covering(2, ["llama", "gemma"], [torch.float32, BF16]))
def test_castings_are_told_apart_whatever_the_dtype(castings):
    name, dtype = castings
    report = tritonite.patch(make(name, dtype), mlp=False, rotary=False, loss=False)
    suffix = ", offset=1" if name == "gemma" else ""
    assert {each.operator for each in report.replaced} == {f"fused.rms_norm, casting={name!r}{suffix}"}


@pytest.mark.parametrize("name", list(MODELS) if FULL else ["llama"])
def test_steps_of_an_optimizer_have_the_losses_of_the_model_before(name):
    given = inputs(name)
    losses = []
    for patched in (False, True):
        model = make(name, **({"dropout_rate": 0.0} if name == "gated_t5" else {}))
        if patched:
            tritonite.patch(model)
        # Larger steps amplify roundoff: for an expert that gets no gradient, AdamW's step is the sign of roundoff.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        own = []
        for _ in range(10 if FULL else 4):
            output, _ = trained(model, given)
            optimizer.step()
            own.append(float(output.loss.detach()))
        losses.append(own)
    assert losses[0][-1] < losses[0][0]
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=2e-4, atol=0.0)


def test_logits_are_left_out_in_training_alone():
    model = make("llama")
    given = inputs("llama")
    tritonite.patch(model, norm=False, mlp=False, rotary=False)
    output = model(**given)
    assert output.logits is None and "logits" not in output and output["loss"] is output.loss
    loss, logits = model(**given, return_dict=False)[:2]
    assert float(loss.detach()) == pytest.approx(float(output.loss.detach())) and logits is None
    assert model(input_ids=given["input_ids"]).logits is not None
    assert model.eval()(**given).logits.shape == (1, 8, 64)


def test_logits_are_kept_on_request():
    model = make("gemma2")
    given = inputs("gemma2")
    expected = model(**given)
    tritonite.patch(model, norm=False, mlp=False, rotary=False, logits=True)
    tritonite.reset_stats()
    found = model(**given)
    assert "tritonite::linear_cross_entropy" in tritonite.stats()
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("options", [{"num_items_in_batch": torch.tensor(11)}, {"num_items_in_batch": 5}, "shifted"])
def test_options_of_the_loss_reach_it(options):
    model = make("llama")
    given = inputs("llama")
    if options == "shifted":
        options = {"shift_labels": given["labels"]}
    wanted, gradients = trained(model, given | options)
    tritonite.patch(model, norm=False, mlp=False, rotary=False)
    found, own = trained(model, given | options)
    assert found.logits is None
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-5, atol=0.0)
    assert apart(own, gradients) < 1e-5


def test_a_bias_and_a_frozen_head():
    model = make("phi")
    model.lm_head.weight.requires_grad_(False)
    given = inputs("phi")
    wanted, gradients = trained(model, given)
    tritonite.patch(model, norm=False, rotary=False)
    found, own = trained(model, given)
    assert "lm_head.bias" in own and "lm_head.weight" not in own
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-5, atol=0.0)
    assert apart(own, gradients) < 1e-5


def test_a_loss_of_logits_computed_otherwise_is_kept():
    model = make("llama")
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.logsumexp(-1).mean()
    report = tritonite.patch(model, norm=False, mlp=False, rotary=False)
    (kept,) = report.kept
    assert kept.kind == "loss" and "needed for more than a loss: logsumexp" in kept.reason
    assert "forward" not in vars(model)


def test_a_head_with_hooks_computes_logits():
    model = make("llama")
    given = inputs("llama")
    assert tritonite.patch(model, norm=False, mlp=False, rotary=False).counts == {"loss": 1}
    seen = []
    model.lm_head.register_forward_hook(lambda *args: seen.append(args[-1].shape))
    assert model(**given).logits is not None and seen == [(1, 8, 64)]


def test_rotation_of_one_model_is_no_other_models():
    from transformers.models.llama import modeling_llama

    original = modeling_llama.apply_rotary_pos_emb
    patched, other = make("llama"), make("llama")
    tritonite.patch(patched, norm=False, mlp=False, loss=False)
    assert modeling_llama.apply_rotary_pos_emb is original
    tritonite.reset_stats()
    other(**inputs("llama"))
    assert "tritonite::rotary_embedding" not in tritonite.stats()
    patched(**inputs("llama"))
    assert "tritonite::rotary_embedding" in tritonite.stats()


def test_generation_with_a_cache():
    model = make("llama").eval()
    ids = inputs("llama", tokens=4)["input_ids"]
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    wanted = model.generate(ids, **options)
    tritonite.patch(model)
    assert torch.equal(model.generate(ids, **options), wanted)


def test_a_bare_transformer_has_no_loss():
    model = make("llama").model
    counts = replaced("llama")
    assert tritonite.patch(model).counts == {kind: counts[kind] for kind in ("RMS norm", "gated MLP", "rotation")}
