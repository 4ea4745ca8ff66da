"""The factorisation A = L D L^T of a tile of symmetric matrices with Bunch and Kaufman's pivots, and solves by it.

D has blocks of one and of two rows. As in LAPACK's `sytrf` for lower triangles, a positive pivot p at step k says that
rows and columns k and p were exchanged; equal negative pivots -p at k and k + 1 say that k + 1 and p were, and that the
block has two rows. The exchanges of a step leave earlier columns of L in place.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tritonite.engine.linalg.tile import (
    BEYOND,
    begin,
    column_of,
    element_of,
    matrices_of,
    pointers,
    row_of,
    vector_pointers,
)
from tritonite.language.math import true_divide
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry

# (1 + sqrt(17)) / 8, which bounds the growth of elements over two steps (Bunch and Kaufman 1977).
ALPHA = tl.constexpr(0.6403882032022076)


@triton.jit
def _largest(vector, line, chosen):
    """Return the largest absolute value of the elements that `chosen` marks, 0 without one, and its first position."""
    size = tl.where(chosen, tl.abs(vector), -1.0)
    most = tl.max(size, 1)
    at = tl.min(tl.where(chosen & (size == most[:, None]), line, BEYOND), 1)
    return tl.maximum(most, 0.0), at


@triton.jit
def _pivot(tile, column, line, k, n):
    """Return (row to exchange, whether the block has two rows, whether the column is zero) for step k."""
    own = column_of(tile, column, k)
    diagonal = tl.abs(element_of(own, line == k))
    most, at = _largest(own, line, (line > k) & (line < n))
    at = tl.where(at < BEYOND, at, k)
    across = row_of(tile, line == at[:, None])
    other, _ = _largest(across, line, (line >= k) & (line < n) & (line != at[:, None]))
    other_diagonal = tl.abs(element_of(across, line == at[:, None]))
    zero = (tl.maximum(diagonal, most) == 0) | (diagonal != diagonal)
    ratio = true_divide(most, tl.where(other == 0, 1.0, other))
    stays = zero | (diagonal >= most * ALPHA) | (diagonal >= most * ALPHA * ratio)
    moves = other_diagonal >= other * ALPHA
    return tl.where(stays, k, at), (stays | moves) == 0, zero


@triton.jit
def _exchanged(tile, row, column, line, k, first, second):
    """Return the matrices with rows and columns `first` and `second` exchanged, from row and column k on."""
    first_row, second_row = first[:, None, None], second[:, None, None]
    upper, lower = row_of(tile, line == first[:, None]), row_of(tile, line == second[:, None])
    swapped = tl.where(row == first_row, lower[:, None, :], tl.where(row == second_row, upper[:, None, :], tile))
    tile = tl.where(column >= k, swapped, tile)
    left = tl.sum(tl.where(column == first_row, tile, 0.0), 2)
    right = tl.sum(tl.where(column == second_row, tile, 0.0), 2)
    swapped = tl.where(column == first_row, right[:, :, None], tl.where(column == second_row, left[:, :, None], tile))
    return tl.where(row >= k, swapped, tile)


@triton.jit
def pair_inverse(first, below, second):
    """Return the elements of the inverse of symmetric blocks of two rows: (1, 1), (2, 1) and (2, 2).

    They are divided by the element below the diagonal, which is the largest, so that the determinant does not overflow.
    """
    a, b = true_divide(first, below), true_divide(second, below)
    scale = true_divide(true_divide(tl.full(a.shape, 1, a.dtype), a * b - 1.0), below)
    return b * scale, -scale, a * scale


@libentry()
@triton.jit(do_not_specialize=["n_matrices", "n"])
def factor_ldl(factors, pivots, info, source, sizes, n_matrices, n, META: tl.constexpr):
    """Write D, with L below it, the pivots, and for each matrix its first block that is 0. The lower triangle is read.

    Both triangles of the part that is not yet factored are kept, because rows are sums of the tile.
    """
    wait_for_previous_launch()
    meta: tl.constexpr = META
    MATRICES: tl.constexpr = meta.matrices
    SIDE: tl.constexpr = meta.rows
    index, exists = matrices_of(tl.program_id(0), n_matrices, META)
    line = tl.arange(0, SIDE)[None, :]
    row, column = tl.arange(0, SIDE)[None, :, None], tl.arange(0, SIDE)[None, None, :]
    inside = exists[:, None, None] & (row < n) & (column < n)
    first = begin(source, index, sizes)
    lower = pointers(first, tl.maximum(row, column), tl.minimum(row, column), source.row, source.column, meta.index)
    tile = tl.load(lower, mask=inside, other=0)
    swaps = line + 1 + tl.zeros((MATRICES, SIDE), tl.int32)
    failed = tl.zeros((MATRICES,), tl.int32)
    # Whether the step is the second of a block of two rows, which the first one has done.
    done = tl.zeros((MATRICES,), tl.int32)
    for k in range(n):
        chosen, two, zero = _pivot(tile, column, line, k, n)
        active = done == 0
        two = active & two
        failed = tl.where((failed == 0) & active & zero, k + 1, failed)
        end = k + two.to(tl.int32)
        chosen = tl.where(active, chosen, k)
        tile = _exchanged(tile, row, column, line, k, tl.where(active, end, k), chosen)
        swaps = tl.where(two[:, None] & ((line == k) | (line == k + 1)), -(chosen + 1)[:, None], swaps)
        swaps = tl.where((active & (two == 0))[:, None] & (line == k), (chosen + 1)[:, None], swaps)
        own, following = column_of(tile, column, k), column_of(tile, column, k + 1)
        pivot, below = element_of(own, line == k), element_of(own, line == k + 1)
        second = element_of(following, line == k + 1)
        rest = (line > end[:, None]) & (line < n)
        one = active & (two == 0) & (zero == 0)
        scaled = true_divide(own, tl.where(one, pivot, 1.0)[:, None])
        a, b, c = pair_inverse(pivot, tl.where(two, below, 1.0), tl.where(two, second, 0.0))
        left = tl.where(two[:, None], own * a[:, None] + following * b[:, None], scaled)
        right = tl.where(two[:, None], own * b[:, None] + following * c[:, None], 0.0)
        changes = rest & (one | two)[:, None]
        left, right = tl.where(changes, left, 0.0), tl.where(changes, right, 0.0)
        own_row = tl.where(column > end[:, None, None], row_of(tile, line == k)[:, None, :], 0.0)
        next_row = tl.where(column > end[:, None, None], row_of(tile, line == k + 1)[:, None, :], 0.0)
        tile -= left[:, :, None] * own_row
        tile -= right[:, :, None] * next_row
        tile = tl.where((column == k) & changes[:, :, None], left[:, :, None], tile)
        tile = tl.where((column == k + 1) & (changes & two[:, None])[:, :, None], right[:, :, None], tile)
        done = two.to(tl.int32)
    target = pointers(begin(factors, index, sizes), row, column, factors.row, factors.column, meta.index)
    tl.store(target, tl.where(row >= column, tile, 0.0), mask=inside)
    target = vector_pointers(begin(pivots, index, sizes), line, pivots.row, meta.index)
    tl.store(target, swaps, mask=exists[:, None] & (line < n))
    tl.store(begin(info, index, sizes), failed, mask=exists)


@triton.jit
def _rows_exchanged(x, line, first, second):
    """Return right-hand sides with rows `first` and `second` of each matrix exchanged."""
    upper, lower = row_of(x, line == first[:, None]), row_of(x, line == second[:, None])
    at_first, at_second = (line == first[:, None])[:, :, None], (line == second[:, None])[:, :, None]
    return tl.where(at_first, lower[:, None, :], tl.where(at_second, upper[:, None, :], x))


@libentry()
@triton.jit(do_not_specialize=["n_matrices", "n", "n_columns"])
def solve_ldl(solution, right, factors, pivots, sizes, n_matrices, n, n_columns, META: tl.constexpr):
    """Write the solution of A X = B for a block of right-hand sides: by L and D forward, by L^T backward."""
    wait_for_previous_launch()
    meta: tl.constexpr = META
    MATRICES: tl.constexpr = meta.matrices
    blocks = tl.cdiv(n_columns, meta.columns)
    index, exists = matrices_of(tl.program_id(0) // blocks, n_matrices, META)
    line = tl.arange(0, meta.rows)[None, :]
    row = tl.arange(0, meta.rows)[None, :, None]
    column = (tl.program_id(0) % blocks * meta.columns + tl.arange(0, meta.columns))[None, None, :]
    inside = exists[:, None, None] & (row < n) & (column < n_columns)
    given = pointers(begin(right, index, sizes), row, column, right.row, right.column, meta.index)
    x = tl.load(given, mask=inside, other=0)
    row_step, column_step = tl.full((), factors.row, meta.index), tl.full((), factors.column, meta.index)
    first = begin(factors, index, sizes)
    lines = first[:, None] + line.to(meta.index) * row_step
    swaps, swap_step = begin(pivots, index, sizes), tl.full((), pivots.row, meta.index)
    done = tl.zeros((MATRICES,), tl.int32)
    for k in range(n):
        swap = tl.load(swaps + k * swap_step, mask=exists, other=1)
        active = done == 0
        two = active & (swap < 0)
        end = tl.where(two, k + 1, k)
        x = _rows_exchanged(x, line, end, tl.where(active, tl.abs(swap) - 1, end))
        rest = exists[:, None] & (line > end[:, None]) & (line < n)
        own = tl.load(lines + k * column_step, mask=rest & active[:, None], other=0)
        following = tl.load(lines + (k + 1) * column_step, mask=rest & two[:, None], other=0)
        own_x, next_x = row_of(x, line == k), row_of(x, line == k + 1)
        x -= own[:, :, None] * own_x[:, None, :]
        x -= following[:, :, None] * next_x[:, None, :]
        diagonal = first + k * (row_step + column_step)
        pivot = tl.load(diagonal, mask=exists & active, other=1)
        below = tl.load(diagonal + row_step, mask=exists & two, other=1)
        second = tl.load(diagonal + row_step + column_step, mask=exists & two, other=0)
        a, b, c = pair_inverse(tl.where(two, pivot, 0.0), below, second)
        upper = tl.where(two[:, None], a[:, None] * own_x + b[:, None] * next_x, true_divide(own_x, pivot[:, None]))
        lower = b[:, None] * own_x + c[:, None] * next_x
        x = tl.where(((line == k) & active[:, None])[:, :, None], upper[:, None, :], x)
        x = tl.where(((line == k + 1) & two[:, None])[:, :, None], lower[:, None, :], x)
        done = two.to(tl.int32)
    done = tl.zeros((MATRICES,), tl.int32)
    for step in range(n):
        k = n - 1 - step
        swap = tl.load(swaps + k * swap_step, mask=exists, other=1)
        active = done == 0
        two = active & (swap < 0)
        rest = exists[:, None] & (line > k) & (line < n)
        own = tl.load(lines + k * column_step, mask=rest & active[:, None], other=0)
        before = tl.load(lines + (k - 1) * column_step, mask=rest & two[:, None], other=0)
        own_x = row_of(x, line == k) - tl.sum(own[:, :, None] * x, 1)
        before_x = row_of(x, line == k - 1) - tl.sum(before[:, :, None] * x, 1)
        x = tl.where((line == k)[:, :, None], own_x[:, None, :], x)
        x = tl.where(((line == k - 1) & two[:, None])[:, :, None], before_x[:, None, :], x)
        here = tl.zeros((MATRICES,), tl.int32) + k
        x = _rows_exchanged(x, line, here, tl.where(active, tl.abs(swap) - 1, here))
        done = two.to(tl.int32)
    target = pointers(begin(solution, index, sizes), row, column, solution.row, solution.column, meta.index)
    tl.store(target, x, mask=inside)
