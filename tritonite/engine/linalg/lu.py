"""The LU factorisation of a tile of matrices with partial pivoting, their determinants, and the factors apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from tritonite.engine.linalg.substitution import permutation
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
from tritonite.language import libdevice
from tritonite.language.math import true_divide
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry


@dataclass(frozen=True)
class LuMeta:
    """Compile-time facts of `factor_lu`.

    tile: the matrices, rows and columns of a program, a `TileMeta`.
    pivot: rows are exchanged.
    determinant: the determinant of each matrix is written to `value`.
    logarithm: instead its sign is written there, and the logarithm of its size to `size`.
    """

    tile: Any
    pivot: bool = True
    determinant: bool = False
    logarithm: bool = False


@triton.jit
def _pivot_position(below, position, k, active):
    """Return the position of the largest element of a column from k on, the first of equals.

    As in LAPACK a nan counts as the largest element at position k, and as the smallest one below it.
    """
    size = tl.where(below == below, tl.abs(below), tl.where(position == k, float("inf"), -1.0))
    size = tl.where(active, size, -1.0)
    largest = tl.max(size, 1)
    return tl.min(tl.where(active & (size == largest[:, None]), position, BEYOND), 1)


@libentry()
@triton.jit(do_not_specialize=["n_matrices", "n_rows", "n_columns"])
def factor_lu(factors, pivots, info, value, size, source, sizes, n_matrices, n_rows, n_columns, META: tl.constexpr):
    """Write L and U of P A = L U in one matrix, the pivots, and for each matrix its first pivot that is 0.

    `position` has the position of each row of the tile; rows themselves stay in place until they are stored.
    """
    wait_for_previous_launch()
    facts: tl.constexpr = META
    meta: tl.constexpr = facts.tile
    MATRICES: tl.constexpr = meta.matrices
    ROWS: tl.constexpr = meta.rows
    index, exists = matrices_of(tl.program_id(0), n_matrices, meta)
    line = tl.arange(0, meta.rows)[None, :]
    row, column = line[:, :, None], tl.arange(0, meta.columns)[None, None, :]
    inside = exists[:, None, None] & (row < n_rows) & (column < n_columns)
    first = begin(source, index, sizes)
    tile = tl.load(pointers(first, row, column, source.row, source.column, meta.index), mask=inside, other=0)
    position = line + tl.zeros((MATRICES, ROWS), tl.int32)
    swaps = position + 1
    failed = tl.zeros((MATRICES,), tl.int32)
    product = tl.full((MATRICES,), 1, tile.dtype)
    logarithm = tl.full((MATRICES,), 0, tile.dtype)
    for k in range(tl.minimum(n_rows, n_columns)):
        below = column_of(tile, column, k)
        if facts.pivot:
            chosen = _pivot_position(below, position, k, (position >= k) & (line < n_rows))
            at = chosen[:, None]
            position = tl.where(position == at, k, tl.where(position == k, at, position))
            swaps = tl.where(line == k, at + 1, swaps)
            product = tl.where(chosen == k, product, -product)
        across = row_of(tile, position == k)
        pivot = element_of(below, position == k)
        failed = tl.where((failed == 0) & (pivot == 0), k + 1, failed)
        if facts.determinant:
            product *= pivot
        if facts.logarithm:
            product *= (pivot > 0).to(tile.dtype) - (pivot < 0).to(tile.dtype)
            logarithm += libdevice.log(tl.abs(pivot))
        rest = (position > k) & (line < n_rows)
        # A column whose pivot is 0 has only zeros below.
        factor = true_divide(below, tl.where(pivot == 0, 1.0, pivot)[:, None])
        updated = tl.where(column == k, factor[:, :, None], tile - factor[:, :, None] * across[:, None, :])
        tile = tl.where(rest[:, :, None] & (column >= k), updated, tile)
    stored = position[:, :, None]
    if factors.data is not None:
        target = pointers(begin(factors, index, sizes), stored, column, factors.row, factors.column, meta.index)
        tl.store(target, tile, mask=inside)
    if pivots.data is not None:
        target = vector_pointers(begin(pivots, index, sizes), line, pivots.row, meta.index)
        tl.store(target, swaps, mask=exists[:, None] & (line < tl.minimum(n_rows, n_columns)))
    if info.data is not None:
        tl.store(begin(info, index, sizes), failed, mask=exists)
    if facts.determinant or facts.logarithm:
        tl.store(begin(value, index, sizes), product, mask=exists)
    if facts.logarithm:
        tl.store(begin(size, index, sizes), logarithm, mask=exists)


@triton.jit
def _multiply(x, y):
    return x * y


@libentry()
@triton.jit(do_not_specialize=["n_matrices", "n"])
def multiply_diagonal(value, size, factors, pivots, sizes, n_matrices, n, META: tl.constexpr):
    """Write the determinant of a matrix, or its sign and the logarithm of its size, given L and U in one matrix."""
    wait_for_previous_launch()
    meta: tl.constexpr = META
    LINES: tl.constexpr = meta.rows
    index, exists = matrices_of(tl.program_id(0), n_matrices, META)
    line = tl.arange(0, LINES)[None, :]
    first, swaps = begin(factors, index, sizes), begin(pivots, index, sizes)
    diagonal_step = tl.full((), factors.row, meta.index) + tl.full((), factors.column, meta.index)
    product = tl.full((1, LINES), 1, factors.data.dtype.element_ty)
    logarithm = tl.zeros((1, LINES), factors.data.dtype.element_ty)
    for start in range(0, n, LINES):
        k = start + line
        pivot = tl.load(vector_pointers(first, k, diagonal_step, meta.index), mask=k < n, other=1)
        swap = tl.load(vector_pointers(swaps, k, pivots.row, meta.index), mask=k < n, other=0)
        product = tl.where((k < n) & (swap != k + 1), -product, product)
        if size.data is not None:
            product *= (pivot > 0).to(pivot.dtype) - (pivot < 0).to(pivot.dtype)
            logarithm += libdevice.log(tl.abs(pivot))
        else:
            product *= pivot
    tl.store(begin(value, index, sizes), tl.reduce(product, 1, _multiply), mask=exists)
    if size.data is not None:
        tl.store(begin(size, index, sizes), tl.sum(logarithm, 1), mask=exists)


@libentry()
@triton.jit(do_not_specialize=["n_matrices", "n_rows", "n_columns"])
def unpack_lu(order, lower, upper, factors, pivots, sizes, n_matrices, n_rows, n_columns, META: tl.constexpr):
    """Write those of P, L and U that have data, from L and U in one matrix and the pivots."""
    wait_for_previous_launch()
    meta: tl.constexpr = META
    index, exists = matrices_of(tl.program_id(0), n_matrices, meta)
    n_factors = tl.minimum(n_rows, n_columns)
    row, column = tl.arange(0, meta.rows)[None, :, None], tl.arange(0, meta.columns)[None, None, :]
    if lower.data is not None:
        inside = exists[:, None, None] & (row < n_rows) & (column < n_columns)
        first = begin(factors, index, sizes)
        tile = tl.load(pointers(first, row, column, factors.row, factors.column, meta.index), mask=inside, other=0)
        one = tl.where(row == column, 1.0, 0.0).to(tile.dtype)
        target = pointers(begin(lower, index, sizes), row, column, lower.row, lower.column, meta.index)
        tl.store(target, tl.where(row > column, tile, one), mask=inside & (column < n_factors))
        target = pointers(begin(upper, index, sizes), row, column, upper.row, upper.column, meta.index)
        tl.store(target, tl.where(row <= column, tile, 0.0), mask=inside & (row < n_factors))
    if order.data is not None:
        swaps = begin(pivots, index, sizes)
        origin = permutation(pivots, swaps, exists, n_factors, meta.rows, meta.index)[:, :, None]
        # The number of rows may exceed that of columns.
        across = tl.arange(0, meta.rows)[None, None, :]
        target = pointers(begin(order, index, sizes), across, row, order.row, order.column, meta.index)
        is_set = tl.where(origin == across, 1.0, 0.0).to(order.data.dtype.element_ty)
        tl.store(target, is_set, mask=exists[:, None, None] & (row < n_rows) & (across < n_rows))
