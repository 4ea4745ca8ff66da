"""L D L^T of matrices that no program holds, and solves by it, in device memory.

A program has a matrix, or some right-hand sides of one. All matrices have contiguous columns. Pivots are those of
`ldl.py`. Threads of a program read what others have written, behind barriers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonite.engine.iteration import offset_type
from tritonite.engine.linalg.ldl import ALPHA, pair_inverse
from tritonite.engine.linalg.tile import BEYOND
from tritonite.language.math import true_divide
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import fusion
from tritonite.runtime.libentry import libentry

# Rows that a program reads at a time, no fewer than it has threads, and columns.
_ROWS, _COLUMNS, _NUM_WARPS = 256, 8, 4


@triton.jit
def _largest(line, start, stop, step, ROWS: tl.constexpr):
    """Return the largest absolute value of elements `start` to `stop` of a line, 0 without one, and its position."""
    most, at = tl.full((), -1.0, line.dtype.element_ty), tl.full((), BEYOND, tl.int32)
    for first in range(start, stop, ROWS):
        i = first + tl.arange(0, ROWS)
        size = tl.where(i < stop, tl.abs(tl.load(line + i * step, mask=i < stop, other=0)), -1.0)
        here = tl.max(size, 0)
        at = tl.where(here > most, tl.min(tl.where(size == here, i, BEYOND), 0), at)
        most = tl.maximum(most, here)
    return tl.maximum(most, 0.0), at


@triton.jit
def _exchange(left, left_step, right, right_step, start, stop, ROWS: tl.constexpr):
    """Exchange elements `start` to `stop` of two lines."""
    for first in range(start, stop, ROWS):
        i = first + tl.arange(0, ROWS)
        upper = tl.load(left + i * left_step, mask=i < stop)
        lower = tl.load(right + i * right_step, mask=i < stop)
        tl.debug_barrier()
        tl.store(left + i * left_step, lower, mask=i < stop)
        tl.store(right + i * right_step, upper, mask=i < stop)
    tl.debug_barrier()


@triton.jit
def _multipliers(own, following, i, n, pivot, block, two):
    """Return what column k, and column k + 1 of a block of two rows, become: rows i of L."""
    a, b, c = block
    x = tl.load(own + i, mask=i < n, other=0)
    y = tl.load(following + i, mask=(i < n) & two, other=0)
    return tl.where(two, x * a + y * b, true_divide(x, pivot)), tl.where(two, x * b + y * c, 0.0)


@libentry()
@triton.jit(do_not_specialize=["n"])
def factor_matrix(x, pivots, info, n, INDEX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Replace the lower triangle of a matrix by D, with L below it. Write pivots and code."""
    wait_for_previous_launch()
    matrix = tl.program_id(0).to(INDEX)
    first = x + matrix * n * n
    failed, k = 0, 0
    while k < n:
        own, following = first + k * n, first + tl.minimum(k + 1, n - 1) * n
        diagonal = tl.abs(tl.load(own + k))
        most, at = _largest(own, k + 1, n, 1, ROWS)
        at = tl.where(at < BEYOND, at, k)
        left, _ = _largest(first + at, k, at, n, ROWS)
        below, _ = _largest(first + at * n, at + 1, n, 1, ROWS)
        other, other_diagonal = tl.maximum(left, below), tl.abs(tl.load(first + at * n + at))
        zero = (tl.maximum(diagonal, most) == 0) | (diagonal != diagonal)
        ratio = true_divide(most, tl.where(other == 0, 1.0, other))
        stays = zero | (diagonal >= most * ALPHA) | (diagonal >= most * ALPHA * ratio)
        two = (stays | (other_diagonal >= other * ALPHA)) == 0
        chosen, end = tl.where(stays, k, at), k + two.to(tl.int32)
        failed = tl.where((failed == 0) & zero, k + 1, failed)
        # No thread may change elements that others still compare.
        tl.debug_barrier()
        if chosen != end:
            last = first + end * n
            _exchange(last, 1, first + chosen * n, 1, chosen + 1, n, ROWS)
            _exchange(last, 1, first + chosen, n, end + 1, chosen, ROWS)
            _exchange(last + end, 0, first + chosen * n + chosen, 0, 0, 1, ROWS)
            if two:
                _exchange(own + end, 0, own + chosen, 0, 0, 1, ROWS)
        target = pivots + matrix * n + k
        tl.store(target, tl.where(two, -(chosen + 1), chosen + 1))
        if two:
            tl.store(target + 1, -(chosen + 1))
        if zero == 0:
            pivot = tl.load(own + k)
            lower = tl.load(own + k + 1, mask=two, other=1)
            second = tl.load(following + k + 1, mask=two, other=0)
            block = pair_inverse(tl.where(two, pivot, 0.0), lower, second)
            for j_first in range(end + 1, n, COLUMNS):
                j = j_first + tl.arange(0, COLUMNS)
                own_row = tl.load(own + j, mask=j < n, other=0)
                next_row = tl.load(following + j, mask=(j < n) & two, other=0)
                for i_first in range(j_first, n, ROWS):
                    i = i_first + tl.arange(0, ROWS)
                    own_factor, next_factor = _multipliers(own, following, i, n, pivot, block, two)
                    place = first + i[:, None] + j[None, :] * n
                    inside = (i[:, None] >= j[None, :]) & (i < n)[:, None]
                    value = tl.load(place, mask=inside, other=0)
                    value -= own_factor[:, None] * own_row[None, :]
                    tl.store(place, value - next_factor[:, None] * next_row[None, :], mask=inside)
            tl.debug_barrier()
            for i_first in range(end + 1, n, ROWS):
                i = i_first + tl.arange(0, ROWS)
                own_factor, next_factor = _multipliers(own, following, i, n, pivot, block, two)
                tl.store(own + i, own_factor, mask=i < n)
                tl.store(following + i, next_factor, mask=(i < n) & two)
            tl.debug_barrier()
        k = end + 1
    tl.store(info + matrix, failed)


@triton.jit
def _exchange_rows(lines, first, second, mask):
    """Exchange two rows of right-hand sides, whose columns begin at `lines`."""
    tl.debug_barrier()
    upper, lower = tl.load(lines + first, mask=mask), tl.load(lines + second, mask=mask)
    tl.debug_barrier()
    tl.store(lines + first, lower, mask=mask)
    tl.store(lines + second, upper, mask=mask)
    tl.debug_barrier()


@libentry()
@triton.jit(do_not_specialize=["n", "n_columns"])
def solve_columns(x, factors, pivots, n, n_columns, INDEX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Replace columns of right-hand sides by the solution: by L and D forward, by L^T backward."""
    wait_for_previous_launch()
    blocks = tl.cdiv(n_columns, COLUMNS)
    matrix = (tl.program_id(0) // blocks).to(INDEX)
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    exists = column < n_columns
    lines = x + matrix * n * n_columns + column.to(INDEX) * n
    first, swaps = factors + matrix * n * n, pivots + matrix * n
    k = 0
    while k < n:
        swap = tl.load(swaps + k)
        two = swap < 0
        end = k + two.to(tl.int32)
        _exchange_rows(lines, end, tl.abs(swap) - 1, exists)
        own, following = first + k * n, first + tl.minimum(k + 1, n - 1) * n
        own_x = tl.load(lines + k, mask=exists, other=0)
        next_x = tl.load(lines + k + 1, mask=exists & two, other=0)
        for i_first in range(end + 1, n, ROWS):
            i = i_first + tl.arange(0, ROWS)
            own_factor = tl.load(own + i, mask=i < n, other=0)
            next_factor = tl.load(following + i, mask=(i < n) & two, other=0)
            place, inside = lines[None, :] + i[:, None], (i < n)[:, None] & exists[None, :]
            value = tl.load(place, mask=inside, other=0)
            value -= own_factor[:, None] * own_x[None, :]
            tl.store(place, value - next_factor[:, None] * next_x[None, :], mask=inside)
        pivot = tl.load(own + k)
        lower = tl.load(own + k + 1, mask=two, other=1)
        second = tl.load(following + k + 1, mask=two, other=0)
        a, b, c = pair_inverse(tl.where(two, pivot, 0.0), lower, second)
        upper = tl.where(two, a * own_x + b * next_x, true_divide(own_x, tl.where(two, 1.0, pivot)))
        tl.debug_barrier()
        tl.store(lines + k, upper, mask=exists)
        tl.store(lines + k + 1, b * own_x + c * next_x, mask=exists & two)
        k = end + 1
    k = n - 1
    while k >= 0:
        tl.debug_barrier()
        swap = tl.load(swaps + k)
        two = swap < 0
        own, before = first + k * n, first + tl.maximum(k - 1, 0) * n
        own_x = tl.load(lines + k, mask=exists, other=0)
        before_x = tl.load(lines + k - 1, mask=exists & two, other=0)
        for i_first in range(k + 1, n, ROWS):
            i = i_first + tl.arange(0, ROWS)
            value = tl.load(lines[None, :] + i[:, None], mask=(i < n)[:, None] & exists[None, :], other=0)
            own_x -= tl.sum(tl.load(own + i, mask=i < n, other=0)[:, None] * value, 0)
            before_x -= tl.sum(tl.load(before + i, mask=(i < n) & two, other=0)[:, None] * value, 0)
        tl.debug_barrier()
        tl.store(lines + k, own_x, mask=exists)
        tl.store(lines + k - 1, before_x, mask=exists & two)
        _exchange_rows(lines, k, tl.abs(swap) - 1, exists)
        k = k - 1 - two.to(tl.int32)


def factor(x: torch.Tensor, pivots: torch.Tensor, info: torch.Tensor) -> None:
    """Replace the lower triangles of matrices, (count, n, n); write pivots, (count, n), and codes, (count,)."""
    count, n, _ = x.shape
    factor_matrix[(count,)](
        *(x, pivots, info, n),
        INDEX=offset_type(x),
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        num_warps=_NUM_WARPS,
        # All threads have to choose the same pivot.
        **fusion(allowed=False),
    )


def solve(x: torch.Tensor, factors: torch.Tensor, pivots: torch.Tensor) -> None:
    """Replace right-hand sides, (count, n, columns), by the solution of systems by factors and contiguous pivots."""
    count, n, n_columns = x.shape
    solve_columns[(count * -(-n_columns // _COLUMNS),)](
        *(x, factors, pivots, n, n_columns),
        INDEX=offset_type(x, factors),
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        num_warps=_NUM_WARPS,
    )
