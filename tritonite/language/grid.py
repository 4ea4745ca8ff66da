"""Coordinates of grid sampling, with ATen's arithmetic: a grid's values in [-1, 1] become positions in an image.

MODE and PADDING are ATen's numbers.
"""

import triton
import triton.language as tl

from tritonite.language import libdevice
from tritonite.language.interpolation import CUBIC
from tritonite.language.math import true_divide

BILINEAR, NEAREST, BICUBIC = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
ZEROS, BORDER, REFLECTION = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def unnormalised(x, size, CORNERS: tl.constexpr):
    """Return the position of a grid value; CORNERS maps -1 and 1 to centres of the corner pixels, not to edges."""
    size = size.to(x.dtype)
    if CORNERS:
        position = (x + 1.0) * 0.5 * (size - 1.0)
    else:
        position = ((x + 1.0) * size - 1.0) * 0.5
    return position


@triton.jit
def _clipped(x, size):
    """Return a position clipped to the image, and nan as 0."""
    return tl.minimum(tl.where(x > 0.0, x, 0.0), size.to(x.dtype) - 1.0)


@triton.jit
def _reflected(x, size, CORNERS: tl.constexpr):
    """Return a position reflected at the borders until it is in the image, and the sign of its derivative."""
    if CORNERS:
        low, span = 0.0, size.to(x.dtype) - 1.0
    else:
        low, span = -0.5, size.to(x.dtype)
    distance = tl.abs(x - low)
    span = tl.broadcast_to(span, distance.shape)
    # One pixel with CORNERS has no extent: every position is 0.
    divisor = tl.where(span == 0.0, 1.0, span)
    rest = libdevice.fmod(distance, divisor)
    odd = (tl.floor(true_divide(distance, divisor)).to(tl.int32) & 1) != 0
    position = tl.where(odd, span - rest + low, rest + low)
    sign = tl.where(odd != (x - low < 0.0), -1.0, 1.0)
    return tl.where(span == 0.0, 0.0, position), tl.where(span == 0.0, 0.0, sign)


@triton.jit
def _representable(x):
    """Return the position, or a position outside the image where int32 does not represent it."""
    return tl.where((x <= 2147483646.0) & (x >= -2147483648.0), x, -100.0)


@triton.jit
def padded(x, size, PADDING: tl.constexpr, CORNERS: tl.constexpr):
    """Return a position after padding: as it is, clipped to the image, or reflected into the image."""
    if PADDING == REFLECTION:
        x, _ = _reflected(x, size, CORNERS)
    if PADDING != ZEROS:
        x = _clipped(x, size)
    return _representable(x)


@triton.jit
def source_position(x, size, PADDING: tl.constexpr, CORNERS: tl.constexpr):
    """Return the position in the image of a grid value."""
    return padded(unnormalised(x, size, CORNERS), size, PADDING, CORNERS)


@triton.jit
def position_derivative(x, size, PADDING: tl.constexpr, CORNERS: tl.constexpr, POSITIVE: tl.constexpr):
    """Return the derivative of `source_position`, a zero at and beyond a border that clips.

    The zero is +0 if POSITIVE. Otherwise it has the sign of a reflection, as the product of the steps' derivatives has.
    """
    extent = size.to(x.dtype)
    derivative = tl.broadcast_to((extent - 1.0 if CORNERS else extent) * 0.5, x.shape)
    if PADDING != ZEROS:
        position = unnormalised(x, size, CORNERS)
        if PADDING == REFLECTION:
            position, sign = _reflected(position, size, CORNERS)
            derivative = derivative * sign
        clips = (position <= 0.0) | (position >= extent - 1.0)
        derivative = tl.where(clips, 0.0 if POSITIVE else derivative * 0.0, derivative)
    return derivative


@triton.jit
def in_range(index, size):
    return (index >= 0) & (index < size)


@triton.jit
def linear_neighbours(position):
    """Return the indices of the two neighbours of a position, and their weights."""
    below = tl.floor(position)
    index = below.to(tl.int32)
    return (index, index + 1), (below + 1.0 - position, position - below)


@triton.jit
def cubic_neighbours(position, size, PADDING: tl.constexpr, CORNERS: tl.constexpr):
    """Return the indices of the four neighbours of an unpadded position, each of which is padded."""
    below = tl.floor(position)
    indices = ()
    for k in tl.static_range(4):
        indices = indices + (padded(below + (k - 1.0), size, PADDING, CORNERS).to(tl.int32),)
    return indices


@triton.jit
def cubic_derivatives(x):
    """Return the derivatives of `cubic_weights`, by factors that do not cancel."""
    a: tl.constexpr = CUBIC
    return (
        (1.0 - x) * a * (1.0 - 3.0 * x),
        (x * (3.0 * (a + 2.0)) - 2.0 * (a + 3.0)) * x,
        ((x - 1.0) * (3.0 * (a + 2.0)) + 2.0 * (a + 3.0)) * (1.0 - x),
        x * a * (2.0 - 3.0 * x),
    )
