"""Device functions of tiles of matrices: which matrices a program has, loads and stores, columns and rows."""

from __future__ import annotations

import triton
import triton.language as tl

from tritonite.language.indices import strided_offset

# An index beyond every row.
BEYOND = tl.constexpr(1 << 20)


@triton.jit
def matrices_of(program, n_matrices, META: tl.constexpr):
    """Return the indices of a program's matrices, and which of them exist."""
    meta: tl.constexpr = META
    index = program.to(meta.index) * meta.matrices + tl.arange(0, meta.matrices)
    return index, index < n_matrices


@triton.jit
def begin(operand, index, sizes):
    """Return pointers to the first elements of matrices, vectors or numbers."""
    return operand.data + strided_offset(index, sizes, operand.batch)


@triton.jit
def pointers(first, rows, columns, row_stride, column_stride, INDEX: tl.constexpr):
    """Return pointers to elements of matrices, given the indices of rows and columns as blocks of three dimensions."""
    row_step = tl.full((), row_stride, INDEX)
    column_step = tl.full((), column_stride, INDEX)
    return first[:, None, None] + rows.to(INDEX) * row_step + columns.to(INDEX) * column_step


@triton.jit
def vector_pointers(first, positions, step, INDEX: tl.constexpr):
    """Return pointers to elements of vectors, given their positions as a block of two dimensions."""
    return first[:, None] + positions.to(INDEX) * tl.full((), step, INDEX)


@triton.jit
def column_of(tile, column, k):
    """Return column k of each matrix, (matrices, rows). `column` is the block of column indices, (1, 1, columns)."""
    return tl.sum(tl.where(column == k, tile, 0.0), 2)


@triton.jit
def row_of(tile, chosen):
    """Return the row of each matrix, (matrices, columns), that `chosen`, (matrices, rows), marks."""
    return tl.sum(tl.where(chosen[:, :, None], tile, 0.0), 1)


@triton.jit
def element_of(vector, chosen):
    """Return the element of each vector, (matrices,), that `chosen` marks."""
    return tl.sum(tl.where(chosen, vector, 0), 1)
