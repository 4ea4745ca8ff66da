"""Attention where models and torch's transforms call it: kernels run, and answers are ATen's."""

import functools

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import tritonite
from tritonite import devices

CPU = devices.current.type == "cpu"
FORWARD = "_scaled_dot_product_flash_attention_for_cpu" if CPU else "_scaled_dot_product_*_attention"
BACKWARD = f"{FORWARD}_backward"


def _launched(name):
    """Return how often kernels of an operator ran. On a GPU the operator is one of several."""
    names = [name] if CPU else [each for each in tritonite.stats() if each.startswith("_scaled_dot_product")]
    names = [each for each in names if each.endswith("_backward") == name.endswith("_backward")]
    assert not any(tritonite.stats()[each].declined for each in names)
    return sum(tritonite.stats()[each].launched + tritonite.stats()[each].replayed for each in names)


def _drawn(*shape, dtype=torch.float32):
    return torch.randn(shape, device=tritonite.device).to(dtype)


def _operands(*shape, dtype=torch.float32):
    return [_drawn(*shape, dtype=dtype).requires_grad_() for _ in range(3)]


def _results(function, operands):
    """Return a function's result, and the gradients of its sum of squares."""
    out = function(*operands)
    return out, *torch.autograd.grad(out.float().square().sum(), operands)


def _check(function, operands, far=1e-4, times=1):
    """Compare results with and without kernels, which must run `times` times forward and once backward."""
    expected = _results(function, operands)
    tritonite.reset_stats()
    with tritonite.use_gems(include=[FORWARD, BACKWARD]):
        found = _results(function, operands)
    assert _launched(FORWARD) == times and _launched(BACKWARD) == 1
    for own, aten in zip(found, expected, strict=True):
        assert own.dtype is aten.dtype and own.shape == aten.shape
        torch.testing.assert_close(own, aten, atol=far, rtol=far)


@pytest.mark.parametrize("causal", [False, True])
def test_sdpa(path, causal):
    _check(functools.partial(scaled_dot_product_attention, is_causal=causal), _operands(2, 3, 20, 16))


def test_multihead_attention(path):
    module = torch.nn.MultiheadAttention(32, 4, batch_first=True).to(tritonite.device)
    _check(lambda *inputs: module(*inputs, need_weights=False)[0], _operands(2, 10, 32))


def test_checkpointing(path):
    """The forward pass runs again before the backward pass."""

    def layer(query, key, value):
        return scaled_dot_product_attention(query.sin(), key, value, is_causal=True)

    _check(lambda *operands: checkpoint(layer, *operands, use_reentrant=False), _operands(1, 2, 12, 16), times=2)


def test_autocast(path):
    """Operands of float32 are multiplied as bfloat16."""

    def function(*operands):
        with torch.autocast(devices.current.type, dtype=torch.bfloat16):
            return scaled_dot_product_attention(*operands)

    assert function(*_operands(1, 2, 12, 16)).dtype is torch.bfloat16
    _check(function, _operands(1, 2, 12, 16), far=5e-2)


def test_compiled(path):
    torch._dynamo.reset()
    function = functools.partial(scaled_dot_product_attention, is_causal=True)
    _check(torch.compile(function, backend="aot_eager", fullgraph=True), _operands(1, 2, 12, 16))


def test_vmap(path):
    operands = [x.detach() for x in _operands(3, 1, 2, 12, 16)]
    expected = torch.stack([scaled_dot_product_attention(*each) for each in zip(*operands, strict=True)])
    tritonite.reset_stats()
    with tritonite.use_gems(include=[FORWARD]):
        found = torch.vmap(scaled_dot_product_attention)(*operands)
    assert _launched(FORWARD)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_jagged_sequences():
    """On a GPU sequences are packed. On a CPU ATen multiplies each one separately."""
    dtype = torch.float32 if CPU else torch.float16
    lengths = (5, 12, 1)
    rows = [[_drawn(length, 2, 16, dtype=dtype) for length in lengths] for _ in range(3)]
    nested = [torch.nested.nested_tensor(each, layout=torch.jagged).transpose(1, 2) for each in rows]
    tritonite.reset_stats()
    with tritonite.use_gems(include="*", faster_only=False):
        found = scaled_dot_product_attention(*nested).transpose(1, 2).unbind()
    names = ["bmm"] if CPU else ["_flash_attention_forward", "_efficient_attention_forward"]
    assert sum(tritonite.stats()[name].launched for name in names if name in tritonite.stats())
    for i, own in enumerate(found):
        alone = [each[i].double().transpose(0, 1) for each in rows]
        exact = scaled_dot_product_attention(*alone).transpose(0, 1)
        torch.testing.assert_close(own.double(), exact, atol=1e-5 if CPU else 2e-3, rtol=1e-3)


def test_flex_attention():
    """Flex attention has no operator here and is unchanged. On a CPU torch has no gradient for it."""
    operands = _operands(1, 2, 16, 16)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 16, 16, device=tritonite.device, BLOCK_SIZE=16)
    function = functools.partial(flex_attention, score_mod=lambda score, *_: score * 0.5, block_mask=mask)

    def results():
        return (function(*[x.detach() for x in operands]),) if CPU else _results(function, operands)

    expected = results()
    tritonite.reset_stats()
    with tritonite.use_gems(include="*", faster_only=False):
        found = results()
    assert sum(counts.launched for counts in tritonite.stats().values())
    for own, aten in zip(found, expected, strict=True):
        torch.testing.assert_close(own, aten, atol=1e-4, rtol=1e-4)
