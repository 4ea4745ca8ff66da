"""Solves of triangular systems."""

from tritonite.dtypes import FULL_FLOATS
from tritonite.engine.linalg import blocked, launch
from tritonite.engine.linalg.substitution import Sweep
from tritonite.engine.linalg.table import linalg_table
from tritonite.engine.movement import move
from tritonite.engine.outputs import outputs
from tritonite.errors import Decline
from tritonite.ops.linalg.checks import (
    broadcast_batch,
    check_matrices,
    check_solved,
    check_square,
    fresh_or_given,
    matrix_strides,
    one_batch,
)
from tritonite.registry import operator
from tritonite.runtime.contract import decline_if_slower, empty_strided


def _check(matrices, right, left):
    """Decline operands that do not fit, and return them expanded to one batch."""
    check_matrices(right, matrices)
    check_square(matrices)
    if matrices.shape[-1] != right.shape[-2 if left else -1]:
        raise Decline(f"triangles of shape {tuple(matrices.shape)} for right-hand sides of shape {tuple(right.shape)}")
    matrices, right = broadcast_batch(matrices, right)
    rows = right.shape[-2 if left else -1]
    if rows <= linalg_table().largest:
        check_solved(right if left else right.mT)
    else:
        decline_if_slower(True)
    return matrices, right


def _solve(out, right, matrices, sweep):
    """Substitute in one launch, or by blocks where a triangle exceeds a program's rows."""
    if out.shape[-2] <= linalg_table().largest:
        launch.solve(out, right, matrices, (sweep,))
        return
    given, triangles = one_batch(right), one_batch(matrices)
    own = empty_strided(given.shape, matrix_strides(given.shape), out.dtype, out.device)
    blocked.solve_triangle(own, given, triangles, sweep)
    out.copy_(own.view(out.shape))


@operator("linalg_solve_triangular", accepts=FULL_FLOATS)
def linalg_solve_triangular(self, B, upper, left=True, unitriangular=False, outs=()):
    """Substitute column by column; X A = B is A^T X^T = B^T."""
    matrices, right = _check(self, B, left)
    given = outputs((self, B), [right.shape], [B.dtype], outs, (B,), matrix_strides(right.shape))
    (out,) = given
    if not left:
        matrices, right, out = matrices.mT, right.mT, out.mT
    _solve(out, right, matrices, Sweep(upper != left, unitriangular))
    return given


@operator("triangular_solve", accepts=FULL_FLOATS)
def triangular_solve(self, A, upper=True, transpose=False, unitriangular=False, outs=()):
    """Substitute column by column, and return a copy of the matrices, too."""
    matrices, right = _check(A, self, True)
    shapes, dtypes = [right.shape, matrices.shape], [self.dtype, A.dtype]
    strides = [matrix_strides(x) for x in shapes]
    outs = fresh_or_given((self, A), shapes, dtypes, outs, strides)
    triangle = matrices.mT if transpose else matrices
    _solve(outs[0], right, triangle, Sweep(upper == transpose, unitriangular))
    move(matrices, outs[1])
    return outs
