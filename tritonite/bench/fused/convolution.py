"""Pairs of convolutions with what follows them in models: bias, residual, activation, of channels-last images."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tritonite import fused
from tritonite.bench.fused.pair import Make, Pair, Shape

aten, library = torch.ops.aten, torch.ops.tritonite
functional = torch.nn.functional


def _composition(activation, x, weight, bias, residual=None):
    padding, groups = weight.shape[2] // 2, x.shape[1] // weight.shape[1]
    out = functional.conv2d(x, weight, bias, 1, padding, 1, groups)
    return activation(out if residual is None else out + residual)


def _fused(activation, x, weight, bias, residual=None):
    padding, groups = weight.shape[2] // 2, x.shape[1] // weight.shape[1]
    return fused.conv_bias_act(x, weight, bias, activation, 1, padding, 1, groups, residual=residual)


def _layer(make: Make, shape: Shape, depthwise: bool = False, residual: bool = False) -> list[torch.Tensor]:
    """Return the operands for `shape` = (batch, channels, columns, side, kernel)."""
    batch, channels, columns, side, kernel = shape
    columns = channels if depthwise else columns
    weight = make(columns, kernel, kernel, 1 if depthwise else channels).movedim(-1, 1)
    images = [make(batch, side, side, size).movedim(-1, 1) for size in (channels, columns)]
    return [images[0], weight, make(columns), *images[1 : 1 + residual]]


def _result(make: Make, shape: Shape) -> list[torch.Tensor]:
    """Return the gradient of a result and the activation's operand."""
    return [make(shape[0], shape[3], shape[3], shape[2]).movedim(-1, 1) for _ in range(2)]


def _pair(
    name: str, activation: Any, shapes: tuple[Shape, ...], depthwise: bool = False, residual: bool = False
) -> Pair:
    """Return the pair of an activation: shapes of models, and small ones for host times and the interpreter."""
    chosen = shapes, (1, 64, 64, 8, 3), (1, 8, 16, 4, 3)
    return Pair(
        functools.partial(_composition, activation),
        functools.partial(_fused, name),
        functools.partial(_layer, depthwise=depthwise, residual=residual),
        chosen,
    )


# (batch, channels, columns, side, kernel) of ResNet-50, EfficientNet-B0, MobileNetV2 and YOLOv8.
_RESNET = ((32, 64, 64, 56, 3), (32, 256, 256, 14, 3), (32, 256, 64, 56, 1))
_EXPANDING = ((32, 64, 256, 56, 1), (32, 256, 1024, 14, 1))
_YOLO = ((16, 64, 64, 80, 3), (16, 128, 128, 40, 3), (32, 40, 240, 28, 1))
_DEPTHWISE = ((32, 144, 144, 56, 3), (32, 240, 240, 28, 5), (32, 960, 960, 7, 3))

PAIRS: dict[str, Pair] = {
    "conv_bias_relu": _pair("relu", functional.relu, _RESNET),
    "conv_bias_relu_residual": _pair("relu", functional.relu, _EXPANDING, residual=True),
    "conv_bias_silu": _pair("silu", functional.silu, _YOLO),
    "conv_bias_relu6_depthwise": _pair("relu6", functional.relu6, _DEPTHWISE, depthwise=True),
    "conv_bias_act_backward": Pair(
        aten.silu_backward,
        lambda grad, operand: library.conv_bias_act_backward(grad, operand, "silu"),
        _result,
        (_YOLO, (1, 64, 64, 8, 3), (1, 8, 16, 4, 3)),
    ),
}
