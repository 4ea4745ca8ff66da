"""Gated RMS norms against torch's composition in float64: values, gradients, layouts, errors, transforms."""

import functools

import pytest
import torch
from compositions import agree, check_library_operator, close, normal
from conftest import every_second

import tritonite
from tritonite import fused
from tritonite.errors import Unsupported

functional = torch.nn.functional
library = torch.ops.tritonite
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def gated(x, gate, weight=None, eps=1e-6):
    return functional.rms_norm(x, x.shape[-1:], weight, eps) * functional.silu(gate)


@every_second(("width", "dtype"), [1, 3, 64, 1000, 4097], DTYPES)
def test_values_and_gradients(width, dtype):
    x, gate = (normal(2, 3, width, dtype=dtype, grad=True) for _ in range(2))
    ours, theirs = (functools.partial(each, eps=1e-2) for each in (fused.gated_rms_norm, gated))
    agree(ours, theirs, [x, gate], terms=16, grad_terms=256)
    agree(ours, theirs, [x, gate, normal(width, dtype=dtype, grad=True)], terms=16, grad_terms=256)


@pytest.mark.parametrize("width", [70, 600])
def test_rows_in_chunks_and_split_rows(width, tiny_blocks):
    operands = [normal(5, width, grad=True), normal(5, width, grad=True), normal(width, grad=True)]
    agree(fused.gated_rms_norm, gated, operands, terms=16, grad_terms=256)


@pytest.mark.smoke
def test_one_row():
    agree(fused.gated_rms_norm, gated, [normal(24, grad=True) for _ in range(3)], terms=16, grad_terms=256)


@pytest.mark.smoke
def test_weights_may_be_float32_and_frozen():
    x, gate = normal(4, 64, dtype=torch.bfloat16, grad=True), normal(4, 64, dtype=torch.bfloat16)
    agree(fused.gated_rms_norm, gated, [x, gate, normal(64, grad=True)], terms=16, grad_terms=64)
    agree(fused.gated_rms_norm, gated, [x, gate, normal(64)], terms=16, grad_terms=64)


def test_operands_of_any_stride():
    x, gate = normal(24, 5, 3).transpose(0, 2).requires_grad_(), normal(3, 5, 24, 2)[..., 0].requires_grad_()
    agree(fused.gated_rms_norm, gated, [x, gate, normal(48)[::2].requires_grad_()], terms=16, grad_terms=64)
    agree(fused.gated_rms_norm, gated, [x, normal(24).expand(3, 5, 24)], terms=16, grad_terms=64)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (4, 0)])
def test_no_elements(shape):
    x, weight = normal(*shape, grad=True), normal(shape[-1], grad=True)
    out = fused.gated_rms_norm(x, x, weight)
    assert out.shape == shape
    for grad in torch.autograd.grad(out.sum(), (x, weight)):
        assert not grad.any()


def test_transformers_module():
    pytest.importorskip("transformers")
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    module = Qwen3NextRMSNormGated(32).to(tritonite.device)
    module.weight.data.normal_()
    x, gate = normal(5, 32), normal(5, 32)
    close(fused.gated_rms_norm(x, gate, module.weight.detach()), module(x, gate).detach().double(), 16, 1e-5)


X = torch.zeros(2, 8)
WRONG = [
    ((X, X[:1]), "gate has the shape"),
    ((X, X.half()), "one dtype"),
    ((X.int(), X.int()), "x is torch.int32"),
    ((X, X, torch.zeros(7)), "weight has the shape"),
    ((X, X, torch.zeros(8, dtype=torch.half)), "weight is torch.float16"),
]


@pytest.mark.declines("refused calls")
@pytest.mark.parametrize(("args", "reason"), WRONG)
def test_wrong_arguments_are_refused(args, reason):
    for device in (tritonite.device, "meta"):
        with pytest.raises(Unsupported, match=reason):
            fused.gated_rms_norm(*[each.to(device) for each in args])


def calls():
    x, gate, weight, rstd = (normal(*each, grad=True) for each in ((2, 3, 8), (2, 3, 8), (8,), (2, 3, 1)))
    detached = [each.detach() for each in (x, x, gate, weight, rstd)]
    yield library.gated_rms_norm, (x, gate, weight, 1e-3)
    yield library.gated_rms_norm, (x, gate)
    yield library.gated_rms_norm_backward, (*detached, True)
    yield library.gated_rms_norm_backward, (*detached[:3], None, detached[4], False)


@pytest.mark.parametrize("i", range(4))
def test_opcheck(i):
    check_library_operator(*list(calls())[i])


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_graphs_give_the_same(dynamic):
    operands = [normal(2, 3, 8, grad=True), normal(2, 3, 8, grad=True), normal(8, grad=True)]
    compiled = torch.compile(fused.gated_rms_norm, fullgraph=True, backend="aot_eager", dynamic=dynamic)(*operands)
    expected = fused.gated_rms_norm(*operands)
    torch.testing.assert_close(compiled, expected, rtol=0, atol=0)
    own, eager = (torch.autograd.grad(each.sum(), operands) for each in (compiled, expected))
    torch.testing.assert_close(own, eager, rtol=0, atol=0)


def test_vmap():
    x, gate, weights = normal(4, 3, 8), normal(3, 8), normal(4, 8)
    actual = torch.vmap(fused.gated_rms_norm, (0, None, None))(x, gate, weights[0])
    torch.testing.assert_close(actual, torch.stack([fused.gated_rms_norm(own, gate, weights[0]) for own in x]))
    actual = torch.vmap(fused.gated_rms_norm, (0, None, 0))(x, gate, weights)
    each = [fused.gated_rms_norm(own, gate, weight) for own, weight in zip(x, weights, strict=True)]
    torch.testing.assert_close(actual, torch.stack(each))
