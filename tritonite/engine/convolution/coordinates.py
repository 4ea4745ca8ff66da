"""Device functions of the kernels of implicit products: which taps meet which elements of the input."""

from __future__ import annotations

import triton
import triton.language as tl

from tritonite.engine.convolution.meta import ImageStrides, Walk
from tritonite.language.indices import aligned_to, quotient

# Blocks of the input


@triton.jit
def across(vector, INNER: tl.constexpr):
    """Return a vector over rows as a column of a (rows, inner) block, or as a row of its transpose."""
    if INNER:
        result = vector[:, None]
    else:
        result = vector[None, :]
    return result


@triton.jit
def along(vector, INNER: tl.constexpr):
    """Return a vector over inner elements as a row of a (rows, inner) block, or as a column of its transpose."""
    if INNER:
        result = vector[None, :]
    else:
        result = vector[:, None]
    return result


@triton.jit
def inside(position, size):
    """Return whether positions are within an axis."""
    return (position >= 0) & (position < size)


@triton.jit
def meets_image(mask, from_d, from_h, from_w, move_d, move_h, move_w, axes, INNER: tl.constexpr, META: tl.constexpr):
    """Restrict the mask of a block of the input to elements inside the image, which are at `from` + `move`.

    `from_*` vary over positions, the block's rows (`across`), and `move_*` over taps. With META.folded each inner
    element of the block has a tap of its own; otherwise the block has one.
    """
    depth, height, width = axes.depth, axes.height, axes.width
    if META.folded:
        mask &= inside(across(from_w, INNER) + along(move_w, INNER), width.size)
        if META.dims > 1:
            mask &= inside(across(from_h, INNER) + along(move_h, INNER), height.size)
        if META.dims > 2:
            mask &= inside(across(from_d, INNER) + along(move_d, INNER), depth.size)
    else:
        meets = inside(from_w + move_w, width.size)
        if META.dims > 1:
            meets &= inside(from_h + move_h, height.size)
        if META.dims > 2:
            meets &= inside(from_d + move_d, depth.size)
        mask &= across(meets, INNER)
    return mask


@triton.jit
def aligned_image(strides, MULTIPLE: tl.constexpr):
    """Return `ImageStrides` of which MULTIPLE divides all but the channel's, in a form that Triton's analysis sees."""
    batch, depth = aligned_to(strides.batch, MULTIPLE), aligned_to(strides.depth, MULTIPLE)
    height, width = aligned_to(strides.height, MULTIPLE), aligned_to(strides.width, MULTIPLE)
    return ImageStrides(batch, strides.channel, depth, height, width)


# Which taps


@triton.jit
def walk(axis):
    """Return the taps of a convolution along an axis: all of them."""
    return Walk(1, 0, axis.stride, axis.origin, axis.dilation, axis.taps, 0, 1)


@triton.jit
def phase_walk(axis, phase):
    """Return the taps that reach output positions q * stride + phase of a transposed convolution.

    Input position i and tap t reach output position i * stride - padding + t * dilation. The taps t of a phase solve
    t * dilation = phase + padding modulo the stride. They are none, or an arithmetic progression with step
    stride / common.
    """
    reach = phase + axis.origin
    tap_step = axis.stride // axis.common
    first_tap = (reach // axis.common * axis.inverse) % tap_step
    taps = tl.maximum(axis.taps - first_tap + tap_step - 1, 0) // tap_step
    taps = tl.where(reach % axis.common == 0, taps, 0)
    # Without taps the quotient is inexact, and not used.
    shift = reach - first_tap * axis.dilation
    origin = tl.where(shift < 0, -(-shift // axis.stride), shift // axis.stride)
    return Walk(axis.stride, phase, 1, origin, -(axis.dilation // axis.common), taps, first_tap, tap_step)


@triton.jit
def divided(x, size):
    """Return the quotient and the remainder of x >= 0 by a size."""
    size = tl.full((), size, x.dtype)
    result = tl.where(size == 1, x, quotient(x, tl.maximum(size, 2)))
    return result, x - result * size


@triton.jit
def indices_of(x, height, width):
    """Return the three indices that a number x >= 0 stands for, the last below `width` and the second below `height`.

    The numbers are those of taps, or of phases.
    """
    rest, last = divided(x, width)
    first, middle = divided(rest, height)
    return first, middle, last


@triton.jit
def position_indices(row, positions_d, positions_h, positions_w):
    """Return the image and the indices along depth, height and width of rows of positions."""
    rest, width = divided(row, positions_w)
    rest, height = divided(rest, positions_h)
    image, depth = divided(rest, positions_d)
    return image, depth, height, width
