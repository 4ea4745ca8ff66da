"""Factorisations and solves of matrices larger than a tile: panels by the kernels of a tile, updates by products.

All tensors are (matrices, rows, columns). A factorisation goes from left to right over panels of a few columns.
Cholesky and triangular solves update a panel by all that is before it (left-looking). LU updates all that is after a
block (right-looking), because its rows are exchanged (Golub and Van Loan, sections 4.2.6 and 3.4).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonite.engine.gemm.product import product
from tritonite.engine.gemm.work import Epilogue
from tritonite.engine.iteration import offset_type
from tritonite.engine.linalg import launch
from tritonite.engine.linalg.substitution import Sweep
from tritonite.engine.linalg.table import linalg_table, panel_columns
from tritonite.engine.movement import fill_zero
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import empty
from tritonite.runtime.libentry import libentry

_COLUMNS = 256


def subtract(out: torch.Tensor, given: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Write given - a b, also in place."""
    product(a, b, out, Epilogue(given, alpha=-1.0, beta=1.0))


def solve_triangle(solution: torch.Tensor, right: torch.Tensor, triangle: torch.Tensor, sweep: Sweep) -> None:
    """Write the solution of triangular systems. `right` may be the solution's own memory."""
    n, step = triangle.shape[-1], linalg_table().block
    starts = range(0, n, step)
    for k in starts if sweep.lower else reversed(starts):
        end = min(k + step, n)
        known = slice(0, k) if sweep.lower else slice(end, n)
        own, given = solution[:, k:end], right[:, k:end]
        if known.start < known.stop:
            subtract(own, given, triangle[:, k:end, known], solution[:, known])
            given = own
        launch.solve(own, given, triangle[:, k:end, k:end], (sweep,))


def solve_by_cholesky(x: torch.Tensor, lower: torch.Tensor) -> None:
    """Replace right-hand sides by the solution of L L^T X = B."""
    solve_triangle(x, x, lower, Sweep(True, unit=False))
    solve_triangle(x, x, lower.mT, Sweep(False, unit=False))


def solve_by_lu(x: torch.Tensor, factors: torch.Tensor, pivots: torch.Tensor, adjoint: bool) -> None:
    """Replace right-hand sides by the solution of P L U X = B, or with `adjoint` of U^T L^T P^T X = B.

    `pivots`, (matrices, rows), are contiguous.
    """
    if adjoint:
        solve_triangle(x, x, factors.mT, Sweep(True, unit=False))
        solve_triangle(x, x, factors.mT, Sweep(False, unit=True))
        exchange_rows(x, pivots, backward=True)
    else:
        exchange_rows(x, pivots)
        solve_triangle(x, x, factors, Sweep(True, unit=True))
        solve_triangle(x, x, factors, Sweep(False, unit=False))


def cholesky(factor: torch.Tensor, info: torch.Tensor, source: torch.Tensor) -> None:
    """Write L of A = L L^T, whose lower triangle is read, and for each matrix its first minor that is not positive."""
    (count, n, _), step = source.shape, linalg_table().block
    fill_zero(factor)
    fill_zero(info)
    codes = empty((count,), torch.int32, source.device)
    for k in range(0, n, step):
        end = min(k + step, n)
        panel = source[:, k:, k:end]
        if k:
            panel = empty((count, n - k, end - k), source.dtype, source.device)
            subtract(panel, source[:, k:, k:end], factor[:, k:, :k], factor[:, k:end, :k].mT)
        corner = factor[:, k:end, k:end]
        launch.cholesky(corner, codes, panel[:, : end - k], False)
        _append(None, info, None, codes, k)
        if end < n:
            launch.solve(factor[:, end:, k:end].mT, panel[:, end - k :].mT, corner, (Sweep(True, unit=False),))


def lu(factors: torch.Tensor, pivots: torch.Tensor, info: torch.Tensor, pivot: bool) -> None:
    """Replace matrices by L and U of P A = L U in one, and write pivots, and for each matrix its first pivot of 0.

    `pivots`, (matrices, the smaller side), are contiguous.
    """
    n_rows, n_columns = factors.shape[1:]
    block, least = linalg_table().block, min(n_rows, n_columns)
    fill_zero(info)
    for start in range(0, least, block):
        stop = min(start + block, least)
        _lu_of_columns(factors[:, start:, start:stop], pivots, info, start, pivot)
        if pivot:
            swaps = pivots[:, start:stop].contiguous()
            exchange_rows(factors[:, start:, :start], swaps, start)
            exchange_rows(factors[:, start:, stop:], swaps, start)
        _eliminate(factors[:, start:], start, stop)


def _lu_of_columns(factors: torch.Tensor, pivots: torch.Tensor, info: torch.Tensor, first: int, pivot: bool) -> None:
    """Factor a block of columns, which begins at row `first` of the matrices, by panels."""
    count, n_rows, n_columns = factors.shape
    step = panel_columns(n_rows, factors.dtype)
    codes = empty((count,), torch.int32, factors.device)
    for k in range(0, n_columns, step):
        end = min(k + step, n_columns)
        panel = empty((count, n_rows - k, end - k), factors.dtype, factors.device)
        swaps = empty((count, end - k), torch.int32, factors.device)
        launch.lu(panel, swaps, codes, factors[:, k:, k:end], pivot)
        factors[:, k:, k:end].copy_(panel)
        _append(pivots, info, swaps, codes, first + k)
        if pivot:
            exchange_rows(factors[:, k:, :k], swaps)
            exchange_rows(factors[:, k:, end:], swaps)
        _eliminate(factors[:, k:], k, end)


def _eliminate(rows: torch.Tensor, start: int, stop: int) -> None:
    """Compute U in the rows of factored columns `start` to `stop`, and subtract L U from the rows below.

    `rows` are the rows of the matrices from `start` on.
    """
    size = stop - start
    if stop == rows.shape[2]:
        return
    upper = rows[:, :size, stop:]
    launch.solve(upper, upper, rows[:, :size, start:stop], (Sweep(True, unit=True),))
    if size < rows.shape[1]:
        rest = rows[:, size:, stop:]
        subtract(rest, rest, rows[:, size:, start:stop], upper)


@libentry()
@triton.jit(do_not_specialize=["k", "stride", "own_stride", "count"])
def append_step(pivots, info, own_pivots, own_info, k, stride, own_stride, count, BLOCK: tl.constexpr):
    """Append the pivots of a panel that begins at row k to those of a matrix, and its code if there is none before."""
    wait_for_previous_launch()
    matrix = tl.program_id(0).to(tl.int64)
    code, own = tl.load(info + matrix), tl.load(own_info + matrix)
    tl.store(info + matrix, tl.where((code == 0) & (own != 0), own + k, code))
    if pivots is not None:
        line = tl.arange(0, BLOCK)
        swaps = tl.load(own_pivots + matrix * own_stride + line, mask=line < count, other=0)
        tl.store(pivots + matrix * stride + k + line, swaps + k, mask=line < count)


def _append(
    pivots: torch.Tensor | None, info: torch.Tensor, swaps: torch.Tensor | None, codes: torch.Tensor, k: int
) -> None:
    stride, count = (0, 0) if pivots is None or swaps is None else (pivots.stride(0), swaps.shape[1])
    append_step[(info.numel(),)](
        *(pivots, info, swaps, codes, k, stride, count, count), BLOCK=triton.next_power_of_2(max(1, count)), num_warps=1
    )


@libentry()
@triton.jit(do_not_specialize=["origin", "n_columns", "count"])
def swap_rows(
    x,
    swaps,
    batch,
    row,
    column,
    origin,
    n_columns,
    count,
    BACKWARD: tl.constexpr,
    INDEX: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Exchange rows of a block of columns by all swaps in turn, as `exchange_rows` describes."""
    wait_for_previous_launch()
    blocks = tl.cdiv(n_columns, COLUMNS)
    matrix = (tl.program_id(0) // blocks).to(INDEX)
    columns = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    row_step = tl.full((), row, INDEX)
    first = x + matrix * tl.full((), batch, INDEX) + columns.to(INDEX) * tl.full((), column, INDEX)
    mask = columns < n_columns
    for step in range(count):
        i = count - 1 - step if BACKWARD else step
        other = tl.load(swaps + matrix * count + i) - 1 - origin
        upper, lower = tl.load(first + i * row_step, mask=mask), tl.load(first + other * row_step, mask=mask)
        tl.store(first + i * row_step, lower, mask=mask)
        tl.store(first + other * row_step, upper, mask=mask)
        # The next loads may be those of other threads.
        tl.debug_barrier()


def exchange_rows(x: torch.Tensor, swaps: torch.Tensor, origin: int = 0, backward: bool = False) -> None:
    """Exchange rows in place by swaps, or by the last swap first.

    Row i of x is exchanged with the row that swap i of its matrix names. Swaps, (matrices, count), are contiguous, and
    count rows of the matrix from 1 on. x begins at row `origin` of the matrix, counted from 0.
    """
    count, _, n_columns = x.shape
    if not n_columns * swaps.numel():
        return
    swap_rows[(count * -(-n_columns // _COLUMNS),)](
        *(x, swaps, *x.stride(), origin, n_columns, swaps.shape[1]),
        BACKWARD=backward,
        INDEX=offset_type(x),
        COLUMNS=_COLUMNS,
        num_warps=4,
    )
