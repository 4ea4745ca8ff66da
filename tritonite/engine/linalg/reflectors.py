"""Products of Householder reflectors with a block of columns, and the matrix T of their compact WY form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from tritonite.engine.linalg.tile import begin, matrices_of, pointers, vector_pointers
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry


@dataclass(frozen=True)
class ReflectorMeta:
    """Compile-time facts of `apply_reflectors`.

    tile: the matrices, rows and columns of a program, a `TileMeta`.
    identity: the columns are those of the identity, and not read.
    ascending: the first reflector is applied first, which multiplies by the transpose of Q = H_1 H_2 ...
    signed: columns of the identity have the signs of the diagonal above the reflectors.
    """

    tile: Any
    identity: bool
    ascending: bool
    signed: bool = False


@libentry()
@triton.jit(do_not_specialize=["n_matrices", "n_rows", "n_columns", "n_reflectors"])
def apply_reflectors(
    product, packed, taus, source, sizes, n_matrices, n_rows, n_columns, n_reflectors, META: tl.constexpr
):
    """Write Q C or Q^T C for a block of columns of C, where Q is the product of reflectors stored below a diagonal."""
    wait_for_previous_launch()
    facts: tl.constexpr = META
    meta: tl.constexpr = facts.tile
    blocks = tl.cdiv(n_columns, meta.columns)
    index, exists = matrices_of(tl.program_id(0) // blocks, n_matrices, meta)
    line = tl.arange(0, meta.rows)[None, :]
    row = line[:, :, None]
    column = (tl.program_id(0) % blocks * meta.columns + tl.arange(0, meta.columns))[None, None, :]
    inside = exists[:, None, None] & (row < n_rows) & (column < n_columns)
    if facts.identity:
        x = tl.where((row == column) & inside, 1.0, 0.0).to(product.data.dtype.element_ty)
    else:
        given = pointers(begin(source, index, sizes), row, column, source.row, source.column, meta.index)
        x = tl.load(given, mask=inside, other=0)
    if facts.signed:
        on_diagonal = pointers(begin(packed, index, sizes), column, column, packed.row, packed.column, meta.index)
        diagonal = tl.load(on_diagonal, mask=exists[:, None, None] & (column < n_reflectors), other=0)
        x = tl.where(diagonal < 0, -x, x)
    row_step, column_step = tl.full((), packed.row, meta.index), tl.full((), packed.column, meta.index)
    lines = begin(packed, index, sizes)[:, None] + line.to(meta.index) * row_step
    scales = begin(taus, index, sizes)
    tau_step = tl.full((), taus.row, meta.index)
    for step in range(n_reflectors):
        k = step if facts.ascending else n_reflectors - 1 - step
        v = tl.load(lines + k * column_step, mask=exists[:, None] & (line > k) & (line < n_rows), other=0)
        v = tl.where(line == k, 1.0, v)
        tau = tl.load(scales + k * tau_step, mask=exists, other=0)
        products = tau[:, None] * tl.sum(v[:, :, None] * x, 1)
        x = tl.where((line >= k)[:, :, None], x - v[:, :, None] * products[:, None, :], x)
    target = pointers(begin(product, index, sizes), row, column, product.row, product.column, meta.index)
    tl.store(target, x, mask=inside)


@libentry()
@triton.jit(do_not_specialize=["n_matrices", "n"])
def factor_triangular(triangle, gram, taus, sizes, n_matrices, n, META: tl.constexpr):
    """Write T of the product 1 - V T V^T of n reflectors, given V^T V, of which the upper triangle is read.

    Column k of T is -tau_k T (V^T v_k) above its diagonal element tau_k (Schreiber and Van Loan 1989).
    """
    wait_for_previous_launch()
    meta: tl.constexpr = META
    MATRICES: tl.constexpr = meta.matrices
    ROWS: tl.constexpr = meta.rows
    COLUMNS: tl.constexpr = meta.columns
    index, exists = matrices_of(tl.program_id(0), n_matrices, META)
    line, across = tl.arange(0, ROWS)[None, :], tl.arange(0, COLUMNS)[None, :]
    row, column = line[:, :, None], across[:, None, :]
    column_step = tl.full((), gram.column, meta.index)
    products = vector_pointers(begin(gram, index, sizes), across, gram.row, meta.index)
    scales, tau_step = begin(taus, index, sizes), tl.full((), taus.row, meta.index)
    tile = tl.zeros((MATRICES, ROWS, COLUMNS), triangle.data.dtype.element_ty)
    for k in range(n):
        tau = tl.load(scales + k * tau_step, mask=exists, other=0)[:, None]
        g = tl.load(products + k * column_step, mask=exists[:, None] & (across < k), other=0)
        own = tl.where(line == k, tau, -tau * tl.sum(tile * g[:, None, :], 2))
        tile = tl.where(column == k, own[:, :, None], tile)
    target = pointers(begin(triangle, index, sizes), row, column, triangle.row, triangle.column, meta.index)
    tl.store(target, tile, mask=exists[:, None, None] & (row < n) & (column < n))
