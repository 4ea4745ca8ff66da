"""Activations and their gradients."""

from __future__ import annotations

from typing import Any

import torch

from tritonite.dtypes import INTS
from tritonite.testing.samples import facts

facts.CHOICES["approximate"] = ("none", "tanh")
# A product of three, one of which may underflow.
facts.ZERO_SIGN_OF_ROUNDOFF.add("gelu_backward")
facts.NAN_UNDEFINED |= {
    "elu_backward",
    "hardshrink_backward",
    "hardswish_backward",
    "hardtanh_backward",
    "softshrink_backward",
}
facts.ZERO_SIGN_UNDEFINED |= {"elu", "hardtanh", "log_sigmoid_backward", "relu", "softshrink"}


@facts.arguments("glu_backward")
def _halves(tensors: facts.Tensors) -> dict[str, Any] | None:
    """An input of two halves, and a gradient of the shape of one."""
    x, gradient = tensors[0], tensors[1].expand(tensors[0].shape)
    if not x.dim():
        return None
    half = x.shape[-1] // 2
    return {"self": x[..., : 2 * half], "grad_output": gradient[..., half : 2 * half]}


facts.may_decline(
    ("nn.functional.hardtanh",),
    ("functional",),
    "*: floating-point number for integer tensors",
    "ATen cuts the fractions off the bounds of integers",
    dtypes=INTS[1:],
)
facts.may_decline(
    ("nn.functional.logsigmoid",),
    ("out=",),
    "log_sigmoid_forward.output: output has shape*",
    "ATen hands itself a buffer without elements, to be resized",
    device="cpu",
)


@facts.arguments("log_sigmoid_backward")
def _gradient_of_its_shape(tensors: facts.Tensors) -> dict[str, Any]:
    """No gradient has another shape than its result."""
    x, grad = tensors[:2]
    return {"grad_output": grad if grad.shape == x.shape else x, "self": x}


@facts.drawn("gelu_backward", "silu_backward")
def _usual_gradient(arguments: dict[str, Any]) -> dict[str, Any]:
    """A huge gradient shows what is left of a derivative next to 0, which ATen rounds to 0 far below it."""
    gradient = arguments["grad_output"]
    if not (facts.real(gradient) and gradient.is_floating_point()):
        return arguments
    gradient = gradient.nan_to_num(1.0, 1.0, 1.0)
    # Of float64 nothing tells what of a difference is roundoff.
    most = 1.0 if gradient.dtype is torch.float64 else 1e10
    return arguments | {"grad_output": gradient.masked_fill(gradient.double().abs() > most, 1.0)}
