"""Compile-time facts, coordinates of taps and loads of the depthwise kernels.

With M filters a channel, stride s, padding p and dilation d along each dimension, and k over the taps of a filter:

    y[c, o]           = bias[c] + sum over k of weight[c, k] x[c // M, o s - p + k d]
    by_x[c, i]        = sum over m < M and k of weight[c M + m, k] by_y[c M + m, (i + p - k d) / s]
    by_weight[c, k]   = sum over n and o of by_y[n, c, o] x[n, c // M, o s - p + k d]

A fraction that is no whole number has no term. A tile has channels and flat positions of one sample. Lanes lie along
the positions of row-major tensors, and along the channels of channels-last ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from tritonite.engine.convolution.meta import ImageStrides


class DepthwiseFilterStrides(NamedTuple):
    """Strides of filters, of shape (channels, 1, depth, height, width)."""

    channel: Any
    depth: Any
    height: Any
    width: Any


class Extents(NamedTuple):
    """Sizes, or coordinates, along the dimensions of a volume."""

    depth: Any
    height: Any
    width: Any


@dataclass(frozen=True)
class Window:
    """The taps of a filter along one dimension, and how they move over the input."""

    taps: int
    stride: int
    padding: int
    dilation: int


@dataclass(frozen=True)
class DepthwiseMeta:
    """Compile-time facts of the kernels.

    A tile has `channels` and `positions`, each of which is a run of `run` adjacent columns. `rank` is 1 if all but the
    width has one position and one tap, 2 if the depth has, otherwise 3. `group` is the number of taps that a program
    unrolls: all of a filter, or 1 in a loop; in the gradient of the weight, the taps that a program computes.
    `transposed` selects the gradient of the input, whose runs
    are longer than 1 only if the stride along the width is 1.
    """

    index: Any
    compute: Any
    channels: int
    positions: int
    multiplier: int
    rank: int
    depth: Window
    height: Window
    width: Window
    group: int
    run: int = 1
    transposed: bool = False


@triton.jit
def numbers(strides, INDEX: tl.constexpr):
    """Return strides as numbers of the dtype INDEX: in loops Triton 3.6 forgets which of a tuple are 1."""
    return ImageStrides(
        tl.full((), strides.batch, tl.int64),
        tl.full((), strides.channel, INDEX),
        tl.full((), strides.depth, INDEX),
        tl.full((), strides.height, INDEX),
        tl.full((), strides.width, INDEX),
    )


@triton.jit
def filter_numbers(strides, INDEX: tl.constexpr):
    """Return strides of filters as `numbers` does."""
    return DepthwiseFilterStrides(
        tl.full((), strides.channel, INDEX),
        tl.full((), strides.depth, INDEX),
        tl.full((), strides.height, INDEX),
        tl.full((), strides.width, INDEX),
    )


@triton.jit
def coordinates(position, height, width, META: tl.constexpr):
    """Return the coordinates of flat positions in a volume of this height and width."""
    if META.rank == 1:
        return Extents(tl.zeros_like(position), tl.zeros_like(position), position)
    row = position // width
    if META.rank == 2:
        return Extents(tl.zeros_like(position), row, position % width)
    return Extents(row // height, row % height, position % width)


@triton.jit
def tap_at(index, META: tl.constexpr):
    """Return the coordinates of a flat tap in the filter."""
    HEIGHT: tl.constexpr = META.height
    WIDTH: tl.constexpr = META.width
    row = index // WIDTH.taps
    return Extents(row // HEIGHT.taps, row % HEIGHT.taps, index % WIDTH.taps)


@triton.jit
def offset_at(strides, at):
    """Return the offset of coordinates."""
    return at.depth * strides.depth + at.height * strides.height + at.width * strides.width


@triton.jit
def _read_index(position, tap, size, WINDOW: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Return the index along one dimension that a tap reads, and whether it lies within `size`."""
    if TRANSPOSED:
        shifted = position + WINDOW.padding - tap * WINDOW.dilation
        index = shifted // WINDOW.stride
        return index, (shifted >= 0) & (index < size) & (shifted % WINDOW.stride == 0)
    index = position * WINDOW.stride - WINDOW.padding + tap * WINDOW.dilation
    return index, (index >= 0) & (index < size)


@triton.jit
def load_column(rows, strides, at, tap, column, valid, inside, sizes, META: tl.constexpr):
    """Load what a tap reads in a given column, and return it with the mask of terms that exist.

    `rows` are addresses by channel, `at` the coordinates of the positions, `valid` and `inside` masks of positions and
    of channels.
    """
    DEPTH: tl.constexpr = META.depth
    HEIGHT: tl.constexpr = META.height
    TRANSPOSED: tl.constexpr = META.transposed
    offset = column * strides.width
    if META.rank > 1:
        row, within = _read_index(at.height, tap.height, sizes.height, HEIGHT, TRANSPOSED)
        valid = valid & within
        offset += row * strides.height
    if META.rank > 2:
        plane, within = _read_index(at.depth, tap.depth, sizes.depth, DEPTH, TRANSPOSED)
        valid = valid & within
        offset += plane * strides.depth
    mask = inside[:, None] & valid[None, :]
    return tl.load(rows[:, None] + offset[None, :], mask=mask, other=0.0).to(META.compute), mask


@triton.jit
def load_tap(rows, strides, at, tap, valid, inside, sizes, META: tl.constexpr):
    """Load what a tap reads, and return it with the mask of terms that exist."""
    WIDTH: tl.constexpr = META.width
    TRANSPOSED: tl.constexpr = META.transposed
    column, within = _read_index(at.width, tap.width, sizes.width, WIDTH, TRANSPOSED)
    return load_column(rows, strides, at, tap, column, valid & within, inside, sizes, META)


@triton.jit
def load_filter(weight, strides, channel, tap, inside, META: tl.constexpr):
    """Load a tap of each channel's filter, as a column."""
    pointers = weight + channel * strides.channel + offset_at(strides, tap)
    return tl.load(pointers, mask=inside, other=0.0).to(META.compute)[:, None]


@triton.jit
def masked_product(values, factor, mask):
    """Multiply the terms that exist. Others are 0, also where the factor is inf or nan.

    The mask stays out of the product, so that it fuses with the sum.
    """
    return values * tl.where(mask, factor, 0.0)
