"""Layer norm and root mean square norm of x or of a sum, x + residual, forward and backward.

Let h = x + residual, h' = (h - mean) * rstd, and a the output's gradient g times the weight. The gradient by h is
rstd * (a - mean(a) - h' * mean(a h')) (Ba, Kiros, Hinton 2016), and the new residual's gradient is added. A root mean
square norm has no mean (Zhang and Sennrich 2019). The gradients by weight and bias are the sums over rows of g h' and
of g.
"""

from __future__ import annotations

from typing import Any

import torch

from tritonite.dtypes import FLOATS, opmath
from tritonite.engine.norm.launch import backward, forward, forward_in_place
from tritonite.errors import Decline
from tritonite.fused.check import check_alike, check_parameters, check_shape, share_memory
from tritonite.fused.norm_formulas import check_casting, layer_kind, layer_means_of, rms_kind, rms_means_of
from tritonite.registry import library_operator


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the layer norm of x over the last dimension, or with a residual, that of x + residual and the sum.

    The norm of h is (h - mean(h)) / sqrt(var(h) + eps) * weight + bias. fp16 and bf16 are computed in float32 and
    rounded once; a sum is rounded before it is normalised, too. Forward and backward read and write every tensor once,
    unless rows are too long for a program's registers.

    Args:
        x: (..., N) of float16, bfloat16, float32 or float64, of any strides.
        weight: (N,) of x's dtype or float32, or None.
        bias: the same as weight.
        eps: the addend of the variance.
        residual: None, or a tensor of x's shape and dtype.

    Returns a contiguous tensor of x's shape and dtype; with a residual also the sum, which is the next residual.

    Raises errors.Unsupported for other shapes or dtypes, and for tensors on several devices.

    Source: Ba, Kiros, Hinton 2016, "Layer Normalization".
    """
    normalized, total, _, _ = torch.ops.tritonite.layer_norm(x, residual, weight, bias, eps)
    return normalized if residual is None else (normalized, total)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    residual: torch.Tensor | None = None,
    offset: float = 0.0,
    casting: str = "llama",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the root mean square norm of x over the last dimension, or with a residual, of x + residual and the sum.

    The norm of h is h / sqrt(mean(h^2) + eps) * (offset + weight). fp16 and bf16 are computed in float32; `casting`
    says where values are rounded to x's dtype. Gradients are computed in float32 and rounded once, whatever the
    casting. Forward and backward read and write every tensor once, unless rows are too long for a program's registers.

    Args:
        x: (..., N) of float16, bfloat16, float32 or float64, of any strides.
        weight: (N,) of x's dtype or float32, or None.
        eps: the addend of the mean of squares; None for the epsilon of the compute dtype.
        residual: None, or a tensor of x's shape and dtype.
        offset: the addend of the weight, 1.0 for Gemma's models; without a weight it is ignored.
        casting: "llama" rounds the sum, the normalised sum and, to the weight's dtype, offset + weight before the
            product, as transformers' LlamaRMSNorm does. "gemma" rounds the sum and the result, as GemmaRMSNorm does.
            "none" rounds the result only, and normalises the sum as it is before its rounding.

    Returns a contiguous tensor of x's shape and dtype; with a residual also the sum, which is the next residual.

    Raises errors.Unsupported for other shapes or dtypes, another `casting`, and for tensors on several devices.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
    """
    normalized, total, _ = torch.ops.tritonite.rms_norm(x, residual, weight, eps, offset, casting)
    return normalized if residual is None else (normalized, total)


def add_rms_norm_(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "llama",
) -> None:
    """Add x to residual in place, and write the root mean square norm of the sum over x, in one launch.

    The formula, and the arguments that are not named here, are those of `rms_norm`.

    Args:
        x: (..., N) of float16, bfloat16, float32 or float64; the norm is written here.
        residual: a tensor of x's shape and dtype that shares no elements with x; the sum is written here.

    Raises errors.Unsupported as `rms_norm` does, for x or residual whose elements share memory, and, while gradients
    are recorded, for arguments that require one.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
    """
    torch.ops.tritonite.add_rms_norm_(x, residual, weight, eps, offset, casting)


def skip_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the layer norm of x + residual over the last dimension, and the sum, which is the next residual.

    fp16 and bf16 are computed in float32, and the sum is rounded before it is normalised. Every tensor is read and
    written once, forward and backward, unless rows are too long for a program's registers.

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
    normalized, total, _, _ = torch.ops.tritonite.layer_norm(x, residual, weight, bias, eps)
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
    normalized, total, _ = torch.ops.tritonite.rms_norm(x, residual, weight, eps, 0.0, "none")
    return normalized, total


# ---- Forward ---------------------------------------------------------------------------------------------------------


def _fake_outputs(x: torch.Tensor, residual: torch.Tensor | None, statistics: int) -> tuple[torch.Tensor | None, ...]:
    rows = [x.new_empty(x.shape[:-1], dtype=opmath(x.dtype)) for _ in range(statistics)]
    return (x.new_empty(x.shape), None if residual is None else x.new_empty(x.shape), *rows)


def _check(x: torch.Tensor, residual: torch.Tensor | None, **parameters: torch.Tensor | None) -> None:
    check_alike(x=x, residual=residual)
    check_parameters(x, x.shape[-1], **parameters)


def epsilon(eps: Any, x: torch.Tensor) -> Any:
    """Return eps, or for None the epsilon of x's compute dtype."""
    return torch.finfo(opmath(x.dtype)).eps if eps is None else eps


def _wanted(ctx: Any, argument: int) -> bool:
    """Return whether autograd needs the gradient by an argument. The dispatcher leaves out trailing defaults."""
    return argument < len(ctx.needs_input_grad) and ctx.needs_input_grad[argument]


def _fake_layer_norm(x, residual=None, weight=None, bias=None, eps=1e-5):
    _check(x, residual, weight=weight, bias=bias)
    return _fake_outputs(x, residual, 2)


def _save_layer_norm(ctx, inputs, output):
    x, residual, weight, bias, _ = inputs
    _, total, mean, rstd = output
    ctx.save_for_backward(x if residual is None else total, mean, rstd, weight, bias)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _layer_norm_gradient(ctx, grad, grad_total, grad_mean, grad_rstd):
    own, by_weight, by_bias = grad_total, None, None
    if grad is not None:
        own, by_weight, by_bias = torch.ops.tritonite.layer_norm_backward(
            grad, grad_total, *ctx.saved_tensors, _wanted(ctx, 2), _wanted(ctx, 3)
        )
    return own, own if _wanted(ctx, 1) else None, by_weight, by_bias, None


@library_operator(
    "layer_norm(Tensor x, Tensor? residual=None, Tensor? weight=None, Tensor? bias=None, float eps=1e-05)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_layer_norm,
    accepts=FLOATS,
    save=_save_layer_norm,
    gradient=_layer_norm_gradient,
    leading=("x", "residual"),
)
def layer_norm_host(x, residual=None, weight=None, bias=None, eps=1e-5):
    """Return the layer norm of x + residual, the sum, and the rows' mean and rstd: Ba, Kiros, Hinton 2016."""
    _check(x, residual, weight=weight, bias=bias)
    outs = forward(x, residual, weight, bias, eps, layer_kind(x, residual))
    return [*outs[:2], *outs[:1:-1]]


def _fake_rms_norm(x, residual=None, weight=None, eps=1e-6, offset=0.0, casting="llama"):
    _check(x, residual, weight=weight)
    check_casting(casting)
    return _fake_outputs(x, residual, 1)


def _save_rms_norm(ctx, inputs, output):
    x, residual, weight, _, ctx.offset, _ = inputs
    _, total, rstd = output
    ctx.save_for_backward(x if residual is None else total, rstd, weight)
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)


def _rms_norm_gradient(ctx, grad, grad_total, grad_rstd):
    own, by_weight = grad_total, None
    if grad is not None:
        own, by_weight = torch.ops.tritonite.rms_norm_backward(
            grad, grad_total, *ctx.saved_tensors, _wanted(ctx, 2), ctx.offset
        )
    return own, own if _wanted(ctx, 1) else None, by_weight, None, None, None


@library_operator(
    "rms_norm(Tensor x, Tensor? residual=None, Tensor? weight=None, float? eps=1e-06, float offset=0.0,"
    ' str casting="llama") -> (Tensor, Tensor, Tensor)',
    fake=_fake_rms_norm,
    accepts=FLOATS,
    save=_save_rms_norm,
    gradient=_rms_norm_gradient,
    leading=("x", "residual"),
    pin=("offset",),
)
def rms_norm_host(x, residual=None, weight=None, eps=1e-6, offset=0.0, casting="llama"):
    """Return the root mean square norm of x + residual, the sum, and the rows' rstd: Zhang and Sennrich 2019."""
    _check(x, residual, weight=weight)
    kind = rms_kind(x, residual, offset, casting)
    return forward(x, residual, weight, None, epsilon(eps, x), kind)


def _check_in_place(x, residual, weight=None, eps=1e-6, offset=0.0, casting="llama"):
    _check(x, residual, weight=weight)
    check_casting(casting)


@library_operator(
    "add_rms_norm_(Tensor(a!) x, Tensor(b!) residual, Tensor? weight=None, float? eps=1e-06, float offset=0.0,"
    ' str casting="llama") -> ()',
    fake=_check_in_place,
    accepts=FLOATS,
    pin=("offset",),
)
def add_rms_norm_in_place_host(x, residual, weight=None, eps=1e-6, offset=0.0, casting="llama"):
    """Add x to residual and write the sum's root mean square norm over x: Zhang and Sennrich 2019."""
    _check(x, residual, weight=weight)
    if share_memory(x, residual):
        raise Decline("x or residual has elements that share memory: call rms_norm, or make it contiguous")
    forward_in_place(x, residual, weight, epsilon(eps, x), rms_kind(x, residual, offset, casting))
    return ()


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
    "layer_norm_backward(Tensor grad, Tensor? grad_total, Tensor total, Tensor mean, Tensor rstd, Tensor? weight,"
    " Tensor? bias, bool weight_wanted, bool bias_wanted) -> (Tensor, Tensor, Tensor)",
    fake=_fake_layer_norm_backward,
    accepts=FLOATS,
    pin=("weight_wanted", "bias_wanted"),
)
def layer_norm_backward_host(grad, grad_total, total, mean, rstd, weight, bias, weight_wanted, bias_wanted):
    """Return the gradients of layer_norm by the sum, weight and bias; None for those not wanted."""
    _check_backward(grad, grad_total, total, {"mean": mean, "rstd": rstd}, weight=weight, bias=bias)
    like = (weight if weight_wanted else None, bias if bias_wanted else None)
    return backward(grad, grad_total, total, (rstd, mean), weight, like, layer_means_of(weight))


def _fake_rms_norm_backward(grad, grad_total, total, rstd, weight, weight_wanted, offset=0.0):
    _check_backward(grad, grad_total, total, {"rstd": rstd}, weight=weight)
    return _fake_gradients(total, weight if weight_wanted else None)


@library_operator(
    "rms_norm_backward(Tensor grad, Tensor? grad_total, Tensor total, Tensor rstd, Tensor? weight,"
    " bool weight_wanted, float offset=0.0) -> (Tensor, Tensor)",
    fake=_fake_rms_norm_backward,
    accepts=FLOATS,
    pin=("weight_wanted", "offset"),
)
def rms_norm_backward_host(grad, grad_total, total, rstd, weight, weight_wanted, offset=0.0):
    """Return the gradients of rms_norm by the sum and the weight; None if that is not wanted."""
    _check_backward(grad, grad_total, total, {"rstd": rstd}, weight=weight)
    like = (weight if weight_wanted else None,)
    offset = 0.0 if weight is None else offset
    return backward(grad, grad_total, total, (rstd,), weight, like, rms_means_of(weight, offset), offset)
