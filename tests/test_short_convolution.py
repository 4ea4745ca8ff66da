"""Short convolutions against torch's, in float64: values, gradients, layouts, states, errors, transforms."""

import functools

import pytest
import torch
from compositions import agree, check_library_operator, close, normal

import tritonite
from tritonite import fused
from tritonite.engine.short_convolution import meta
from tritonite.errors import Unsupported
from tritonite.testing.compositions.layers import short_convolution as convolution

functional = torch.nn.functional
library = torch.ops.tritonite
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def of(activation):
    return [functools.partial(each, activation=activation) for each in (fused.short_convolution, convolution)]


def with_state(function):
    return lambda x, weight, bias, state: function(x, weight, bias, initial_state=state)


@pytest.fixture(params=[(4, 8), (1, 16), (8, 2)], ids=str)
def small_blocks(request, monkeypatch):
    """Make blocks so small that channels and tokens have several."""
    small = meta.ConvolutionTable(along_tokens=request.param, along_channels=request.param, elements=16)
    monkeypatch.setattr(meta, "TABLE", dict.fromkeys(meta.TABLE, small))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_convolution(width, activation, dtype):
    ours, theirs = of(activation)
    x, weight, bias = (normal(*shape, dtype=dtype, grad=True) for shape in ((2, 5, 19), (5, width), (5,)))
    agree(ours, theirs, [x, weight], terms=16, grad_terms=256)
    agree(ours, theirs, [x, weight, bias], terms=16, grad_terms=256)
    state = normal(2, 5, width - 1, dtype=dtype, grad=True)
    agree(with_state(ours), with_state(theirs), [x, weight, bias, state], terms=16, grad_terms=256)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_several_blocks(activation, transposed, small_blocks, change_device):
    change_device(programs=4)
    x = normal(2, 21, 11).transpose(1, 2) if transposed else normal(2, 11, 21)
    ours, theirs = (with_state(each) for each in of(activation))
    operands = [x.requires_grad_(), *(normal(*shape, grad=True) for shape in ((11, 4), (11,), (2, 11, 3)))]
    own = [ours(*operands), *torch.autograd.grad(ours(*operands).sum(), operands)]
    wide = [each.detach().double().requires_grad_() for each in operands]
    for found, exact in zip(own, [theirs(*wide), *torch.autograd.grad(theirs(*wide).sum(), wide)], strict=True):
        close(found.detach(), exact.detach(), 256)


def test_result_has_the_memory_order_of_x():
    x, weight = normal(2, 9, 6).transpose(1, 2).requires_grad_(), normal(6, 4)
    out = fused.short_convolution(x, weight)
    assert out.stride() == x.stride()
    (grad,) = torch.autograd.grad(out, x, normal(2, 6, 9))
    assert grad.stride() == x.stride()
    assert fused.short_convolution(x.detach().contiguous(), weight).is_contiguous()
    torch.testing.assert_close(out, fused.short_convolution(x.detach().contiguous(), weight))


def test_operands_of_any_stride():
    x = normal(3, 5, 8, 2)[..., 0].transpose(0, 1)
    weight, bias, state = normal(4, 3).t(), normal(6)[::2], normal(1, 1, 3).expand(5, 3, 3)
    expected = convolution(x.double(), weight.double(), bias.double(), "silu", state.double())
    close(fused.short_convolution(x, weight, bias, "silu", state), expected, 16)


@pytest.mark.smoke
def test_leading_dimensions():
    operands = [normal(2, 3, 4, 9, grad=True), normal(4, 4, grad=True)]
    agree(*of("silu"), operands, terms=16, grad_terms=256)
    agree(*of(None), [normal(4, 9, grad=True), operands[1]], terms=16, grad_terms=256)


@pytest.mark.smoke
def test_parameters_may_be_float32():
    x, weight, bias = normal(2, 4, 9, dtype=torch.bfloat16, grad=True), normal(4, 4, grad=True), normal(4, grad=True)
    agree(*of("silu"), [x, weight, bias], terms=16, grad_terms=256)


@pytest.mark.parametrize("shape", [(0, 4, 5), (2, 0, 5), (2, 4, 0)])
def test_no_elements(shape):
    x, weight, bias = (normal(*each, grad=True) for each in (shape, (shape[1], 4), (shape[1],)))
    state = normal(shape[0], shape[1], 3, grad=True)
    out = fused.short_convolution(x, weight, bias, "silu", state)
    assert out.shape == shape
    for grad in torch.autograd.grad(out.sum(), (x, weight, bias, state)):
        assert not grad.any()


def test_transformers_function():
    pytest.importorskip("transformers")
    from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn

    x, weight, bias = normal(2, 6, 17), normal(6, 4), normal(6)
    ours = fused.short_convolution(x, weight, bias, "silu")
    torch.testing.assert_close(ours, causal_conv1d_fn(x, weight, bias, "silu"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [3, 4, 9])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_update(activation, length, dtype):
    state, weight, bias = (normal(*each, dtype=dtype) for each in ((2, 5, length), (5, 4), (5,)))
    for _ in range(3):
        x = normal(2, 5, dtype=dtype)
        tokens = torch.cat((state, x.unsqueeze(-1)), -1)
        expected = convolution(tokens.double(), weight.double(), bias.double(), activation)[..., -1]
        close(fused.short_convolution_update(x, state, weight, bias, activation), expected, 16)
        assert torch.equal(state, tokens[..., 1:])


def test_updates_follow_a_convolution(small_blocks):
    x, weight = normal(3, 7, 12), normal(7, 4)
    whole, state = fused.short_convolution(x, weight, None, "silu"), normal(3, 4, 7).transpose(1, 2)
    first = fused.short_convolution(x[..., :8], weight, None, "silu")
    state.copy_(x[..., 4:8])
    rest = [fused.short_convolution_update(x[..., t], state, weight, None, "silu") for t in range(8, 12)]
    torch.testing.assert_close(torch.cat((first, torch.stack(rest, -1)), -1), whole)


def test_update_of_no_elements_and_of_one_tap():
    x, weight = normal(0, 4), normal(4, 3)
    assert fused.short_convolution_update(x, normal(0, 4, 2), weight).shape == (0, 4)
    x = normal(2, 4)
    torch.testing.assert_close(fused.short_convolution_update(x, normal(2, 4, 0), weight[:, :1]), x * weight[:, 0])


X, WEIGHT = torch.zeros(2, 4, 5), torch.zeros(4, 3)
WRONG = [
    (fused.short_convolution, (X.double(), WEIGHT), "x is torch.float64"),
    (fused.short_convolution, (X[0, 0], WEIGHT), "x has the shape"),
    (fused.short_convolution, (X, WEIGHT[:3]), "weight has the shape"),
    (fused.short_convolution, (X, torch.zeros(4, 17)), "width of 1 to 16"),
    (fused.short_convolution, (X, WEIGHT.half()), "weight is torch.float16"),
    (fused.short_convolution, (X, WEIGHT, X[0, 0]), "bias has the shape"),
    (fused.short_convolution, (X, WEIGHT, None, "gelu"), "activation is 'gelu'"),
    (fused.short_convolution, (X, WEIGHT, None, None, X), "initial_state has the shape"),
    (fused.short_convolution, (X, WEIGHT, None, None, X[..., :2].half()), "one dtype"),
    (fused.short_convolution_update, (X[..., 0], X[..., :1], WEIGHT), "state has 1 tokens"),
    (fused.short_convolution_update, (X[..., 0], X[:1], WEIGHT), "state has the shape"),
    (fused.short_convolution_update, (X[0, 0, 0], X, WEIGHT), "x has no dimension"),
]


@pytest.mark.declines("refused calls")
@pytest.mark.parametrize(("function", "args", "reason"), WRONG)
def test_wrong_arguments_are_refused(function, args, reason):
    for device in (tritonite.device, "meta"):
        with pytest.raises(Unsupported, match=reason):
            function(*[each.to(device) if isinstance(each, torch.Tensor) else each for each in args])


@pytest.mark.declines("refused calls")
def test_states_that_cannot_be_written_are_refused():
    with pytest.raises(Unsupported, match="share memory"):
        fused.short_convolution_update(normal(2, 4), normal(1, 4, 3).expand(2, 4, 3), normal(4, 3))
    with pytest.raises(Unsupported, match="no gradient"):
        fused.short_convolution_update(normal(2, 4, grad=True), normal(2, 4, 3), normal(4, 3))


def calls():
    x, weight, bias, state = (normal(*each, grad=True) for each in ((2, 4, 5), (4, 3), (4,), (2, 4, 2)))
    turned = normal(2, 5, 4).transpose(1, 2)
    yield library.short_convolution, (x, weight, bias, "silu", state)
    yield library.short_convolution, (turned, weight)
    yield library.short_convolution_backward, (*(each.detach() for each in (x, x, weight, bias)), None, state.detach())
    yield library.short_convolution_backward, (turned, turned, weight.detach(), None, "silu", None)
    yield library.short_convolution_update, (turned[..., 0], normal(2, 4, 3), weight.detach(), bias.detach(), "silu")


@pytest.mark.parametrize("i", range(5))
def test_opcheck(i):
    check_library_operator(*list(calls())[i])


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_graphs_give_the_same(dynamic):
    def layer(x, weight, state):
        new = fused.short_convolution(x.transpose(1, 2), weight, None, "silu").transpose(1, 2)
        return new, fused.short_convolution_update(x[:, 0].detach(), state, weight.detach())

    x, weight, state = normal(2, 5, 4, grad=True), normal(4, 4, grad=True), normal(2, 4, 4)
    other = state.clone()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)(x, weight, other)
    expected = layer(x, weight, state)
    torch.testing.assert_close(compiled, expected, rtol=0, atol=0)
    torch.testing.assert_close(other, state, rtol=0, atol=0)
    own, eager = (torch.autograd.grad(each[0].sum(), (x, weight)) for each in (compiled, expected))
    torch.testing.assert_close(own, eager, rtol=0, atol=0)


def test_vmap():
    x, weight, states = normal(3, 2, 4, 5), normal(4, 3), normal(2, 4, 2)
    actual = torch.vmap(lambda each: fused.short_convolution(each, weight, None, "silu", states))(x)
    each = [fused.short_convolution(own, weight, None, "silu", states) for own in x]
    torch.testing.assert_close(actual, torch.stack(each))
    weights = normal(3, 4, 3)
    actual = torch.vmap(fused.short_convolution, (None, 0))(x[0], weights)
    torch.testing.assert_close(actual, torch.stack([fused.short_convolution(x[0], own) for own in weights]))
