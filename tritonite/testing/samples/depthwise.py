"""Depthwise convolutions, which ATen does not have on CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tritonite.registry import Op
from tritonite.testing.samples import facts

# Dimensions of the operators' inputs.
RANKS = {"_conv_depthwise2d": 4, "conv_depthwise3d": 5}
facts.CANCELLING |= set(RANKS)
facts.ZERO_SIGN_OF_ROUNDOFF |= set(RANKS)


@facts.layouts(*RANKS)
def _images(op: Op, make: facts.Make) -> Iterator[tuple[str, facts.Tensors]]:
    """Yield images or volumes in several layouts. The second tensor is the bias, if it has one dimension."""
    sizes = (4, 3, 5)[5 - RANKS[op.packet] :]
    yield "images", [make(2, 3, *sizes), make(6)]
    yield "images channels_last", [make(2, *sizes, 3).movedim(-1, 1), make(6)]
    yield "images without bias", [make(2, 3, *sizes)] * 2
    yield "images transposed", [make(2, 3, *sizes[::-1]).transpose(2, -1), make(6)]


def _filtered(x: torch.Tensor, bias: torch.Tensor, rank: int) -> dict[str, Any] | None:
    if x.dim() != rank or x.numel() < 8 * x.shape[1]:
        return None
    taps, channels = (3, 2, 2)[5 - rank :], 2 * x.shape[1]
    weight = x.reshape(-1).flip(0)[: 4 * channels].repeat(3)[: channels * torch.Size(taps).numel()]
    return {
        "self": x,
        "weight": weight.reshape(channels, 1, *taps),
        "kernel_size": taps,
        "bias": bias if bias.dim() == 1 else None,
        "stride": (1, 2, 1)[5 - rank :],
        "padding": (1, 0, 2)[5 - rank :],
        "dilation": (1, 1, 2)[5 - rank :],
    }


@facts.arguments("_conv_depthwise2d")
def _images_and_filters(tensors: facts.Tensors) -> dict[str, Any] | None:
    return _filtered(tensors[0], tensors[1], 4)


@facts.arguments("conv_depthwise3d")
def _volumes_and_filters(tensors: facts.Tensors) -> dict[str, Any] | None:
    return _filtered(tensors[0], tensors[1], 5)


def convolution(
    self: torch.Tensor, weight: torch.Tensor, kernel_size: Any, bias: Any, stride: Any, padding: Any, dilation: Any
) -> torch.Tensor:
    return torch.convolution(
        self, weight, bias, stride, padding, dilation, False, [0] * len(kernel_size), self.shape[1]
    )


facts.REFERENCES |= dict.fromkeys(RANKS, convolution)
