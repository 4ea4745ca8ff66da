"""Convolutions with a bias, a residual and an activation against compositions in float64, and their transforms."""

import functools
import itertools

import pytest
import torch
from compositions import check_library_operator, close, normal

import tritonite
from tritonite import devices, fused
from tritonite.engine.convolution import table
from tritonite.engine.convolution.table import Tile
from tritonite.errors import Unsupported
from tritonite.fused.activations import ACTIVATIONS
from tritonite.testing.compositions.layers import conv_bias_act
from tritonite.testing.tolerances import RTOL

library = torch.ops.tritonite
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
# Input, weight, and the steps.
CASES = {
    "image": ((2, 3, 7, 6), (5, 3, 3, 3), {"padding": 1}),
    "strided": ((1, 4, 9, 8), (6, 2, 3, 2), {"stride": (2, 1), "groups": 2, "dilation": (1, 2)}),
    "one tap": ((2, 20, 3, 5), (6, 20, 1, 1), {}),
    "depthwise": ((2, 5, 6, 7), (5, 1, 3, 3), {"padding": 1, "groups": 5}),
    "sequence": ((2, 6, 9), (4, 6, 3), {"padding": 1}),
    "volume": ((1, 2, 3, 4, 5), (3, 2, 2, 2, 2), {"stride": (1, 2, 1)}),
    "transposed": ((2, 4, 4, 3), (4, 3, 3, 3), {"transposed": True, "stride": 2, "padding": 1, "output_padding": 1}),
    "transposed depthwise": ((1, 4, 4, 3), (4, 1, 2, 2), {"transposed": True, "stride": 2, "groups": 4}),
    "unbatched": ((3, 7, 6), (5, 3, 3, 3), {}),
    "two batches": ((2, 3, 4, 9), (5, 4, 3), {"stride": 2}),
}


def compare(x, weight, bias, terms=64, grad_terms=256, residual=False, **given):
    """Compare a call, and its gradients by all tensors that require one, with the composition in float64."""
    given["bias"] = bias
    if residual:
        given["residual"] = torch.randn_like(fused.conv_bias_act(x.detach(), weight.detach(), **given)).requires_grad_()
    wide = {
        name: value.detach().double().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value
        for name, value in given.items()
    }
    exact = [each.detach().double().requires_grad_(each.requires_grad) for each in (x, weight)]
    found, wanted = fused.conv_bias_act(x, weight, **given), conv_bias_act(*exact, **wide)
    assert found.dtype is x.dtype
    close(found.detach(), wanted.detach(), terms)
    own = [each for each in (x, weight, *given.values()) if isinstance(each, torch.Tensor) and each.requires_grad]
    references = [each for each in (*exact, *wide.values()) if isinstance(each, torch.Tensor) and each.requires_grad]
    if not own:
        return found
    grad = torch.randn_like(found)
    for actual, reference, operand in zip(
        torch.autograd.grad(found, own, grad), torch.autograd.grad(wanted, references, grad.double()), own, strict=True
    ):
        assert actual.dtype is operand.dtype
        close(actual, reference, grad_terms, max(RTOL[x.dtype], RTOL[operand.dtype]))
    return found


def operands(case, dtype=torch.float32, last=False, grad=True):
    shape, weight, steps = CASES[case]
    x = normal(*shape, dtype=dtype)
    x = x.movedim(-len(weight) + 1, -1).contiguous().movedim(-1, -len(weight) + 1) if last else x
    columns = weight[1] * steps.get("groups", 1) if steps.get("transposed") else weight[0]
    tensors = x, normal(*weight, dtype=dtype), normal(columns, dtype=dtype)
    return *(each.requires_grad_(grad) for each in tensors), steps


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("last", [False, True])
def test_layers(case, last):
    for activation, residual in (("relu", True), ("silu", False)):
        x, weight, bias, steps = operands(case, last=last)
        found = compare(x, weight, bias, activation=activation, residual=residual, **steps)
        assert found.is_contiguous() != last or found.shape.numel() == found.shape[-weight.dim() + 1]


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("case", ["image", "one tap", "depthwise"])
def test_activations(activation, case):
    x, weight, bias, steps = operands(case, torch.float64)
    compare(x, weight, None, activation=activation, residual=True, **steps)
    compare(x, weight, bias.float().detach().requires_grad_(), activation=activation, **steps)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", ["image", "one tap", "depthwise", "transposed"])
def test_16_bit_floats(case, dtype):
    for last, activation in ((False, "relu"), (True, "gelu")):
        x, weight, bias, steps = operands(case, dtype, last)
        compare(x, weight, bias, 256, 1024, True, activation=activation, **steps)
    compare(x, weight, bias.float().detach().requires_grad_(), 256, 1024, activation="silu", **steps)


def test_several_tiles(monkeypatch):
    tiles = dict.fromkeys((2, 4, 8), (Tile(16, 16, 16),))
    monkeypatch.setitem(
        table.TABLE, devices.current.kind, table.table()._replace(forward=tiles, filters=tiles, folded_channels=1)
    )
    for last in (False, True):
        x, weight, bias = normal(2, 20, 5, 6), normal(21, 20, 3, 3), normal(21)
        x = x.to(memory_format=torch.channels_last) if last else x
        compare(x, weight, bias, 256, residual=True, activation="hardswish", padding=1)


def test_an_infinity_and_a_nan():
    x = torch.zeros(1, 2, 3, 3, device=tritonite.device)
    x[0, 0, 1, 1], x[0, 1, 0, 0] = float("inf"), float("nan")
    weight = torch.ones(2, 1, 1, 1, device=tritonite.device)
    for activation in ("relu", "relu6", "hardswish", "tanh"):
        found = fused.conv_bias_act(x, weight, None, activation, groups=2)
        torch.testing.assert_close(found, conv_bias_act(x, weight, None, activation, groups=2), equal_nan=True)


def test_layouts_of_results():
    x, weight = normal(2, 4, 5, 6), normal(3, 4, 3, 3)
    for own, other in itertools.product((torch.contiguous_format, torch.channels_last), repeat=2):
        operands = x.to(memory_format=own), weight.to(memory_format=other)
        found = fused.conv_bias_act(*operands, None, "relu")
        assert found.stride() == torch.conv2d(*operands).stride()
    residual = normal(2, 3, 3, 4).to(memory_format=torch.channels_last)
    expected = torch.conv2d(x, weight).add(residual)
    torch.testing.assert_close(fused.conv_bias_act(x, weight, residual=residual), expected, rtol=1e-4, atol=1e-4)


def test_residual_of_any_strides():
    x, weight, bias = normal(2, 4, 5, 6), normal(3, 4, 3, 3), normal(6)[::2]
    residual = normal(1, 1, 3, 1).expand(2, 3, 3, 4)
    expected = conv_bias_act(x.double(), weight.double(), bias.double(), "relu", residual=residual.double())
    close(fused.conv_bias_act(x, weight, bias, "relu", residual=residual), expected, 64)


def test_no_images():
    x, weight, bias = normal(0, 3, 4, 5, grad=True), normal(2, 3, 2, 2, grad=True), normal(2, grad=True)
    found = fused.conv_bias_act(x, weight, bias, "silu")
    assert found.shape == (0, 2, 3, 4)
    grads = torch.autograd.grad(found.sum(), (x, weight, bias))
    assert all(not each.any() for each in grads)


def test_gradients_of_some():
    x, weight, bias, steps = operands("image", grad=False)
    for i in range(3):
        tensors = [each.clone().requires_grad_(i == j) for j, each in enumerate((x, weight, bias))]
        compare(*tensors, activation="silu", **steps)


def test_the_operand_is_kept_only_for_gradients_that_need_it():
    x, weight, bias, _ = operands("image")
    arguments = (x, weight, bias, None, "silu", [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    out, operand = library.conv_bias_act(*arguments, True)
    assert not operand.requires_grad
    again, nothing = library.conv_bias_act(*arguments, False)
    assert nothing is None and torch.equal(out, again)
    # Without the operand the gradient computes it again.
    grads = [torch.autograd.grad(each.square().sum(), (x, weight, bias)) for each in (out, again)]
    torch.testing.assert_close(*grads)


X, WEIGHT = torch.zeros(2, 4, 5, 6), torch.zeros(3, 4, 2, 2)
WRONG = [
    ((X.int(), WEIGHT), {}, "input is torch.int32"),
    ((X, WEIGHT.half()), {}, "one dtype"),
    ((X, WEIGHT, torch.zeros(3).half()), {}, "bias is torch.float16"),
    ((X, WEIGHT, torch.zeros(4)), {}, "bias has the shape"),
    ((X, WEIGHT[:, :3]), {}, "input has 4 channels"),
    ((X, WEIGHT), {"groups": 3}, "in 3 groups"),
    ((X, WEIGHT), {"groups": 0}, "groups is 0"),
    ((X, WEIGHT[0, 0]), {}, "weight has 2 dimensions"),
    ((X[0, 0], WEIGHT), {}, "input has the shape"),
    ((X, torch.zeros(3, 4, 6, 2)), {}, "a size below 1"),
    ((X[..., :0], WEIGHT), {}, "only leading dimensions"),
    ((X, WEIGHT), {"stride": 0}, "stride is"),
    ((X, WEIGHT), {"padding": (1, 1, 1)}, "padding is"),
    ((X, WEIGHT), {"output_padding": 1}, "only a transposed"),
    ((X, WEIGHT.transpose(0, 1)), {"transposed": True, "output_padding": 1}, "must be below"),
    ((X, WEIGHT, None, "softmax"), {}, "activation is 'softmax'"),
    ((X, WEIGHT), {"residual": X}, "residual has the shape"),
    ((X, WEIGHT), {"residual": torch.zeros(2, 3, 4, 5).half()}, "residual is torch.float16"),
]


@pytest.mark.declines("refused calls")
@pytest.mark.parametrize(("args", "given", "reason"), WRONG)
def test_wrong_arguments_are_refused(args, given, reason):
    for device in (tritonite.device, "meta"):

        def moved(each, device=device):
            return each.to(device) if isinstance(each, torch.Tensor) else each

        with pytest.raises(Unsupported, match=reason):
            fused.conv_bias_act(*map(moved, args), **{name: moved(each) for name, each in given.items()})


def calls():
    x, weight, bias = normal(2, 3, 5, 4, grad=True), normal(4, 3, 3, 3, grad=True), normal(4, grad=True)
    residual, steps = normal(2, 4, 5, 4, grad=True), ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    yield library.conv_bias_act, (x, weight, bias, residual, "relu", *steps, False)
    yield library.conv_bias_act, (x, weight, None, residual, "silu", *steps, True)
    last = x.detach().to(memory_format=torch.channels_last).requires_grad_()
    yield library.conv_bias_act, (last, weight, bias, None, "gelu", *steps, True)
    transposed = ([2], [1], [1], True, [1], 2)
    yield library.conv_bias_act, (normal(3, 4, 5), normal(4, 2, 3), None, None, None, *transposed, False)
    own = residual.detach()
    yield library.conv_bias_act_backward, (own, own, "relu")
    yield library.conv_bias_act_backward, (own, own.to(memory_format=torch.channels_last), "silu")


@pytest.mark.parametrize("i", range(6))
def test_opcheck(i):
    check_library_operator(*list(calls())[i])


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_graphs_give_the_same(dynamic):
    def layer(x, weight, bias):
        first = fused.conv_bias_act(x, weight, bias, "silu", padding=1)
        return fused.conv_bias_act(first, weight, None, "relu", padding=1, residual=x)

    x, weight, bias = normal(2, 4, 5, 6, grad=True), normal(4, 4, 3, 3, grad=True), normal(4, grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)(x, weight, bias)
    expected = layer(x, weight, bias)
    torch.testing.assert_close(compiled, expected, rtol=0, atol=0)
    own, eager = (torch.autograd.grad(each.sum(), (x, weight, bias)) for each in (compiled, expected))
    torch.testing.assert_close(own, eager, rtol=0, atol=0)


def test_vmap():
    x, weight, residual = normal(3, 2, 4, 5, 6), normal(4, 4, 3, 3), normal(3, 2, 4, 3, 4)
    call = functools.partial(fused.conv_bias_act, bias=None, activation="silu")
    actual = torch.vmap(lambda x, residual: call(x, weight, residual=residual))(x, residual)
    each = [call(own, weight, residual=other) for own, other in zip(x, residual, strict=True)]
    torch.testing.assert_close(actual, torch.stack(each))
    weights = normal(3, 5, 4, 3, 3)
    actual = torch.vmap(lambda weight: call(x[0], weight))(weights)
    torch.testing.assert_close(actual, torch.stack([call(x[0], own) for own in weights]))
