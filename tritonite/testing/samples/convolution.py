"""Convolutions: sequences, images and volumes, groups, strides, transposes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from tritonite.dtypes import FLOATS
from tritonite.ops.convolution.call import precision
from tritonite.registry import Op
from tritonite.testing.samples import facts
from tritonite.testing.samples.matmul import truncated_terms
from tritonite.testing.tolerances import ATOL

_WHOLE = ("convolution", "_convolution", "convolution_backward")
_IMAGES = ("_slow_conv2d_forward", "_slow_conv2d_backward", "slow_conv_dilated2d")
_VOLUMES = ("slow_conv3d_forward", "slow_conv_dilated3d")
_TRANSPOSED = ("slow_conv_transpose2d", "slow_conv_transpose3d", "cudnn_convolution_transpose")
_CUDNN = ("cudnn_convolution", "cudnn_convolution_relu", "cudnn_convolution_add_relu")
PACKETS = (*_WHOLE, *_IMAGES, *_VOLUMES, *_TRANSPOSED, *_CUDNN)
# Libraries differ in whether a sum begins with 0 or with the first product.
facts.ZERO_SIGN_OF_ROUNDOFF |= {*PACKETS, "conv_tbc"}


@facts.layouts(*_WHOLE, *_CUDNN)
def _layouts(op: Op, make: facts.Make) -> Iterator[tuple[str, facts.Tensors]]:
    """Yield inputs and weights; a third tensor makes a transposed convolution."""
    last = {"memory_format": torch.channels_last}
    images, weight = make(2, 4, 9, 8), make(6, 2, 3, 3)
    yield "images", [images, weight]
    yield "images channels_last", [images.to(**last), make(6, 4, 2, 3).to(**last)]
    yield "weight channels_last", [make(2, 4, 6, 5), make(6, 2, 3, 3).to(**last)]
    yield "images sliced", [make(2, 8, 9, 16)[:, ::2, :, ::2], make(6, 4, 3, 6)[..., ::2]]
    yield "one tap", [make(2, 4, 6, 5), make(6, 4, 1, 1)]
    yield "one tap channels_last", [make(2, 4, 6, 5).to(**last), make(6, 4, 1, 1)]
    yield "depthwise", [images, make(4, 1, 3, 3)]
    yield "volumes", [make(1, 2, 5, 4, 6), make(3, 2, 2, 3, 2)]
    if op.packet in _CUDNN:
        return
    yield "sequences", [make(3, 4, 11), make(6, 2, 3)]
    yield "sequences permuted", [make(3, 11, 4).transpose(1, 2), make(6, 3, 4).transpose(1, 2)]
    yield "transposed images", [make(2, 4, 5, 6), make(4, 3, 3, 2), images]
    yield "transposed images channels_last", [make(2, 4, 6, 5).to(**last), make(4, 3, 3, 2), images]
    yield "transposed sequences", [make(2, 6, 7), make(6, 2, 4), images]
    yield "transposed volumes", [make(1, 2, 3, 2, 3), make(2, 3, 2, 3, 2), images]


def _batch(x: torch.Tensor, dims: int) -> torch.Tensor | None:
    """Return a view of (N, C, ...) with `dims` spatial dimensions, or with those that it has for 0."""
    if not x.numel():
        return x.new_empty(0, 3, *[4] * max(dims, 1))
    if x.dim() == 0:
        return None
    x = x.unflatten(0, (-1, 2, 10)) if x.dim() == 1 else x[None] if x.dim() == 2 else x
    while dims and x.dim() < dims + 2:
        x = x.unsqueeze(2)
    while dims and x.dim() > dims + 2:
        x = x.select(2, 0)
    return x


def _filled(values: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return a contiguous tensor with the elements of another, repeated or cut off."""
    flat, count = values.flatten() if values.numel() else values.new_ones(1), math.prod(shape)
    return flat.repeat(count // len(flat) + 1)[:count].view(shape)


def _call(tensors: facts.Tensors, dims: int = 0, transposed: bool = False) -> dict[str, Any] | None:
    """Return arguments of a convolution whose strides and groups follow from the shapes of input and weight."""
    x = _batch(tensors[0], dims)
    if x is None or not x.isfinite().all():
        return None
    weight, dims, channels = tensors[1], x.dim() - 2, x.shape[1]
    if weight.dim() != x.dim() or x.dim() == 2 or weight.shape == x.shape:
        kernel = [3 if size > 3 else 1 for size in x.shape[2:]]
        weight = _filled(tensors[1], channels, channels, *kernel)
    transposed |= len(tensors) == 3
    groups = 1 if transposed else channels // weight.shape[1]
    stride = [2 if x.shape[-1] % 2 == 0 else 1] * dims
    dilation = [2 if max(x.shape[2:]) > 8 else 1] * dims
    padding = [0 if max(weight.shape[2:]) == 1 else 1] * dims
    if transposed and min(x.shape[2:]) < 3:
        padding = [0] * dims
    more = [1 if transposed and stride[0] + dilation[0] > 2 else 0] * dims
    steps = stride, padding, dilation, transposed, more, groups
    axes = zip(x.shape[2:], weight.shape[2:], padding, dilation, strict=True)
    if not transposed and any(size + 2 * p - d * (k - 1) < 1 for size, k, p, d in axes):
        return None
    columns = weight.shape[1] if transposed else weight.shape[0]
    shape = torch.convolution(x.to("meta"), weight.to("meta"), None, *steps).shape
    grad = _filled(x.flip(0), *shape)
    given = {"input": x, "self": x, "weight": weight, "bias": _filled(weight, columns), "grad_output": grad}
    given |= dict(zip(("stride", "padding", "dilation", "transposed", "output_padding", "groups"), steps, strict=True))
    return given | {
        "bias_sizes": [columns],
        "kernel_size": list(weight.shape[2:]),
        "output_mask": [True, True, True],
        "cudnn_enabled": True,
        # For small problems cuDNN takes no TF32 where it may.
        "allow_tf32": False,
    }


facts.arguments(*_WHOLE)(_call)


@facts.drawn(*PACKETS)
def _exact(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments without TF32, and with a finite weight and gradient.

    A kernel multiplies weights and gradients by the zeros around an image, which makes nan of an infinite one. ATen's
    libraries differ in whether they do.
    """
    multiplied = {name: arguments[name] for name in ("weight", "grad_output") if name in arguments}
    return (
        arguments
        | {name: x.nan_to_num(1.0, 1.0, -1.0) for name, x in multiplied.items() if _has_nonfinite(x)}
        | ({"allow_tf32": False} if "allow_tf32" in arguments else {})
    )


def _has_nonfinite(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype in FLOATS and not x.isfinite().all()


def _convolution_relu(
    x: torch.Tensor, weight: torch.Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> torch.Tensor:
    return torch.convolution(x, weight, bias, stride, padding, dilation, False, [0] * (x.dim() - 2), groups).relu()


# cuDNN has no fused kernel for float64.
facts.REFERENCES["cudnn_convolution_relu"] = _convolution_relu


def _convolution_add_relu(
    x: torch.Tensor, weight: torch.Tensor, z: torch.Tensor, alpha: Any, bias: Any, stride: Any, *steps: Any
) -> torch.Tensor:
    padding, dilation, groups = steps
    sums = torch.convolution(x, weight, bias, stride, padding, dilation, False, [0] * (x.dim() - 2), groups)
    return (sums + z * (1 if alpha is None else alpha)).relu()


facts.REFERENCES["cudnn_convolution_add_relu"] = _convolution_add_relu


@facts.arguments(*_CUDNN)
def _of_images(tensors: facts.Tensors) -> dict[str, Any] | None:
    given = _call(tensors, max(2, tensors[0].dim() - 2))
    return None if given is None else given | {"z": given["grad_output"], "alpha": None if given["groups"] > 1 else 0.5}


@facts.arguments(*_IMAGES)
def _one_group(tensors: facts.Tensors) -> dict[str, Any] | None:
    given = _call(tensors[:2], 2)
    return None if given is None else given | _without_dilation(given)


@facts.arguments(*_VOLUMES)
def _one_group_of_volumes(tensors: facts.Tensors) -> dict[str, Any] | None:
    given = _call(tensors[:2], 3)
    return None if given is None else given | _without_dilation(given)


def _without_dilation(given: dict[str, Any]) -> dict[str, Any]:
    """Return the dilation and the gradient of a call with a dilation of 1."""
    x, weight, dims = given["self"], given["weight"], given["self"].dim() - 2
    steps = given["stride"], given["padding"], [1] * dims, False, [0] * dims, 1
    shape = torch.convolution(x.to("meta"), weight.to("meta"), None, *steps).shape
    return {"dilation": [1] * dims, "grad_output": _filled(x.flip(0), *shape)}


@facts.arguments("slow_conv_transpose2d", "cudnn_convolution_transpose")
def _transposed_images(tensors: facts.Tensors) -> dict[str, Any] | None:
    return _call(tensors[:2], 2, transposed=True)


@facts.arguments("slow_conv_transpose3d")
def _transposed_volumes(tensors: facts.Tensors) -> dict[str, Any] | None:
    return _call(tensors[:2], 3, transposed=True)


@facts.arguments("conv_tbc")
def _time_first(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return sequences of (time, batch, channel), a weight of three taps and a padding of 1."""
    x = _batch(tensors[0], 1)
    if x is None or not x.isfinite().all() or not x.numel():
        return None
    weight = _filled(tensors[1], 3, x.shape[2], 4)
    return {"self": x, "weight": weight, "bias": _filled(weight, 4), "pad": 2}


@facts.terms(*PACKETS, "conv_tbc")
def terms_of_convolutions(sums: facts.Sums) -> float:
    """Return the terms of sums over taps and channels or over positions, of products of elements of at least 2."""
    sizes = [x.numel() / max(1, min(x.shape[:2])) for x in sums.tensors if x.dim() > 2]
    squares = [float(x.detach().double().square().mean().nan_to_num(1, 1)) for x in sums.tensors[:2]]
    longest = max(1.0, *sizes)
    rounded = max(16.0, math.prod(squares)) * longest
    if precision(sums.result.dtype) == "tf32":
        # Of operands 10 bits are left, and of a large result's elements some err by several standard deviations.
        rounded *= (2**-8 / ATOL[torch.float32]) ** 2
    return max(rounded, truncated_terms(sums.tensors, longest))


@facts.drawn("_slow_conv2d_backward")
def _of_two_dimensions(arguments: dict[str, Any]) -> dict[str, Any]:
    """Replace lists of other than two numbers, which ATen's gradient reads as if they had two."""
    pairs = {"kernel_size": [3, 3], "stride": [1, 1], "padding": [1, 1]}
    return arguments | {name: pair for name, pair in pairs.items() if len(arguments[name]) != 2}


@facts.drawn("convolution_backward")
def _with_sizes(arguments: dict[str, Any]) -> dict[str, Any]:
    """Name the bias's size without images: for a wanted gradient by a bias without a size ATen ends the process."""
    grad = arguments["grad_output"]
    if not isinstance(grad, torch.Tensor) or grad.numel() or grad.dim() < 2 or arguments.get("bias_sizes") is not None:
        return arguments
    return arguments | {"bias_sizes": [grad.shape[1]]}


@facts.drawn("conv_tbc")
def _with_finite_weight(arguments: dict[str, Any]) -> dict[str, Any]:
    """Make the weight finite: an implicit product multiplies padding by it, and ATen leaves padding out."""
    weight = arguments["weight"]
    return arguments | {"weight": weight.nan_to_num(1, 1, 1)} if _has_nonfinite(weight) else arguments
