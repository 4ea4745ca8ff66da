"""Kernels of the depthwise convolution, in which each channel has filters of its own.

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

from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry


class Strides(NamedTuple):
    """Strides of an image or a volume."""

    batch: Any
    channel: Any
    depth: Any
    height: Any
    width: Any


class FilterStrides(NamedTuple):
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

    A tile has `channels` and `positions`. `rank` is 1 if all but the width has one position and one tap, 2 if the depth
    has, otherwise 3. `group` is the number of taps that a program unrolls: all of a filter, or 1 in a loop; in the
    gradient of the weight, the taps that a program computes. `transposed` selects the gradient of the input.
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
    transposed: bool = False


@triton.jit
def _numbers(strides, INDEX: tl.constexpr):
    """Return strides as numbers of the dtype INDEX: in loops Triton 3.6 forgets which of a tuple are 1."""
    return Strides(
        tl.full((), strides.batch, tl.int64),
        tl.full((), strides.channel, INDEX),
        tl.full((), strides.depth, INDEX),
        tl.full((), strides.height, INDEX),
        tl.full((), strides.width, INDEX),
    )


@triton.jit
def _filter_numbers(strides, INDEX: tl.constexpr):
    """Return strides of filters as `_numbers` does."""
    return FilterStrides(
        tl.full((), strides.channel, INDEX),
        tl.full((), strides.depth, INDEX),
        tl.full((), strides.height, INDEX),
        tl.full((), strides.width, INDEX),
    )


@triton.jit
def _coordinates(position, height, width, META: tl.constexpr):
    """Return the coordinates of flat positions in a volume of this height and width."""
    if META.rank == 1:
        return Extents(tl.zeros_like(position), tl.zeros_like(position), position)
    row = position // width
    if META.rank == 2:
        return Extents(tl.zeros_like(position), row, position % width)
    return Extents(row // height, row % height, position % width)


@triton.jit
def _tap(tap, META: tl.constexpr):
    """Return the coordinates of a flat tap in the filter."""
    HEIGHT: tl.constexpr = META.height
    WIDTH: tl.constexpr = META.width
    row = tap // WIDTH.taps
    return Extents(row // HEIGHT.taps, row % HEIGHT.taps, tap % WIDTH.taps)


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
def _load_tap(rows, strides, at, tap, sizes, inside, valid, META: tl.constexpr):
    """Load what a tap reads for a tile, and return it with the mask of terms that exist.

    `rows` are addresses by channel, `at` the coordinates of the positions.
    """
    DEPTH: tl.constexpr = META.depth
    HEIGHT: tl.constexpr = META.height
    WIDTH: tl.constexpr = META.width
    TRANSPOSED: tl.constexpr = META.transposed
    column, within = _read_index(at.width, tap.width, sizes.width, WIDTH, TRANSPOSED)
    valid = valid & within
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
def _load_filter(weight, strides, channel, tap, inside, META: tl.constexpr):
    """Load a tap of each channel's filter, as a column."""
    offset = tap.depth * strides.depth + tap.height * strides.height + tap.width * strides.width
    return tl.load(weight + channel * strides.channel + offset, mask=inside, other=0.0).to(META.compute)[:, None]


@triton.jit
def _product(values, factor, mask):
    """Multiply the terms that exist. Others are 0, also where the factor is inf or nan.

    The mask stays out of the product, so that it fuses with the sum.
    """
    return values * tl.where(mask, factor, 0.0)


@triton.jit
def _offsets(strides, at):
    """Return the offsets of coordinates."""
    return at.depth * strides.depth + at.height * strides.height + at.width * strides.width


@triton.jit
def _add_tap(total, tap, rows, weight, channel, strides, at, sizes, inside, valid, META: tl.constexpr):
    """Add a tap's terms to a tile; `strides` are those of what is read and of the filters."""
    values, mask = _load_tap(rows, strides[0], at, tap, sizes, inside, valid, META)
    return total + _product(values, _load_filter(weight, strides[1], channel, tap, inside, META), mask)


@libentry()
@triton.jit(do_not_specialize=["depth", "height", "width", "out_height", "out_width", "positions", "blocks"])
def convolve(
    x,
    weight,
    bias,
    out,
    x_strides,
    weight_strides,
    bias_stride,
    out_strides,
    channels,
    depth,
    height,
    width,
    out_height,
    out_width,
    positions,
    blocks,
    META: tl.constexpr,
):
    """Compute a tile of `out`: the convolution of x, or if transposed its gradient by x, where x is that of the result.

    Args:
        channels: channels of `out`.
        depth, height, width: sizes of x.
        positions: positions of a sample of `out`, of which every channel has `blocks` tiles.
    """
    wait_for_previous_launch()
    INDEX: tl.constexpr = META.index
    CHANNELS: tl.constexpr = META.channels
    POSITIONS: tl.constexpr = META.positions
    DEPTH: tl.constexpr = META.depth
    HEIGHT: tl.constexpr = META.height
    WIDTH: tl.constexpr = META.width
    TAPS: tl.constexpr = DEPTH.taps * HEIGHT.taps * WIDTH.taps
    FILTERS: tl.constexpr = META.multiplier if META.transposed else 1
    strides = _numbers(x_strides, INDEX), _filter_numbers(weight_strides, INDEX)
    channel_blocks = tl.cdiv(channels, META.channels)
    program = tl.program_id(0)
    batch = (program // (blocks * channel_blocks)).to(tl.int64)
    channel = (program // blocks % channel_blocks).to(INDEX) * META.channels + tl.arange(0, META.channels)
    position = (program % blocks).to(INDEX) * META.positions + tl.arange(0, META.positions)
    inside, valid = channel < channels, position < positions
    at, sizes = _coordinates(position, out_height, out_width, META), Extents(depth, height, width)
    total = tl.zeros((CHANNELS, POSITIONS), META.compute)
    if bias is not None:
        total += tl.load(bias + channel * bias_stride, mask=inside, other=0.0).to(META.compute)[:, None]
    for i in range(FILTERS):
        if META.transposed:
            source = channel * META.multiplier + i
            own = source
        else:
            source = channel // META.multiplier
            own = channel
        rows = x + batch * strides[0].batch + source * strides[0].channel
        if META.group == TAPS:
            for k in tl.static_range(TAPS):
                total = _add_tap(total, _tap(k, META), rows, weight, own, strides, at, sizes, inside, valid, META)
        else:
            for k in range(TAPS):
                total = _add_tap(total, _tap(k, META), rows, weight, own, strides, at, sizes, inside, valid, META)
    pointers = out + batch * out_strides.batch + channel[:, None] * out_strides.channel
    mask = inside[:, None] & valid[None, :]
    tl.store(pointers + _offsets(out_strides, at)[None, :], total.to(out.dtype.element_ty), mask=mask)


@libentry()
@triton.jit(do_not_specialize=["depth", "height", "width", "out_height", "out_width", "positions", "blocks", "tiles"])
def sum_products(
    x,
    grad,
    partials,
    x_strides,
    grad_strides,
    channels,
    depth,
    height,
    width,
    out_height,
    out_width,
    positions,
    blocks,
    tiles,
    META: tl.constexpr,
):
    """Compute a slice of the gradient of the weight, for a block of channels and META.group taps.

    The programs of the grid's last dimension take the tiles of all samples in turn. `partials` are contiguous,
    (slices, taps, channels). Sizes are those of x, positions those of `grad`.
    """
    wait_for_previous_launch()
    INDEX: tl.constexpr = META.index
    GROUP: tl.constexpr = META.group
    CHANNELS: tl.constexpr = META.channels
    POSITIONS: tl.constexpr = META.positions
    DEPTH: tl.constexpr = META.depth
    HEIGHT: tl.constexpr = META.height
    WIDTH: tl.constexpr = META.width
    TAPS: tl.constexpr = DEPTH.taps * HEIGHT.taps * WIDTH.taps
    x_strides, grad_strides = _numbers(x_strides, INDEX), _numbers(grad_strides, INDEX)
    channel = tl.program_id(0).to(INDEX) * META.channels + tl.arange(0, META.channels)
    first = tl.program_id(1) * GROUP
    inside, sizes = channel < channels, Extents(depth, height, width)
    sums = ()
    for _ in tl.static_range(GROUP):
        sums = sums + (tl.zeros((CHANNELS, POSITIONS), META.compute),)
    for tile in range(tl.program_id(2), tiles, tl.num_programs(2)):
        batch = (tile // blocks).to(tl.int64)
        position = (tile % blocks).to(INDEX) * META.positions + tl.arange(0, META.positions)
        valid = position < positions
        at = _coordinates(position, out_height, out_width, META)
        rows = grad + batch * grad_strides.batch + channel * grad_strides.channel
        mask = inside[:, None] & valid[None, :]
        pointers = rows[:, None] + _offsets(grad_strides, at)[None, :]
        own = tl.load(pointers, mask=mask, other=0.0).to(META.compute)
        rows = x + batch * x_strides.batch + (channel // META.multiplier) * x_strides.channel
        added = ()
        for k in tl.static_range(GROUP):
            values, mask = _load_tap(rows, x_strides, at, _tap(first + k, META), sizes, inside, valid, META)
            added = added + (sums[k] + _product(values, own, mask),)
        sums = added
    for k in tl.static_range(GROUP):
        row = (tl.program_id(2) * TAPS + first + k).to(tl.int64)
        mask = inside & (first + k < TAPS)
        tl.store(partials + row * channels + channel, tl.sum(sums[k], 1), mask=mask)


@libentry()
@triton.jit(do_not_specialize=["slices"])
def add_slices(partials, by_weight, strides, channels, slices, META: tl.constexpr):
    """Add up the slices of the gradient of the weight: META.positions slices at a time, of META.channels elements."""
    wait_for_previous_launch()
    CHANNELS: tl.constexpr = META.channels
    POSITIONS: tl.constexpr = META.positions
    DEPTH: tl.constexpr = META.depth
    HEIGHT: tl.constexpr = META.height
    WIDTH: tl.constexpr = META.width
    TAPS: tl.constexpr = DEPTH.taps * HEIGHT.taps * WIDTH.taps
    element = tl.program_id(0).to(tl.int64) * META.channels + tl.arange(0, META.channels)
    inside = element < channels * TAPS
    sums = tl.zeros((POSITIONS, CHANNELS), META.compute)
    for first in range(0, slices, META.positions):
        each = first + tl.arange(0, META.positions).to(tl.int64)
        pointers = partials + each[:, None] * (channels * TAPS) + element[None, :]
        sums += tl.load(pointers, mask=(each < slices)[:, None] & inside[None, :], other=0.0)
    tap = _tap(element // channels, META)
    pointers = by_weight + (element % channels) * strides.channel + _offsets(strides, tap)
    tl.store(pointers, tl.sum(sums, 0).to(by_weight.dtype.element_ty), mask=inside)
