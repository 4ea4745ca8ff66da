"""LU factorisation, and solves, inverses and determinants by it."""

import torch

from tritonite.dtypes import FULL_FLOATS
from tritonite.engine.iteration import broadcast_shape
from tritonite.engine.linalg import blocked, launch, triangles
from tritonite.engine.linalg.substitution import Sweep
from tritonite.engine.outputs import outputs
from tritonite.errors import Decline
from tritonite.ops import aten
from tritonite.ops.linalg.checks import (
    blocks_of,
    broadcast_batch,
    check_matrices,
    check_square,
    copy_of_blocks,
    fresh_or_given,
    is_blocked,
    is_solved_by_blocks,
    matrix_strides,
    one_batch,
    refuse_errors,
)
from tritonite.registry import operator
from tritonite.runtime.contract import empty, empty_strided


def _check_pivot(pivot):
    if not pivot and aten.on_cpu():
        raise Decline("pivot=False, for which ATen raises on a CPU")


def _pivots_of(x):
    """Return the shape of the pivots of matrices."""
    return (*x.shape[:-2], min(x.shape[-2:]))


def _scratch(x):
    """Return memory for the factors and the pivots of matrices."""
    factors = empty_strided(x.shape, matrix_strides(x.shape), x.dtype, x.device)
    return factors, empty(_pivots_of(x), torch.int32, x.device)


@operator("linalg_lu_factor_ex", accepts=FULL_FLOATS)
def linalg_lu_factor_ex(A, pivot=True, check_errors=False, outs=()):
    """Eliminate column by column with implicit row exchanges (Golub and Van Loan, section 3.4)."""
    refuse_errors(check_errors)
    _check_pivot(pivot)
    check_matrices(A)
    divided = is_blocked(A, "lu", panels=True)
    shapes, dtypes = [A.shape, _pivots_of(A), A.shape[:-2]], [A.dtype, torch.int32, torch.int32]
    outs = outputs((A,), shapes, dtypes, outs, (A,), matrix_strides(A.shape))
    _factor(*outs, A, divided, pivot)
    return outs


def _factor(factors, pivots, info, A, divided, pivot=True):
    """Write L and U in one matrix, pivots, and codes if `info` is a tensor."""
    if not divided:
        launch.lu(factors, pivots, info, A, pivot)
        return
    own = copy_of_blocks(A)
    swaps, codes = empty(_pivots_of(own), torch.int32, A.device), empty(own.shape[:1], torch.int32, A.device)
    blocked.lu(own, swaps, codes, pivot)
    for result, found in ((factors, own), (pivots, swaps), (info, codes)):
        if result is not None:
            result.copy_(found.view(result.shape))


def _unpacked_shapes(x, unpack_data, unpack_pivots):
    """Return the shapes of P, L and U, of which those that are not wanted are empty."""
    *batch, rows, columns = x.shape
    inner = min(rows, columns)
    factors = [(*batch, rows, inner), (*batch, inner, columns)] if unpack_data else [(0,), (0,)]
    return [(*batch, rows, rows) if unpack_pivots else (0,), *factors]


def _swaps(pivots):
    """Return pivots as a batch of one dimension, contiguous."""
    return pivots.contiguous().view(-1, pivots.shape[-1])


def _unpack(given, factors, pivots, unpack_data, unpack_pivots, divided):
    order, lower, upper = given
    if divided:
        inner = min(factors.shape[-2:])
        if unpack_data:
            triangles.unit_lower(lower, factors[..., :inner])
            triangles.upper(upper, factors[..., :inner, :])
        if unpack_pivots:
            own = blocks_of(order.shape, order)
            triangles.identity(own)
            blocked.exchange_rows(own, _swaps(pivots), backward=True)
            order.copy_(own.view(order.shape))
        return
    wanted = (order if unpack_pivots else None, *((lower, upper) if unpack_data else (None, None)))
    if unpack_data or unpack_pivots:
        launch.unpack(*wanted, factors, pivots)


@operator("linalg_lu", accepts=FULL_FLOATS)
def linalg_lu(A, pivot=True, outs=()):
    """Factor, and write the permutation matrix and the two factors apart."""
    _check_pivot(pivot)
    check_matrices(A)
    divided = is_blocked(A, "lu", panels=True)
    outs = outputs((A,), _unpacked_shapes(A, True, pivot), [A.dtype] * 3, outs)
    factors, pivots = _scratch(A)
    _factor(factors, pivots, None, A, divided, pivot)
    _unpack(outs, factors, pivots, True, pivot, divided)
    return outs


@operator("lu_unpack", accepts=FULL_FLOATS)
def lu_unpack(LU_data, LU_pivots, unpack_data=True, unpack_pivots=True, outs=()):
    """Copy the triangles, and exchange the rows of the identity as the pivots say."""
    check_matrices(LU_data)
    if unpack_pivots and (LU_pivots.dtype is not torch.int32 or LU_pivots.shape != _pivots_of(LU_data)):
        raise Decline(f"pivots of {LU_pivots.dtype} and shape {tuple(LU_pivots.shape)}")
    divided = is_blocked(LU_data, "lu_unpack")
    shapes = _unpacked_shapes(LU_data, unpack_data, unpack_pivots)
    outs = outputs((LU_data, LU_pivots), shapes, [LU_data.dtype] * 3, outs)
    _unpack(outs, LU_data, LU_pivots if unpack_pivots else None, unpack_data, unpack_pivots, divided)
    return outs


def _solve(out, right, factors, pivots, left, adjoint, divided):
    """Write the solution of A X = B, or of X A = B, by the factors of A or with `adjoint` of its transpose.

    Without `right` B is the identity.

    P L U X = B is solved by L and U after B is permuted, and U^T L^T P^T X = B before X is.
    """
    if not left:
        out, right, adjoint = out.mT, None if right is None else right.mT, not adjoint
    if divided:
        own = blocks_of(out.shape, out)
        if right is None:
            triangles.identity(own)
        else:
            own.copy_(one_batch(right))
        blocked.solve_by_lu(own, one_batch(factors), _swaps(pivots), adjoint)
        out.copy_(own.view(out.shape))
        return
    if adjoint:
        sweeps = Sweep(True, unit=False, transposed=True), Sweep(False, unit=True, transposed=True)
    else:
        sweeps = Sweep(True, unit=True), Sweep(False, unit=False)
    launch.solve(out, right, factors, sweeps, pivots, "stores" if adjoint else "loads")


@operator("linalg_lu_solve", accepts=FULL_FLOATS)
def linalg_lu_solve(LU, pivots, B, left=True, adjoint=False, outs=()):
    """Substitute forward and backward in one launch or by blocks, and permute the rows."""
    check_matrices(LU, B)
    check_square(LU)
    if pivots.dtype is not torch.int32 or pivots.shape != LU.shape[:-1]:
        raise Decline(f"pivots of {pivots.dtype} and shape {tuple(pivots.shape)}")
    if LU.shape[-1] != B.shape[-2 if left else -1]:
        raise Decline(f"factors of shape {tuple(LU.shape)} for right-hand sides of shape {tuple(B.shape)}")
    factors, right = broadcast_batch(LU, B)
    divided = is_solved_by_blocks(right if left else right.mT, "lu_solve")
    given = (LU, pivots, B)
    outs = outputs(given, [right.shape], [B.dtype], outs, (B,), matrix_strides(right.shape, left))
    _solve(outs[0], right, factors, pivots.expand(factors.shape[:-1]), left, adjoint, divided)
    return outs


@operator("linalg_inv_ex", accepts=FULL_FLOATS)
def linalg_inv_ex(A, check_errors=False, outs=()):
    """Factor, and solve for the columns of the identity."""
    refuse_errors(check_errors)
    check_matrices(A, square=True)
    divided, by_blocks = is_blocked(A, "inverse", panels=True), is_solved_by_blocks(A, "inverse")
    shapes, dtypes = [A.shape, A.shape[:-2]], [A.dtype, torch.int32]
    inverse, info = outs = outputs((A,), shapes, dtypes, outs, (A,), matrix_strides(A.shape))
    factors, pivots = _scratch(A)
    _factor(factors, pivots, info, A, divided)
    _solve(inverse, None, factors, pivots, True, False, by_blocks)
    return outs


@operator("_linalg_solve_ex", accepts=FULL_FLOATS)
def linalg_solve_ex(A, B, left=True, check_errors=False, outs=()):
    """Factor, and substitute; a right-hand side without columns is a vector."""
    refuse_errors(check_errors)
    check_matrices(A, square=True)
    vector = B.dim() == 1 or (A.dim() - 1 == B.dim() and B.shape == A.shape[:-1])
    if vector and not left:
        raise Decline("a vector on the left")
    right = B.unsqueeze(-1) if vector else B
    check_matrices(right, A)
    if A.shape[-1] != right.shape[-2 if left else -1]:
        raise Decline(f"matrices of shape {tuple(A.shape)} for right-hand sides of shape {tuple(B.shape)}")
    batch = broadcast_shape([A.shape[:-2], right.shape[:-2]])
    right = right.expand(*batch, *right.shape[-2:])
    divided, by_blocks = is_blocked(A, "solve", panels=True), is_solved_by_blocks(right if left else right.mT, "solve")
    shape = right.shape[:-1] if vector else right.shape
    shapes, dtypes = [shape, A.shape, A.shape[:-1], A.shape[:-2]], [A.dtype, A.dtype, torch.int32, torch.int32]
    outs = fresh_or_given((A, B), shapes, dtypes, outs, [matrix_strides(shape, left), matrix_strides(A.shape)])
    result, factors, pivots, info = outs
    _factor(factors, pivots, info, A, divided)
    own = factors.expand(*batch, *A.shape[-2:]), pivots.expand(*batch, A.shape[-1])
    _solve(result.unsqueeze(-1) if vector else result, right, *own, left, False, by_blocks)
    return outs


def _by_columns(x):
    """Return the matrices whose factors ATen's determinants return: the transpose of contiguous ones."""
    return x.mT if x.is_contiguous() else x


def _factor_with_determinant(factors, pivots, A, divided, value, logarithm=None):
    """Write factors, pivots and the determinant, or with `logarithm` its sign and the logarithm of its size."""
    source = _by_columns(A)
    if divided:
        _factor(factors, pivots, None, source, True)
        launch.determinant(value, logarithm, factors, pivots)
    else:
        launch.lu(factors, pivots, None, source, determinant=value, logarithm=logarithm)


@operator("_linalg_det", accepts=FULL_FLOATS)
def linalg_det(A, outs=()):
    """Multiply the pivots as they are found."""
    check_matrices(A, square=True)
    divided = is_blocked(A, "det", panels=True)
    shapes, dtypes = [A.shape[:-2], A.shape, A.shape[:-1]], [A.dtype, A.dtype, torch.int32]
    result, factors, pivots = outs = fresh_or_given((A,), shapes, dtypes, outs, [None, matrix_strides(A.shape)])
    _factor_with_determinant(factors, pivots, A, divided, result)
    return outs


@operator("_linalg_slogdet", accepts=FULL_FLOATS)
def linalg_slogdet(A, outs=()):
    """Add up the logarithms of the pivots as they are found."""
    check_matrices(A, square=True)
    divided = is_blocked(A, "slogdet", panels=True)
    batch = A.shape[:-2]
    shapes, dtypes = [batch, batch, A.shape, A.shape[:-1]], [A.dtype, A.dtype, A.dtype, torch.int32]
    outs = fresh_or_given((A,), shapes, dtypes, outs, [None, None, matrix_strides(A.shape)])
    sign, size, factors, pivots = outs
    _factor_with_determinant(factors, pivots, A, divided, sign, size)
    return outs
