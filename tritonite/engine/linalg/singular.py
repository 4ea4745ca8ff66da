"""Singular values of a tile of matrices, and the bases of their singular vectors, by Jacobi's one-sided method."""

from __future__ import annotations

import triton
import triton.language as tl

from tritonite.engine.linalg.jacobi import (
    normalized,
    opponent,
    ordered,
    positions,
    rotated,
    rotated_columns,
    rotation,
)
from tritonite.engine.linalg.tile import begin, matrices_of, pointers, vector_pointers
from tritonite.language.math import square_root
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry


@libentry()
@triton.jit(do_not_specialize=["n_matrices", "n_rows", "n_columns"])
def orthogonalize_columns(
    values, product, right, failed, source, sizes, n_matrices, n_rows, n_columns, META: tl.constexpr
):
    """Write S, V and A V of matrices, where A V has orthogonal columns, whose norms S descend (Hestenes, 1958).

    A V is divided by a power of two, so that no square overflows. `failed` becomes -1 if a matrix is not finite or
    needs too many sweeps. Two columns count as orthogonal if their product is small next to the larger one and the
    largest column.
    """
    wait_for_previous_launch()
    facts: tl.constexpr = META
    meta: tl.constexpr = facts.tile
    MATRICES: tl.constexpr = meta.matrices
    COLUMNS: tl.constexpr = meta.columns
    index, exists = matrices_of(tl.program_id(0), n_matrices, meta)
    line = tl.arange(0, meta.columns)[None, :]
    row, column = tl.arange(0, meta.rows)[None, :, None], tl.arange(0, meta.columns)[None, None, :]
    inside = exists[:, None, None] & (row < n_rows) & (column < n_columns)
    given = pointers(begin(source, index, sizes), row, column, source.row, source.column, meta.index)
    tile, scale, finite = normalized(tl.load(given, mask=inside, other=0))
    component = tl.arange(0, meta.columns)[None, :, None]
    basis = tl.where(component == column, 1.0, tl.zeros((MATRICES, COLUMNS, COLUMNS), tile.dtype))
    players = n_columns + n_columns % 2
    sweep = 0
    rest = tl.full((MATRICES,), 1, tl.int32)
    while (sweep < facts.most_sweeps) & (tl.max(rest, 0) > 0):
        skew = tl.zeros((MATRICES, COLUMNS), tl.int32)
        for step in range(players - 1):
            met = tl.broadcast_to(opponent(line, step, players), (MATRICES, COLUMNS))
            others = tl.gather(tile, tl.broadcast_to(met[:, None, :], tile.shape), 2)
            own = tl.sum(tile * tile, 1)
            other = tl.gather(own, met, 1)
            cross = tl.sum(tile * others, 1)
            # A finished matrix stays as it is, so that results do not depend on other matrices of the tile.
            cross = tl.where(rest[:, None] > 0, cross, 0.0)
            allowed = facts.tolerance * facts.tolerance * tl.maximum(own, other) * tl.max(own, 1)[:, None]
            skew = tl.maximum(skew, (cross * cross > allowed).to(tl.int32))
            tangent, sine, cosm1 = rotation(cross, own, other, line < met)
            moves = (rest[:, None] > 0) & (tl.maximum(line, met) < n_columns)
            # The order of columns that are roundoff does not settle.
            above = 4096 * facts.tolerance * facts.tolerance * tl.max(own, 1)[:, None]
            moves &= tl.maximum(own, other) > above
            stay, add, _, change = ordered(tangent, sine, cosm1, cross, own, other, line < met, moves, facts.tolerance)
            skew = tl.maximum(skew, change.to(tl.int32))
            tile = rotated(tile, others, stay[:, None, :], add[:, None, :], change[:, None, :])
            if facts.vectors:
                basis = rotated_columns(basis, met, stay, add, change)
        rest = tl.max(skew, 1)
        sweep += 1
    norm = tl.sum(tile * tile, 1)
    position = positions(tl.where(line < n_columns, -norm, float("inf")))
    target = vector_pointers(begin(values, index, sizes), position, values.row, meta.index)
    tl.store(target, square_root(norm) * scale[:, None], mask=exists[:, None] & (line < n_columns))
    if facts.vectors:
        order = position[:, None, :]
        target = pointers(begin(product, index, sizes), row, order, product.row, product.column, meta.index)
        tl.store(target, tile, mask=inside)
        target = pointers(begin(right, index, sizes), component, order, right.row, right.column, meta.index)
        square = exists[:, None, None] & (component < n_columns) & (column < n_columns)
        tl.store(target, basis, mask=square)
    bad = exists & ((finite == 0) | (rest > 0))
    tl.store(failed, -1, mask=tl.max(bad.to(tl.int32), 0) > 0)
