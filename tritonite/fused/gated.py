"""Gated activations of transformers' feed-forward layers: f(x) y, of two tensors or of the two slices of one.

The gradient by x is g y f'(x), and by y it is g f(x). One pass over g, x and y computes both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl

from tritonite.dtypes import FLOATS
from tritonite.errors import Decline
from tritonite.fused.check import check_alike, check_device, check_shape
from tritonite.language.math import sigmoid, silu_derivative
from tritonite.ops.activation import gelu, gelu_backward, relu, silu
from tritonite.registry import library_operator, scalar_kernel
from tritonite.runtime.contract import empty

_gelu, _gelu_gradient, _relu, _silu = gelu.formula, gelu_backward.formula, relu.formula, silu.formula


def gelu_and_mul(x: torch.Tensor, y: torch.Tensor | None = None, approximate: str = "none") -> torch.Tensor:
    """Return gelu(x) * y, or without y, gelu of the first half of x's last dimension times the second half.

    fp16 and bf16 are computed in float32 and rounded once. Forward and backward each read and write every tensor once,
    and the gradient of one tensor is one tensor.

    Args:
        x: (..., N) of float16, bfloat16, float32 or float64, of any strides; without y, N is even.
        y: None, or a tensor of x's shape and dtype.
        approximate: "none" for the exact function, "tanh" for the approximation, as in torch.nn.functional.gelu.

    Returns a contiguous tensor of x's dtype and shape; without y, with half the last dimension.

    Raises errors.Unsupported for other shapes or dtypes, another `approximate`, and for tensors on several devices.

    Source: Shazeer 2020, "GLU Variants Improve Transformer", its GEGLU.
    """
    result: torch.Tensor = torch.ops.tritonite.gelu_and_mul(x, y, approximate)
    return result


def relu_and_mul(x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
    """Return relu(x) * y, or without y, relu of the first half of x's last dimension times the second half.

    fp16 and bf16 are computed in float32 and rounded once. Forward and backward each read and write every tensor once,
    and the gradient of one tensor is one tensor.

    Args:
        x: (..., N) of float16, bfloat16, float32 or float64, of any strides; without y, N is even.
        y: None, or a tensor of x's shape and dtype.

    Returns a contiguous tensor of x's dtype and shape; without y, with half the last dimension.

    Raises errors.Unsupported for other shapes or dtypes, and for tensors on several devices.

    Source: Shazeer 2020, "GLU Variants Improve Transformer", its ReGLU.
    """
    result: torch.Tensor = torch.ops.tritonite.relu_and_mul(x, y)
    return result


def silu_and_mul(x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
    """Return silu(x) * y, or without y, silu of the first half of x's last dimension times the second half.

    fp16 and bf16 are computed in float32 and rounded once. Forward and backward each read and write every tensor once,
    and the gradient of one tensor is one tensor.

    Args:
        x: (..., N) of float16, bfloat16, float32 or float64, of any strides; without y, N is even.
        y: None, or a tensor of x's shape and dtype.

    Returns a contiguous tensor of x's dtype and shape; without y, with half the last dimension.

    Raises errors.Unsupported for other shapes or dtypes, and for tensors on several devices.

    Source: Shazeer 2020, "GLU Variants Improve Transformer", its SwiGLU.
    """
    result: torch.Tensor = torch.ops.tritonite.silu_and_mul(x, y)
    return result


def geglu(x: torch.Tensor, y: torch.Tensor | None = None, approximate: str = "tanh") -> torch.Tensor:
    """Return `gelu_and_mul(x, y, approximate)`, by default with the approximation by tanh."""
    return gelu_and_mul(x, y, approximate)


def reglu(x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
    """Return `relu_and_mul(x, y)`."""
    return relu_and_mul(x, y)


def swiglu(x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
    """Return `silu_and_mul(x, y)`."""
    return silu_and_mul(x, y)


@scalar_kernel(accepts=FLOATS, static=("approximate",), contiguous=True)
def _gelu_and_mul(x, y, approximate):
    return _gelu(x, approximate) * y


@scalar_kernel(accepts=FLOATS, static=("approximate",), output_dtypes=(None, None), contiguous=True)
def _gelu_and_mul_gradients(grad, x, y, approximate):
    return _gelu_gradient(grad * y, x, approximate), grad * _gelu(x, approximate)


@scalar_kernel(accepts=FLOATS, contiguous=True)
def _relu_and_mul(x, y):
    return _relu(x) * y


@scalar_kernel(accepts=FLOATS, output_dtypes=(None, None), contiguous=True)
def _relu_and_mul_gradients(grad, x, y):
    return tl.where(x <= 0, 0.0, grad * y), grad * _relu(x)


@scalar_kernel(accepts=FLOATS, contiguous=True)
def _silu_and_mul(x, y):
    return _silu(x) * y


@scalar_kernel(accepts=FLOATS, output_dtypes=(None, None), contiguous=True)
def _silu_and_mul_gradients(grad, x, y):
    gate = sigmoid(x)
    return grad * y * silu_derivative(x, gate), grad * x * gate


def gated_shape(x: torch.Tensor, y: torch.Tensor | None) -> tuple[int, ...]:
    """Return the result's shape; decline operands that have none."""
    check_alike(x=x, y=y)
    if y is not None:
        return tuple(x.shape)
    if x.shape[-1] % 2:
        raise Decline(f"x has the shape {tuple(x.shape)}: without y its last dimension must be even")
    return (*x.shape[:-1], x.shape[-1] // 2)


def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the two halves of the last dimension."""
    size = x.shape[-1] // 2
    return x.narrow(-1, 0, size), x.narrow(-1, size, size)


def _check_approximate(approximate: str) -> None:
    if approximate not in ("none", "tanh"):
        raise Decline(f'approximate is {approximate!r}: it may be "none" or "tanh"')


def _check_grad(grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor | None) -> None:
    check_shape("grad", grad, gated_shape(x, y), "that of the result")
    if grad.dtype is not x.dtype:
        raise Decline(f"grad is {grad.dtype} and x {x.dtype}: give both one dtype")
    check_device("grad", grad, "x", x)


def _run(kernel: Any, x: torch.Tensor, y: torch.Tensor | None, *statics: str) -> Sequence[torch.Tensor]:
    gated_shape(x, y)
    results: Sequence[torch.Tensor] = kernel.run((*((x, y) if y is not None else halves(x)), *statics))
    return results


def _run_gradients(
    kernel: Any, grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor | None, *statics: str
) -> Sequence[torch.Tensor | None]:
    _check_grad(grad, x, y)
    if y is not None:
        results: Sequence[torch.Tensor] = kernel.run((grad, x, y, *statics))
        return results
    by_x = empty(x.shape, x.dtype, x.device)
    kernel.run((grad, *halves(x), *statics), halves(by_x))
    return by_x, None


def _fake(x, y=None):
    return x.new_empty(gated_shape(x, y))


def _fake_gradients(grad, x, y=None):
    _check_grad(grad, x, y)
    return x.new_empty(x.shape), None if y is None else y.new_empty(y.shape)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])
    ctx.statics = inputs[2:]


def _fake_gelu(x, y=None, approximate="none"):
    _check_approximate(approximate)
    return _fake(x, y)


def _fake_gelu_gradients(grad, x, y=None, approximate="none"):
    _check_approximate(approximate)
    return _fake_gradients(grad, x, y)


@library_operator(
    'gelu_and_mul(Tensor x, Tensor? y=None, str approximate="none") -> Tensor',
    fake=_fake_gelu,
    accepts=FLOATS,
    save=_save,
    gradient=lambda ctx, grad: (
        *torch.ops.tritonite.gelu_and_mul_backward(grad, *ctx.saved_tensors, *ctx.statics),
        None,
    ),
    leading=("x", "y"),
)
def gelu_and_mul_host(x, y=None, approximate="none"):
    """Return gelu(x) * y, of two tensors or of the two halves of one: Shazeer 2020."""
    _check_approximate(approximate)
    return _run(_gelu_and_mul, x, y, approximate)


@library_operator(
    'gelu_and_mul_backward(Tensor grad, Tensor x, Tensor? y=None, str approximate="none") -> (Tensor, Tensor)',
    fake=_fake_gelu_gradients,
    accepts=FLOATS,
    leading=("grad", "x", "y"),
)
def gelu_and_mul_backward_host(grad, x, y=None, approximate="none"):
    """Return the gradients of gelu_and_mul by x and by y; None without y."""
    _check_approximate(approximate)
    return _run_gradients(_gelu_and_mul_gradients, grad, x, y, approximate)


def _declare(name: str, kernel: Any, gradients: Any) -> None:
    """Declare `<name>_and_mul` and `<name>_and_mul_backward` for an activation without options."""

    def host(x, y=None):
        return _run(kernel, x, y)

    def backward_host(grad, x, y=None):
        return _run_gradients(gradients, grad, x, y)

    def gradient(ctx, grad):
        return getattr(torch.ops.tritonite, f"{name}_and_mul_backward")(grad, *ctx.saved_tensors)

    host.__doc__ = f"Return {name}(x) * y, of two tensors or of the two halves of one: Shazeer 2020."
    backward_host.__doc__ = f"Return the gradients of {name}_and_mul by x and by y; None without y."
    library_operator(
        f"{name}_and_mul(Tensor x, Tensor? y=None) -> Tensor",
        fake=_fake,
        accepts=FLOATS,
        save=_save,
        gradient=gradient,
        leading=("x", "y"),
    )(host)
    library_operator(
        f"{name}_and_mul_backward(Tensor grad, Tensor x, Tensor? y=None) -> (Tensor, Tensor)",
        fake=_fake_gradients,
        accepts=FLOATS,
        leading=("grad", "x", "y"),
    )(backward_host)


_declare("relu", _relu_and_mul, _relu_and_mul_gradients)
_declare("silu", _silu_and_mul, _silu_and_mul_gradients)
