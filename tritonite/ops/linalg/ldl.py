"""The factorisation of symmetric matrices that need not be definite, and solves by it."""

import torch

from tritonite.dtypes import FULL_FLOATS
from tritonite.engine.linalg import launch
from tritonite.engine.outputs import outputs
from tritonite.errors import Decline
from tritonite.ops.linalg.checks import (
    broadcast_batch,
    check_factored,
    check_matrices,
    check_solved,
    check_square,
    matrix_strides,
    refuse_errors,
)
from tritonite.registry import operator


@operator("linalg_ldl_factor_ex", accepts=FULL_FLOATS)
def linalg_ldl_factor_ex(self, hermitian=False, check_errors=False, outs=()):
    """Eliminate one or two columns at a time (Bunch and Kaufman 1977); real matrices are symmetric either way."""
    refuse_errors(check_errors)
    check_matrices(self, square=True)
    check_factored(self, method="ldl")
    shapes, dtypes = [self.shape, self.shape[:-1], self.shape[:-2]], [self.dtype, torch.int32, torch.int32]
    outs = outputs((self,), shapes, dtypes, outs, (self,), matrix_strides(self.shape))
    launch.ldl(*outs, self)
    return outs


@operator("linalg_ldl_solve", accepts=FULL_FLOATS)
def linalg_ldl_solve(LD, pivots, B, hermitian=False, outs=()):
    """Substitute forward, divide by blocks, and substitute backward in one launch, which also exchanges rows."""
    check_matrices(LD, B)
    check_square(LD)
    if pivots.dtype is not torch.int32 or pivots.shape != LD.shape[:-1]:
        raise Decline(f"pivots of {pivots.dtype} and shape {tuple(pivots.shape)}")
    if LD.shape[-1] != B.shape[-2]:
        raise Decline(f"factors of shape {tuple(LD.shape)} for right-hand sides of shape {tuple(B.shape)}")
    factors, right = broadcast_batch(LD, B)
    check_solved(right, "ldl_solve")
    outs = outputs((LD, pivots, B), [right.shape], [B.dtype], outs, (B,), matrix_strides(right.shape))
    launch.solve_ldl(outs[0], right, factors, pivots.expand(factors.shape[:-1]))
    return outs
