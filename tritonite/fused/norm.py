"""Layer norm and root mean square norm of a sum, x + residual, forward and backward.

Let h = x + residual, h' = (h - mean) * rstd, and a the output's gradient g times the weight. The gradient by h is
rstd * (a - mean(a) - h' * mean(a h')) (Ba, Kiros, Hinton 2016), and the new residual's gradient is added. A root mean
square norm has no mean (Zhang and Sennrich 2019). The gradients by weight and bias are the sums over rows of g h' and
of g.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from tritonite.dtypes import FLOATS, opmath
from tritonite.engine.norm.launch import backward, forward
from tritonite.engine.rows.declare import Reduction
from tritonite.engine.rows.formulas import add_states
from tritonite.fused.check import check_alike, check_parameters, check_shape
from tritonite.language.math import inverse, square_root
from tritonite.ops.normalization import BACKWARD, RMS_BACKWARD, mean_and_rstd
from tritonite.ops.reduction.moments import combine_moments, moment_leaf
from tritonite.ops.reduction.sums import over_count
from tritonite.registry import library_operator


def skip_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the layer norm of x + residual over the last dimension, and the sum, which is the next residual.

    fp16 and bf16 are computed in float32, and the sum is rounded only as a result, not before it is normalised. Every
    tensor is read and written once, forward and backward, unless rows are too long for a program's registers.

    Args:
        x: (..., N) of float16, bfloat16, float32 or float64, of any strides.
        residual: the same shape and dtype.
        weight: (N,) of x's dtype or float32, or None.
        bias: the same as weight.
        eps: the addend of the variance.

    Returns the normalised sum and the sum, both contiguous, of x's shape and dtype.

    Raises errors.Unsupported for other shapes or dtypes, and for tensors on several devices.

    Source: Ba, Kiros, Hinton 2016, "Layer Normalization".
    """
    normalized, total, _, _ = torch.ops.tritonite.skip_layer_norm(x, residual, weight, bias, eps)
    return normalized, total


def skip_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None = None, eps: float | None = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the root mean square norm of x + residual over the last dimension, and the sum, the next residual.

    fp16 and bf16 are computed in float32, and the sum is rounded only as a result, not before it is normalised. Every
    tensor is read and written once, forward and backward, unless rows are too long for a program's registers.

    Args:
        x: (..., N) of float16, bfloat16, float32 or float64, of any strides.
        residual: the same shape and dtype.
        weight: (N,) of x's dtype or float32, or None.
        eps: the addend of the mean of squares; None for the epsilon of the compute dtype, as in
            torch.nn.functional.rms_norm.

    Returns the normalised sum and the sum, both contiguous, of x's shape and dtype.

    Raises errors.Unsupported for other shapes or dtypes, and for tensors on several devices.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
    """
    normalized, total, _ = torch.ops.tritonite.skip_rms_norm(x, residual, weight, eps)
    return normalized, total


# ---- Forward ---------------------------------------------------------------------------------------------------------


@triton.jit
def _moment_leaf(x, residual):
    return moment_leaf(x + residual)


@triton.jit
def _square(x, residual):
    return (x + residual) * (x + residual)


@triton.jit
def _inverse_root_mean_square(squares, count, eps):
    return inverse(square_root(over_count(squares, count) + eps.to(squares.dtype)))


# Reductions of x and residual to the statistics of rows that no program holds.
_RSTD = Reduction((0.0,), _square, add_states, _inverse_root_mean_square)
_MEAN_AND_RSTD = Reduction((0.0, 0.0, 0.0), _moment_leaf, combine_moments, mean_and_rstd, (None,) * 3, 2)


def _fake_outputs(x: torch.Tensor, statistics: int) -> tuple[torch.Tensor, ...]:
    rows = [x.new_empty(x.shape[:-1], dtype=opmath(x.dtype)) for _ in range(statistics)]
    return (x.new_empty(x.shape), x.new_empty(x.shape), *rows)


def _check(x: torch.Tensor, residual: torch.Tensor, **parameters: torch.Tensor | None) -> None:
    check_alike(x=x, residual=residual)
    check_parameters(x, x.shape[-1], **parameters)


def _wanted(ctx: Any, argument: int) -> bool:
    """Return whether autograd needs the gradient by an argument. The dispatcher leaves out trailing defaults."""
    return argument < len(ctx.needs_input_grad) and ctx.needs_input_grad[argument]


def _fake_layer_norm(x, residual, weight=None, bias=None, eps=1e-5):
    _check(x, residual, weight=weight, bias=bias)
    return _fake_outputs(x, 2)


def _save_layer_norm(ctx, inputs, output):
    _, total, mean, rstd = output
    ctx.save_for_backward(total, mean, rstd, inputs[2], inputs[3])
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _layer_norm_gradient(ctx, grad, grad_total, grad_mean, grad_rstd):
    if grad is None:
        return grad_total, grad_total, None, None, None
    own, by_weight, by_bias = torch.ops.tritonite.skip_layer_norm_backward(
        grad, grad_total, *ctx.saved_tensors, _wanted(ctx, 2), _wanted(ctx, 3)
    )
    return own, own, by_weight, by_bias, None


@library_operator(
    "skip_layer_norm(Tensor x, Tensor residual, Tensor? weight=None, Tensor? bias=None, float eps=1e-05)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_layer_norm,
    accepts=FLOATS,
    save=_save_layer_norm,
    gradient=_layer_norm_gradient,
    leading=("x", "residual"),
)
def skip_layer_norm_host(x, residual, weight=None, bias=None, eps=1e-5):
    """Return the layer norm of x + residual, the sum, and the rows' mean and rstd: Ba, Kiros, Hinton 2016."""
    _check(x, residual, weight=weight, bias=bias)
    outs = forward(x, residual, weight, bias, eps, _MEAN_AND_RSTD)
    return [*outs[:2], *outs[:1:-1]]


def _fake_rms_norm(x, residual, weight=None, eps=1e-6):
    _check(x, residual, weight=weight)
    return _fake_outputs(x, 1)


def _save_rms_norm(ctx, inputs, output):
    _, total, rstd = output
    ctx.save_for_backward(total, rstd, inputs[2])
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)


def _rms_norm_gradient(ctx, grad, grad_total, grad_rstd):
    if grad is None:
        return grad_total, grad_total, None, None
    own, by_weight = torch.ops.tritonite.skip_rms_norm_backward(grad, grad_total, *ctx.saved_tensors, _wanted(ctx, 2))
    return own, own, by_weight, None


@library_operator(
    "skip_rms_norm(Tensor x, Tensor residual, Tensor? weight=None, float? eps=1e-06) -> (Tensor, Tensor, Tensor)",
    fake=_fake_rms_norm,
    accepts=FLOATS,
    save=_save_rms_norm,
    gradient=_rms_norm_gradient,
    leading=("x", "residual"),
)
def skip_rms_norm_host(x, residual, weight=None, eps=1e-6):
    """Return the root mean square norm of x + residual, the sum, and the rows' rstd: Zhang and Sennrich 2019."""
    _check(x, residual, weight=weight)
    eps = torch.finfo(opmath(x.dtype)).eps if eps is None else eps
    return forward(x, residual, weight, None, eps, _RSTD)


# ---- Backward --------------------------------------------------------------------------------------------------------


def _check_backward(grad, grad_total, total, statistics, **parameters):
    check_alike(grad=grad, grad_total=grad_total, total=total)
    for name, each in statistics.items():
        check_shape(name, each, total.shape[:-1], "that of total without its last dimension")
    check_parameters(total, total.shape[-1], **parameters)


def _fake_gradients(total, *like):
    return (total.new_empty(total.shape), *(None if each is None else each.new_empty(each.shape) for each in like))


def _fake_layer_norm_backward(grad, grad_total, total, mean, rstd, weight, bias, weight_wanted, bias_wanted):
    _check_backward(grad, grad_total, total, {"mean": mean, "rstd": rstd}, weight=weight, bias=bias)
    return _fake_gradients(total, weight if weight_wanted else None, bias if bias_wanted else None)


@library_operator(
    "skip_layer_norm_backward(Tensor grad, Tensor? grad_total, Tensor total, Tensor mean, Tensor rstd, Tensor? weight,"
    " Tensor? bias, bool weight_wanted, bool bias_wanted) -> (Tensor, Tensor, Tensor)",
    fake=_fake_layer_norm_backward,
    accepts=FLOATS,
    pin=("weight_wanted", "bias_wanted"),
)
def skip_layer_norm_backward_host(grad, grad_total, total, mean, rstd, weight, bias, weight_wanted, bias_wanted):
    """Return the gradients of skip_layer_norm by the sum, weight and bias; None for those not wanted."""
    _check_backward(grad, grad_total, total, {"mean": mean, "rstd": rstd}, weight=weight, bias=bias)
    like = (weight if weight_wanted else None, bias if bias_wanted else None)
    return backward(grad, grad_total, total, (rstd, mean), weight, like, BACKWARD[weight is not None].reduction)


def _fake_rms_norm_backward(grad, grad_total, total, rstd, weight, weight_wanted):
    _check_backward(grad, grad_total, total, {"rstd": rstd}, weight=weight)
    return _fake_gradients(total, weight if weight_wanted else None)


@library_operator(
    "skip_rms_norm_backward(Tensor grad, Tensor? grad_total, Tensor total, Tensor rstd, Tensor? weight,"
    " bool weight_wanted) -> (Tensor, Tensor)",
    fake=_fake_rms_norm_backward,
    accepts=FLOATS,
    pin=("weight_wanted",),
)
def skip_rms_norm_backward_host(grad, grad_total, total, rstd, weight, weight_wanted):
    """Return the gradients of skip_rms_norm by the sum and the weight; None if that is not wanted."""
    _check_backward(grad, grad_total, total, {"rstd": rstd}, weight=weight)
    like = (weight if weight_wanted else None,)
    return backward(grad, grad_total, total, (rstd,), weight, like, RMS_BACKWARD[weight is not None].reduction)
