"""Calls of products: sizes, factors, products without terms, destinations, dtypes of results, and declines."""

import math
import random

import pytest
import torch
from conftest import FULL, covering, some
from products import FLOATS, LAYOUTS, check, laid_out, matmul, normal

import tritonite
from tritonite import devices, registry
from tritonite.engine.gemm import select
from tritonite.errors import Decline
from tritonite.testing import fuzz
from tritonite.testing.fuzz.draw import functional_results
from tritonite.testing.judge import assert_close
from tritonite.testing.samples.matmul import shapes_of


@pytest.mark.parametrize(
    ("K", "dtype", "layouts"), some([1, 3, 8], FLOATS, list(zip(LAYOUTS, LAYOUTS, strict=True)), turns=3), ids=str
)
def test_short_inner_dimensions(K, dtype, layouts):
    """Products have one row or several tiles, batches, and addends."""
    for M, N, batches in ((1, 64, (5,)), (7, 130, (3,)), (70, 40, ()), (40, 1, (2,))):
        a, b = (laid_out(*size, layout, dtype, batches) for size, layout in zip(((M, K), (K, N)), layouts, strict=True))
        function = matmul.bmm if batches else matmul.mm
        check(function(a, b)[0], torch.bmm if batches else torch.mm, a, b)
    a, b, added = laid_out(70, K, layouts[0], dtype), laid_out(K, 40, layouts[1], dtype), normal(40, dtype=dtype)
    check(matmul.addmm(added, a, b, beta=0.5, alpha=2.0)[0], torch.addmm, added, a, b, beta=0.5, alpha=2.0)


@pytest.mark.parametrize(
    ("size", "dtype", "layout"),
    some([(1, 300), (300, 1), (7, 300), (300, 16), (1, 1)], FLOATS, LAYOUTS[:2], turns=2),
    ids=str,
)
def test_few_rows_or_columns(size, layout, dtype):
    rows, columns = size
    a, b = laid_out(rows, 500, "plain", dtype), laid_out(500, columns, layout, dtype)
    check(matmul.mm(a, b)[0], torch.mm, a, b)
    x = normal(columns, dtype=dtype)
    check(matmul.addmm(x, a, b, 1, 1)[0], torch.addmm, x, a, b)


def test_vectors():
    a, v, w = normal(30, 700), normal(1400)[::2], normal(30)
    check(matmul.mv(a, v)[0], torch.mv, a, v)
    check(matmul.addmv(w, a, v, 0.5, -1)[0], torch.addmv, w, a, v, beta=0.5, alpha=-1)
    check(matmul.dot(v, v.flip(0))[0], torch.dot, v, v.flip(0))
    with pytest.raises(Decline):
        matmul.mv(a, v[:, None])
    with tritonite.use_gems():
        check(torch.addr(a, w, v), torch.addr, a, w, v)
        assert torch.addr(a.int(), w.int(), v.int(), alpha=2).dtype is torch.int32
        check(torch.addr(a * math.nan, w, v, beta=0), torch.addr, a, w, v, beta=0)
    assert tritonite.stats()["addr"].launched + tritonite.stats()["addr"].replayed


def test_factors_of_zero():
    a, b, x = normal(40, 30), normal(30, 50), torch.full((50,), math.nan, device=tritonite.device)
    assert matmul.addmm(x, a, b, 0, 1)[0].isfinite().all()
    assert (matmul.addmm(torch.ones_like(x), a * math.nan, b, 3, 0)[0] == 3).all()
    for beta, value in ((0, 0), (2, 2)):
        assert (matmul.addmm(torch.ones_like(x), a[:, :0], b[:0], beta, 1)[0] == value).all()
    assert not matmul.mm(a[:0], b)[0].numel()


# Sizes of a product, and factors. Sizes are 0, 1, or no multiple of a tile.
SIZES, FACTORS = (0, 1, 15, 63, 64), (0, 1, 0.5)
SIZED = [op for op in registry.overloads().values() if op.family == "matmul" and shapes_of(op.packet, 1, 1, 1, 1)]


def _sized_calls(op, dtype, count):
    """Yield calls of an overload by drawn sizes and factors. Operands with a factor of 0 are nan."""
    draw = random.Random(f"{op.overload} {dtype}")
    for number in range(count):
        # Half of the calls have an inner dimension or a factor of 0. Before an activation, such a dimension declines.
        inner = SIZES[1:] if op.packet == "_addmm_activation" else (0, *SIZES)
        batches, M, N, K = (draw.choice(each) for each in ((0, 1, 2), SIZES, SIZES, inner))
        alpha, beta = draw.choice((0, *FACTORS)), draw.choice(FACTORS)
        arguments = {
            name: normal(*shape, dtype=dtype) for name, shape in shapes_of(op.packet, batches, M, N, K).items()
        }
        own = {
            "beta": beta,
            "alpha": alpha,
            "use_gelu": number % 2 == 0,
            "out_dtype": max(dtype, torch.float32, key=lambda each: each.itemsize),
        }
        arguments |= {name: value for name, value in own.items() if name in op.names}
        if "beta" in arguments and beta == 0 and number % 2:
            arguments["self"].fill_(math.nan)
        # Without a BLAS, for a few elements, ATen multiplies batches by a factor of 0 on the CPU.
        reads = op.packet == "addr" or (op.packet == "baddbmm" and devices.current.type == "cpu")
        if "alpha" in arguments and alpha == 0 and number % 3 == 0 and not reads:
            arguments[op.names[1]].fill_(math.inf)
        arguments = {name: arguments[name] for name in op.names}
        call = fuzz.Call(op, arguments)
        if op.out_names:
            answer = functional_results(call)
            if answer is None:
                continue
            call = fuzz.Call(op, {**arguments, op.out_names[0]: torch.full_like(answer[0], math.nan)})
        yield call


@pytest.mark.parametrize(
    ("op", "dtype", "path"),
    # Without the full set the path alternates from dtype to dtype and from overload to overload.
    covering(2, SIZED, [torch.float16, torch.bfloat16, torch.float32, torch.float64], ["native", "python"]),
    ids=lambda value: getattr(value, "overload", str(value)),
    indirect=["path"],
)
def test_products_of_all_sizes(op, dtype, path):
    if dtype not in op.declaration.accepts:
        pytest.skip("a dtype that the kernel is not for")
    if not op.has_place:
        pytest.skip("an overload that ATen has on a GPU alone")
    for call in _sized_calls(op, dtype, 125 if FULL else 8):
        tritonite.reset_stats()
        assert fuzz.check(call) is None, str(call)
        counts = tritonite.stats()[op.overload]
        assert counts.launched + counts.replayed == 2 and not counts.declined, (str(call), counts)
        assert path == "python" or counts.replayed, (str(call), counts)


WITHOUT_TERMS = {
    "mm": lambda x: matmul.mm(x[:15, :0], x[:0, :1]),
    "mm of columns": lambda x: matmul.mm(x[:0, :15].mT, x[:0, :1]),
    "bmm": lambda x: matmul.bmm(x.new_empty(2, 1, 0), x.new_empty(2, 0, 7)),
    "mv": lambda x: matmul.mv(x[:4, :0], x[0, :0]),
    "addmv": lambda x: matmul.addmv(x[0], x[:, :1], x[0, :1], 0, 0),
    "addmm": lambda x: matmul.addmm(x[0, :9], x[:, :0], x[:0, :9], 1, 3),
    "addmm by 0": lambda x: matmul.addmm(x[:, :9], x, x[:, :9], 0.5, 0),
    "activation by 0": lambda x: matmul._addmm_activation(x[0, :9], x, x[:, :9], 1, 0, True),
    "addbmm": lambda x: matmul.addbmm(x[:16, :1], x.new_empty(0, 16, 3), x.new_empty(0, 3, 1), 0.5, 1),
    "addbmm by 0": lambda x: matmul.addbmm(x[:16, :1], x[None, :16], x[None, :, :1], 1, 0),
    "baddbmm by 0": lambda x: matmul.baddbmm(x[None, :16, :1], x[None, :16], x[None, :, :1], 1, 0),
    "baddbmm to columns": lambda x: matmul.baddbmm(
        x[None], x[None], x[None], 1, 0, outs=(torch.zeros_like(x).mT[None],)
    ),
}


@pytest.mark.parametrize("name", WITHOUT_TERMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("invariant", [False, True])
def test_products_without_terms_need_no_tiles(name, dtype, invariant, monkeypatch):
    """Kernels with tiles need K above 0. Products with K of 0 are computed before tiles are chosen."""

    def no_tiles(problem, *_):
        raise AssertionError(f"tiles for {problem}")

    for asked in ("choose", "fitting", "aten_is_faster", "microseconds"):
        monkeypatch.setattr(select, asked, no_tiles)
    x = normal(63, 63, dtype=dtype)
    with tritonite.use_gems(invariant=invariant):
        assert WITHOUT_TERMS[name](x)[0].isfinite().all()


@pytest.mark.declines("the result has another shape in ATen")
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_a_product_without_rows_has_its_addends_shape_in_aten(shape):
    added, mat, vec = (torch.ones(size, device=tritonite.device) for size in (shape, (0, 2), (2,)))
    assert torch.addmv(added, mat, vec).shape == shape
    with tritonite.use_gems(include="addmv", faster_only=False):
        assert torch.addmv(added, mat, vec).shape == shape


def test_offsets_beyond_32_bits():
    store = torch.empty(2**31 + 4096, dtype=torch.float16, device=tritonite.device)
    a = store.as_strided((3, 64), (2**30, 1))
    a.copy_(normal(3, 64))
    b = normal(64, 40, dtype=torch.float16)
    check(matmul.mm(a, b)[0], torch.mm, a.clone(), b)


def test_activations_after_an_inner_dimension_of_0_decline():
    x = normal(32, 32)
    half, byte, one = x.half(), x.to(torch.float8_e4m3fn), torch.ones((), device=x.device)
    ends = torch.tensor([16, 32], dtype=torch.int32, device=x.device)
    for declined in (
        lambda: matmul._addmm_activation(x, x[:, :0], x[:0], 1, 1, False),
        lambda: matmul._scaled_mm(byte[:, :0], byte.mT[:0], one, one, None, None, torch.bfloat16, False),
        lambda: matmul._grouped_mm(half[:, :0], half[:0], ends, None, None),
        lambda: matmul._grouped_mm(half[:, :0], half.new_empty(2, 32, 16)[:, :0], ends, None, None),
    ):
        with pytest.raises(Decline, match="an inner dimension of 0"):
            declined()


def test_destinations():
    a, b = normal(40, 32, dtype=torch.float16), normal(32, 48, dtype=torch.float16)
    expected = torch.mm(a, b)
    kept = normal(48, 80, dtype=torch.float16)
    for out in (torch.empty_like(expected), torch.empty_like(expected.mT).mT, kept.clone().mT[::2]):
        with tritonite.use_gems():
            torch.mm(a, b, out=out)
        check(out.contiguous(), torch.mm, a, b)
    x = normal(40, 48, dtype=torch.float16)
    with tritonite.use_gems():
        y = x.clone().addmm_(a, b, beta=0.5)
    check(y, torch.addmm, x, a, b, beta=0.5)
    assert not any(counts.declined for counts in tritonite.stats().values())
    square = normal(32, 32)
    with pytest.raises(Decline, match="overlaps"):
        matmul.mm(square, square, outs=(square,))
    with pytest.raises(Decline, match="overlaps"):
        matmul.addmm(square.mT, square + 1, square + 2, 1, 1, outs=(square,))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.ones(3, 4), torch.ones(5, 6)),
        (torch.ones(3, 4), torch.ones(4)),
        (torch.ones(3, 4), torch.ones(4, 5, dtype=torch.float64)),
        (torch.ones(3, 4).int(), torch.ones(4, 5).int()),
        (torch.ones(3, 4, dtype=torch.complex64), torch.ones(4, 5, dtype=torch.complex64)),
    ],
)
def test_invalid_operands_decline(a, b):
    with pytest.raises(Decline):
        matmul.mm(a.to(tritonite.device), b.to(tritonite.device))


def test_float32_results_of_16_bit_products():
    a, b = normal(40, 64, dtype=torch.bfloat16), normal(64, 48, dtype=torch.bfloat16)
    (wide,) = matmul.mm(a, b, out_dtype=torch.float32)
    assert_close(wide, a.float() @ b.float(), a.double() @ b.double(), terms=64 * 9)
    with pytest.raises(Decline):
        matmul.mm(a, b, out_dtype=torch.float16)
    x, a, b = wide[None], a[None], b[None]
    out = torch.empty_like(x)
    matmul.bmm(a, b, out_dtype=torch.float32, outs=(out,))
    assert_close(out, a.float() @ b.float(), a.double() @ b.double(), terms=64 * 9)
    matmul.baddbmm(x, a, b, 1, 2, out_dtype=torch.float32, outs=(out,))
    assert_close(out, x + 2 * a.float() @ b.float(), x + 2 * a.double() @ b.double(), terms=64 * 36)


@pytest.mark.skipif(tritonite.device == "cuda", reason="there ATen has them, and the samples are theirs")
@pytest.mark.parametrize("packet", ["mm", "bmm", "addmm", "baddbmm"])
def test_float32_results_that_aten_has_on_cuda_only(packet):
    rank = 3 if "b" in packet.removeprefix("add") else 2
    a, b, added = (torch.randn(*(2, 5, 5)[3 - rank :], generator=torch.manual_seed(i)).half() for i in range(3))
    exact, given = a.double() @ b.double(), (a, b)
    if packet not in ("mm", "bmm"):
        exact, given = exact * 0.5 + added.double() * 2.0, (added, a, b)
    factors = {"alpha": 0.5, "beta": 2.0} if len(given) == 3 else {}
    op = tritonite.overloads()[f"{packet}.dtype"]
    assert not op.has_place
    found = op(*given, torch.float32, **factors)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)
    out = torch.empty_like(found)
    assert tritonite.overloads()[f"{packet}.dtype_out"](*given, torch.float32, **factors, out=out) is out
    assert torch.equal(out, found)


def test_tf32_where_torch_allows_it(monkeypatch):
    taken, before = [], torch.backends.cuda.matmul.fp32_precision
    monkeypatch.setattr(matmul, "product", lambda a, b, out, added, sums, **_: taken.append(sums.precision))
    try:
        for setting in ("ieee", "tf32"):
            torch.backends.cuda.matmul.fp32_precision = setting
            matmul.mm(normal(4, 4), normal(4, 4))
            matmul.mm(normal(4, 4).double(), normal(4, 4).double())
        torch.set_float32_matmul_precision("high")
        matmul.mm(normal(4, 4), normal(4, 4))
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = before
    assert taken == ["ieee", "ieee", "tf32", "ieee", "tf32"]
