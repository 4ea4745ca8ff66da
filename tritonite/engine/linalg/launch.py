"""Launches of the linear algebra kernels. All tensors of a launch have one batch shape in front."""

from __future__ import annotations

import torch

from tritonite.engine.linalg.cholesky import factor_cholesky
from tritonite.engine.linalg.eigen import factor_symmetric
from tritonite.engine.linalg.jacobi import JacobiMeta
from tritonite.engine.linalg.ldl import factor_ldl
from tritonite.engine.linalg.ldl import solve_ldl as substitute_ldl
from tritonite.engine.linalg.lu import LuMeta, factor_lu, multiply_diagonal, unpack_lu
from tritonite.engine.linalg.operands import TileMeta, over_batch
from tritonite.engine.linalg.qr import factor_qr
from tritonite.engine.linalg.reflectors import ReflectorMeta, apply_reflectors, factor_triangular
from tritonite.engine.linalg.singular import orthogonalize_columns
from tritonite.engine.linalg.substitution import SubstitutionMeta, Sweep, substitute
from tritonite.engine.linalg.table import Tile, right_hand_sides, rotated_matrices, whole_matrices
from tritonite.runtime.contract import fusion

# Elements of a diagonal that a program multiplies at a time.
_DIAGONAL = 512


def _programs(count: int, held: int) -> int:
    return -(-count // held)


def cholesky(factor: torch.Tensor, info: torch.Tensor, source: torch.Tensor, upper: bool) -> None:
    """Write the Cholesky factors of symmetric matrices, of which the triangle of the factor is read."""
    *shape, n, _ = source.shape
    batch, (to, code, a) = over_batch(shape, (factor, 2), (info, 0), (source, 2))
    if not batch.n_matrices:
        return
    if upper:
        to, a = to.transposed, a.transposed
    tile = whole_matrices(n, n, batch.n_matrices, source.dtype)
    factor_cholesky[(_programs(batch.n_matrices, tile.matrices),)](
        *(to, code, a, batch.sizes, batch.n_matrices, n),
        META=TileMeta.of(tile, (factor, source)),
        num_warps=tile.num_warps,
    )


def solve(
    solution: torch.Tensor,
    right: torch.Tensor | None,
    triangle: torch.Tensor,
    sweeps: tuple[Sweep] | tuple[Sweep, Sweep],
    pivots: torch.Tensor | None = None,
    permuted: str = "",
    symmetric: bool = False,
) -> None:
    """Write the solution of triangular systems in turn. Without `right` the right-hand sides are the identity."""
    *shape, n, n_columns = solution.shape
    batch, (x, b, a, swaps) = over_batch(shape, (solution, 2), (right, 2), (triangle, 2), (pivots, 1))
    if not batch.n_matrices * n * n_columns:
        return
    tile = right_hand_sides(n, n_columns, batch.n_matrices, solution.dtype)
    meta = TileMeta.of(tile, (solution, right, triangle))
    second = sweeps[1] if len(sweeps) > 1 else None
    grid = _programs(batch.n_matrices, tile.matrices) * _programs(n_columns, tile.columns)
    substitute[(grid,)](
        *(x, b, a, swaps, batch.sizes, batch.n_matrices, n, n_columns),
        META=SubstitutionMeta(meta, sweeps[0], second, right is None, permuted, symmetric),
        num_warps=tile.num_warps,
    )


def ldl(factors: torch.Tensor, pivots: torch.Tensor, info: torch.Tensor, source: torch.Tensor) -> None:
    """Write D and L of symmetric matrices in one, pivots and codes. The lower triangle is read."""
    *shape, n, _ = source.shape
    batch, operands = over_batch(shape, (factors, 2), (pivots, 1), (info, 0), (source, 2))
    if not batch.n_matrices:
        return
    tile = whole_matrices(n, n, batch.n_matrices, source.dtype)
    factor_ldl[(_programs(batch.n_matrices, tile.matrices),)](
        *(*operands, batch.sizes, batch.n_matrices, n),
        META=TileMeta.of(tile, (factors, source)),
        num_warps=tile.num_warps,
        # All threads have to choose the same pivot.
        **fusion(allowed=False),
    )


def solve_ldl(solution: torch.Tensor, right: torch.Tensor, factors: torch.Tensor, pivots: torch.Tensor) -> None:
    """Write the solution of symmetric systems by D and L in one and the pivots."""
    *shape, n, n_columns = solution.shape
    batch, operands = over_batch(shape, (solution, 2), (right, 2), (factors, 2), (pivots, 1))
    if not batch.n_matrices * n * n_columns:
        return
    tile = right_hand_sides(n, n_columns, batch.n_matrices, solution.dtype)
    grid = _programs(batch.n_matrices, tile.matrices) * _programs(n_columns, tile.columns)
    substitute_ldl[(grid,)](
        *(*operands, batch.sizes, batch.n_matrices, n, n_columns),
        META=TileMeta.of(tile, (solution, right, factors)),
        num_warps=tile.num_warps,
    )


def lu(
    factors: torch.Tensor | None,
    pivots: torch.Tensor | None,
    info: torch.Tensor | None,
    source: torch.Tensor,
    pivot: bool = True,
    determinant: torch.Tensor | None = None,
    logarithm: torch.Tensor | None = None,
) -> None:
    """Write L and U of matrices in one, pivots, codes, and determinants, or with `logarithm` their signs and sizes."""
    *shape, n_rows, n_columns = source.shape
    given = ((factors, 2), (pivots, 1), (info, 0), (determinant, 0), (logarithm, 0), (source, 2))
    batch, operands = over_batch(shape, *given)
    if not batch.n_matrices:
        return
    tile = whole_matrices(n_rows, n_columns, batch.n_matrices, source.dtype)
    meta = TileMeta.of(tile, (factors, source))
    logs = logarithm is not None
    factor_lu[(_programs(batch.n_matrices, tile.matrices),)](
        *(*operands, batch.sizes, batch.n_matrices, n_rows, n_columns),
        META=LuMeta(meta, pivot, determinant is not None and not logs, logs),
        num_warps=tile.num_warps,
    )


def determinant(
    value: torch.Tensor, logarithm: torch.Tensor | None, factors: torch.Tensor, pivots: torch.Tensor
) -> None:
    """Write determinants, or with `logarithm` their signs and the logarithms of their sizes, given L and U in one."""
    *shape, n, _ = factors.shape
    batch, operands = over_batch(shape, (value, 0), (logarithm, 0), (factors, 2), (pivots, 1))
    if not batch.n_matrices:
        return
    tile = Tile(1, _DIAGONAL, 1, 4)
    multiply_diagonal[(batch.n_matrices,)](
        *(*operands, batch.sizes, batch.n_matrices, n),
        META=TileMeta.of(tile, (factors,)),
        num_warps=tile.num_warps,
    )


def unpack(
    order: torch.Tensor | None,
    lower: torch.Tensor | None,
    upper: torch.Tensor | None,
    factors: torch.Tensor,
    pivots: torch.Tensor,
) -> None:
    """Write the permutation matrix P, and L and U, of factors in one matrix. Without a tensor it is not written."""
    *shape, n_rows, n_columns = factors.shape
    batch, operands = over_batch(shape, (order, 2), (lower, 2), (upper, 2), (factors, 2), (pivots, 1))
    if not batch.n_matrices:
        return
    tile = whole_matrices(n_rows, n_columns, batch.n_matrices, factors.dtype)
    unpack_lu[(_programs(batch.n_matrices, tile.matrices),)](
        *(*operands, batch.sizes, batch.n_matrices, n_rows, n_columns),
        META=TileMeta.of(tile, (order, lower, upper, factors)),
        num_warps=tile.num_warps,
    )


def qr(
    packed: torch.Tensor | None, taus: torch.Tensor | None, triangle: torch.Tensor | None, source: torch.Tensor
) -> None:
    """Write R over the reflectors of Q, the reflectors' factors, and R alone, which may have fewer rows."""
    *shape, n_rows, n_columns = source.shape
    batch, operands = over_batch(shape, (packed, 2), (taus, 1), (triangle, 2), (source, 2))
    if not batch.n_matrices * n_rows * n_columns:
        return
    tile = whole_matrices(n_rows, n_columns, batch.n_matrices, source.dtype)
    kept_rows = 0 if triangle is None else triangle.shape[-2]
    factor_qr[(_programs(batch.n_matrices, tile.matrices),)](
        *(*operands, batch.sizes, batch.n_matrices, n_rows, n_columns, kept_rows),
        META=TileMeta.of(tile, (packed, triangle, source)),
        num_warps=tile.num_warps,
    )


def reflect(
    product: torch.Tensor,
    source: torch.Tensor | None,
    packed: torch.Tensor,
    taus: torch.Tensor,
    ascending: bool,
    signed: bool = False,
) -> None:
    """Write Q C, or if `ascending` Q^T C, for the product Q of reflectors. Without `source` C is the identity.

    If `signed`, columns of the identity have the signs of R's diagonal, so that those of A = Q R are not negative.
    """
    *shape, n_rows, n_columns = product.shape
    batch, operands = over_batch(shape, (product, 2), (packed, 2), (taus, 1), (source, 2))
    if not batch.n_matrices * n_rows * n_columns:
        return
    tile = right_hand_sides(n_rows, n_columns, batch.n_matrices, product.dtype)
    meta = TileMeta.of(tile, (product, source, packed))
    grid = _programs(batch.n_matrices, tile.matrices) * _programs(n_columns, tile.columns)
    apply_reflectors[(grid,)](
        *(*operands, batch.sizes, batch.n_matrices, n_rows, n_columns, taus.shape[-1]),
        META=ReflectorMeta(meta, source is None, ascending, signed),
        num_warps=tile.num_warps,
    )


def triangular_factor(triangle: torch.Tensor, gram: torch.Tensor, taus: torch.Tensor) -> None:
    """Write T of the product 1 - V T V^T of reflectors, given V^T V and the reflectors' factors."""
    *shape, n, _ = gram.shape
    batch, operands = over_batch(shape, (triangle, 2), (gram, 2), (taus, 1))
    tile = whole_matrices(n, n, batch.n_matrices, gram.dtype)
    factor_triangular[(_programs(batch.n_matrices, tile.matrices),)](
        *(*operands, batch.sizes, batch.n_matrices, n),
        META=TileMeta.of(tile, (triangle, gram)),
        num_warps=tile.num_warps,
    )


def eigh(values: torch.Tensor, vectors: torch.Tensor | None, failed: torch.Tensor, source: torch.Tensor) -> None:
    """Write the eigenvalues and eigenvectors of symmetric matrices, of which the lower triangle is read.

    `failed`, one int64, becomes -1 if a matrix has none.
    """
    *shape, n, _ = source.shape
    batch, (value, vector, a) = over_batch(shape, (values, 1), (vectors, 2), (source, 2))
    tile = rotated_matrices(n, n, batch.n_matrices, source.dtype)
    meta = TileMeta.of(tile, (vectors, source))
    factor_symmetric[(_programs(batch.n_matrices, tile.matrices),)](
        *(value, vector, failed, a, batch.sizes, batch.n_matrices, n),
        META=JacobiMeta.of(meta, vectors is not None, source.dtype),
        num_warps=tile.num_warps,
    )


def svd(
    values: torch.Tensor,
    product: torch.Tensor | None,
    right: torch.Tensor | None,
    failed: torch.Tensor,
    source: torch.Tensor,
) -> None:
    """Write S of A = U S V^T, V, and a multiple of A V. A has at least as many rows as columns.

    `failed`, one int64, becomes -1 if a matrix has none.
    """
    *shape, n_rows, n_columns = source.shape
    batch, operands = over_batch(shape, (values, 1), (product, 2), (right, 2), (source, 2))
    value, columns, vectors, a = operands
    tile = rotated_matrices(n_rows, n_columns, batch.n_matrices, source.dtype)
    meta = TileMeta.of(tile, (product, right, source))
    orthogonalize_columns[(_programs(batch.n_matrices, tile.matrices),)](
        *(value, columns, vectors, failed, a, batch.sizes, batch.n_matrices, n_rows, n_columns),
        META=JacobiMeta.of(meta, right is not None, source.dtype),
        num_warps=tile.num_warps,
        # Both columns of a pair need the same angle, to the bit.
        **fusion(allowed=False),
    )
