"""Least squares by QR factorisation, for matrices of full rank."""

import torch
import triton
import triton.language as tl

from tritonite.dtypes import FULL_FLOATS
from tritonite.engine.iteration import contiguous_strides
from tritonite.engine.linalg import blocked, compact_wy, launch
from tritonite.engine.linalg.substitution import Sweep
from tritonite.engine.movement import fill_zero
from tritonite.engine.rows.declare import Reduction, reduced
from tritonite.engine.rows.formulas import add_states
from tritonite.errors import Decline
from tritonite.language.math import maximum_nan
from tritonite.ops import aten
from tritonite.ops.linalg.checks import (
    blocks_of,
    check_matrices,
    copy_of_blocks,
    is_blocked,
    matrix_strides,
    one_batch,
)
from tritonite.ops.linalg.qr import factor_by_blocks
from tritonite.ops.reduction.logic import all_satisfy, refuse_unless_all
from tritonite.ops.reduction.norms import absolute, square
from tritonite.ops.reduction.sums import only
from tritonite.registry import exclude, operator
from tritonite.runtime.contract import empty, empty_strided

exclude("linalg_lstsq.out", "ATen resizes the solution to the larger side's rows, and returns a part of that memory")
_SQUARES = Reduction((0.0,), square, add_states, only)
_LARGEST = Reduction((0.0,), absolute, maximum_nan, only)


@triton.jit
def _above_roundoff(x, largest):
    unit: tl.constexpr = 2.0**-46 if x.dtype == tl.float64 else 2.0**-17
    return (tl.abs(x) > largest * unit).to(tl.int32)


_ALL_ABOVE_ROUNDOFF = all_satisfy(_above_roundoff)


def _factor(A, divided):
    """Return (reflectors over R, tau) of tall or square matrices of full rank. Blocks are a batch of one dimension."""
    if divided:
        packed, taus = factor_by_blocks(A)
    else:
        packed = empty_strided(A.shape, matrix_strides(A.shape), A.dtype, A.device)
        taus = empty((*A.shape[:-2], A.shape[-1]), A.dtype, A.device)
        launch.qr(packed, taus, None, A)
    _refuse_singular(packed)
    return packed, taus


def _refuse_singular(packed):
    """Decline, on a CPU, triangles with roundoff, 0 or nan on the diagonal.

    ATen's CPU kernel raises where it finds exactly 0, which depends on its roundoff. ATen's GPU kernels divide by the
    diagonal, and raise for no matrix.
    """
    if aten.on_gpu():
        return
    diagonal = packed.diagonal(dim1=-2, dim2=-1)
    (most,) = reduced(_LARGEST, (diagonal,), -1, True, (packed.dtype,), (), packed.dtype)
    given = (diagonal, most.expand(diagonal.shape))
    refuse_unless_all(_ALL_ABOVE_ROUNDOFF, given, packed.dtype, "a matrix that is not of full rank, or not finite")


def _results(A, right, vector):
    """Return results of ATen's shapes; a fresh solution is a part of a matrix of the larger side's rows."""
    *batch, rows, columns = A.shape
    has_residuals = rows > columns
    shapes = [(*batch, columns, right.shape[-1]), (*batch, right.shape[-1]) if has_residuals else (0,), (0,), (0,)]
    dtypes = [A.dtype, A.dtype, torch.int64, A.dtype]
    whole = (*batch, max(rows, columns), right.shape[-1])
    solution = empty_strided(whole, matrix_strides(whole), A.dtype, A.device)[..., :columns, :]
    others = [
        empty_strided(shape, contiguous_strides(shape), dtype, A.device)
        for shape, dtype in zip(shapes[1:], dtypes[1:], strict=True)
    ]
    return [solution.squeeze(-1) if vector else solution, *others]


def _tall(solution, residuals, A, right, divided):
    """Solve R x = Q^T b, of which the rest of rows are the residuals."""
    columns = A.shape[-1]
    packed, taus = _factor(A, divided)
    if divided:
        own = copy_of_blocks(right)
        compact_wy.reflect(own, packed, taus, True)
        found = blocks_of(solution.shape, A)
        blocked.solve_triangle(found, own[:, :columns], packed[:, :columns], Sweep(False, unit=False))
        solution.copy_(found.view(solution.shape))
        _add_squares(residuals, own.view(right.shape)[..., columns:, :])
        return
    rotated = empty_strided(right.shape, matrix_strides(right.shape), A.dtype, A.device)
    launch.reflect(rotated, right, packed, taus, True)
    launch.solve(solution, rotated[..., :columns, :], packed[..., :columns, :], (Sweep(False, unit=False),))
    _add_squares(residuals, rotated[..., columns:, :])


def _add_squares(residuals, rest):
    """Write the sum of squares of each column, unless there are no rows."""
    if rest.shape[-2]:
        _SQUARES.run((rest,), (rest.dim() - 2,), (residuals,), rest.dtype)


def _wide(solution, A, right, divided):
    """Return the shortest solution: Q z of A^T = Q R, where R^T z = b."""
    rows = A.shape[-2]
    packed, taus = _factor(A.mT, divided)
    if divided:
        own = blocks_of(solution.shape, A)
        fill_zero(own)
        blocked.solve_triangle(own[:, :rows], one_batch(right), packed[:, :rows].mT, Sweep(True, unit=False))
        compact_wy.reflect(own, packed, taus, False)
        solution.copy_(own.view(solution.shape))
        return
    padded = empty_strided(solution.shape, matrix_strides(solution.shape), A.dtype, A.device)
    fill_zero(padded)
    lower = packed[..., :rows, :].mT
    launch.solve(padded[..., :rows, :], right, lower, (Sweep(True, unit=False),))
    launch.reflect(solution, padded, packed, taus, False)


@operator("linalg_lstsq", accepts=FULL_FLOATS)
def linalg_lstsq(self, b, rcond=None, driver=None, outs=()):
    """Factor the matrices, or the transpose of wide ones (Golub and Van Loan, sections 5.3.2 and 5.6.2)."""
    A = self
    if driver != "gels" and (driver is not None or aten.on_cpu()):
        raise Decline(f"driver {driver!r}; 'gels' is served, for matrices of full rank")
    check_matrices(A)
    vector = b.dim() == A.dim() - 1 and b.shape == A.shape[:-1]
    right = b.unsqueeze(-1) if vector else b
    check_matrices(right, A)
    if right.shape[:-1] != A.shape[:-1] or not A.numel() or not right.numel():
        raise Decline(f"matrices of shape {tuple(A.shape)} for right-hand sides of shape {tuple(b.shape)}")
    tall = A.shape[-2] >= A.shape[-1]
    divided = is_blocked(A if tall else A.mT, "least_squares", panels=True)
    outs = _results(A, right, vector)
    solution = outs[0].unsqueeze(-1) if vector else outs[0]
    if tall:
        _tall(solution, outs[1], A, right, divided)
    else:
        _wide(solution, A, right, divided)
    return outs
