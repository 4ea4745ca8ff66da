"""The family of random benchmark cases of pooling, resampling and grid sampling: layers of models and their gradients.

The operators compute each element of the result from a window of the input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tritonite.bench.cases import Make, Shape
from tritonite.bench.convolution import operand
from tritonite.bench.drawing import Call, Source, exactly, family, log_uniform

# Kernel, stride and padding of pooling: VGG and U-Nets, ResNet, Inception, a pyramid of YOLO, an unpadded GoogLeNet.
_POOLED = ((2, 2, 0), (3, 2, 1), (3, 1, 1), (5, 1, 2), (3, 2, 0))
# Sides of the results of adaptive pooling: VGG, AlexNet, PSPNet's pyramid, global pooling.
_ADAPTIVE = (7, 6, 1, 2, 3, 6, 1)
# Sides of images over those of the features that segmentation, super-resolution and U-Nets resample.
_SCALES = (2, 2, 2, 4, 8, 0.5, 1.5)


def _images(random: Source, channels: Sequence[int] | None = None, scale: float = 1.0) -> Shape:
    """Draw the shape of images whose sides are to be multiplied by `scale`."""
    sizes = random.sizes
    most, C = sizes.most // 4, random.choice(channels or sizes.channels)
    height, width = _sides(random)
    while (elements := math.ceil(C * height * width * max(1.0, scale) ** 2)) > most and min(height, width) >= 8:
        height, width = height // 2, width // 2
    N = min(max(1, most // elements), log_uniform(random, (1, 2 * sizes.batches[1])))
    return N, C, height, width


def _sides(random: Source) -> tuple[int, int]:
    """Draw the height and width of images, square with a probability of 0.7 at least."""
    low, high = random.sizes.sides
    # The smallest windows and scales need a side of 4.
    side = log_uniform(random, (max(4, low), high))
    return side, side if random.random() < 0.7 else log_uniform(random, (max(4, low), high))


def _scaled(sizes: Sequence[int], scale: float) -> list[int]:
    return [max(1, int(size * scale)) for size in sizes]


Operands = Callable[[Make], Sequence[Any]]


def _either(random: Source, name: str, forwards: Operands, backwards: Operands) -> Call:
    """Draw the forward or the backward pass of an operator, each from what makes its arguments."""
    if random.random() < 0.5:
        return Call(name, name, exactly(forwards))
    return Call(f"{name}_backward", f"{name}_backward", exactly(backwards))


def _averages(random: Source) -> Call:
    """Draw averages over windows."""
    shape, (kernel, stride, padding) = _images(random), random.choice(_POOLED)
    rest = random.random() < 0.25, random.random() < 0.5, None
    arguments = [kernel] * 2, [stride] * 2, [padding] * 2, *rest
    sizes = torch.ops.aten.avg_pool2d.default(torch.empty(shape, device="meta"), *arguments).shape
    x, grad = _pair(random, shape, tuple(sizes))
    return _either(
        random, "avg_pool2d", lambda make: (x(make), *arguments), lambda make: (grad(make), x(make), *arguments)
    )


def _maxima(random: Source) -> Call:
    """Draw maxima over windows, with their indices."""
    shape, (kernel, stride, padding) = _images(random), random.choice(_POOLED)
    arguments = [kernel] * 2, [stride] * 2, [padding] * 2, [1, 1], random.random() < 0.25
    return _with_indices(random, "max_pool2d_with_indices", shape, arguments, arguments)


def _adaptive(random: Source) -> Call:
    """Draw averages or maxima over as many windows as the result has pixels."""
    shape, side = _images(random), random.choice(_ADAPTIVE)
    sizes = [side, side]
    if random.random() < 0.3:
        return _with_indices(random, "adaptive_max_pool2d", shape, (sizes,), ())
    x, grad = _pair(random, shape, (*shape[:2], side, side))
    name = "_adaptive_avg_pool2d"
    return _either(random, name, lambda make: (x(make), sizes), lambda make: (grad(make), x(make)))


def _with_indices(
    random: Source, name: str, shape: Shape, arguments: tuple[Any, ...], of_gradient: tuple[Any, ...]
) -> Call:
    """Draw the forward or backward pass of maxima, whose gradient takes their indices."""
    x, op = operand(shape, random.random() < 0.5), getattr(torch.ops.aten, name).default

    def backwards(make: Make) -> tuple[Any, ...]:
        image = x(make)
        out, indices = op(image, *arguments)
        return torch.empty_like(out).copy_(make(*out.shape)), image, *of_gradient, indices

    return _either(random, name, lambda make: (x(make), *arguments), backwards)


def _pair(random: Source, shape: Shape, result: Shape) -> tuple[Callable[[Make], torch.Tensor], ...]:
    """Draw what makes the input and the gradient of the result, both contiguous or both channels-last."""
    channels_last = random.random() < 0.5
    return operand(shape, channels_last), operand(result, channels_last)


def _resampling(random: Source) -> Call:
    """Draw nearest, bilinear or bicubic resampling; bicubic also of a vision transformer's position embedding."""
    name = random.choice(("upsample_nearest2d", "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d"))
    scale = random.choice(_SCALES)
    shape = _images(random, (3,) if random.random() < 0.25 else None, scale)
    if "bicubic" in name and random.random() < 0.5:
        patches = min(16, random.sizes.sides[1])
        shape = (1, shape[1], patches, patches)
    sizes = [max(1, int(size * scale)) for size in shape[2:]]
    corners = () if "nearest" in name else (random.random() < 0.25,)
    rest = *corners, *((scale, scale) if random.random() < 0.5 else (None, None))
    x, grad = _pair(random, shape, (*shape[:2], *sizes))
    return _either(
        random, name, lambda make: (x(make), sizes, *rest), lambda make: (grad(make), sizes, list(shape), *rest)
    )


def _grids(random: Source) -> Call:
    """Draw grid sampling: warped images, or deformable attention with four points for each query."""
    attends = random.random() < 0.5
    # Each head is an image of its own.
    shape = _images(random, random.sizes.head_sizes[:1] if attends else (3, *random.sizes.channels[:4]))
    points = (max(1, shape[2] * shape[3] // 4), 4) if attends else shape[2:]
    # Bilinear with a probability of 3/4, else nearest; zeros, borders or reflections outside the image.
    rest = random.choice((0, 0, 0, 1)), random.choice((0, 0, 1, 2)), random.random() < 0.25
    x = operand(shape, random.random() < 0.3)

    def operands(make: Make) -> tuple[torch.Tensor, torch.Tensor]:
        # The image's corners are -1 and 1. Values are from -3 to 3, so that some points are outside.
        return x(make), make(shape[0], *points, 2).mul_(0.35)

    return _either(
        random,
        "grid_sampler_2d",
        lambda make: (*operands(make), *rest),
        lambda make: (make(*shape[:2], *points), *operands(make), *rest, [True, True]),
    )


_DRAWS = (_maxima, _maxima, _averages, _adaptive, _resampling, _resampling, _resampling, _grids)


@family("windows")
def _windows(random: Source) -> Call:
    """Draw pooling, resampling or grid sampling, forward or backward."""
    return random.choice(_DRAWS)(random)
