"""Kernels of the gradient of a depthwise convolution's filters: sums by slices, then the sum of the slices."""

from __future__ import annotations

import triton
import triton.language as tl

from tritonite.engine.convolution.depthwise_taps import (
    Extents,
    coordinates,
    load_tap,
    masked_product,
    numbers,
    offset_at,
    tap_at,
)
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry


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
    x_strides, grad_strides = numbers(x_strides, INDEX), numbers(grad_strides, INDEX)
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
        at = coordinates(position, out_height, out_width, META)
        rows = grad + batch * grad_strides.batch + channel * grad_strides.channel
        mask = inside[:, None] & valid[None, :]
        pointers = rows[:, None] + offset_at(grad_strides, at)[None, :]
        own = tl.load(pointers, mask=mask, other=0.0).to(META.compute)
        rows = x + batch * x_strides.batch + (channel // META.multiplier) * x_strides.channel
        added = ()
        for k in tl.static_range(GROUP):
            values, mask = load_tap(rows, x_strides, at, tap_at(first + k, META), valid, inside, sizes, META)
            added = added + (sums[k] + masked_product(values, own, mask),)
        sums = added
    for k in tl.static_range(GROUP):
        row = (tl.program_id(2) * TAPS + first + k).to(tl.int64)
        mask = inside & (first + k < TAPS)
        tl.store(partials + row * channels + channel, tl.sum(sums[k], 1), mask=mask)


@libentry()
@triton.jit(do_not_specialize=["slices"])
def add_depthwise_slices(partials, by_weight, strides, channels, slices, META: tl.constexpr):
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
    tap = tap_at(element // channels, META)
    pointers = by_weight + (element % channels) * strides.channel + offset_at(strides, tap)
    tl.store(pointers, tl.sum(sums, 0).to(by_weight.dtype.element_ty), mask=inside)
