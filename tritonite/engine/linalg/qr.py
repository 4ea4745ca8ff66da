"""The QR factorisation of a tile of matrices by Householder reflectors."""

from __future__ import annotations

import triton
import triton.language as tl

from tritonite.engine.linalg.tile import begin, column_of, element_of, matrices_of, pointers, vector_pointers
from tritonite.language import libdevice
from tritonite.language.math import square_root, true_divide
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry


@triton.jit
def _reflector(below, line, k):
    """Return (v below its 1 at row k, tau, the diagonal element beta) of H = 1 - tau v v^T that clears a column.

    As in LAPACK beta has the sign opposite to that of the column's element, and a column that is clear has tau = 0. The
    norm is that of the column divided by its largest element, so that no square overflows.
    """
    alpha = element_of(below, line == k)
    tail = tl.where(line > k, below, 0.0)
    # A largest element would hide a nan.
    clear = tl.sum((tail != 0).to(tl.int32), 1) == 0
    size = tl.maximum(tl.max(tl.abs(tail), 1), tl.abs(alpha))
    size = tl.where(size == 0, 1.0, size)
    scaled, own = true_divide(tail, size[:, None]), true_divide(alpha, size)
    # In units of the largest element, so that numbers below the smallest normal one lose no bits.
    norm = -libdevice.copysign(square_root(tl.sum(scaled * scaled, 1) + own * own), own)
    beta = tl.where(clear, alpha, size * norm)
    tau = tl.where(clear, 0.0, true_divide(norm - own, tl.where(clear, 1.0, norm)))
    v = true_divide(scaled, tl.where(clear, 1.0, own - norm)[:, None])
    return v, tau, beta


@libentry()
@triton.jit(do_not_specialize=["n_matrices", "n_rows", "n_columns", "kept_rows"])
def factor_qr(packed, taus, triangle, source, sizes, n_matrices, n_rows, n_columns, kept_rows, META: tl.constexpr):
    """Write those of R over the reflectors, tau and R alone that have data. R alone has `kept_rows` rows."""
    wait_for_previous_launch()
    meta: tl.constexpr = META
    MATRICES: tl.constexpr = meta.matrices
    ROWS: tl.constexpr = meta.rows
    index, exists = matrices_of(tl.program_id(0), n_matrices, META)
    line = tl.arange(0, meta.rows)[None, :]
    row, column = line[:, :, None], tl.arange(0, meta.columns)[None, None, :]
    inside = exists[:, None, None] & (row < n_rows) & (column < n_columns)
    first = begin(source, index, sizes)
    tile = tl.load(pointers(first, row, column, source.row, source.column, meta.index), mask=inside, other=0)
    n_reflectors = tl.minimum(n_rows, n_columns)
    found = tl.zeros((MATRICES, ROWS), tile.dtype)
    for k in range(n_reflectors):
        v, tau, beta = _reflector(column_of(tile, column, k), line, k)
        found = tl.where(line == k, tau[:, None], found)
        whole = tl.where(line == k, 1.0, v)
        products = tau[:, None] * tl.sum(whole[:, :, None] * tile, 1)
        updated = tl.where(column > k, tile - whole[:, :, None] * products[:, None, :], tile)
        own = tl.where(line == k, beta[:, None], v)
        updated = tl.where(column == k, own[:, :, None], updated)
        tile = tl.where((line >= k)[:, :, None], updated, tile)
    if packed.data is not None:
        target = pointers(begin(packed, index, sizes), row, column, packed.row, packed.column, meta.index)
        tl.store(target, tile, mask=inside)
    if taus.data is not None:
        target = vector_pointers(begin(taus, index, sizes), line, taus.row, meta.index)
        tl.store(target, found, mask=exists[:, None] & (line < n_reflectors))
    if triangle.data is not None:
        target = pointers(begin(triangle, index, sizes), row, column, triangle.row, triangle.column, meta.index)
        tl.store(target, tl.where(row <= column, tile, 0.0), mask=inside & (row < kept_rows))
