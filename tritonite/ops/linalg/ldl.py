"""The factorisation of symmetric matrices that need not be definite, and solves by it."""

import torch

from tritonite.dtypes import FULL_FLOATS
from tritonite.engine.linalg import launch, ldl_in_memory, triangles
from tritonite.engine.outputs import outputs
from tritonite.errors import Decline
from tritonite.ops.linalg.checks import (
    blocks_of,
    broadcast_batch,
    check_matrices,
    check_square,
    copy_of_blocks,
    is_blocked,
    is_solved_by_blocks,
    matrix_strides,
    one_batch,
    refuse_errors,
)
from tritonite.registry import operator
from tritonite.runtime.contract import empty


@operator("linalg_ldl_factor_ex", accepts=FULL_FLOATS)
def linalg_ldl_factor_ex(self, hermitian=False, check_errors=False, outs=()):
    """Eliminate one or two columns at a time (Bunch and Kaufman 1977); real matrices are symmetric either way."""
    refuse_errors(check_errors)
    check_matrices(self, square=True)
    divided = is_blocked(self, "ldl")
    shapes, dtypes = [self.shape, self.shape[:-1], self.shape[:-2]], [self.dtype, torch.int32, torch.int32]
    outs = outputs((self,), shapes, dtypes, outs, (self,), matrix_strides(self.shape))
    if not divided:
        launch.ldl(*outs, self)
        return outs
    factors, pivots = blocks_of(self.shape, self), empty(self.shape[:-1], torch.int32, self.device)
    info = empty(self.shape[:-2], torch.int32, self.device)
    # The lower triangle, and 0 above it.
    triangles.upper(factors.mT, one_batch(self).mT)
    ldl_in_memory.factor(factors, pivots, info)
    for out, own in zip(outs, (factors.view(self.shape), pivots, info), strict=True):
        out.copy_(own)
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
    divided = is_solved_by_blocks(right, "ldl_solve")
    outs = outputs((LD, pivots, B), [right.shape], [B.dtype], outs, (B,), matrix_strides(right.shape))
    swaps = pivots.expand(factors.shape[:-1])
    if divided:
        solution = copy_of_blocks(right)
        ldl_in_memory.solve(solution, copy_of_blocks(factors), swaps.contiguous())
        outs[0].copy_(solution.view(right.shape))
    else:
        launch.solve_ldl(outs[0], right, factors, swaps)
    return outs
