"""Kernels of a round of Jacobi's methods: each program has a pair of blocks of columns, or the tile of two pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from tritonite.engine.linalg.jacobi import opponent, rotated_pairs
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry


@dataclass(frozen=True)
class PairMeta:
    """Compile-time facts of kernels of pairs of blocks.

    side: rows and columns of a tile, which has room for two blocks.
    lines: rows of the columns of a pair that are multiplied at a time.
    tolerance: the largest product that needs no further sweep, where the norm of a matrix is about 1.
    gram: the tile has the products of columns, as in `JacobiMeta`.
    crossed: columns meet those of the other block alone.
    index: the type of offsets.
    vectors: the rotations are kept.
    """

    side: int
    lines: int
    tolerance: float
    gram: bool
    crossed: bool
    index: Any
    vectors: bool = True


@triton.jit
def _pair_lines(pair, step, pairs, block, n, SIDE: tl.constexpr):
    """Return the columns of a pair of blocks in a round, and which exist. Those that exist come first.

    There are 2 * pairs blocks. The last one meets the block that the circle method leaves alone.
    """
    last = 2 * pairs - 1
    alone = step * pairs % last
    one = (alone + pair) % last
    other = tl.where(pair == 0, last, (alone + last - pair) % last)
    line = tl.arange(0, SIDE)
    first, second = tl.minimum(one, other) * block, tl.maximum(one, other) * block
    index = tl.where(line < block, first + line, second + line - block)
    return index, (line < 2 * block) & (index < n)


@triton.jit
def _across(line, turn, block):
    """Return whom each column of a pair of blocks meets in the other block. Lanes beyond both meet themselves."""
    met = tl.where(line < block, block + (line + turn) % block, (line + block - turn) % block)
    return tl.where(line < 2 * block, met, line)


@triton.jit
def _rotate_tile(tile, block, n, META: tl.constexpr):
    """Return (tile, diagonal, rotations, skew) of the symmetric tile of a pair of blocks, (1, side, side)."""
    meta: tl.constexpr = META
    SIDE: tl.constexpr = meta.side
    line = tl.arange(0, SIDE)[None, :]
    row, column = tl.arange(0, SIDE)[None, :, None], tl.arange(0, SIDE)[None, None, :]
    diagonal = tl.sum(tl.where(row == column, tile, 0.0), 1)
    tile = tl.where(row == column, 0.0, tile)
    basis = tl.where(row == column, 1.0, tl.zeros((1, SIDE, SIDE), tile.dtype))
    skew = tl.zeros((1, SIDE), tl.int32)
    turns = block if meta.crossed else 2 * block - 1
    for turn in range(turns):
        if meta.crossed:
            met, crossed = _across(line, turn, block), _across(column, turn, block)
        else:
            met, crossed = opponent(line, turn, 2 * block), opponent(column, turn, 2 * block)
        # Lanes beyond both blocks meet themselves, and have nothing in common with others.
        active = line < n
        tile, diagonal, basis, skew = rotated_pairs(tile, diagonal, basis, skew, met, row == crossed, active, n, meta)
    return tile, diagonal, basis, skew


@triton.jit
def _is_settled(unsettled, own, n_matrices, sweep):
    """Return whether a matrix needed no rotation in the last sweep. Before the first one no matrix is settled."""
    return (sweep > 0) & (tl.load(unsettled + sweep * n_matrices + own) == 0)


@triton.jit
def _note_skew(unsettled, left, skew, own, n_matrices, sweep):
    """Note that a matrix, and so the call, needs another sweep if a product exceeded the tolerance."""
    skewed = tl.max(tl.max(skew, 1), 0) > 0
    tl.store(unsettled + (sweep + 1) * n_matrices + own, 1, mask=skewed)
    tl.store(left + sweep, -1, mask=skewed)


@triton.jit
def square_pointers(first, row, column, n, INDEX: tl.constexpr):
    """Return pointers to the elements of rows and columns of a contiguous matrix with n columns."""
    return first + row.to(INDEX)[:, None] * n + column.to(INDEX)[None, :]


@triton.jit
def _rotations_of(rotations, program, SIDE: tl.constexpr, INDEX: tl.constexpr):
    """Return pointers to the rotations of a pair."""
    line = tl.arange(0, SIDE)
    return square_pointers(rotations + program.to(INDEX) * (SIDE * SIDE), line, line, SIDE, INDEX)


@libentry()
@triton.jit(do_not_specialize=["n_matrices", "n", "block", "pairs", "step", "sweep"])
def rotate_symmetric_pairs(
    matrix, rotations, unsettled, left, n_matrices, n, block, pairs, step, sweep, META: tl.constexpr
):
    """Rotate the tiles of pairs of blocks on the diagonal, in place, and write the rotations."""
    wait_for_previous_launch()
    meta: tl.constexpr = META
    program = tl.program_id(0)
    own = program // pairs
    if _is_settled(unsettled, own, n_matrices, sweep):
        return
    line, exists = _pair_lines(program % pairs, step, pairs, block, n, meta.side)
    place = square_pointers(matrix + own.to(meta.index) * n * n, line, line, n, meta.index)
    inside = exists[:, None] & exists[None, :]
    tile = tl.load(place, mask=inside, other=0)[None, :, :]
    tile, diagonal, basis, skew = _rotate_tile(tile, block, tl.sum(exists.to(tl.int32), 0), meta)
    row, column = tl.arange(0, meta.side)[None, :, None], tl.arange(0, meta.side)[None, None, :]
    tile = tl.where(row == column, diagonal[:, None, :], tile)
    tl.store(place, tl.reshape(tile, (meta.side, meta.side)), mask=inside)
    tl.store(_rotations_of(rotations, program, meta.side, meta.index), tl.reshape(basis, (meta.side, meta.side)))
    _note_skew(unsettled, left, skew, own, n_matrices, sweep)


@libentry()
@triton.jit(do_not_specialize=["n_matrices", "n_rows", "stored_rows", "n", "block", "pairs", "step", "sweep"])
def rotate_products_of_pairs(
    columns,
    rotations,
    unsettled,
    left,
    n_matrices,
    n_rows,
    stored_rows,
    n,
    block,
    pairs,
    step,
    sweep,
    META: tl.constexpr,
):
    """Write the rotations that make the columns of pairs of blocks more orthogonal, given their first `n_rows` rows."""
    wait_for_previous_launch()
    meta: tl.constexpr = META
    program = tl.program_id(0)
    own = program // pairs
    if _is_settled(unsettled, own, n_matrices, sweep):
        return
    line, exists = _pair_lines(program % pairs, step, pairs, block, n, meta.side)
    first = columns + own.to(meta.index) * stored_rows * n
    dtype: tl.constexpr = columns.dtype.element_ty
    SIDE: tl.constexpr = meta.side
    LINES: tl.constexpr = meta.lines
    gram = tl.zeros((SIDE, SIDE), dtype)
    for start in range(0, n_rows, LINES):
        row = start + tl.arange(0, LINES)
        inside = (row < n_rows)[:, None] & exists[None, :]
        x = tl.load(square_pointers(first, row, line, n, meta.index), mask=inside, other=0)
        gram = tl.dot(tl.trans(x), x, gram, "ieee", out_dtype=dtype)
    _, _, basis, skew = _rotate_tile(gram[None, :, :], block, tl.sum(exists.to(tl.int32), 0), meta)
    tl.store(_rotations_of(rotations, program, meta.side, meta.index), tl.reshape(basis, (meta.side, meta.side)))
    _note_skew(unsettled, left, skew, own, n_matrices, sweep)


@libentry()
@triton.jit(do_not_specialize=["n_matrices", "n", "block", "pairs", "step", "sweep"])
def rotate_between_pairs(matrix, rotations, unsettled, n_matrices, n, block, pairs, step, sweep, META: tl.constexpr):
    """Multiply tiles off the diagonal by the rotations of their rows and columns, and mirror them, in place."""
    wait_for_previous_launch()
    meta: tl.constexpr = META
    program = tl.program_id(0)
    own = program // (pairs * pairs)
    upper, lower = program // pairs % pairs, program % pairs
    if (upper >= lower) | _is_settled(unsettled, own, n_matrices, sweep):
        return
    row, row_exists = _pair_lines(upper, step, pairs, block, n, meta.side)
    column, column_exists = _pair_lines(lower, step, pairs, block, n, meta.side)
    first = matrix + own.to(meta.index) * n * n
    inside = row_exists[:, None] & column_exists[None, :]
    place = square_pointers(first, row, column, n, meta.index)
    dtype: tl.constexpr = matrix.dtype.element_ty
    tile = tl.load(place, mask=inside, other=0)
    left = tl.load(_rotations_of(rotations, own * pairs + upper, meta.side, meta.index))
    tile = tl.dot(tl.trans(left), tile, None, "ieee", out_dtype=dtype)
    right = tl.load(_rotations_of(rotations, own * pairs + lower, meta.side, meta.index))
    tile = tl.dot(tile, right, None, "ieee", out_dtype=dtype)
    tl.store(place, tile, mask=inside)
    mirrored = square_pointers(first, column, row, n, meta.index)
    tl.store(mirrored, tl.trans(tile), mask=column_exists[:, None] & row_exists[None, :])


@libentry()
@triton.jit(do_not_specialize=["n_matrices", "n_rows", "n", "block", "pairs", "step", "sweep"])
def rotate_columns(columns, rotations, unsettled, n_matrices, n_rows, n, block, pairs, step, sweep, META: tl.constexpr):
    """Multiply the columns of pairs of blocks by their rotations, in place."""
    wait_for_previous_launch()
    meta: tl.constexpr = META
    chunks = tl.cdiv(n_rows, meta.lines)
    program = tl.program_id(0)
    pair = program // chunks
    own = pair // pairs
    if _is_settled(unsettled, own, n_matrices, sweep):
        return
    row = program % chunks * meta.lines + tl.arange(0, meta.lines)
    line, exists = _pair_lines(pair % pairs, step, pairs, block, n, meta.side)
    place = square_pointers(columns + own.to(meta.index) * n_rows * n, row, line, n, meta.index)
    inside = (row < n_rows)[:, None] & exists[None, :]
    dtype: tl.constexpr = columns.dtype.element_ty
    x = tl.load(place, mask=inside, other=0)
    x = tl.dot(x, tl.load(_rotations_of(rotations, pair, meta.side, meta.index)), None, "ieee", out_dtype=dtype)
    tl.store(place, x, mask=inside)
