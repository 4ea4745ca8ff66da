"""Triangular systems by forward and backward substitution, one or two in turn, with a permutation of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from tritonite.engine.linalg.tile import begin, element_of, matrices_of, pointers, row_of
from tritonite.language.math import true_divide
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry


@dataclass(frozen=True)
class Sweep:
    """One triangular system: which triangle of the matrix is read, and whether its diagonal is taken to be 1."""

    lower: bool
    unit: bool
    transposed: bool = False


@dataclass(frozen=True)
class SubstitutionMeta:
    """Compile-time facts of `substitute`.

    tile: the matrices, rows and right-hand sides of a program, a `TileMeta`.
    first, second: the systems in order; the second may be None.
    identity: the right-hand sides are the columns of the identity, and not read.
    permuted: "loads" reads the right-hand sides in the pivots' order, "stores" writes the solution in it.
    symmetric: the solution is symmetric. Its lower triangle is written to both.
    """

    tile: Any
    first: Sweep
    second: Sweep | None = None
    identity: bool = False
    permuted: str = ""
    symmetric: bool = False


@triton.jit
def permutation(pivots, first, exists, n_swaps, ROWS: tl.constexpr, INDEX: tl.constexpr):
    """Return the order of rows after the swaps of `pivots`, from 1 on: the original row at each position."""
    line = tl.arange(0, ROWS)[None, :]
    order = line + tl.zeros_like(exists.to(tl.int32))[:, None]
    step = tl.full((), pivots.row, INDEX)
    for k in range(n_swaps):
        other = tl.load(first + k * step, mask=exists, other=k + 1) - 1
        own, swapped = element_of(order, line == k), element_of(order, line == other[:, None])
        order = tl.where(line == other[:, None], own[:, None], order)
        order = tl.where(line == k, swapped[:, None], order)
    return order


@triton.jit
def _sweep(x, triangle, index, exists, sizes, n, SWEEP: tl.constexpr, INDEX: tl.constexpr, ROWS: tl.constexpr):
    """Return the solution of a triangular system with the right-hand sides x, (matrices, rows, columns)."""
    sweep: tl.constexpr = SWEEP
    row_stride, column_stride = triangle.row, triangle.column
    row_step, column_step = tl.full((), row_stride, INDEX), tl.full((), column_stride, INDEX)
    if sweep.transposed:
        row_step, column_step = tl.full((), column_stride, INDEX), tl.full((), row_stride, INDEX)
    line = tl.arange(0, ROWS)[None, :]
    first = begin(triangle, index, sizes)
    lines = first[:, None] + line.to(INDEX) * row_step
    for step in range(n):
        k = step if sweep.lower else n - 1 - step
        rest = (line > k) if sweep.lower else (line < k)
        rest = rest & (line < n) & exists[:, None]
        factors = tl.load(lines + k * column_step, mask=rest, other=0)
        solved = row_of(x, (line == k) & exists[:, None])
        if not sweep.unit:
            diagonal = tl.load(first + k * (row_step + column_step), mask=exists, other=1)
            solved = true_divide(solved, diagonal[:, None])
            x = tl.where((line == k)[:, :, None], solved[:, None, :], x)
        x = tl.where(rest[:, :, None], x - factors[:, :, None] * solved[:, None, :], x)
    return x


@libentry()
@triton.jit(do_not_specialize=["n_matrices", "n", "n_columns"])
def substitute(solution, right, triangle, pivots, sizes, n_matrices, n, n_columns, META: tl.constexpr):
    """Write the solution of `META.first`, and then of `META.second`, for a block of right-hand sides."""
    wait_for_previous_launch()
    facts: tl.constexpr = META
    meta: tl.constexpr = facts.tile
    FIRST: tl.constexpr = facts.first
    SECOND: tl.constexpr = facts.second
    blocks = tl.cdiv(n_columns, meta.columns)
    index, exists = matrices_of(tl.program_id(0) // blocks, n_matrices, meta)
    line = tl.arange(0, meta.rows)[None, :]
    row = tl.arange(0, meta.rows)[None, :, None]
    column = (tl.program_id(0) % blocks * meta.columns + tl.arange(0, meta.columns))[None, None, :]
    inside = exists[:, None, None] & (row < n) & (column < n_columns)
    order = line
    if facts.permuted != "":
        order = permutation(pivots, begin(pivots, index, sizes), exists, n, meta.rows, meta.index)
    if facts.identity:
        source = order[:, :, None] if facts.permuted == "loads" else row
        x = tl.where((source == column) & inside, 1.0, 0.0).to(solution.data.dtype.element_ty)
    else:
        source = order[:, :, None] if facts.permuted == "loads" else row
        given = pointers(begin(right, index, sizes), source, column, right.row, right.column, meta.index)
        x = tl.load(given, mask=inside, other=0)
    x = _sweep(x, triangle, index, exists, sizes, n, FIRST, meta.index, meta.rows)
    if SECOND is not None:
        x = _sweep(x, triangle, index, exists, sizes, n, SECOND, meta.index, meta.rows)
    out = begin(solution, index, sizes)
    place = order[:, :, None] if facts.permuted == "stores" else row
    target = pointers(out, place, column, solution.row, solution.column, meta.index)
    if facts.symmetric:
        tl.store(target, x, mask=inside & (row >= column))
        mirrored = pointers(out, column, place, solution.row, solution.column, meta.index)
        tl.store(mirrored, x, mask=inside & (row > column))
    else:
        tl.store(target, x, mask=inside)
