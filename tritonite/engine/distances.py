"""Distances of each row of one matrix to each row of another, and their gradients.

A program of `_distances` owns a tile of rows of both matrices and reads a column of either at a time. A program of
`_gradients` owns a tile of the first matrix and adds up one row of the second matrix after the other, so that no two
programs write the same element. Distances between the rows of one matrix are stored as the part of the square above its
diagonal, row by row. `_augment` prepares the Euclidean distance as a product of matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.dtypes import TRITON_DTYPES, opmath
from tritonite.engine.iteration import INT32_LIMIT, power_of_2, span
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry

# Terms that are added up before their sum is added to the total, so that roundoff grows with the number of sums.
_TERMS = 32


@dataclass(frozen=True)
class Norm:
    """A norm as device functions of blocks.

    `term` maps a difference and p to a term, `combine` adds two terms, `finish` maps their total and p to the norm.
    `slope` maps a difference, the gradient by the distance, the distance and p to the gradient by the difference.
    """

    term: Any
    combine: Any
    finish: Any
    slope: Any


class Matrices(NamedTuple):
    """Element strides of a batch of matrices: of a matrix, a row and a column."""

    batch: int
    row: int
    column: int


@dataclass(frozen=True)
class DistanceMeta:
    """Compile-time facts of the kernels.

    rows: rows of the first matrix in a tile.
    columns: rows of the second matrix in a tile of distances, features in a tile of gradients.
    terms: terms added up at a time.
    triangle: whether both matrices are one, and distances are stored above the diagonal only.
    index: the type of offsets.
    """

    rows: int
    columns: int
    terms: int
    triangle: bool
    index: tl.dtype


@triton.jit
def _pair(i, j, n):
    """Return the index of the pair of rows i < j among all pairs of n rows, in row-major order."""
    return i * n - i * (i + 1) // 2 + (j - i - 1)


@libentry()
@triton.jit(do_not_specialize=["n_rows", "n_columns", "n_features", "p"])
def _distances(
    out,
    x,
    y,
    x_strides,
    y_strides,
    p: tl.float64,
    n_rows,
    n_columns,
    n_features,
    TERM: tl.constexpr,
    COMBINE: tl.constexpr,
    FINISH: tl.constexpr,
    META: tl.constexpr,
):
    """Write a tile of the distances of rows of x, (batches, n_rows, n_features), to rows of y."""
    wait_for_previous_launch()
    meta: tl.constexpr = META
    ROWS: tl.constexpr = meta.rows
    COLUMNS: tl.constexpr = meta.columns
    across = tl.cdiv(n_columns, COLUMNS)
    down = tl.cdiv(n_rows, ROWS)
    program = tl.program_id(0)
    p = tl.full((), p, tl.float64)
    batch = (program // (across * down)).to(meta.index)
    first_row = (program // across % down) * ROWS
    first_column = (program % across) * COLUMNS
    row = first_row.to(meta.index) + tl.arange(0, ROWS)
    column = first_column.to(meta.index) + tl.arange(0, COLUMNS)
    x_rows = x + batch * x_strides.batch + row * x_strides.row
    y_rows = y + batch * y_strides.batch + column * y_strides.row
    x_step = tl.full((), x_strides.column, meta.index)
    y_step = tl.full((), y_strides.column, meta.index)
    mask = (row < n_rows)[:, None] & (column < n_columns)[None, :]
    if meta.triangle:
        mask &= row[:, None] < column[None, :]
        offset = _pair(row[:, None], column[None, :], n_rows)
        # Nothing is read for a tile below the diagonal.
        n_features = tl.where(first_row < first_column + COLUMNS - 1, n_features, 0)
    else:
        offset = ((batch * n_rows + row) * n_columns)[:, None] + column[None, :]
    total = tl.zeros((ROWS, COLUMNS), out.dtype.element_ty)
    for begin in range(0, n_features, meta.terms):
        partial = tl.zeros((ROWS, COLUMNS), out.dtype.element_ty)
        for k in range(begin, tl.minimum(begin + meta.terms, n_features)):
            own = tl.load(x_rows + k * x_step, mask=row < n_rows, other=0)
            other = tl.load(y_rows + k * y_step, mask=column < n_columns, other=0)
            partial = COMBINE(partial, TERM(own[:, None] - other[None, :], p))
        total = COMBINE(total, partial)
    tl.store(out + offset, FINISH(total, p), mask=mask)


@libentry()
@triton.jit(do_not_specialize=["n_rows", "n_columns", "n_features", "p"])
def _gradients(
    gradient,
    grad_output,
    x,
    y,
    distances,
    grad_strides,
    x_strides,
    y_strides,
    distance_strides,
    p: tl.float64,
    n_rows,
    n_columns,
    n_features,
    SLOPE: tl.constexpr,
    META: tl.constexpr,
):
    """Write a tile of the gradient by x: the sum of the slopes over all rows of y.

    For a triangle, `grad_strides.column` and `distance_strides.column` are the strides of pairs.
    """
    wait_for_previous_launch()
    meta: tl.constexpr = META
    ROWS: tl.constexpr = meta.rows
    COLUMNS: tl.constexpr = meta.columns
    across = tl.cdiv(n_features, COLUMNS)
    down = tl.cdiv(n_rows, ROWS)
    program = tl.program_id(0)
    p = tl.full((), p, tl.float64)
    batch = (program // (across * down)).to(meta.index)
    row = (program // across % down).to(meta.index) * ROWS + tl.arange(0, ROWS)
    feature = (program % across).to(meta.index) * COLUMNS + tl.arange(0, COLUMNS)
    row_mask, feature_mask = row < n_rows, feature < n_features
    mask = row_mask[:, None] & feature_mask[None, :]
    x += batch * x_strides.batch + (row * x_strides.row)[:, None] + (feature * x_strides.column)[None, :]
    own = tl.load(x, mask=mask, other=0)
    y += batch * y_strides.batch + feature * y_strides.column
    grad_output += batch * grad_strides.batch + row * grad_strides.row
    distances += batch * distance_strides.batch + row * distance_strides.row
    y_step = tl.full((), y_strides.row, meta.index)
    grad_step = tl.full((), grad_strides.column, meta.index)
    distance_step = tl.full((), distance_strides.column, meta.index)
    total = tl.zeros((ROWS, COLUMNS), gradient.dtype.element_ty)
    for begin in range(0, n_columns, meta.terms):
        partial = tl.zeros((ROWS, COLUMNS), gradient.dtype.element_ty)
        for j in range(begin, tl.minimum(begin + meta.terms, n_columns)):
            other = tl.load(y + j * y_step, mask=feature_mask, other=0)
            pair, exists = row * 0 + j, row_mask
            if meta.triangle:
                pair = _pair(tl.minimum(row, j), tl.maximum(row, j), n_rows)
                exists &= row != j
            grad = tl.load(grad_output + pair * grad_step, mask=exists, other=0)
            distance = tl.load(distances + pair * distance_step, mask=exists, other=0)
            partial += SLOPE(own - other[None, :], grad[:, None], distance[:, None], p)
        total += partial
    offset = ((batch * n_rows + row) * n_features)[:, None] + feature[None, :]
    tl.store(gradient + offset, total, mask=mask)


@libentry()
@triton.jit(do_not_specialize=["n_rows", "n_features", "factor"])
def _augment(
    out,
    x,
    out_strides,
    x_strides,
    factor: tl.float64,
    n_rows,
    n_features,
    norm_column,
    one_column,
    COMPUTE: tl.constexpr,
    META: tl.constexpr,
):
    """Write rows of `factor` * x, followed by the row's squared norm and a one in the given columns."""
    wait_for_previous_launch()
    meta: tl.constexpr = META
    ROWS: tl.constexpr = meta.rows
    COLUMNS: tl.constexpr = meta.columns
    down = tl.cdiv(n_rows, ROWS)
    batch = (tl.program_id(0) // down).to(meta.index)
    row = (tl.program_id(0) % down).to(meta.index) * ROWS + tl.arange(0, ROWS)
    row_mask = row < n_rows
    x += batch * x_strides.batch + (row * x_strides.row)[:, None]
    rows = out + batch * out_strides.batch + row * out_strides.row
    x_step = tl.full((), x_strides.column, meta.index)
    scale = tl.full((), factor, tl.float64).to(COMPUTE)
    norm = tl.zeros((ROWS,), COMPUTE)
    for begin in range(0, n_features, COLUMNS):
        column = begin + tl.arange(0, COLUMNS).to(meta.index)
        mask = row_mask[:, None] & (column < n_features)[None, :]
        value = tl.load(x + (column * x_step)[None, :], mask=mask, other=0).to(COMPUTE)
        norm += tl.sum(value * value, axis=1)
        tl.store(rows[:, None] + column[None, :], (value * scale).to(out.dtype.element_ty), mask=mask)
    tl.store(rows + norm_column, norm.to(out.dtype.element_ty), mask=row_mask)
    tl.store(rows + one_column, tl.full((ROWS,), 1.0, COMPUTE).to(out.dtype.element_ty), mask=row_mask)


def _index_type(*tensors: torch.Tensor, reach: int = 0) -> tl.dtype:
    """Return the integer type of offsets into the tensors and of integers up to `reach`."""
    far = any([span(x.shape, x.stride()) >= INT32_LIMIT for x in tensors if x.numel()])
    return tl.int64 if far or reach >= INT32_LIMIT else tl.int32


def _tile(batches: int, n_rows: int, n_columns: int, dtype: torch.dtype, device: torch.device) -> tuple[int, int]:
    """Return the sides of a tile: the largest up to 64 x 64, or half as many float64, that keep the device busy."""
    rows, columns = min(64, power_of_2(n_rows)), min(256 // dtype.itemsize, power_of_2(n_columns))
    while rows * columns > 256:
        programs = batches * -(-n_rows // rows) * -(-n_columns // columns)
        if programs >= devices.multiprocessors(device):
            break
        rows, columns = (rows // 2, columns) if rows >= columns else (rows, columns // 2)
    return rows, columns


def distances(out: torch.Tensor, x: torch.Tensor, y: torch.Tensor, norm: Norm, p: float, triangle: bool) -> None:
    """Write the distances of the rows of x to the rows of y, or of the pairs of rows of x if `triangle`.

    x and y are batches of matrices of any strides with features, out is contiguous.
    """
    batches, n_rows, n_features = x.shape
    n_columns = y.shape[1]
    rows, columns = _tile(batches, n_rows, n_columns, x.dtype, x.device)
    # A pair's index is computed from the square of a row.
    index = _index_type(out, x, y, reach=(n_rows + rows) ** 2 if triangle else 0)
    _distances[(batches * -(-n_rows // rows) * -(-n_columns // columns),)](
        *(out, x, y, Matrices(*x.stride()), Matrices(*y.stride()), p, n_rows, n_columns, n_features),
        TERM=norm.term,
        COMBINE=norm.combine,
        FINISH=norm.finish,
        META=DistanceMeta(rows, columns, _TERMS, triangle, index),
    )


def gradients(
    gradient: torch.Tensor,
    grad_output: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
    distances: torch.Tensor,
    norm: Norm,
    p: float,
    triangle: bool,
) -> None:
    """Write the contiguous gradient by x of `distances` to the rows of y, or of pairs of rows of x if `triangle`.

    Matrices have a batch dimension each, and any strides; pairs are vectors.
    """
    batches, n_rows, n_features = x.shape
    rows, columns = _tile(batches, n_rows, n_features, x.dtype, x.device)
    every = (gradient, grad_output, x, y, distances)
    index = _index_type(*every, reach=(n_rows + rows) ** 2 if triangle else 0)
    own = [Matrices(0, 0, *z.stride()) if triangle else Matrices(*z.stride()) for z in (grad_output, distances)]
    _gradients[(batches * -(-n_rows // rows) * -(-n_features // columns),)](
        *(*every, own[0], Matrices(*x.stride()), Matrices(*y.stride()), own[1], p, n_rows, y.shape[1], n_features),
        SLOPE=norm.slope,
        META=DistanceMeta(rows, columns, _TERMS, triangle, index),
    )


def augment(out: torch.Tensor, x: torch.Tensor, factor: float, norm_column: int, one_column: int) -> None:
    """Write `factor` * x, the squared norms of its rows and ones to `out`, whose rows are two elements longer."""
    batches, n_rows, n_features = x.shape
    columns = min(256, power_of_2(n_features))
    rows = min(max(1, devices.current.row_elements // 2 // columns), power_of_2(n_rows))
    _augment[(batches * -(-n_rows // rows),)](
        *(out, x, Matrices(*out.stride()), Matrices(*x.stride()), factor, n_rows, n_features, norm_column, one_column),
        COMPUTE=TRITON_DTYPES[opmath(x.dtype)],
        META=DistanceMeta(rows, columns, 1, False, _index_type(out, x)),
    )
