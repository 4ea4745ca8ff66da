"""Linear layers in float8 against an emulation of the quantised operands in float64, and against exact layers."""

import functools

import pytest
import torch
from compositions import close, normal
from conftest import every_second

import tritonite
from tritonite import devices, fused
from tritonite.errors import Unsupported
from tritonite.testing.tolerances import RTOL

library = torch.ops.tritonite
FLOATS = [torch.float16, torch.bfloat16, torch.float32]
# (rows, N, K): one element, one row, several tiles of odd sizes.
SIZES = [(1, 1, 1), (1, 40, 70), (6, 33, 130), (70, 24, 48)]


def quantized(x, dtype=torch.float8_e4m3fn):
    """Return the numbers that a float8 tensor with one scale stands for, in float64."""
    most = torch.finfo(dtype).max
    # On a GPU, ATen divides by a number as if it multiplied by the number's rounded inverse.
    scale = (x.detach().float().abs().max().cpu() / most).to(x.device)
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, 1.0, scale)
    return (x.detach().float() / scale).clamp(-most, most).to(dtype).double() * scale.double()


def gradients(x, weight, grad):
    """Return the gradients by x, the weight and the bias of float8 operands."""
    rows = quantized(grad, torch.float8_e5m2).flatten(0, -2)
    by_x = (rows @ quantized(weight)).view(x.shape)
    return by_x, rows.T @ quantized(x).flatten(0, -2), grad.double().flatten(0, -2).sum(0)


def agrees(actual, exact, terms):
    # Hopper's tensor cores add float8 products with 13 bits of the largest (DeepSeek-AI 2024).
    sums = 4e-6 if tritonite.backend.interpreted else 2e-3
    close(actual.detach(), exact, terms, max(RTOL[actual.dtype], sums))


@pytest.mark.smoke
@every_second(("sizes", "dtype", "lead"), SIZES, FLOATS, [(), (2,)])
def test_values_and_gradients(sizes, dtype, lead):
    M, N, K = sizes
    x, weight = normal(*lead, M, K, dtype=dtype, grad=True), normal(N, K, dtype=dtype, grad=True)
    bias, grad = normal(N, grad=True), normal(*lead, M, N, dtype=dtype)
    actual = fused.fp8_linear(x, weight, bias)
    assert actual.dtype is dtype and actual.is_contiguous()
    agrees(actual, quantized(x) @ quantized(weight).T + bias.detach().double(), K)
    found = torch.autograd.grad(actual, (x, weight, bias), grad)
    for own, exact, terms in zip(found, gradients(x, weight, grad), (N, 2 * M, 2 * M), strict=True):
        agrees(own, exact, terms)


def test_float8_is_as_close_as_its_mantissa():
    x, weight, grad = normal(64, 96, grad=True), normal(48, 96, grad=True), normal(64, 48)
    exact = torch.nn.functional.linear(x, weight)
    actual = fused.fp8_linear(x, weight)
    error = lambda own, other: ((own - other).norm() / other.norm()).item()
    assert error(actual, exact) < 2**-4
    for own, other in zip(
        torch.autograd.grad(actual, (x, weight), grad), torch.autograd.grad(exact, (x, weight), grad), strict=True
    ):
        # e5m2 has one bit less.
        assert error(own, other) < 2**-3


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
def test_some_gradients(wanted):
    x, weight, bias = (normal(*s, grad=g) for s, g in zip(((5, 40), (20, 40), (20,)), wanted, strict=True))
    grad = normal(5, 20)
    (own,) = torch.autograd.grad(
        fused.fp8_linear(x, weight, bias), [each for each in (x, weight, bias) if each.requires_grad], grad
    )
    agrees(own, gradients(x, weight, grad)[wanted.index(True)], 40)


def test_without_a_bias_and_with_an_expanded_gradient():
    x, weight = normal(2, 3, 40, grad=True), normal(20, 40, grad=True)
    fused.fp8_linear(x, weight).sum().backward()
    by_x, by_weight, _ = gradients(x, weight, torch.ones(2, 3, 20, device=x.device))
    agrees(x.grad, by_x, 20)
    agrees(weight.grad, by_weight, 6)


def test_operands_of_any_strides():
    x, weight = normal(40, 6).t(), normal(20, 80)[:, ::2]
    expected = fused.fp8_linear(x.contiguous(), weight.contiguous())
    assert torch.equal(fused.fp8_linear(x, weight), expected)


@pytest.mark.parametrize("sizes", [(0, 3, 5), (0, 3, 1), (3, 0, 5), (3, 4, 0)])
def test_no_elements(sizes):
    M, N, K = sizes
    x, weight, bias = normal(2, M, K, grad=True), normal(N, K, grad=True), normal(N, grad=True)
    result = fused.fp8_linear(x, weight, bias)
    assert torch.equal(result, bias.expand(2, M, N))
    for own, each in zip(torch.autograd.grad(result.sum(), (x, weight, bias)), (x, weight, bias), strict=True):
        assert own.shape == each.shape and (each is bias or not own.any())


def test_extreme_values():
    x, weight = normal(3, 40), normal(20, 40)
    assert not fused.fp8_linear(x * 0, weight).any()
    assert not fused.fp8_linear(x * 1e-44, weight).any()
    agrees(fused.fp8_linear(x * 1e30, weight), quantized(x * 1e30) @ quantized(weight).T, 40)
    x[1, 3] = float("nan")
    assert fused.fp8_linear(x, weight).isnan().all()


X, W = torch.zeros(2, 3, 8), torch.zeros(5, 8)
WRONG = [
    ((X.double(), W), "x is torch.float64"),
    ((X, W.half()), "one dtype"),
    ((X, W[:, :7]), "weight has the shape"),
    ((X, W, W[:4, 0]), "bias has the shape"),
    ((X, W, W[:, 0].half()), "bias is torch.float16"),
]


@pytest.mark.declines("refused calls")
@pytest.mark.parametrize(("args", "reason"), WRONG)
def test_wrong_arguments_are_refused(args, reason):
    for device in (tritonite.device, "meta"):
        with pytest.raises(Unsupported, match=reason):
            fused.fp8_linear(*[x.to(device) for x in args])


@pytest.mark.declines("refused calls")
def test_devices_without_float8_are_refused(monkeypatch):
    monkeypatch.setattr(devices, "has_float8", lambda _: False)
    with pytest.raises(Unsupported, match="no float8_e4m3fn"):
        fused.fp8_linear(normal(3, 8), normal(5, 8))


def calls():
    x, weight, bias = normal(2, 3, 40, grad=True), normal(20, 40, grad=True), normal(20, grad=True)
    yield library.fp8_linear, (x, weight, bias)
    yield library.fp8_linear, (x, weight)
    _, *saved = library.fp8_linear(x.detach(), weight.detach())
    for wanted in ((True, True), (True, False), (False, True)):
        yield library.fp8_linear_backward, (normal(2, 3, 20), *saved, *wanted)


@pytest.mark.parametrize("i", range(5))
def test_opcheck_and_explain(i):
    function, args = list(calls())[i]
    # torch (2.13) compares arguments before and after a call in arithmetic that float8 lacks.
    utils = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(function, args, test_utils=utils)
    assert "launch  " in tritonite.explain(function._qualified_op_name, *args)


def test_compiled_graphs_give_the_same():
    operands = normal(2, 3, 40, grad=True), normal(20, 40, grad=True), normal(20, grad=True)
    compiled = torch.compile(fused.fp8_linear, fullgraph=True, backend="aot_eager")
    actual, expected = compiled(*operands), fused.fp8_linear(*operands)
    assert torch.equal(actual, expected)
    gradients_of = functools.partial(torch.autograd.grad, inputs=operands, grad_outputs=normal(2, 3, 20))
    for own, eager in zip(gradients_of(actual), gradients_of(expected), strict=True):
        assert torch.equal(own, eager)


def test_vmap():
    x, weight = normal(4, 3, 40), normal(20, 40)
    actual = torch.vmap(fused.fp8_linear, (0, None))(x, weight)
    assert torch.equal(actual, torch.stack([fused.fp8_linear(each, weight) for each in x]))
