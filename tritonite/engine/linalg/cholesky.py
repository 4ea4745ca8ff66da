"""The Cholesky factorisation of a tile of matrices."""

from __future__ import annotations

import triton
import triton.language as tl

from tritonite.engine.linalg.tile import begin, column_of, element_of, matrices_of, pointers, row_of
from tritonite.language.math import square_root, true_divide
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry


@libentry()
@triton.jit(do_not_specialize=["n_matrices", "n"])
def factor_cholesky(factor, info, source, sizes, n_matrices, n, META: tl.constexpr):
    """Write L of A = L L^T, whose lower triangle is read, and for each matrix its first minor that is not positive.

    The tile is symmetric, so that the row of the rank-1 update of a column is a sum of the tile, too.
    """
    wait_for_previous_launch()
    meta: tl.constexpr = META
    MATRICES: tl.constexpr = meta.matrices
    index, exists = matrices_of(tl.program_id(0), n_matrices, META)
    row = tl.arange(0, meta.rows)[None, :, None]
    column = tl.arange(0, meta.columns)[None, None, :]
    line = tl.arange(0, meta.rows)[None, :]
    inside = exists[:, None, None] & (row < n) & (column < n)
    first = begin(source, index, sizes)
    lower = pointers(first, tl.maximum(row, column), tl.minimum(row, column), source.row, source.column, meta.index)
    tile = tl.load(lower, mask=inside, other=0)
    failed = tl.zeros((MATRICES,), tl.int32)
    for k in range(n):
        below = column_of(tile, column, k)
        across = row_of(tile, (line == k) & exists[:, None])
        pivot = element_of(below, line == k)
        failed = tl.where((failed == 0) & ((pivot > 0) == 0), k + 1, failed)
        root = square_root(pivot)
        below = tl.where(line > k, true_divide(below, root[:, None]), 0.0)
        right = tl.where(tl.arange(0, meta.columns)[None, :] > k, true_divide(across, root[:, None]), 0.0)
        tile -= below[:, :, None] * right[:, None, :]
        scaled = tl.where(line == k, root[:, None], below)
        tile = tl.where(column == k, scaled[:, :, None], tile)
    target = pointers(begin(factor, index, sizes), row, column, factor.row, factor.column, meta.index)
    tl.store(target, tl.where(row >= column, tile, 0.0), mask=inside)
    tl.store(begin(info, index, sizes), failed, mask=exists)
