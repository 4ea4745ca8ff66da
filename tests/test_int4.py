"""Linear layers of packed 4-bit weights: products, gradients, packing, dequantising."""

import pytest
import torch
from compositions import close, normal
from conftest import every_second

import tritonite
from tritonite import devices, fused
from tritonite.dtypes import FLOATS_OF_16_BITS
from tritonite.errors import Unsupported
from tritonite.testing.tolerances import RTOL

library = torch.ops.tritonite
# (rows of x, N, K, group): one row and column, few rows with slices of K, several tiles, groups that do not divide K.
SIZES = [(1, 1, 2, 128), (1, 70, 512, 128), (5, 37, 320, 64), (40, 33, 130, 48), (3, 20, 70, 70)]


@pytest.fixture
def sliced(monkeypatch):
    """Run a test on a device of 64 multiprocessors, where a product of few rows takes split-K."""
    monkeypatch.setattr(devices, "multiprocessors", lambda _: 64)


def packed(N, K, group, dtype, symmetric=False):
    weight = normal(N, K, dtype=dtype)
    return weight, *fused.pack_int4(weight, group, symmetric=symmetric)


def numbers_of(weight):
    """Return packed numbers one an element."""
    return torch.stack((weight & 15, weight >> 4), -1).flatten(-2)


def dequantized(weight, scales, zeros, group):
    """Return (numbers - zeros) * scales in scales' dtype, by torch."""
    numbers = numbers_of(weight).to(scales.dtype)
    wide = lambda each: each.repeat_interleave(group, -1)[:, : numbers.shape[1]]
    zeros = torch.full_like(scales, 8) if zeros is None else zeros
    return (numbers - wide(zeros)) * wide(scales)


@pytest.mark.smoke
@every_second(("sizes", "dtype", "symmetric"), SIZES, FLOATS_OF_16_BITS, [False, True])
def test_products(sizes, dtype, symmetric, sliced):
    M, N, K, group = sizes
    _, weight, scales, zeros = packed(N, K, group, dtype, symmetric)
    x, bias = normal(2, M, K, dtype=dtype), normal(N, dtype=dtype)
    exact = x.double() @ dequantized(weight, scales, zeros, group).double().T
    close(fused.linear_int4(x, weight, scales, zeros, group=group), exact, terms=16)
    close(fused.linear_int4(x, weight, scales, zeros, bias, group=group), exact + bias.double(), terms=16)


@every_second(("sizes", "dtype", "symmetric"), SIZES, FLOATS_OF_16_BITS, [False, True])
def test_dequantised_weights_have_torchs_bits(sizes, dtype, symmetric):
    _, N, K, group = sizes
    _, weight, scales, zeros = packed(N, K, group, dtype, symmetric)
    actual = fused.dequantize_int4(weight, scales, zeros, group=group)
    assert torch.equal(actual, dequantized(weight, scales, zeros, group))


@every_second(("sizes", "dtype", "symmetric"), SIZES, FLOATS_OF_16_BITS, [False, True])
def test_packing_rounds_to_the_nearest_number(sizes, dtype, symmetric):
    _, N, K, group = sizes
    given, weight, scales, zeros = packed(N, K, group, dtype, symmetric)
    assert weight.dtype is torch.uint8 and weight.shape == (N, K // 2) and scales.shape == (N, -(-K // group))
    assert (zeros is None) == symmetric
    actual = fused.dequantize_int4(weight, scales, zeros, group=group).double()
    step = scales.double().repeat_interleave(group, -1)[:, :K]
    # Half a step, and the roundoff of scales, which at the end of the range adds up to 8 of their resolutions.
    assert ((actual - given.double()).abs() <= step * (0.5 + 16 * RTOL[dtype])).all()


def test_packing_puts_the_even_number_into_the_low_nibble():
    weight = torch.arange(-8, 8, device=tritonite.device).half().view(1, 16)
    weight[0, 0] = -7
    found, scales, zeros = fused.pack_int4(weight, 16, symmetric=True)
    assert zeros is None and scales.item() == 1
    assert numbers_of(found).tolist() == [[1, *range(1, 16)]]
    assert found[0, :2].tolist() == [1 + 16 * 1, 2 + 16 * 3]


def test_packing_keeps_zeros_exact():
    weight = torch.zeros(3, 32, dtype=torch.float16, device=tritonite.device)
    weight[1], weight[2, ::2] = 3.0, -0.7
    for symmetric in (False, True):
        actual = fused.dequantize_int4(*fused.pack_int4(weight, 16, symmetric=symmetric), group=16)
        assert torch.equal(actual == 0, weight == 0)
        close(actual, weight.double(), resolution=2e-3)


def layouts(x):
    """Yield a matrix with other strides: gaps between rows, gaps between elements, and transposed."""
    padded = x.new_empty((x.shape[0], x.shape[1] + 3))
    padded[:, : x.shape[1]] = x
    strided = x.new_empty((*x.shape, 2))
    strided[..., 0] = x
    return padded[:, : x.shape[1]], strided[..., 0], x.t().contiguous().t()


@pytest.mark.parametrize("i", range(3))
def test_operands_of_any_strides(i):
    given, *weights = packed(20, 64, 16, torch.bfloat16)
    x = normal(5, 64, dtype=torch.bfloat16)
    expected = fused.linear_int4(x, *weights, group=16)
    other = [layouts(each)[(i + j) % 3] for j, each in enumerate(weights)]
    assert torch.equal(fused.linear_int4(layouts(x)[i], *other, group=16), expected)
    assert torch.equal(fused.dequantize_int4(*other, group=16), fused.dequantize_int4(*weights, group=16))
    for own, each in zip(fused.pack_int4(layouts(given)[i], 16), weights, strict=True):
        assert torch.equal(own, each)


@pytest.mark.parametrize("sizes", [(0, 3, 4), (3, 0, 4), (3, 4, 0)])
def test_no_elements(sizes):
    M, N, K = sizes
    given, *weights = packed(N, K, 16, torch.float16)
    x, bias = normal(2, M, K, dtype=torch.float16), normal(N, dtype=torch.float16)
    result = fused.linear_int4(x, *weights, bias, group=16)
    assert torch.equal(result, bias.expand(2, M, N)) and fused.dequantize_int4(*weights, group=16).shape == given.shape


@pytest.mark.parametrize("dtype", FLOATS_OF_16_BITS)
def test_gradients_by_x_and_by_the_bias(dtype):
    _, weight, scales, zeros = packed(20, 64, 16, dtype)
    x, bias = normal(2, 3, 64, dtype=dtype, grad=True), normal(20, grad=True)
    grad = normal(2, 3, 20, dtype=dtype)
    result = fused.linear_int4(x, weight, scales, zeros, bias, group=16)
    by_x, by_bias = torch.autograd.grad(result, (x, bias), grad)
    close(by_x, grad.double() @ dequantized(weight, scales, zeros, 16).double(), terms=16)
    close(by_bias, grad.double().sum((0, 1)), terms=16)
    # In groups of the default size, which the dispatcher leaves out.
    _, weight, scales, _ = packed(20, 64, 128, dtype, symmetric=True)
    (by_x,) = torch.autograd.grad(fused.linear_int4(x, weight, scales), x, grad)
    close(by_x, grad.double() @ dequantized(weight, scales, None, 128).double(), terms=16)


def test_few_rows_are_summed_in_slices_of_k(sliced):
    _, *weights = packed(20, 1024, 64, torch.float16)
    assert "reduce_split_k" in tritonite.explain(
        "tritonite::linear_int4", normal(3, 1024, dtype=torch.float16), *weights, None, 64
    )


X, W, S = torch.zeros(3, 64).half(), torch.zeros(5, 32, dtype=torch.uint8), torch.ones(5, 4).half()
WRONG = [
    (library.linear_int4, (X.float(), W, S, None, None, 16), "x is torch.float32"),
    (library.linear_int4, (X, W.to(torch.int8), S, None, None, 16), "weight is torch.int8"),
    (library.linear_int4, (X[:, :32], W, S, None, None, 16), "x has the shape"),
    (library.linear_int4, (X, W, S, None, None, 32), "scales has the shape"),
    (library.linear_int4, (X, W, S, S[:, :1], None, 16), "zeros has the shape"),
    (library.linear_int4, (X, W, S, S.bfloat16(), None, 16), "zeros is torch.bfloat16"),
    (library.linear_int4, (X, W, S.bfloat16(), None, None, 16), "scales is torch.bfloat16"),
    (library.linear_int4, (X, W, S, None, S[:1, 0], 16), "bias has the shape"),
    (library.linear_int4, (X, W, S, None, None, 24), "group is 24"),
    (library.pack_int4, (X.float(), 16, False), "weight is torch.float32"),
    (library.pack_int4, (X[:, :7], 16, False), "even K"),
    (library.pack_int4, (X, 0, False), "group is 0"),
    (library.dequantize_int4, (W[0], S, None, 16), "weight has the shape"),
]


@pytest.mark.declines("refused calls")
@pytest.mark.parametrize(("function", "args", "reason"), WRONG)
def test_wrong_arguments_are_refused(function, args, reason):
    for device in (tritonite.device, "meta"):
        with pytest.raises(Unsupported, match=reason):
            function(*[x.to(device) if isinstance(x, torch.Tensor) else x for x in args])


def calls():
    given, weight, scales, zeros = packed(20, 64, 16, torch.float16)
    x = normal(2, 3, 64, dtype=torch.float16, grad=True)
    bias = normal(20, dtype=torch.float16, grad=True)
    yield library.linear_int4, (x, weight, scales, zeros, bias, 16)
    yield library.linear_int4, (x, weight, scales[:, :1])
    yield library.pack_int4, (given, 16)
    yield library.pack_int4, (given, 16, True)
    yield library.dequantize_int4, (weight, scales, zeros, 16)


@pytest.mark.parametrize("i", range(5))
def test_opcheck_and_explain(i):
    function, args = list(calls())[i]
    torch.library.opcheck(function, args)
    assert "launch  " in tritonite.explain(function._qualified_op_name, *args)


def test_compiled_graphs_give_the_same():
    def layer(x, weight):
        packed, scales, zeros = fused.pack_int4(weight, 16)
        return fused.linear_int4(x, packed, scales, zeros, group=16) @ fused.dequantize_int4(packed, scales, group=16)

    args = normal(3, 64, dtype=torch.float16, grad=True), normal(20, 64, dtype=torch.float16)
    actual, expected = torch.compile(layer, fullgraph=True, backend="aot_eager")(*args), layer(*args)
    assert torch.equal(actual, expected)
    own, eager = (torch.autograd.grad(each.sum(), args[0])[0] for each in (actual, expected))
    torch.testing.assert_close(own, eager)


def test_vmap():
    _, weight, scales, zeros = packed(20, 64, 16, torch.bfloat16)
    x = normal(4, 3, 64, dtype=torch.bfloat16)
    actual = torch.vmap(lambda x: fused.linear_int4(x, weight, scales, zeros, group=16))(x)
    assert torch.equal(actual, fused.linear_int4(x, weight, scales, zeros, group=16))
