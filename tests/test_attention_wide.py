"""Attention of heads of more than 256 elements: parts of the scores, masks, biases, shared heads, empty sequences."""

import math

import pytest
import torch
from conftest import covering
from test_attention import _by_definition as by_definition
from test_attention import _drawn as drawn
from test_attention import _operands as operands

import tritonite
from tritonite.engine.attention import wide
from tritonite.engine.attention.problem import Problem
from tritonite.errors import Decline

NAME = "_scaled_dot_product_efficient_attention"


@pytest.fixture(params=[False, True], ids=["whole", "parts"])
def parts(request, monkeypatch):
    """Run a test with all scores in memory, and with a few rows at a time, whose keys take several steps."""
    if request.param:
        monkeypatch.setattr(wide, "WIDE_SCORES", 200)
        monkeypatch.setattr(wide, "WIDE_BLOCK", 16)


def with_parts(name, values):
    """Parametrize a test by `parts` and values, or without the full set by half of the combinations."""
    cases = covering(2, [False, True], values)
    ids = [f"{'parts' if part else 'whole'}-{value}" for part, value in cases]
    return pytest.mark.parametrize(("parts", name), cases, ids=ids, indirect=["parts"])


def passes(query, key, value, bias=None, causal=False, scale=None):
    """Return (out, logsumexp, gradients) by the operators, and the gradient of the result."""
    ops = tritonite.overloads()
    out, logsumexp, seed, offset = ops[NAME](query, key, value, bias, True, 0.0, causal, scale=scale)
    grad = drawn(*out.shape, dtype=out.dtype)
    given = (grad, query, key, value, bias, out, logsumexp, seed, offset, 0.0, [True, True, True, False], causal)
    *grads, _ = ops[f"{NAME}_backward"](*given, scale=scale)
    return out, logsumexp, grads, grad


def by_engine(query, key, value):
    """Return the result, its gradients by the operands, and the gradient of the result, of the engine alone."""
    problem = Problem(query, key, value, None, None, False, 0, "ieee")
    out, logsumexp = torch.empty_like(query), torch.empty(query.shape[:3], device=query.device)
    wide.attention(problem, out, logsumexp, "inf")
    grad, grads = drawn(*out.shape, dtype=out.dtype), tuple(map(torch.empty_like, (query, key, value)))
    wide.attention_backward(problem, grad, out, logsumexp, grads)
    return out, grads, grad


def compare(query, key, value, bias=None, causal=False, scale=None, resolution=2e-5):
    out, logsumexp, grads, grad = passes(query, key, value, bias, causal, scale)
    exact = [x.double().requires_grad_() for x in (query, key, value)]
    added = None if bias is None else bias.double()
    expected, logarithms = by_definition(*exact, added, causal, scale=scale)
    torch.testing.assert_close(out.double(), expected, atol=resolution, rtol=resolution)
    rows = query.shape[2]
    torch.testing.assert_close(logsumexp[:, :, :rows].double(), logarithms, atol=1e-4, rtol=1e-5)
    assert logsumexp.shape[2] % 32 == 0 and logsumexp[:, :, rows:].eq(math.inf).all()
    for own, reference in zip(grads, torch.autograd.grad(expected, exact, grad.double()), strict=True):
        torch.testing.assert_close(own.double(), reference, atol=8 * resolution, rtol=8 * resolution)


@with_parts("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_results_and_gradients(parts, dtype):
    resolution = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    compare(*operands(B=2, S=20, T=33, D=264, V=320, dtype=dtype), resolution=resolution)


@pytest.mark.smoke
@with_parts("sizes", [(1, 1), (20, 33), (40, 40), (33, 20)])
def test_causal_masks_and_biases(parts, sizes):
    S, T = sizes
    query, key, value = operands(S=S, T=T, D=512)
    bias = drawn(1, 2, S, 48)[..., :T]
    compare(query, key, value, bias, causal=True, scale=0.125)
    compare(query, key, value, drawn(1, 1, 1, 48)[..., :T].expand_as(bias), scale=-0.05)


def test_rows_without_keys():
    """A bias of -inf hides a row's keys. Lowest and highest finite numbers hide none."""
    query, key, value = operands(S=20, T=24, D=264)
    bias = torch.zeros(1, 2, 20, 24, device=tritonite.device)
    bias[:, :, 3], bias[:, :, 5], bias[:, :, 7] = -math.inf, torch.finfo(bias.dtype).min, torch.finfo(bias.dtype).max
    out, logsumexp, grads, _ = passes(query, key, value, bias)
    mean = value.mean(2)
    assert out[:, :, 3].eq(0).all() and logsumexp[:, :, 3].eq(0).all() and all(x.isfinite().all() for x in grads)
    torch.testing.assert_close(out[:, :, 5], mean, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out[:, :, 7], mean, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sizes", [(0, 8), (8, 0), (0, 0)], ids=str)
def test_empty_sequences(sizes):
    S, T = sizes
    out, grads, *_ = by_engine(*operands(S=S, T=T, D=264))
    assert out.shape == (1, 2, S, 264) and out.eq(0).all() and all(x.eq(0).all() for x in grads)


def test_heads_that_share_keys(parts):
    given = operands(H=4, shared=2, S=9, T=12, D=264, dtype=torch.float16)
    _, grads, grad = by_engine(*given)
    exact = [x.double().requires_grad_() for x in given]
    expected, _ = by_definition(*exact)
    for own, reference in zip(grads, torch.autograd.grad(expected, exact, grad.double()), strict=True):
        torch.testing.assert_close(own.double(), reference, atol=1e-2, rtol=1e-2)


def test_what_is_declined():
    query, key, value = operands(S=8, T=8, D=264)
    bias = drawn(1, 2, 8, 8)
    ops = tritonite.overloads()
    with pytest.raises(Decline, match="dropout"):
        ops[NAME](query, key, value, None, True, 0.5)
    out, logsumexp, *state = ops[NAME](query, key, value, bias, True)
    given = (out, query, key, value, bias, out, logsumexp, *state, 0.0, [True] * 4)
    with pytest.raises(Decline, match="gradient of a bias"):
        ops[f"{NAME}_backward"](*given)


def test_replayed_calls(device):
    """A call of the same kind with another scale runs the recorded plan."""
    if device != "cuda":
        pytest.skip("ATen has the operator on CUDA alone")
    query, key, value = operands(S=40, T=40, D=512, dtype=torch.bfloat16)
    with tritonite.use_gems(faster_only=False):
        for scale in (0.1, 0.1, 0.2):
            out = getattr(torch.ops.aten, NAME)(query, key, value, None, True, scale=scale)[0]
            expected, _ = by_definition(*[x.double() for x in (query, key, value)], scale=scale)
            torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)
    assert tritonite.stats()[NAME].replayed
