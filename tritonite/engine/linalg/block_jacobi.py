"""Eigenvalues and singular values of matrices larger than a tile, by Jacobi's methods on pairs of blocks of columns.

A sweep is a tournament of blocks, by the circle method: in each round every block has one opponent. A program holds the
symmetric tile of a pair, and rotates each column of one block with each of the other. In the first round it also
rotates the columns of each block with one another, so that all pairs of columns meet once in a sweep (Golub and Van
Loan, section 8.5.6). Then all other tiles of the matrix, and the vectors, are multiplied by the rotations.

- Eigenvalues: the tile is the pair's part of the matrix. The others are multiplied from both sides, in place: a program
  has the rows of one pair and the columns of another, and writes the mirrored tile, too.
- Singular values: the tile has the products of the pair's columns, which are multiplied from the right.

These are kernels of their own, and no products of `gemm`, because no stride leads from the columns of one pair to those
of the next. Roundoff of elements off the diagonal has to be relative to them alone, as in `jacobi.py`: tiles on the
diagonal are never multiplied.

The host reads after each sweep whether a matrix needs another one. A matrix that needs none stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import triton
import triton.language as tl

from tritonite.engine.iteration import offset_type, power_of_2
from tritonite.engine.linalg import triangles
from tritonite.engine.linalg.block_pairs import (
    PairMeta,
    rotate_between_pairs,
    rotate_columns,
    rotate_products_of_pairs,
    rotate_symmetric_pairs,
    square_pointers,
)
from tritonite.engine.linalg.jacobi import power_of_2_below
from tritonite.engine.linalg.operands import Operand, over_batch
from tritonite.engine.linalg.table import linalg_table
from tritonite.language.math import square_root, true_divide
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import empty, read, zeros
from tritonite.runtime.libentry import libentry

# The smallest side of a product's tile.
_LEAST_SIDE = 16
# Rows of a block of columns that are multiplied at a time.
_LINES = 64
# Elements of a matrix that a program reads at a time, and columns that it puts in order.
_ELEMENTS, _COLUMNS = 4096, 32
# Sweeps after which a matrix counts as one for which the method fails.
_MOST_SWEEPS = 40


@triton.jit
def _elements(operand, own, element, n_columns, SYMMETRIC: tl.constexpr, INDEX: tl.constexpr):
    """Return pointers to elements of a matrix in row-major order. Of symmetric ones the lower triangle is read."""
    row, column = element // n_columns, element % n_columns
    if SYMMETRIC:
        row, column = tl.maximum(row, column), tl.minimum(row, column)
    first = operand.data + own.to(INDEX) * operand.batch[0]
    return first + row.to(INDEX) * operand.row + column.to(INDEX) * operand.column


@libentry()
@triton.jit(do_not_specialize=["n_rows", "n_columns"])
def measure_norms(
    scale, failed, source, n_rows, n_columns, SYMMETRIC: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr
):
    """Write powers of two that divide matrices to Frobenius norms in [1, 2).

    The largest power that is finite may be too small. `failed` becomes -1 if an element is not finite.
    """
    wait_for_previous_launch()
    own = tl.program_id(0)
    dtype: tl.constexpr = scale.dtype.element_ty
    lane = tl.arange(0, BLOCK).to(INDEX)
    count = tl.full((), n_rows, INDEX) * n_columns
    largest, bad = tl.zeros((BLOCK,), dtype), tl.zeros((BLOCK,), tl.int32)
    for start in range(0, count, BLOCK):
        element = start + lane
        x = tl.load(_elements(source, own, element, n_columns, SYMMETRIC, INDEX), mask=element < count, other=0)
        bad |= (x - x != 0).to(tl.int32)
        largest = tl.maximum(largest, tl.abs(x))
    tl.store(failed, -1, mask=tl.max(bad, 0) > 0)
    power = power_of_2_below(tl.max(largest[None, :], 1))
    total = tl.zeros((BLOCK,), dtype)
    for start in range(0, count, BLOCK):
        element = start + lane
        x = tl.load(_elements(source, own, element, n_columns, SYMMETRIC, INDEX), mask=element < count, other=0)
        x = true_divide(x, power)
        total += x * x
    norm = power_of_2_below(tl.maximum(square_root(tl.sum(total[None, :], 1)), 1.0))
    most: tl.constexpr = 2.0**1023 if dtype == tl.float64 else 2.0**127
    # The quotient is exact, and the product would be infinite.
    power = tl.where(power >= most / norm, most, power * norm)
    tl.store(scale + own + tl.arange(0, 1), power)


@libentry()
@triton.jit(do_not_specialize=["n_rows", "n_columns", "stored_rows"])
def divide_matrices(
    out,
    source,
    scale,
    n_rows,
    n_columns,
    stored_rows,
    SYMMETRIC: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write matrices divided by numbers to the first rows of contiguous matrices."""
    wait_for_previous_launch()
    count = tl.full((), n_rows, INDEX) * n_columns
    chunks = tl.cdiv(count, BLOCK)
    own = (tl.program_id(0) // chunks).to(INDEX)
    element = (tl.program_id(0) % chunks).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(_elements(source, own, element, n_columns, SYMMETRIC, INDEX), mask=element < count, other=0)
    target = out + own * stored_rows * n_columns + element
    tl.store(target, true_divide(x, tl.load(scale + own)), mask=element < count)


@libentry()
@triton.jit(do_not_specialize=["n_rows", "stored_rows", "n"])
def column_norms(
    norms, columns, n_rows, stored_rows, n, INDEX: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr
):
    """Write the norms of the first `n_rows` elements of columns."""
    wait_for_previous_launch()
    chunks = tl.cdiv(n, COLUMNS)
    own = (tl.program_id(0) // chunks).to(INDEX)
    column = tl.program_id(0) % chunks * COLUMNS + tl.arange(0, COLUMNS)
    first = columns + own * stored_rows * n
    total = tl.zeros((LINES, COLUMNS), columns.dtype.element_ty)
    for start in range(0, n_rows, LINES):
        row = start + tl.arange(0, LINES)
        inside = (row < n_rows)[:, None] & (column < n)[None, :]
        x = tl.load(square_pointers(first, row, column, n, INDEX), mask=inside, other=0)
        total += x * x
    tl.store(norms + own * n + column, square_root(tl.sum(total, 0)), mask=column < n)


@libentry()
@triton.jit(do_not_specialize=["n_rows", "stored_rows", "first_row", "n"])
def sort_columns(
    values,
    out,
    columns,
    key,
    scale,
    n_rows,
    stored_rows,
    first_row,
    n,
    DESCENDING: tl.constexpr,
    INDEX: tl.constexpr,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write keys times `scale`, and rows of columns, in the order of the keys. Without data they are not written."""
    wait_for_previous_launch()
    chunks = tl.cdiv(n, COLUMNS)
    own = (tl.program_id(0) // chunks).to(INDEX)
    column = tl.program_id(0) % chunks * COLUMNS + tl.arange(0, COLUMNS)
    keys, key_step = key.data + own * key.batch[0], tl.full((), key.row, INDEX)
    value = tl.load(keys + column * key_step, mask=column < n, other=0)
    position = tl.zeros((COLUMNS,), tl.int32)
    for start in range(0, n, COLUMNS):
        other = start + tl.arange(0, COLUMNS)
        met = tl.load(keys + other * key_step, mask=other < n, other=0)[:, None]
        before = (met > value[None, :]) if DESCENDING else (met < value[None, :])
        before |= (met == value[None, :]) & (other[:, None] < column[None, :])
        position += tl.sum((before & (other < n)[:, None]).to(tl.int32), 0)
    if values.data is not None:
        target = values.data + own * values.batch[0] + position.to(INDEX) * values.row
        tl.store(target, value * tl.load(scale + own), mask=column < n)
    if out.data is not None:
        first = columns + (own * stored_rows + first_row) * n
        for start in range(0, n_rows, LINES):
            row = start + tl.arange(0, LINES)
            inside = (row < n_rows)[:, None] & (column < n)[None, :]
            x = tl.load(square_pointers(first, row, column, n, INDEX), mask=inside, other=0)
            lines = row.to(INDEX)[:, None] * out.row + position.to(INDEX)[None, :] * out.column
            tl.store(out.data + own * out.batch[0] + lines, x, mask=inside)


class _Tournament:
    """The rounds of pairs of blocks of a batch of matrices, and the memory of their rotations."""

    def __init__(self, like: torch.Tensor, count: int, n: int, tolerance: float, gram: bool) -> None:
        table = linalg_table()
        self.pairs = -(-n // (2 * table.rotated_block))
        # A multiple of 4, so that blocks begin at addresses that vectors can be read from.
        self.block = -(-n // (8 * self.pairs)) * 4
        side = max(_LEAST_SIDE, power_of_2(2 * self.block))
        self.count, self.n = count, n
        self.rotations = empty((count * self.pairs, side, side), like.dtype, like.device)
        self.unsettled = zeros((_MOST_SWEEPS + 1, count), torch.int32, like.device)
        self.left = zeros((_MOST_SWEEPS,), torch.int64, like.device)
        self.meta = PairMeta(side, _LINES, tolerance, gram, True, offset_type(like, self.rotations))
        self.num_warps = max(4, min(table.most_warps, side * side * like.dtype.itemsize // table.rotated_bytes))

    def run(self, round_of: Callable[[PairMeta, tuple[int, ...]], None]) -> bool:
        """Run rounds until all matrices are settled, or return False after too many sweeps.

        A round is given (facts, (n, block, pairs, step, sweep)).
        """
        for sweep in range(_MOST_SWEEPS):
            for step in range(2 * self.pairs - 1):
                sizes = self.n, self.block, self.pairs, step, sweep
                round_of(replace(self.meta, crossed=step > 0), sizes)
            (skewed,) = read(self.left[sweep : sweep + 1])
            if skewed.value >= 0:
                return True
        return False

    def rotate(self, columns: torch.Tensor, sizes: tuple[int, ...]) -> None:
        """Multiply the columns of all pairs, (matrices, rows, n), by the rotations of a round."""
        rows = columns.shape[1]
        rotate_columns[(self.count * self.pairs * -(-rows // _LINES),)](
            *(columns, self.rotations, self.unsettled, self.count, rows, *sizes), META=self.meta, num_warps=4
        )


def normalize(out: torch.Tensor, source: torch.Tensor, failed: torch.Tensor, symmetric: bool = False) -> torch.Tensor:
    """Write matrices divided by powers of two to a norm of about 1, and return the powers.

    All tensors are (matrices, rows, columns). `out` is contiguous and may have further rows. Of `symmetric` matrices
    the lower triangle is read. `failed`, one int64, becomes -1 if a matrix is not finite.
    """
    count, n_rows, n_columns = source.shape
    scale = empty((count,), source.dtype, source.device)
    _, (given,) = over_batch((count,), (source, 2))
    facts = {"SYMMETRIC": symmetric, "INDEX": offset_type(source, out)}
    block = min(_ELEMENTS, power_of_2(n_rows * n_columns))
    measure_norms[(count,)](scale, failed, given, n_rows, n_columns, **facts, BLOCK=block, num_warps=8)
    divide_matrices[(count * -(-n_rows * n_columns // block),)](
        *(out, given, scale, n_rows, n_columns, out.shape[1]), **facts, BLOCK=block, num_warps=8
    )
    return scale


def eigh(
    values: torch.Tensor,
    vectors: torch.Tensor | None,
    matrix: torch.Tensor,
    scale: torch.Tensor,
) -> bool:
    """Write eigenvalues, (matrices, n), and eigenvectors of `matrix` times `scale`. Return False for too many sweeps.

    `matrix`, as `normalize` writes symmetric ones, is overwritten.
    """
    count, n, _ = matrix.shape
    tournament = _Tournament(matrix, count, n, 2 * torch.finfo(matrix.dtype).eps, False)
    basis = matrix
    if vectors is not None:
        basis = empty(matrix.shape, matrix.dtype, matrix.device)
        triangles.identity(basis)

    def round_of(meta: PairMeta, sizes: tuple[int, ...]) -> None:
        state = tournament.rotations, tournament.unsettled
        rotate_symmetric_pairs[(count * tournament.pairs,)](
            *(matrix, *state, tournament.left, count, *sizes), META=meta, num_warps=tournament.num_warps
        )
        if tournament.pairs > 1:
            rotate_between_pairs[(count * tournament.pairs**2,)](
                *(matrix, *state, count, *sizes), META=tournament.meta, num_warps=tournament.num_warps
            )
        if vectors is not None:
            tournament.rotate(basis, sizes)

    if not tournament.run(round_of):
        return False
    _sort(values, vectors, basis, 0, matrix.diagonal(dim1=-2, dim2=-1), scale, False)
    return True


def svd(
    values: torch.Tensor,
    product: torch.Tensor | None,
    right: torch.Tensor | None,
    columns: torch.Tensor,
    n_rows: int,
    scale: torch.Tensor,
) -> bool:
    """Write S of A = U S V^T, V, and a multiple of A V. Return False for too many sweeps.

    `columns` has A divided by `scale` in its first `n_rows` rows, as `normalize` writes it, and for V as many further
    rows as columns. It is overwritten.
    """
    count, stored_rows, n = columns.shape
    # Roundoff of the products of columns grows with the number of terms.
    tolerance = max(2.0, n_rows**0.5) * torch.finfo(columns.dtype).eps
    tournament = _Tournament(columns, count, n, tolerance, True)
    if right is not None:
        triangles.identity(columns[:, n_rows:])

    def round_of(meta: PairMeta, sizes: tuple[int, ...]) -> None:
        state = tournament.rotations, tournament.unsettled, tournament.left
        rotate_products_of_pairs[(count * tournament.pairs,)](
            *(columns, *state, count, n_rows, stored_rows, *sizes), META=meta, num_warps=tournament.num_warps
        )
        tournament.rotate(columns, sizes)

    if not tournament.run(round_of):
        return False
    norms = empty((count, n), columns.dtype, columns.device)
    column_norms[(count * -(-n // _COLUMNS),)](
        *(norms, columns, n_rows, stored_rows, n), INDEX=offset_type(columns), LINES=_LINES, COLUMNS=_COLUMNS
    )
    _sort(values, product, columns, 0, norms, scale, True)
    if right is not None:
        _sort(None, right, columns, n_rows, norms, scale, True)
    return True


def _sort(
    values: torch.Tensor | None,
    out: torch.Tensor | None,
    columns: torch.Tensor,
    first_row: int,
    key: torch.Tensor,
    scale: torch.Tensor,
    descending: bool,
) -> None:
    """Write keys times `scale`, and rows of columns from `first_row` on, in the order of the keys."""
    count, stored_rows, n = columns.shape
    operands: list[Operand] = over_batch((count,), (values, 1), (out, 2), (key, 1))[1]
    value, target, keys = operands
    n_rows = 0 if out is None else out.shape[1]
    sort_columns[(count * -(-n // _COLUMNS),)](
        *(value, target, columns, keys, scale, n_rows, stored_rows, first_row, n),
        DESCENDING=descending,
        INDEX=offset_type(columns, key, *[x for x in (values, out) if x is not None]),
        LINES=_LINES,
        COLUMNS=_COLUMNS,
        num_warps=4,
    )
