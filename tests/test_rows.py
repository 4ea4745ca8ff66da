"""Reductions and row operators where small samples do not reach: several blocks, split rows, 64-bit offsets."""

import itertools
import math

import pytest
import torch
from conftest import FULL, check_each, served, with_cuts

import tritonite
from tritonite import devices
from tritonite.engine.rows import declare, meta
from tritonite.engine.rows import space as spaces
from tritonite.runtime.libentry import LibEntry

SHAPES = [(5 if FULL else 3, 70), (3, 4, 10), (2, 72)]


def values(shape, device, transposed=False):
    x = torch.randn(shape, device=device)
    return x.transpose(0, -1) if transposed else x


@pytest.mark.parametrize(("shape", "cut"), with_cuts(*SHAPES), indirect=["cut"])
def test_any_dimensions(shape, device, cut):
    for transposed in (False, True):
        x = values(shape, device, transposed)
        for dims in ((0,), (-1,), (0, -1), tuple(range(x.dim()))):
            expected = x.sum(dims), x.amax(dims, keepdim=True), x.var(dims, correction=0)
            with tritonite.use_gems():
                actual = x.sum(dims), x.amax(dims, keepdim=True), x.var(dims, correction=0)
            torch.testing.assert_close(actual, expected)
    assert served("sum.dim_IntList") and served("amax") and served("var.correction")


@pytest.mark.smoke
@pytest.mark.parametrize(("shape", "cut"), with_cuts(*SHAPES), indirect=["cut"])
def test_softmax_and_layer_norm_along_any_dimension(shape, device, cut):
    for transposed, dim in itertools.product((False, True), range(len(shape))):
        x = values(shape, device, transposed)
        expected = x.softmax(dim), x.log_softmax(dim)
        with tritonite.use_gems():
            torch.testing.assert_close((x.softmax(dim), x.log_softmax(dim)), expected)
    x, weight, bias = values(shape, device), values(shape[-1:], device), values(shape[-1:], device)
    arguments = (x, shape[-1:], weight, bias, 1e-5)
    expected = torch.native_layer_norm(*arguments)
    with tritonite.use_gems():
        torch.testing.assert_close(torch.native_layer_norm(*arguments), expected)
    assert served("_softmax") and served("_log_softmax") and served("native_layer_norm")


@pytest.mark.parametrize(("shape", "cut"), with_cuts(*SHAPES), indirect=["cut"])
def test_softmax_in_place(shape, device, cut):
    """The fast path of nn.MultiheadAttention calls softmax in this way."""
    aten = torch.ops.aten
    for dim in range(len(shape)):
        x, grad = values(shape, device), values(shape, device)
        y = x.softmax(dim)
        gradient = aten._softmax_backward_data(grad, y, dim, x.dtype)
        with tritonite.use_gems():
            assert aten._softmax.out(x, dim, False, out=x) is x
            aten._softmax_backward_data.out(grad, y, dim, x.dtype, grad_input=grad)
        torch.testing.assert_close((x, grad), (y, gradient))
    assert served("_softmax.out") and served("_softmax_backward_data.out")


LENGTHS = {
    torch.float16: ((7, 0), (8, 0), (129, 0), (300, 0), (512, 0), (1000, 8)),
    torch.float32: ((256, 0), (300, 0), (333, 0), (333, 3)),
}


if FULL:
    both = (*[(n, 0) for n in (7, 8, 129, 256, 300, 333, 512, 1000, 1024, 1500)], (1000, 8), (333, 3))
    LENGTHS = dict.fromkeys(LENGTHS, both)


@pytest.mark.parametrize(
    ("n", "more", "dtype"), [(*length, dtype) for dtype, lengths in LENGTHS.items() for length in lengths], ids=str
)
def test_rows_of_whole_and_partial_blocks(n, dtype, more, device, change_device):
    change_device(row_elements=32, row_columns=16, programs=1)
    # 300 rows of few elements, or 3 of a thousand, fill the device.
    rows = 300 if n < 10 else 3 if FULL or n >= 1000 else 2
    x = torch.randn(rows, n + more, device=device).to(dtype)[:, :n]
    weight = torch.randn(n, device=device).to(dtype)
    functions = {
        "_softmax": lambda: x.softmax(1),
        "_log_softmax": lambda: x.log_softmax(1),
        "native_layer_norm": lambda: torch.native_layer_norm(x, (n,), weight, weight, 1e-5),
        "max.dim": lambda: x.max(1),
        "var.correction": lambda: x.var(1),
        "logsumexp": lambda: x.logsumexp(1),
        "cumsum": lambda: x.float().cumsum(1),
    }
    check_each(functions, dtype)


def test_scalar_arguments_reach_kernels_unchanged(device, monkeypatch):
    number, launches = object(), []
    monkeypatch.setattr(LibEntry, "run", lambda kernel, *args, **kwargs: launches.append(args))
    x, sums = torch.ones(4, 8, device=device), torch.empty(4, device=device)
    reduction = declare.Reduction((0.0,), None, None, None)
    reduction.run((x,), (1,), (sums,), torch.float32, (number,))
    declare.RowTransform(reduction, None).run((x,), (1,), (x,), torch.float32, (number,))
    assert len(launches) == 2 and all(any(value is number for value in args) for args in launches)


def test_metadata_distinguishes_functions_by_their_source():
    class Function:
        __repr__ = lambda _: "function"

        def __init__(self, cache_key):
            self.cache_key = cache_key

    def known_by(leaf="x", combine="x + y", in_stage="x", **more):
        stage = declare.Stage(0.0, Function(in_stage), Function("x + y"), Function("x"))
        return str(meta.RowsMeta(Function(leaf), Function(combine), None, None, (0.0,), stages=(stage,), **more))

    assert known_by() == known_by()
    others = [{"leaf": "2 * x"}, {"combine": "x * y"}, {"in_stage": "2 * x"}, {"single_block": True}, {"block": (1, 4)}]
    assert len({known_by(), *[known_by(**other) for other in others]}) == 6


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (value, dtype)
        for i, value in enumerate((0.1, 60_000.0, 1e-7))
        for j, dtype in enumerate((torch.float16, torch.bfloat16, torch.float32))
        if FULL or i == j
    ],
    ids=str,
)
def test_rows_of_one_value_have_no_variance(value, dtype, device, cut):
    elements = devices.current.row_elements
    for n in (7, 96, min(1000, 8 * elements), 2 * elements):
        x = torch.full((2, n), value, device=device).to(dtype)
        with tritonite.use_gems():
            variance, mean = torch.var_mean(x, 1)
        assert (variance == 0).all() and torch.equal(mean, x[:, 0])
    assert served("var_mean.correction")


def test_subnormal_probabilities(device):
    x = torch.tensor([0.0, -87, -88, -89, -91, -92, -float("inf")], device=device).bfloat16()
    exact = x.double().softmax(0)
    with tritonite.use_gems():
        probabilities = x.softmax(0)
    # Subnormals of bfloat16 are multiples of 2^-133.
    assert ((probabilities.double() - exact).abs() <= torch.maximum(exact * 2**-8, torch.tensor(2.0**-134))).all()


def test_split_rows_in_another_order_than_in_memory(device, change_device):
    change_device(row_elements=32, row_columns=16, programs=64)
    x = torch.randn(3, 2, 300 if FULL else 150, device=device).transpose(0, 1)
    expected = x.softmax(-1), x.sum(-1), x.var(-1)
    with tritonite.use_gems():
        torch.testing.assert_close((x.softmax(-1), x.sum(-1), x.var(-1)), expected)


def test_indices_of_extrema_are_of_the_first_or_of_nan(device, cut):
    ties = torch.tensor([[1.0, 3.0, 3.0, -1.0], [2.0, 2.0, 2.0, 2.0], [-math.inf] * 4], device=device).repeat(1, 17)
    holes = ties.clone()
    holes[:, 5], holes[:, 60] = math.nan, math.nan
    for x, dims in ((ties, (1,)), (holes, (0, 1)), (ties.t(), (0,)), (ties.int(), (1,))):
        for dim in dims:
            expected = x.max(dim), x.min(dim), x.argmax(dim), x.argmin(dim)
            with tritonite.use_gems():
                actual = x.max(dim), x.min(dim), x.argmax(dim), x.argmin(dim)
            torch.testing.assert_close(actual, expected, equal_nan=True)
        expected = x.argmax()
        with tritonite.use_gems():
            assert x.argmax() == expected


@pytest.mark.parametrize("n", [600, 1024])
def test_indices_in_many_rows(n, device, change_device):
    """A program reads a row in several blocks. The first of equal elements may be in any of them."""
    change_device(row_elements=4096, programs=4)
    x = torch.randint(9, (9, n), device=device).float()
    x[3, 500:510], x[4], x[5, 255:257] = math.nan, -math.inf, 9
    expected = x.max(1), x.min(1), x.argmax(1), x.argmin(1)
    with tritonite.use_gems():
        actual = x.max(1), x.min(1), x.argmax(1), x.argmin(1)
    torch.testing.assert_close(actual, expected, equal_nan=True)
    assert served("max.dim") and served("min.dim") and served("argmax") and served("argmin")


def test_a_wide_row_has_64_bit_indices(device, monkeypatch):
    monkeypatch.setattr(spaces, "INT32_LIMIT", 4)
    x = torch.arange(40.0, device=device).flip(0)
    with tritonite.use_gems():
        assert x.argmin() == 39 and x.argmax() == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, None])
def test_elements_are_converted_first(dtype, device):
    x = torch.randn(6, 8, device=device) * 9
    expected = x.sum(1, dtype=dtype), x.sum(dtype=dtype), x.prod(0, dtype=dtype)
    with tritonite.use_gems():
        torch.testing.assert_close((x.sum(1, dtype=dtype), x.sum(dtype=dtype), x.prod(0, dtype=dtype)), expected)
    assert served("sum.dim_IntList") and served("sum") and served("prod.dim_int")


@pytest.mark.parametrize("n", [1, 2, 5, 64])
def test_sums_of_negative_zeros_are_positive(n, device):
    """ATen's sums begin with 0, whatever the length."""
    nothing, one, columns = (torch.full((n,), number, device=device) for number in (-0.0, 1.0, 2.0))
    rows, flat = torch.full((n, 4), -0.0, device=device), torch.ones(4, device=device)
    mean, rstd, masks = (
        torch.zeros(n, 1, device=device),
        torch.ones(n, 1, device=device),
        ([True] * 3, [False, True, False]),
    )
    aten, sums = torch.ops.aten, []
    with tritonite.use_gems():
        sums += [
            aten.binary_cross_entropy(one, one, None, 2),
            aten.dot(nothing, columns),
            nothing.sum(),
            nothing.mean(),
        ]
        for mask in masks:
            sums += aten.native_layer_norm_backward(rows, rows + 1, [4], mean, rstd, flat, flat, mask)[1:]
        sums += aten.native_batch_norm_backward(rows, rows + 1, flat, None, None, 0 * flat, flat, True, 1e-5, masks[0])[
            1:
        ]
    assert not any(total.signbit().any() or total.any() for total in sums if total is not None)
    assert all(map(served, ("binary_cross_entropy", "dot", "native_layer_norm_backward", "native_batch_norm_backward")))


def test_layer_norm_gradients_of_some_arguments(device):
    x = torch.randn(6, 8, device=device, requires_grad=True)
    weight = torch.randn(8, device=device)
    for arguments in ((None, None), (weight, None), (weight.clone().requires_grad_(), weight.clone().requires_grad_())):
        leaves = [x, *(value for value in arguments if value is not None and value.requires_grad)]

        def gradients(arguments=arguments, leaves=leaves):
            return torch.autograd.grad(torch.layer_norm(x, (8,), *arguments).exp().sum(), leaves)

        expected = gradients()
        with tritonite.use_gems():
            for _ in range(3):
                torch.testing.assert_close(gradients(), expected)
    assert served("native_layer_norm_backward")


def test_reductions_of_no_elements(device):
    x = torch.empty(3, 0, 2, device=device)
    with tritonite.use_gems():
        assert x.sum() == 0 and x.prod(1).eq(1).all() and x.mean().isnan() and not x.any() and x.all()
        assert x.sum(0).shape == (0, 2) and x.amax(0).shape == (0, 2)
        with pytest.raises(IndexError):
            x.amax(1)
        with pytest.raises(RuntimeError):
            x.max()


def test_errors_and_warnings_are_atens(device):
    x = torch.randn(3, 4, device=device)
    with tritonite.use_gems():
        with pytest.raises(IndexError):
            x.sum(2)
        with pytest.raises(RuntimeError):
            x.sum((0, 0))
        with pytest.warns(UserWarning, match="degrees of freedom"):
            assert x[:1].var(0).isnan().all()
        assert torch.equal(torch.var_mean(x, 1, correction=float("nan"))[0], torch.full((3,), torch.inf, device=device))


def test_the_same_bits_every_time(device, cut):
    x = torch.randn((3, 300) if FULL else (2, 150), device=device)
    with tritonite.use_gems():
        first = x.sum(), x.sum(0), x.std(1), x.softmax(0)
        for _ in range(2 if FULL else 1):
            assert all(map(torch.equal, first, (x.sum(), x.sum(0), x.std(1), x.softmax(0))))
