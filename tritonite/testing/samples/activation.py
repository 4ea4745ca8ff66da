"""Activations and their gradients."""

from __future__ import annotations

from typing import Any

import torch

from tritonite.dtypes import INTS
from tritonite.testing.samples import facts

facts.CHOICES["approximate"] = ("none", "tanh")
# A product of three factors, one of which may underflow.
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
def _gated(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return an input with an even last dimension, and a gradient with half as many columns."""
    x, gradient = tensors[0], tensors[1].expand(tensors[0].shape)
    if not x.dim():
        return None
    half = x.shape[-1] // 2
    return {"self": x[..., : 2 * half], "grad_output": gradient[..., half : 2 * half]}


@facts.arguments("glu_jvp")
def _tangent(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return the result of glu for an input with an even last dimension, the input, and its tangent."""
    x, tangent = tensors[0], tensors[1].expand(tensors[0].shape)
    # ATen computes glu of floats alone.
    if not x.dim() or not (x.is_floating_point() or x.is_complex()):
        return None
    even = x.shape[-1] // 2 * 2
    x, tangent = x[..., :even], tangent[..., :even]
    return {"glu": torch.ops.aten.glu(x, -1), "x": x, "dx": tangent, "dim": -1}


facts.may_decline(
    ("nn.functional.hardtanh",),
    ("functional",),
    "*: floating-point number for integer tensors",
    "ATen truncates the bounds of integers",
    dtypes=INTS[1:],
)
facts.may_decline(
    ("nn.functional.logsigmoid",),
    ("out=",),
    "log_sigmoid_forward.output: output has shape*",
    "ATen calls its forward kernel with an empty buffer and resizes it",
    device="cpu",
)


@facts.arguments("log_sigmoid_backward")
def _same_shape(tensors: facts.Tensors) -> dict[str, Any]:
    """Return a gradient of the input's shape."""
    x, grad = tensors[:2]
    return {"grad_output": grad if grad.shape == x.shape else x, "self": x}


@facts.drawn("glu_jvp")
def _usual_gate(arguments: dict[str, Any]) -> dict[str, Any]:
    """Limit the gate and its tangent: ATen computes 1 - sigmoid(b) by a difference, roundoff for a gate near 1."""
    if not all(facts.real(x) and x.is_floating_point() for x in (arguments["x"], arguments["dx"])):
        return arguments
    limited = {name: arguments[name].nan_to_num(1.0, 1.0, 1.0).clamp(-2.0, 2.0) for name in ("x", "dx")}
    return arguments | limited


@facts.drawn("gelu_backward", "mish_backward", "silu_backward")
def _usual_gradient(arguments: dict[str, Any]) -> dict[str, Any]:
    """Limit the gradient: a huge one magnifies a derivative near 0 that ATen rounds to 0."""
    gradient = arguments["grad_output"]
    if not (facts.real(gradient) and gradient.is_floating_point()):
        return arguments
    gradient = gradient.nan_to_num(1.0, 1.0, 1.0)
    # In float64 there is no better reference to tell roundoff from an error.
    most = 1.0 if gradient.dtype is torch.float64 else 1e10
    return arguments | {"grad_output": gradient.masked_fill(gradient.double().abs() > most, 1.0)}
