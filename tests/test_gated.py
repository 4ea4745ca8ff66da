"""swiglu, geglu, reglu and relu_and_mul against float64 compositions; tests/test_fused.py has the other names."""

import functools

import pytest
import torch
from compositions import agree, normal

import tritonite
from tritonite import fused
from tritonite.errors import Unsupported
from tritonite.testing.compositions.layers import gated

functional = torch.nn.functional
library = torch.ops.tritonite
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


tanh = functools.partial(functional.gelu, approximate="tanh")
GATED = [
    (fused.swiglu, functools.partial(gated, functional.silu)),
    (fused.geglu, functools.partial(gated, tanh)),
    (functools.partial(fused.geglu, approximate="none"), functools.partial(gated, functional.gelu)),
    (fused.reglu, functools.partial(gated, functional.relu)),
    (fused.relu_and_mul, functools.partial(gated, functional.relu)),
]


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ours", "theirs"), GATED)
def test_values_and_gradients(ours, theirs, dtype):
    for width in (1, 3, 70):
        agree(ours, theirs, [normal(3, 2 * width, dtype=dtype, grad=True)], terms=4, grad_terms=16)
        operands = [normal(2, 3, width, dtype=dtype, grad=True) for _ in range(2)]
        agree(ours, theirs, operands, terms=4, grad_terms=16)


def test_names_of_the_field_are_the_operators():
    x, y = normal(3, 8), normal(3, 8)
    assert torch.equal(fused.swiglu(x, y), fused.silu_and_mul(x, y))
    assert torch.equal(fused.geglu(x, y), fused.gelu_and_mul(x, y, "tanh"))
    assert torch.equal(fused.reglu(x), fused.relu_and_mul(x))


def test_relu_of_zero_and_nan_is_torchs():
    x = torch.tensor([[0.0, -0.0, torch.nan, -1.0, torch.inf]], device=tritonite.device)
    y, own, other = normal(1, 5), x.clone().requires_grad_(), x.clone().requires_grad_()
    actual, expected = fused.reglu(own, y), functional.relu(other) * y
    torch.testing.assert_close(actual, expected, equal_nan=True)
    actual.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(own.grad, other.grad, equal_nan=True)


def test_rows_at_any_stride():
    transposed, padded, expanded = normal(8, 3).t(), normal(3, 11)[:, :8], normal(1, 8).expand(3, 8)
    for x, y in ((transposed, padded), (expanded, transposed), (padded, None), (normal(3, 8, 2)[..., 0], None)):
        operands = [None if each is None else each.detach().requires_grad_() for each in (x, y)]
        agree(fused.reglu, functools.partial(gated, functional.relu), operands, terms=4, grad_terms=16)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (4, 0)])
def test_no_elements(shape):
    x = normal(*shape, grad=True)
    for ours, _ in GATED:
        assert ours(x).shape == (*shape[:-1], shape[-1] // 2) and ours(x, x).shape == shape
        assert torch.autograd.grad(ours(x).sum(), x)[0].shape == shape


X = torch.zeros(2, 3, 8)


@pytest.mark.declines("refused calls")
@pytest.mark.parametrize(
    ("function", "args", "reason"),
    [
        (fused.reglu, (X[..., :7],), "even"),
        (fused.geglu, (X, None, "exact"), "approximate"),
        (fused.relu_and_mul, (X, X[:1]), "y has the shape"),
        (fused.swiglu, (X, X.double()), "one dtype"),
        (fused.reglu, (X.long(),), "x is torch.int64"),
    ],
)
def test_wrong_arguments_are_refused(function, args, reason):
    for device in (tritonite.device, "meta"):
        with pytest.raises(Unsupported, match=reason):
            function(*[each.to(device) if isinstance(each, torch.Tensor) else each for each in args])


@pytest.mark.parametrize("two", [False, True])
def test_opcheck(two):
    x, grad = normal(2, 8, grad=True), normal(2, 8)
    torch.library.opcheck(library.relu_and_mul, (x, grad if two else None))
    torch.library.opcheck(library.relu_and_mul_backward, (grad, grad, grad) if two else (grad[:, :4], grad))


def test_compiled_graphs_give_the_same():
    def layer(x):
        return fused.reglu(x) * fused.swiglu(x) + fused.geglu(x)

    x = normal(3, 8, grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected, actual = layer(x), compiled(x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    grads = [torch.autograd.grad(each.sum(), x)[0] for each in (actual, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def test_vmap():
    x, y = normal(4, 3, 8), normal(3, 8)
    expected = torch.stack([fused.reglu(each, y) for each in x])
    torch.testing.assert_close(torch.vmap(fused.reglu, (0, None))(x, y), expected)
