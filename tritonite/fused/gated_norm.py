"""Root mean square norm whose result a gate multiplies: x rstd weight silu(gate), forward and backward.

Let x' = x rstd, and a the output's gradient times silu(gate). With b = a weight, the gradient by x is
rstd (b - x' mean(b x')) (Zhang and Sennrich 2019). By the gate it is grad x' weight silu'(gate), and by the weight the
sum over rows of a x'.
"""

from __future__ import annotations

import torch
import triton

from tritonite.dtypes import FLOATS, opmath
from tritonite.engine.rows.declare import Reduction, RowTransform
from tritonite.engine.rows.formulas import add_states
from tritonite.fused.check import check_alike, check_parameters, check_shape
from tritonite.language.math import inverse, sigmoid, silu_derivative, square_root
from tritonite.ops.reduction.norms import square
from tritonite.ops.reduction.sums import added_to_zero, over_count
from tritonite.registry import library_operator
from tritonite.runtime.contract import empty, zeros


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6
) -> torch.Tensor:
    """Return the root mean square norm of x over the last dimension, times weight and silu(gate).

    out = x / sqrt(mean(x^2) + eps) * weight * silu(gate): the norm comes before the gate. fp16 and bf16 are computed in
    float32 and rounded once.

    Args:
        x: (..., N) of float16, bfloat16, float32 or float64, of any strides.
        gate: the same shape and dtype.
        weight: (N,) of x's dtype or float32, or None.
        eps: the addend of the mean of squares.

    Returns a contiguous tensor of x's shape and dtype.

    Raises errors.Unsupported for other shapes or dtypes, and for tensors on several devices.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization"; Yang, Kautz, Hatamizadeh 2024, "Gated Delta
    Networks", its output gate.
    """
    result, _ = torch.ops.tritonite.gated_rms_norm(x, gate, weight, eps)
    return result  # type: ignore[no-any-return]


@triton.jit
def _inverse_rms(squares, count, eps):
    return inverse(square_root(over_count(squares, count) + eps.to(squares.dtype)))


@triton.jit
def _gated(x, gate, rstd, eps):
    return x * rstd * (gate * sigmoid(gate))


@triton.jit
def _gated_weight(x, gate, weight, rstd, eps):
    return x * rstd * weight * (gate * sigmoid(gate))


@triton.jit
def _product(grad, x, gate, rstd):
    return grad * (gate * sigmoid(gate)) * x * rstd


@triton.jit
def _product_weight(grad, x, gate, rstd, weight):
    return grad * (gate * sigmoid(gate)) * weight * x * rstd


@triton.jit
def _gradients(grad, x, gate, rstd, mean_product):
    share = sigmoid(gate)
    normalized = x * rstd
    by_x = rstd * (grad * gate * share - normalized * mean_product)
    return by_x, grad * normalized * silu_derivative(gate, share)


@triton.jit
def _gradients_weight(grad, x, gate, rstd, weight, mean_product):
    return _gradients(grad * weight, x, gate, rstd, mean_product)


_RSTD = Reduction((0.0,), square, add_states, _inverse_rms)
# By whether there is a weight.
_FORWARD = {
    False: RowTransform(_RSTD, _gated, leaf_inputs=1),
    True: RowTransform(_RSTD, _gated_weight, leaf_inputs=1),
}
_BACKWARD = {
    False: RowTransform(Reduction((0.0,), _product, add_states, over_count), _gradients),
    True: RowTransform(Reduction((0.0,), _product_weight, add_states, over_count), _gradients_weight),
}
_BY_WEIGHT = Reduction((0.0,), _product, add_states, added_to_zero)


def _check(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None) -> None:
    check_alike(x=x, gate=gate)
    check_parameters(x, x.shape[-1], weight=weight)


def _fake(x, gate, weight=None, eps=1e-6):
    _check(x, gate, weight)
    return x.new_empty(x.shape), x.new_empty((*x.shape[:-1], 1), dtype=opmath(x.dtype))


def _save(ctx, inputs, output):
    ctx.save_for_backward(*(*inputs, None)[:3], output[1])
    ctx.mark_non_differentiable(output[1])


def _gradient(ctx, grad, _):
    x, gate, weight, rstd = ctx.saved_tensors
    wanted = weight is not None and ctx.needs_input_grad[2]
    return (*torch.ops.tritonite.gated_rms_norm_backward(grad, x, gate, weight, rstd, wanted), None)


@library_operator(
    "gated_rms_norm(Tensor x, Tensor gate, Tensor? weight=None, float eps=1e-06) -> (Tensor, Tensor)",
    fake=_fake,
    accepts=FLOATS,
    save=_save,
    gradient=_gradient,
    leading=("x", "gate"),
)
def gated_rms_norm_host(x, gate, weight=None, eps=1e-6):
    """Return the root mean square norm of x times weight and silu(gate), and the rows' rstd: Zhang, Sennrich 2019."""
    _check(x, gate, weight)
    compute = opmath(x.dtype)
    out = empty(x.shape, x.dtype, x.device)
    rstd = (empty if x.numel() else zeros)((*x.shape[:-1], 1), compute, x.device)
    if x.numel():
        operands = (x, gate) if weight is None else (x, gate, weight.expand(x.shape))
        _FORWARD[weight is not None].run(operands, (x.dim() - 1,), (out,), compute, (eps,), (rstd,), (0,))
    return out, rstd


def _check_backward(grad, x, gate, weight, rstd):
    check_alike(x=x, gate=gate, grad=grad)
    check_parameters(x, x.shape[-1], weight=weight)
    check_shape("rstd", rstd, (*x.shape[:-1], 1), "a number for each row of x")


def _fake_backward(grad, x, gate, weight, rstd, weight_wanted):
    _check_backward(grad, x, gate, weight, rstd)
    by_weight = weight.new_empty(weight.shape) if weight_wanted else None
    return x.new_empty(x.shape), x.new_empty(x.shape), by_weight


@library_operator(
    "gated_rms_norm_backward(Tensor grad, Tensor x, Tensor gate, Tensor? weight, Tensor rstd, bool weight_wanted)"
    " -> (Tensor, Tensor, Tensor)",
    fake=_fake_backward,
    accepts=FLOATS,
    pin=("weight_wanted",),
)
def gated_rms_norm_backward_host(grad, x, gate, weight, rstd, weight_wanted):
    """Return the gradients of gated_rms_norm by x, gate and weight; None for a weight whose gradient is not wanted."""
    _check_backward(grad, x, gate, weight, rstd)
    compute = opmath(x.dtype)
    by_x, by_gate = [empty(x.shape, x.dtype, x.device) for _ in range(2)]
    if not x.numel():
        return by_x, by_gate, zeros(weight.shape, weight.dtype, x.device) if weight_wanted else None
    by_weight = empty(weight.shape, weight.dtype, x.device) if weight_wanted else None
    operands = (grad, x, gate, rstd.expand(x.shape))
    given = operands if weight is None else (*operands, weight.expand(x.shape))
    _BACKWARD[weight is not None].run(given, (x.dim() - 1,), (by_x, by_gate), compute)
    if by_weight is not None:
        _BY_WEIGHT.run(operands, tuple(range(x.dim() - 1)), (by_weight,), compute)
    return by_x, by_gate, by_weight
