"""Cholesky factorisation, solves and inverses by its factors."""

import torch

from tritonite.dtypes import FULL_FLOATS
from tritonite.engine.linalg import blocked, launch, triangles
from tritonite.engine.linalg.substitution import Sweep
from tritonite.engine.outputs import outputs
from tritonite.errors import Decline
from tritonite.ops import aten
from tritonite.ops.linalg.checks import (
    blocks_of,
    check_matrices,
    copy_of_blocks,
    is_blocked,
    is_solved_by_blocks,
    matrix_strides,
    one_batch,
    refuse_errors,
)
from tritonite.ops.reduction.logic import ALL_NONZERO, refuse_unless_all
from tritonite.registry import operator
from tritonite.runtime.contract import empty


@operator("linalg_cholesky_ex", accepts=FULL_FLOATS)
def linalg_cholesky_ex(self, upper=False, check_errors=False, outs=()):
    """Eliminate a column after the other of matrices in registers (Golub and Van Loan, section 4.2)."""
    refuse_errors(check_errors)
    check_matrices(self, square=True)
    divided = is_blocked(self, "cholesky")
    shapes, dtypes = [self.shape, self.shape[:-2]], [self.dtype, torch.int32]
    factor, info = outs = outputs((self,), shapes, dtypes, outs, (self,), matrix_strides(self.shape))
    if not divided:
        launch.cholesky(factor, info, self, upper)
        return outs
    source, own = one_batch(self), blocks_of(self.shape, self)
    codes = empty(source.shape[:1], torch.int32, self.device)
    blocked.cholesky(own, codes, source.mT if upper else source)
    factor.copy_((own.mT if upper else own).view(factor.shape))
    info.copy_(codes.view(info.shape))
    return outs


def _solve_by_factor(factor, upper):
    """Return L and the two sweeps that solve L L^T X = B, given L or, if `upper`, its transpose."""
    return factor.mT if upper else factor, (Sweep(lower=True, unit=False), Sweep(False, False, transposed=True))


@operator("_cholesky_solve_helper", accepts=FULL_FLOATS)
def cholesky_solve(self, A, upper, outs=()):
    """Substitute forward by the factor, and backward by its transpose, in one launch or by blocks."""
    check_matrices(self, A)
    if A.shape[:-1] != self.shape[:-1] or A.shape[-1] != A.shape[-2]:
        raise Decline(f"factors of shape {tuple(A.shape)} for right-hand sides of shape {tuple(self.shape)}")
    divided = is_solved_by_blocks(self, "cholesky_solve")
    given = outputs((self, A), [self.shape], [self.dtype], outs, (self,), matrix_strides(self.shape))
    (out,) = given
    if not divided:
        launch.solve(out, self, *_solve_by_factor(A, upper))
        return given
    own = copy_of_blocks(self)
    blocked.solve_by_cholesky(own, one_batch(A.mT if upper else A))
    out.copy_(own.view(out.shape))
    return given


def _refuse_singular(factor):
    """Decline, on a CPU, factors with 0 on the diagonal, for which ATen raises. ATen's GPU kernels divide by the 0."""
    if aten.on_cpu() and factor.numel():
        diagonal = factor.diagonal(dim1=-2, dim2=-1)
        refuse_unless_all(ALL_NONZERO, (diagonal,), factor.dtype, "a factor with 0 on the diagonal")


@operator("cholesky_inverse", accepts=FULL_FLOATS)
def cholesky_inverse(self, upper=False, outs=()):
    """Solve for the columns of the identity, of which the lower triangle of the solution is kept."""
    check_matrices(self, square=True)
    _refuse_singular(self)
    divided = is_solved_by_blocks(self, "cholesky_inverse")
    given = outputs((self,), [self.shape], [self.dtype], outs, strides=matrix_strides(self.shape))
    (out,) = given
    if not divided:
        launch.solve(out, None, *_solve_by_factor(self, upper), symmetric=True)
        return given
    own = blocks_of(self.shape, self)
    triangles.identity(own)
    blocked.solve_by_cholesky(own, one_batch(self.mT if upper else self))
    triangles.mirror(out, own.view(out.shape))
    return given
