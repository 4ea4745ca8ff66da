"""Activations of layers, by their names, and their gradients by results or by operands."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tritonite.dtypes import FLOATS
from tritonite.errors import Decline
from tritonite.language import libdevice
from tritonite.language.math import maximum_nan, minimum_nan
from tritonite.language.math import sigmoid as logistic
from tritonite.ops.activation import gelu, gelu_backward, hardswish_backward, relu, silu, silu_backward
from tritonite.registry import scalar_kernel

_relu, _silu, _silu_gradient = relu.formula, silu.formula, silu_backward.formula
_gelu, _gelu_gradient, _hardswish_gradient = gelu.formula, gelu_backward.formula, hardswish_backward.formula


class Activation(NamedTuple):
    """An activation: its function of a block, and whether the gradient follows from the result alone."""

    function: Any
    of_result: bool


@triton.jit
def _relu6(x):
    return minimum_nan(maximum_nan(x, tl.zeros_like(x)), tl.full(x.shape, 6.0, x.dtype))


@triton.jit
def _hardswish(x):
    return x * _relu6(x + 3.0) * 0.16666666666666666


@triton.jit
def _gelu_exact(x):
    return _gelu(x, "none")


@triton.jit
def _gelu_tanh(x):
    return _gelu(x, "tanh")


@triton.jit
def _tanh(x):
    return libdevice.tanh(x)


ACTIVATIONS = {
    "relu": Activation(_relu, True),
    "relu6": Activation(_relu6, True),
    "sigmoid": Activation(logistic, True),
    "tanh": Activation(_tanh, True),
    "silu": Activation(_silu, False),
    "gelu": Activation(_gelu_exact, False),
    "gelu_tanh": Activation(_gelu_tanh, False),
    "hardswish": Activation(_hardswish, False),
}


def check_activation(activation: str | None) -> None:
    """Decline a name that is neither None nor an activation's."""
    if activation is not None and activation not in ACTIVATIONS:
        names = ", ".join(f'"{name}"' for name in ACTIVATIONS)
        raise Decline(f"activation is {activation!r}: it may be None or one of {names}")


def function_of(activation: str | None) -> Any:
    """Return the device function of an activation, None for None."""
    return None if activation is None else ACTIVATIONS[activation].function


@scalar_kernel(accepts=FLOATS, static=("activation",))
def _gradient(grad, saved, activation):
    """Return grad times the derivative, which is that at `saved`, or at the operand whose result `saved` is."""
    if activation == "relu":
        return tl.where(saved <= 0, tl.zeros_like(grad), grad)
    if activation == "relu6":
        return tl.where((saved <= 0) | (saved >= 6.0), tl.zeros_like(grad), grad)
    if activation == "sigmoid":
        return grad * (1.0 - saved) * saved
    if activation == "tanh":
        return grad * (1.0 - saved * saved)
    if activation == "silu":
        return _silu_gradient(grad, saved)
    if activation == "gelu":
        return _gelu_gradient(grad, saved, "none")
    if activation == "gelu_tanh":
        return _gelu_gradient(grad, saved, "tanh")
    return _hardswish_gradient(grad, saved)


def run_gradient(grad: torch.Tensor, saved: torch.Tensor, activation: str, out: torch.Tensor) -> None:
    """Write the gradient of an activation, by its result or its operand as `of_result` says."""
    _gradient.run((grad, saved, activation), (out,))
