"""Linear layers of quantised operands against products of the dequantised operands in float64."""

import math

import pytest
import torch
from compositions import close, normal
from conftest import every_second

import tritonite
from tritonite import devices, fused
from tritonite.errors import Unsupported
from tritonite.testing.tolerances import RTOL

library = torch.ops.tritonite
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# The resolution of sums. Hopper's tensor cores add float8 products with 13 bits of the largest (DeepSeek-AI 2024).
SUMS = 4e-6 if tritonite.backend.interpreted else 2e-3
FLOATS = [torch.float16, torch.bfloat16, torch.float32]
# (rows of x, N, K): one element, one row and column, few rows with slices of K, several tiles of odd sizes.
SIZES = [(1, 1, 1), (1, 70, 300), (5, 37, 600), (70, 33, 129)]


def random(*shape, dtype=E4M3):
    """Return numbers of a quantised dtype: all bytes for int8, else of unit variance, finite."""
    if dtype is torch.int8:
        return torch.randint(-128, 128, shape, dtype=dtype, device=tritonite.device)
    return torch.randn(shape, device=tritonite.device).to(dtype)


def scale(*shape):
    return torch.rand(shape, device=tritonite.device) + 0.5


def spread(scales, rows, columns, block=(1, 128)):
    """Return an element for each number from a scale for each block."""
    return scales.double().repeat_interleave(block[0], -2)[..., :rows, :].repeat_interleave(block[1], -1)[..., :columns]


def agrees(actual, exact, K, bias=0.0):
    """Assert that a result is within the resolution of its dtype and of sums, and zeros within that of a sum of K."""
    close(actual, exact + bias, terms=max(1, K // 8), resolution=max(RTOL[actual.dtype], SUMS))


@pytest.fixture
def sliced(monkeypatch):
    """Run a test on a device of 64 multiprocessors, where a product of few rows takes split-K."""
    monkeypatch.setattr(devices, "multiprocessors", lambda _: 64)


@pytest.fixture(params=[True, False], ids=["float8", "decoded"])
def native(request, monkeypatch):
    """Run a test on a device with float8, and on one that decodes it in registers."""
    monkeypatch.setattr(devices, "has_float8", lambda _: request.param)
    return request.param


@pytest.mark.smoke
@every_second(("sizes", "out_dtype"), SIZES, FLOATS)
def test_scales_of_blocks(sizes, out_dtype, native, sliced):
    M, N, K = sizes
    x, weight, x_scale, weight_scale = (
        random(M, K),
        random(N, K),
        scale(M, -(-K // 128)),
        scale(-(-N // 128), -(-K // 128)),
    )
    actual = fused.linear_fp8_blocks(x, weight, x_scale, weight_scale, out_dtype=out_dtype)
    exact = (x.double() * spread(x_scale, M, K)) @ (weight.double() * spread(weight_scale, N, K, (128, 128))).T
    assert actual.dtype is out_dtype and actual.is_contiguous()
    agrees(actual, exact, K)


@pytest.mark.parametrize("block", [(1, 32), (16, 96), (128, 256)])
def test_other_blocks_and_a_bias(block):
    M, N, K = 3, 40, 200
    x, weight, bias = random(2, M, K, dtype=E5M2), random(N, K), normal(N)
    x_scale, weight_scale = scale(2, M, -(-K // block[1])), scale(-(-N // block[0]), -(-K // block[1]))
    actual = fused.linear_fp8_blocks(x, weight, x_scale, weight_scale, bias=bias, out_dtype=torch.float32, block=block)
    exact = (x.double() * spread(x_scale, M, K, (1, block[1]))) @ (
        weight.double() * spread(weight_scale, N, K, block)
    ).T
    agrees(actual, exact, K, bias.double())


def test_products_of_float8_in_blocks_are_scaled_one_by_one():
    # The product of a block overflows float32 if it is scaled after all blocks have been added.
    x, weight = torch.full((1, 256), 448.0).to(E4M3).to(tritonite.device), torch.full((1, 256), 448.0).to(E4M3)
    scales = torch.tensor([[1e30, 1e-30]], device=tritonite.device)
    actual = fused.linear_fp8_blocks(x, weight.to(x.device), scales, scales.flip(1), out_dtype=torch.float32)
    agrees(actual, torch.full((1, 1), 256 * 448.0**2, dtype=torch.float64, device=x.device), 256)


@every_second(("sizes", "out_dtype", "kind"), SIZES, FLOATS, ["rows", "tensors"])
def test_scales_of_rows_and_of_tensors(sizes, out_dtype, kind, native, sliced):
    M, N, K = sizes
    x, weight, bias = random(M, K), random(N, K, dtype=E5M2), normal(N)
    x_scale, weight_scale = (scale(M, 1), scale(N, 1)) if kind == "rows" else (scale(1), scale())
    actual = fused.linear_fp8(x, weight, x_scale, weight_scale, bias, out_dtype=out_dtype)
    agrees(actual, x.double() @ weight.double().T * x_scale * weight_scale.reshape(1, -1), K, bias.double())


@pytest.mark.smoke
@every_second(("sizes", "out_dtype", "kind"), SIZES, FLOATS, ["rows", "tensors"])
def test_int8(sizes, out_dtype, kind):
    M, N, K = sizes
    x, weight, bias = random(M, K, dtype=torch.int8), random(N, K, dtype=torch.int8), normal(N, dtype=out_dtype)
    # Scales for which no result exceeds float16.
    x_scale, weight_scale = (scale(M, 1), scale(N)) if kind == "rows" else (scale(1), scale(1))
    x_scale = x_scale / 1000
    actual = fused.linear_int8(x, weight, x_scale, weight_scale, bias, out_dtype=out_dtype)
    exact = x.double() @ weight.double().T * x_scale.double() * weight_scale.double() + bias.double()
    close(actual, exact, resolution=max(RTOL[out_dtype], 1e-6))


def test_int8_sums_are_exact():
    K = 1100
    x = torch.full((1, K), -128, dtype=torch.int8, device=tritonite.device)
    x[0, 0] = 127
    actual = fused.linear_int8(x, x, scale(1) * 0 + 1, scale(1) * 0 + 1, out_dtype=torch.float32)
    assert torch.equal(actual, torch.full_like(actual, 128 * 128 * (K - 1) + 127 * 127))


def every_number(dtype):
    return torch.arange(256, dtype=torch.uint8, device=tritonite.device).view(dtype)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_float8_number_is_decoded(dtype, monkeypatch):
    monkeypatch.setattr(devices, "has_float8", lambda _: False)
    numbers, one = every_number(dtype), torch.ones(1, device=tritonite.device)
    x = numbers[:, None]
    actual = fused.linear_fp8(x, one.to(dtype)[:, None], one, one, out_dtype=torch.float32)
    assert torch.equal(actual.nan_to_num(nan=0.5), numbers.float()[:, None].nan_to_num(nan=0.5))


def layouts(x):
    """Yield a matrix with other strides: gaps between rows, gaps between elements, and transposed."""
    padded = x.new_empty((x.shape[0], x.shape[1] + 3))
    padded[:, : x.shape[1]] = x
    strided = x.new_empty((*x.shape, 2))
    strided[..., 0] = x
    return padded[:, : x.shape[1]], strided[..., 0], x.t().contiguous().t()


@pytest.mark.parametrize("i", range(3))
def test_operands_of_any_strides(i):
    M, N, K = 5, 20, 70
    x, weight, scales = random(M, K), random(N, K), (scale(1, M).t(), scale(2, N)[1])
    own, other = layouts(x.view(torch.uint8))[i].view(E4M3), layouts(weight.view(torch.uint8))[2 - i].view(E4M3)
    agrees(fused.linear_fp8(own, other, *scales), x.double() @ weight.double().T * scales[0] * scales[1], K)
    blocks = scale(1, M).t(), scale(1, 1)
    assert torch.equal(fused.linear_fp8_blocks(own, other, *blocks), fused.linear_fp8_blocks(x, weight, *blocks))
    own, other = own.view(torch.int8), other.view(torch.int8)
    expected = fused.linear_int8(x.view(torch.int8), weight.view(torch.int8), *scales)
    assert torch.equal(fused.linear_int8(own, other, *scales), expected)


def calls(M, N, K, lead=()):
    """Yield each product of quantised operands and its arguments, for sizes that may be 0."""
    groups = -(-K // 128)
    x, weight, bias = random(*lead, M, K), random(N, K), normal(N)
    yield library.linear_fp8, (x, weight, scale(*lead, M, 1), scale(N, 1), bias, torch.float32)
    yield (
        library.linear_fp8_blocks,
        (x, weight, scale(*lead, M, groups), scale(-(-N // 128), groups), bias, torch.float32),
    )
    integers = x.view(torch.int8), weight.view(torch.int8)
    yield library.linear_int8, (*integers, scale(*lead, M, 1), scale(N), bias, torch.float32)


@pytest.mark.parametrize("sizes", [(0, 3, 5), (3, 0, 5), (3, 4, 0)])
def test_no_elements(sizes):
    for function, args in calls(*sizes, lead=(2,)):
        result = function(*args)
        assert result.shape == (2, *sizes[:2])
        # Without elements along K the result is the bias.
        assert torch.equal(result, args[4].expand(result.shape))


def test_a_vector_is_one_row():
    for function, args in calls(1, 20, 40):
        x, weight, x_scale, *rest = args
        assert torch.equal(function(x[0], weight, x_scale[0], *rest), function(*args)[0])


def test_few_rows_are_summed_in_slices_of_k(sliced):
    x, weight = random(3, 1024), random(40, 1024)
    text = tritonite.explain("tritonite::linear_fp8_blocks", x, weight, scale(3, 8), scale(1, 8))
    assert "reduce_split_k" in text


def test_rows_do_not_depend_on_others_in_invariant_mode():
    tritonite.enable(invariant=True)
    try:
        x, weight, x_scale, weight_scale = random(40, 512), random(40, 512), scale(40, 4), scale(1, 4)
        every = fused.linear_fp8_blocks(x, weight, x_scale, weight_scale)
        for rows in (1, 5):
            assert torch.equal(every[:rows], fused.linear_fp8_blocks(x[:rows], weight, x_scale[:rows], weight_scale))
    finally:
        tritonite.disable()


X, W = torch.zeros(2, 3, 64, dtype=E4M3), torch.zeros(5, 64, dtype=E4M3)
ONE, ROWS = torch.ones(1), torch.ones(2, 3, 1)
WRONG = [
    (fused.linear_fp8, (X.float(), W, ONE, ONE), "x is torch.float32"),
    (fused.linear_fp8, (X, W.view(torch.int8), ONE, ONE), "weight is torch.int8"),
    (fused.linear_fp8, (X, W[:, :8], ONE, ONE), "weight has the shape"),
    (fused.linear_fp8, (X[0, 0, 0], W, ONE, ONE), "no dimension"),
    (fused.linear_fp8, (X, W, torch.ones(3, 1), ONE), "x_scale has the shape"),
    (fused.linear_fp8, (X, W, ONE, torch.ones(4)), "weight_scale has the shape"),
    (fused.linear_fp8, (X, W, ONE.half(), ONE), "x_scale is torch.float16"),
    (fused.linear_fp8, (X, W, ONE, ONE, torch.ones(4)), "bias has the shape"),
    (fused.linear_fp8, (X, W, ONE, ONE, torch.ones(5).half()), "bias is torch.float16"),
    (fused.linear_fp8, (X, W.to("meta"), ONE, ONE), "one device"),
    (fused.linear_fp8_blocks, (X, W, torch.ones(2, 3, 2), ONE[None]), "x_scale has the shape"),
    (fused.linear_fp8_blocks, (X, W, ROWS, torch.ones(2, 1)), "weight_scale has the shape"),
    (fused.linear_fp8_blocks, (X, W, ROWS.double(), ONE[None]), "x_scale is torch.float64"),
    (fused.linear_int8, (X, W, ONE, ONE), "x is torch.float8_e4m3fn"),
]


@pytest.mark.declines("refused calls")
@pytest.mark.parametrize(("function", "args", "reason"), WRONG)
def test_wrong_arguments_are_refused(function, args, reason):
    on_device = [x.to(tritonite.device) if x.device.type == "cpu" else x for x in args]
    for given in (on_device, [x.to("meta") for x in args]):
        if reason == "one device" and given is not on_device:
            continue
        with pytest.raises(Unsupported, match=reason):
            function(*given)


@pytest.mark.declines("refused calls")
def test_wrong_blocks_and_dtypes_of_results_are_refused():
    x, weight, one = random(3, 64), random(5, 64), scale(1)
    for block in ((128, 48), (0, 128), (128, 0)):
        with pytest.raises(Unsupported, match="block is"):
            fused.linear_fp8_blocks(x, weight, scale(3, 1), scale(1, 1), block=block)
    with pytest.raises(Unsupported, match="out_dtype is"):
        fused.linear_fp8(x, weight, one, one, out_dtype=torch.float64)


@pytest.mark.parametrize("i", range(3))
def test_opcheck_and_explain(i):
    function, args = list(calls(3, 20, 40, lead=(2,)))[i]
    # torch (2.13) compares arguments before and after a call in arithmetic that float8 lacks.
    utils = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(function, args, test_utils=utils)
    assert "launch  " in tritonite.explain(function._qualified_op_name, *args)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_graphs_give_the_same(dynamic):
    def layer(x, weight, x_scale, weight_scale):
        blocks = fused.linear_fp8_blocks(x, weight, x_scale, weight_scale)
        return blocks, fused.linear_fp8(x, weight, x_scale, weight_scale[0])

    args = random(3, 40), random(20, 40), scale(3, 1), scale(1, 1)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for actual, expected in zip(compiled(*args), layer(*args), strict=True):
        assert torch.equal(actual, expected)


def test_vmap():
    for function, args in calls(3, 20, 40, lead=(4,)):
        actual = torch.vmap(function, (0, None, 0, None, None, None))(*args)
        agrees(actual, function(*args).double(), 40)


def test_a_large_magnitude_in_one_row_leaves_the_others_alone():
    x, weight = random(3, 64), random(20, 64)
    scales = torch.tensor([[1.0], [math.inf], [math.nan]], device=tritonite.device)
    actual = fused.linear_fp8_blocks(x, weight, scales, scale(1, 1) * 0 + 1)
    assert actual[0].isfinite().all() and not actual[1:].isfinite().any()
