"""Invariant mode: the bits of a row do not depend on how many rows are in the batch."""

import sys

import pytest
import torch
from conftest import FULL, every_second

import tritonite
from tritonite import devices, fused
from tritonite.engine import scan
from tritonite.engine.gemm import launch as gemm_launch
from tritonite.engine.gemm import operands as gemm_operands
from tritonite.engine.gemm import select
from tritonite.engine.gemm.problem import FEW, Problem
from tritonite.engine.gemm.work import Epilogue
from tritonite.engine.rows import blocks
from tritonite.engine.rows.blocks import RowTraits
from tritonite.engine.rows.space import RowSpace
from tritonite.engine.rows.table import Invariant
from tritonite.runtime import contract
from tritonite.testing.verify import check_overload

PRODUCT = sys.modules["tritonite.engine.gemm.product"]
# Few rows, because the interpreter takes milliseconds for a block. The choice of blocks is tested for every number.
ROWS = 20
# Rows for operators other than products, which have no tiles of 16 rows or more.
FEWER = ROWS if FULL else 6
EVERY = (*range(1, 70), *(2**i + more for i in range(7, 13) for more in (-1, 0, 1)))
if not FULL:
    EVERY = (*range(1, 10), *(2**i + more for i in range(4, 13) for more in (-1, 0, 1)))


@pytest.fixture
def invariant():
    with tritonite.use_gems(invariant=True):
        yield


@pytest.fixture
def small_blocks(change_tables, change_device):
    """Make blocks of 128 elements of a row, two of them in a program."""
    change_device(row_elements=512)
    change_tables(rows={"invariant": Invariant(1 / 4, 2, 16)})


def bits(result):
    results = result if isinstance(result, (list, tuple)) else (result,)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return [x.view(integers[x.dtype.itemsize]) for x in results]


def check(function, *operands, kept=0, result=None):
    """Compare the results of some rows along dimension `kept`, computed alone and with all others."""
    tritonite.reset_stats()
    every = function(*operands)
    every = every if isinstance(every, (list, tuple)) else (every,)
    place, rows = kept if result is None else result, operands[0].shape[kept]
    for first, count in ((0, 1), (rows // 4, 3), (0, rows - 3)):
        found = function(*(x.narrow(kept, first, count) for x in operands))
        found = found if isinstance(found, (list, tuple)) else (found,)
        for own, all_rows in zip(found, every, strict=True):
            assert torch.equal(*(bits(x)[0] for x in (own, all_rows.narrow(place, first, count)))), (first, count)
    reasons = [reason for each in tritonite.stats().values() for reason in each.declined]
    # Results are compared on the CPU.
    assert tritonite.stats() and all(reason.endswith("on another device") for reason in reasons)


# ---- Rows ------------------------------------------------------------------------------------------------------------

OVER_ROWS = {
    "sum": lambda x, dim: x.sum(dim),
    "var_mean": lambda x, dim: torch.var_mean(x, dim),
    "logsumexp": lambda x, dim: x.logsumexp(dim),
    "max": lambda x, dim: tuple(x.max(dim)),
    "norm": lambda x, dim: x.norm(2, dim),
}
ROW_BY_ROW = {
    "softmax": lambda x, dim: x.softmax(dim),
    "log_softmax": lambda x, dim: x.log_softmax(dim),
    "cumsum": lambda x, dim: x.cumsum(dim),
    "logcumsumexp": lambda x, dim: x.logcumsumexp(dim),
}


@pytest.mark.parametrize("name", [*OVER_ROWS, *ROW_BY_ROW])
def test_rows_do_not_depend_on_other_rows(name, device, small_blocks, invariant):
    function = {**OVER_ROWS, **ROW_BY_ROW}[name]
    for length, dtype in ((70, torch.float16), (300, torch.float32)):
        # Contiguous rows, and columns. A single column is contiguous.
        x = torch.randn(FEWER, length, device=device).to(dtype)
        column_major = torch.randn(length, FEWER, device=device).to(dtype)
        check(lambda x: function(x, -1), x)
        if FULL or length == 70:
            check(lambda x: function(x, -1), column_major.t())
        if FULL or length == 300:
            check(lambda x: function(x, 0), column_major, kept=1, result=1 if name in ROW_BY_ROW else 0)
    if name in ("sum", "var_mean"):
        check(lambda x: function(x, (1, 2)), torch.randn(FEWER, 3, 50, device=device))


def test_a_row_is_the_same_in_any_layout(device, small_blocks, invariant):
    x = torch.randn(3 if FULL else 2, 301, device=device)
    column_major = x.t().contiguous().t()
    for function in (*OVER_ROWS.values(), *ROW_BY_ROW.values()):
        for one, other in zip(bits(function(x, 1)), bits(function(column_major, 1)), strict=True):
            assert torch.equal(one, other)


@pytest.mark.skipif(not devices.current.interpreted, reason="other tests run it on a GPU; the interpreter has a twin")
@pytest.mark.parametrize("name", ["cumsum", "cumprod", "logcumsumexp", "cummax"])
def test_scans_by_halves(name, small_blocks, monkeypatch):
    function = getattr(torch, name)
    x = torch.randint(-3, 4, (5 if FULL else 2, 301)).double()
    expected = function(x, 1)
    scanned = []
    monkeypatch.setattr(scan, "_scan_in_order", lambda *given: scanned.append(1) or scan._scan_by_halves(*given))
    with tritonite.use_gems(invariant=True):
        torch.testing.assert_close(function(x, 1), expected)
    assert scanned


def test_norms_do_not_depend_on_other_rows(device, small_blocks, invariant):
    n = 300
    x, grad = (torch.randn(FEWER, n, device=device) for _ in range(2))
    weight, bias = torch.randn(n, device=device), torch.randn(n, device=device)
    check(lambda x: torch.native_layer_norm(x, (n,), weight, bias, 1e-5), x)
    _, mean, rstd = torch.native_layer_norm(x, (n,), weight, bias, 1e-5)

    def gradient(grad, x, mean, rstd):
        wanted = [True, False, False]
        function = torch.ops.aten.native_layer_norm_backward
        return function(grad, x, (n,), mean, rstd, weight, bias, wanted)[0]

    check(gradient, grad, x, mean, rstd)
    # Images, in which a row is a group.
    check(lambda x: torch.native_group_norm(x, None, None, len(x), 4, n // 4, 2, 1e-5)[0], x.view(-1, 4, n // 4))


def test_fused_norms_do_not_depend_on_other_rows(device, invariant):
    for n in (24, 1000):
        x, residual, grad = (torch.randn(FEWER, n, device=device) for _ in range(3))
        weight, bias = torch.randn(n, device=device), torch.randn(n, device=device)
        check(lambda x, residual: fused.skip_layer_norm(x, residual, weight, bias), x, residual)
        check(lambda x, residual: fused.skip_rms_norm(x, residual, weight), x, residual)
        _, total, rstd = torch.ops.tritonite.rms_norm(x, residual, weight)

        def gradient(grad, total, rstd):
            return torch.ops.tritonite.rms_norm_backward(grad, None, total, rstd, weight, False)[0]

        check(gradient, grad, total, rstd)


def spaces(length, counts):
    """Yield spaces with each count of rows of a length, contiguous and as columns."""
    for count in counts:
        for x, dim in ((torch.empty(count, length, device="meta"), 1), (torch.empty(length, count, device="meta"), 0)):
            yield RowSpace.of((x,), (dim,), (x,), (), False)


@pytest.mark.parametrize("length", [1, 64, 1000, 1024, 1025, 4096, 65_536, 128_256, 2**24])
def test_a_row_is_cut_by_its_length(length, on_a_gpu):
    traits = RowTraits(4, True, 1, torch.float32)
    with contract.under(contract.Settings(False, True)):
        found = set()
        for space in spaces(length, EVERY):
            of_reduction, of_transform = blocks.for_reduction(space, 1), blocks.for_transform(space, traits)
            for each in (of_reduction, of_transform, scan._blocks(space, space.inner)):
                assert each.programs * each.rows >= space.n_kept and each.programs_per_row == 1
                assert each.steps * each.splits * each.columns >= length
                found.add((each.columns, each.steps, each.splits))
            states = space._replace(n_reduced=of_reduction.splits, reduced=(((space.n_kept,),), ()))
            found.add(("states", blocks.for_states(states)[1]))
        assert len(found) == 2
    # By default blocks depend on the number of rows.
    assert len({blocks.for_reduction(space, 1)[1:] for space in spaces(length, EVERY)}) > 1


# ---- Products --------------------------------------------------------------------------------------------------------


@every_second(("shape", "dtype"), [(48, 64), (50, 33), (1, 70), (16, 40), (24, 520)], [torch.float32, torch.bfloat16])
def test_products_do_not_depend_on_other_rows(shape, dtype, device, invariant):
    N, K = shape
    a, b, bias = (torch.randn(*size, device=device).to(dtype) for size in ((ROWS, K), (K, N), (N,)))
    columns = a.t().contiguous().t()
    for rows, weight in ((a, b), (columns, b), (a, b.t().contiguous().t())):
        check(lambda a: torch.mm(a, weight), rows)
        check(lambda a: torch.addmm(bias, a, weight, alpha=0.5), rows)
    check(lambda a: torch.mv(a, b[:, 0]), a)
    batches, others = torch.randn(FEWER, 3, K, device=device).to(dtype), b.expand(FEWER, K, N)
    check(torch.bmm, batches, others.contiguous())
    check(torch.bmm, batches, others)
    check(lambda out, a: torch.addmm(bias, a, b, out=out), torch.empty(N, ROWS, device=device, dtype=dtype).t(), a)


@every_second(
    ("shape", "dtype"),
    [(4096, 4096), (14_336, 4096), (64, 14_336), (1, 4096), (1000, 1001)],
    [torch.bfloat16, torch.float32, torch.float64, torch.int8],
)
def test_tiles_are_alike_for_any_rows(shape, dtype, on_a_gpu, monkeypatch):
    N, K = shape
    found = set()
    monkeypatch.setattr(gemm_launch, "run", lambda work, config: found.add(config))
    monkeypatch.setattr(gemm_operands, "copy_padded", lambda *_: None)
    result = torch.int32 if dtype is torch.int8 else dtype

    def multiply(count, transposed, full=True):
        for batches, M in ((1, count), (count, 3)):
            a = torch.empty(batches, M, K, dtype=dtype, device="meta")
            if transposed:
                a = a.new_empty(batches, K, M).mT
            b, out = a.new_empty(batches, N, K).mT, a.new_empty(batches, M, N, dtype=result)
            addend = torch.empty((batches, M, N) if full else N, device="meta")
            PRODUCT.product(a, b, out, Epilogue(addend, beta=1))

    with contract.under(contract.Settings(False, True)):
        for count in EVERY:
            for transposed in (False, True):
                multiply(count, transposed)
                multiply(count, transposed, full=False)
    if dtype is torch.bfloat16:
        # bfloat16 sums have the same bits in all tiles for tensor cores.
        assert all(config.splits == 1 and config.BLOCK_M >= FEW for config in found)
    elif dtype is torch.float32:
        assert len({(config.splits, config.BLOCK_K, config.transposed, config.bf16x6) for config in found}) == 1
        assert all(config.bf16x6 for config in found)
    else:
        assert len(found) == 1
    found.clear()
    for count in EVERY:
        multiply(count, False)
    assert len(found) > 1


@pytest.mark.skipif(not devices.has_wgmma(torch.device(tritonite.device)), reason="of Hopper's tensor cores alone")
@pytest.mark.parametrize(
    ("dtype", "K"),
    [(torch.bfloat16, 2056), (torch.float16, 2056), (torch.float32, 2056), (torch.float16, 120)],
    ids=str,
)
def test_sums_have_the_same_bits_in_all_tiles(dtype, K):
    """Numbers of very different sizes are added up by every kind of kernel in the tables."""
    device = torch.device("cuda", torch.cuda.current_device())
    assert select.has_invariant_tiles(dtype, device)
    M, N = 100, 264
    a, b = torch.randn(1, M, K, device=device), torch.randn(1, N, K, device=device)
    a, b = (a * 2 ** torch.randn_like(a).mul(3)).to(dtype), b.to(dtype).mT
    problem = Problem.of(a, b, b.new_empty(1, M, N))._replace(invariant=True)
    table = select.table_for(problem, device, True)
    tiles = table.candidates[select._invariant(problem, table.candidates, device)]
    found, kinds = set(), set()
    for tile in tiles:
        config = table.configs[tile["number"]]._replace(splits=int(tile["splits"]))
        kind = config._replace(BLOCK_M=0, num_warps=0, num_stages=0, programs=0, rate=0, GROUP_M=0, MORE_N=0)
        if kind not in kinds:
            kinds.add(kind)
            out = b.new_empty(1, M, N)
            PRODUCT.product(a, b, out, config=select.fitting(config, problem, device))
            found.add(bits(out)[0].cpu().numpy().tobytes())
    assert len(kinds) > 3 and len(found) == 1


# ---- Attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sequence_does_not_depend_on_others(dtype, queries, device, invariant):
    query, key, value = (torch.randn(FEWER, 2, n, 64, device=device).to(dtype) for n in (queries, 300, 300))
    attention = torch.nn.functional.scaled_dot_product_attention
    check(attention, query, key, value)
    check(lambda *operands: attention(*operands, is_causal=True), query, key, value)


# ---- Right answers ---------------------------------------------------------------------------------------------------

# Without the full set, blocks are so small that rows of the smaller samples have several.
LABELS = (
    None if FULL else ("transposed*", "sliced*", "misaligned*", "empty*", "zero_dim*", "float32*", "permuted", "ext*")
)
CHECKED = ("sum.dim_IntList", "var_mean.correction", "max.dim", "cumsum", "cummax", "_softmax", "mm", "addmm_", "bmm")


@pytest.mark.parametrize("name", [*CHECKED, "native_layer_norm", "native_layer_norm_backward", "mv", "_grouped_mm"])
def test_answers_are_atens(name, change_device, monkeypatch):
    asked = contract.settings_of
    monkeypatch.setattr(contract, "settings_of", lambda faster_only=True, invariant=False: asked(faster_only, True))
    change_device(row_elements=32 if FULL else 16, row_columns=16)
    report = check_overload(tritonite.overloads()[name], torch.float32, labels=LABELS)
    assert report.served and not report.failures


# ---- The switch ------------------------------------------------------------------------------------------------------


def test_scopes_switch_it(device, path, small_blocks):
    x = torch.randn(3, 1001, device=device)
    for _ in range(2):
        for asked in (True, False):
            with tritonite.use_gems(invariant=asked):
                torch.testing.assert_close(x.sum(1), x.double().sum(1).float())
                assert ("invariant" in tritonite.explain("sum.dim_IntList", x, [1])) == asked
    if path == "native":
        counts = tritonite.stats()["sum.dim_IntList"]
        # float32 and float64.
        assert (counts.launched, counts.replayed) == (4, 4)
    tritonite.enable(invariant=True)
    assert contract.settings() == (False, True)
    with tritonite.use_gems():
        assert not contract.settings().invariant
    assert contract.settings().invariant
    tritonite.disable()
    assert not contract.settings().invariant


def test_fused_calls_are_asked_too(device):
    with tritonite.use_gems(include=(), invariant=True):
        assert "invariant" in tritonite.explain("tritonite::rms_norm", *torch.ones(2, 3, 8, device=device))
