"""Formulas of the fused norms' statistics and gradients, for rows that no program holds, and their roundings."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonite.engine.norm.launch import NormKind
from tritonite.engine.rows.declare import Reduction
from tritonite.engine.rows.formulas import add_pairs, add_states
from tritonite.errors import Decline
from tritonite.language.math import inverse, square_root
from tritonite.ops.normalization import BACKWARD, RMS_BACKWARD, mean_and_rstd
from tritonite.ops.reduction.moments import combine_moments, moment_leaf
from tritonite.ops.reduction.sums import over_count


@triton.jit
def _sum_moments(x, residual):
    return moment_leaf(x + residual)


@triton.jit
def _float16_sum(x, residual):
    return (x + residual).to(tl.float16).to(x.dtype)


@triton.jit
def _bfloat16_sum(x, residual):
    return (x + residual).to(tl.bfloat16).to(x.dtype)


@triton.jit
def _float16_sum_moments(x, residual):
    return moment_leaf(_float16_sum(x, residual))


@triton.jit
def _bfloat16_sum_moments(x, residual):
    return moment_leaf(_bfloat16_sum(x, residual))


@triton.jit
def _square(x):
    return x * x


@triton.jit
def _square_of_sum(x, residual):
    return (x + residual) * (x + residual)


@triton.jit
def _square_of_float16_sum(x, residual):
    return _square(_float16_sum(x, residual))


@triton.jit
def _square_of_bfloat16_sum(x, residual):
    return _square(_bfloat16_sum(x, residual))


@triton.jit
def _inverse_root_mean_square(squares, count, eps):
    return inverse(square_root(over_count(squares, count) + eps.to(squares.dtype)))


def _rstd(leaf):
    return Reduction((0.0,), leaf, add_states, _inverse_root_mean_square)


def _moments(leaf):
    return Reduction((0.0, 0.0, 0.0), leaf, combine_moments, mean_and_rstd, (None,) * 3, 2)


_LAYER_NORM, _LAYER_NORM_OF_SUM = NormKind(_moments(moment_leaf)), NormKind(_moments(_sum_moments))
# Statistics are those of the rounded sum, which is saved: beside others, gradients of nearly equal elements are wrong.
_LAYER_NORM_OF_ROUNDED = {
    torch.float16: NormKind(_moments(_float16_sum_moments), round_total=True),
    torch.bfloat16: NormKind(_moments(_bfloat16_sum_moments), round_total=True),
}
_RSTD_OF_ONE, _RSTD_OF_SUM = _rstd(_square), _rstd(_square_of_sum)
# Reductions of sums that are rounded to a dtype before they are normalised.
_RSTD_OF_ROUNDED = {
    torch.float16: _rstd(_square_of_float16_sum),
    torch.bfloat16: _rstd(_square_of_bfloat16_sum),
}


@triton.jit
def _both_products(grad, x, rstd, weight):
    return grad * weight * x * rstd, grad * x * rstd


@triton.jit
def _mean_with_offset(weighted, plain, count, offset):
    return over_count(weighted + plain * offset.to(plain.dtype), count)


_OFFSET_MEAN = Reduction((0.0, 0.0), _both_products, add_pairs, _mean_with_offset, (None, None))

# Whether the sum and the normalised sum are rounded, by casting.
_ROUNDED = {"llama": (True, True), "gemma": (True, False), "none": (False, False)}


def check_casting(casting: str) -> None:
    if casting not in _ROUNDED:
        raise Decline(f'casting is {casting!r}: it may be "llama", "gemma" or "none"')


def layer_kind(x: torch.Tensor, residual: torch.Tensor | None) -> NormKind:
    """Return the kind of a layer norm."""
    return _LAYER_NORM if residual is None else _LAYER_NORM_OF_ROUNDED.get(x.dtype, _LAYER_NORM_OF_SUM)


def rms_kind(x: torch.Tensor, residual: torch.Tensor | None, offset: float, casting: str) -> NormKind:
    """Return the kind of a root mean square norm; decline an unknown casting."""
    check_casting(casting)
    total, normalized = _ROUNDED[casting] if x.dtype in _RSTD_OF_ROUNDED else _ROUNDED["none"]
    if residual is None:
        return NormKind(_RSTD_OF_ONE, offset, False, normalized)
    return NormKind(_RSTD_OF_ROUNDED[x.dtype] if total else _RSTD_OF_SUM, offset, total, normalized)


def layer_means_of(weight: torch.Tensor | None) -> Reduction:
    """Return the reduction to the two means that a layer norm's gradient needs."""
    reduction: Reduction = BACKWARD[weight is not None].reduction
    return reduction


def rms_means_of(weight: torch.Tensor | None, offset: float) -> Reduction:
    """Return the reduction to the mean that a root mean square norm's gradient needs."""
    reduction: Reduction = _OFFSET_MEAN if offset else RMS_BACKWARD[weight is not None].reduction
    return reduction
