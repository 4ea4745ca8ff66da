"""Eigenvalues and eigenvectors of a tile of symmetric matrices by Jacobi's method."""

from __future__ import annotations

import triton
import triton.language as tl

from tritonite.engine.linalg.jacobi import normalized, opponent, positions, rotated_pairs
from tritonite.engine.linalg.tile import begin, matrices_of, pointers, vector_pointers
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry


@libentry()
@triton.jit(do_not_specialize=["n_matrices", "n"])
def factor_symmetric(values, vectors, failed, source, sizes, n_matrices, n, META: tl.constexpr):
    """Write L and V of A V = V L, where A is symmetric and its lower triangle is read.

    `failed` becomes -1 if a matrix is not finite or needs too many sweeps.
    """
    wait_for_previous_launch()
    facts: tl.constexpr = META
    meta: tl.constexpr = facts.tile
    MATRICES: tl.constexpr = meta.matrices
    SIDE: tl.constexpr = meta.rows
    index, exists = matrices_of(tl.program_id(0), n_matrices, meta)
    line = tl.arange(0, meta.rows)[None, :]
    row, column = tl.arange(0, meta.rows)[None, :, None], tl.arange(0, meta.columns)[None, None, :]
    inside = exists[:, None, None] & (row < n) & (column < n)
    first = begin(source, index, sizes)
    lower = pointers(first, tl.maximum(row, column), tl.minimum(row, column), source.row, source.column, meta.index)
    tile, scale, finite = normalized(tl.load(lower, mask=inside, other=0))
    diagonal = tl.sum(tl.where(row == column, tile, 0.0), 1)
    tile = tl.where(row == column, 0.0, tile)
    basis = tl.where(row == column, 1.0, tl.zeros((MATRICES, SIDE, SIDE), tile.dtype))
    players = n + n % 2
    sweep = 0
    rest = tl.full((MATRICES,), 1, tl.int32)
    while (sweep < facts.most_sweeps) & (tl.max(rest, 0) > 0):
        # A finished matrix stays as it is, so that results do not depend on other matrices of the tile.
        active = rest[:, None] > 0
        skew = tl.zeros((MATRICES, SIDE), tl.int32)
        for step in range(players - 1):
            met = tl.broadcast_to(opponent(line, step, players), (MATRICES, SIDE))
            meets = row == opponent(column, step, players)
            tile, diagonal, basis, skew = rotated_pairs(tile, diagonal, basis, skew, met, meets, active, n, facts)
        rest = tl.max(skew, 1)
        sweep += 1
    position = positions(tl.where(line < n, diagonal, float("inf")))
    target = vector_pointers(begin(values, index, sizes), position, values.row, meta.index)
    tl.store(target, diagonal * scale[:, None], mask=exists[:, None] & (line < n))
    if facts.vectors:
        order = position[:, None, :]
        target = pointers(begin(vectors, index, sizes), row, order, vectors.row, vectors.column, meta.index)
        tl.store(target, basis, mask=inside)
    bad = exists & ((finite == 0) | (rest > 0))
    tl.store(failed, -1, mask=tl.max(bad.to(tl.int32), 0) > 0)
