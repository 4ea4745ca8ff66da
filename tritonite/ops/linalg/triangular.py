"""Solves of triangular systems."""

from tritonite.dtypes import FULL_FLOATS
from tritonite.engine.linalg import blocked, launch
from tritonite.engine.linalg.substitution import Sweep
from tritonite.engine.movement import move
from tritonite.engine.outputs import outputs
from tritonite.errors import Decline
from tritonite.ops.linalg.checks import (
    blocks_of,
    broadcast_batch,
    check_matrices,
    check_square,
    fresh_or_given,
    is_solved_by_blocks,
    matrix_strides,
    one_batch,
)
from tritonite.registry import operator


def _check(matrices, right, left):
    """Decline operands that do not fit. Return them expanded to one batch, and whether they are divided into blocks."""
    check_matrices(right, matrices)
    check_square(matrices)
    if matrices.shape[-1] != right.shape[-2 if left else -1]:
        raise Decline(f"triangles of shape {tuple(matrices.shape)} for right-hand sides of shape {tuple(right.shape)}")
    matrices, right = broadcast_batch(matrices, right)
    return matrices, right, is_solved_by_blocks(right if left else right.mT, "triangular")


def _solve(out, right, matrices, sweep, divided):
    """Substitute in one launch, or by blocks where a triangle exceeds a program's rows."""
    if not divided:
        launch.solve(out, right, matrices, (sweep,))
        return
    own = blocks_of(right.shape, right)
    blocked.solve_triangle(own, one_batch(right), one_batch(matrices), sweep)
    out.copy_(own.view(out.shape))


@operator("linalg_solve_triangular", accepts=FULL_FLOATS)
def linalg_solve_triangular(self, B, upper, left=True, unitriangular=False, outs=()):
    """Substitute column by column; X A = B is A^T X^T = B^T."""
    matrices, right, divided = _check(self, B, left)
    given = outputs((self, B), [right.shape], [B.dtype], outs, (B,), matrix_strides(right.shape))
    (out,) = given
    if not left:
        matrices, right, out = matrices.mT, right.mT, out.mT
    _solve(out, right, matrices, Sweep(upper != left, unitriangular), divided)
    return given


@operator("triangular_solve", accepts=FULL_FLOATS)
def triangular_solve(self, A, upper=True, transpose=False, unitriangular=False, outs=()):
    """Substitute column by column, and return a copy of the matrices, too."""
    matrices, right, divided = _check(A, self, True)
    shapes, dtypes = [right.shape, matrices.shape], [self.dtype, A.dtype]
    strides = [matrix_strides(x) for x in shapes]
    outs = fresh_or_given((self, A), shapes, dtypes, outs, strides)
    triangle = matrices.mT if transpose else matrices
    _solve(outs[0], right, triangle, Sweep(upper == transpose, unitriangular), divided)
    move(matrices, outs[1])
    return outs
