"""Batches, memory formats and checks of images that all pooling operators share."""

from __future__ import annotations

import torch

from tritonite.dtypes import FLOATS
from tritonite.engine.iteration import (
    INT32_LIMIT,
    format_strides,
    has_channels_last,
    span,
    suggests_channels_last,
)
from tritonite.errors import Decline
from tritonite.ops import aten
from tritonite.ops.scatter import refuse_if_deterministic

# The integers of a formula over windows: the limits of its loop, then the numbers of `Windows`.
NUMBERS = ("taps", "sizes", "counts", "kernels", "steps", "dilations", "pads")


def batched(images: torch.Tensor, rank: int) -> torch.Tensor:
    """Return images of `rank` dimensions with a batch and channels in front."""
    return images if images.dim() == rank + 2 else images.unsqueeze(0)


def check_images(images: torch.Tensor, rank: int, first: int) -> None:
    """Decline unless images have `rank` dimensions behind the channels, and elements in dimensions from `first` on.

    `first` counts from the channels, which are dimension 0.
    """
    if images.dtype not in FLOATS:
        raise Decline(f"dtype {images.dtype}; float16, bfloat16, float32 and float64 are served")
    if images.dim() not in (rank + 1, rank + 2) or 0 in images.shape[first - rank - 1 :]:
        raise Decline(f"shape {tuple(images.shape)}; images of {rank} dimensions with channels are served")
    plane = images.shape[-rank:].numel()
    if plane >= INT32_LIMIT > span(images.shape, images.stride()):
        raise Decline(f"an expanded image of {plane} elements")


def check_gradient(grad: torch.Tensor, images: torch.Tensor, counts: tuple[int, ...]) -> None:
    """Decline gradients whose dtype is not that of the images, or which do not have an element for each window."""
    shape = (*images.shape[: -len(counts)], *counts)
    if grad.dtype is not images.dtype or tuple(grad.shape) != shape or 0 in shape[images.dim() - len(counts) - 1 :]:
        raise Decline(f"gradient of shape {tuple(grad.shape)} and {grad.dtype}, not {shape} and {images.dtype}")


def strides_for(images: torch.Tensor, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Return the strides of a result: channels-last for images of four dimensions that suggest it, else row-major."""
    return format_strides(shape, rank == 2 and images.dim() == 4 and suggests_channels_last(images))


def strides_of_volumes(images: torch.Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a result that keeps channels-last volumes, with a batch or without."""
    if images.dim() == 5:
        return format_strides(shape, suggests_channels_last(images))
    strides: tuple[int, ...] = format_strides((1, *shape), has_channels_last(images.unsqueeze(0)))[1:]
    return strides


def check_format(volumes: torch.Tensor) -> None:
    """Decline, on a CPU, volumes without a batch that have the strides of channels-last images: ATen raises."""
    if aten.on_cpu() and volumes.dim() == 4 and suggests_channels_last(volumes):
        raise Decline(f"strides {volumes.stride()} of volumes without a batch, as of channels-last images")


def decline_where_aten_raises() -> None:
    """Decline on a GPU if deterministic algorithms are enabled, for which ATen raises."""
    refuse_if_deterministic("deterministic algorithms, for which ATen raises")
