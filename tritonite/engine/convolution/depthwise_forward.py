"""Kernel of the depthwise convolution, and of its gradient by the input."""

from __future__ import annotations

import triton
import triton.language as tl

from tritonite.engine.convolution.depthwise_taps import (
    Extents,
    coordinates,
    filter_numbers,
    load_column,
    load_filter,
    load_tap,
    masked_product,
    numbers,
    offset_at,
    tap_at,
)
from tritonite.engine.convolution.epilogue import store_results
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry


@triton.jit
def _add_tap(total, index, rows, weight, channel, strides, at, valid, inside, sizes, META: tl.constexpr):
    """Add a flat tap's terms to a tile. `strides` are those of what is read and of the filters."""
    tap = tap_at(index, META)
    values, mask = load_tap(rows, strides[0], at, tap, valid, inside, sizes, META)
    return total + masked_product(values, load_filter(weight, strides[1], channel, tap, inside, META), mask)


@triton.jit
def _add_distant(total, DISTANCE: tl.constexpr, values, mask, filters, META: tl.constexpr):
    """Add the products with the tap at a distance from the first one, if the filter has such a tap."""
    WIDTH: tl.constexpr = META.width
    if (DISTANCE >= 0) & (WIDTH.taps * WIDTH.dilation > DISTANCE) & (DISTANCE % WIDTH.dilation == 0):
        total += masked_product(values, filters[DISTANCE // WIDTH.dilation], mask)
    return total


@triton.jit
def _add_row(totals, row, rows, weight, channel, strides, at, valid, inside, sizes, META: tl.constexpr):
    """Add the terms of a row of the filter to a tile for each column of a run.

    A column that is read serves all columns of the run. It lies `j` columns from where the first tap reads for the
    first column of the run.
    """
    WIDTH: tl.constexpr = META.width
    RUN: tl.constexpr = META.run
    TAPS: tl.constexpr = WIDTH.taps
    REACH: tl.constexpr = (WIDTH.taps - 1) * WIDTH.dilation
    filters = ()
    for k in tl.static_range(TAPS):
        own = load_filter(weight, strides[1], channel, tap_at(row * TAPS + k, META), inside, META)
        filters = filters + (own,)
    tap = tap_at(row * TAPS, META)
    FIRST: tl.constexpr = -REACH if META.transposed else 0
    LAST: tl.constexpr = RUN if META.transposed else (RUN - 1) * WIDTH.stride + REACH + 1
    if META.transposed:
        start = at.width + WIDTH.padding
    else:
        start = at.width * WIDTH.stride - WIDTH.padding
    for j in tl.static_range(FIRST, LAST):
        column = start + j
        within = valid & (column >= 0) & (column < sizes.width)
        values, mask = load_column(rows, strides[0], at, tap, column, within, inside, sizes, META)
        added = ()
        for i in tl.static_range(RUN):
            if META.transposed:
                added = added + (_add_distant(totals[i], i - j, values, mask, filters, META),)
            else:
                added = added + (_add_distant(totals[i], j - i * WIDTH.stride, values, mask, filters, META),)
        totals = added
    return totals


@libentry()
@triton.jit(do_not_specialize=["depth", "height", "width", "out_height", "out_width", "positions", "blocks"])
def convolve_depthwise(
    x,
    weight,
    bias,
    out,
    residual,
    sums,
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
    ACTIVATION: tl.constexpr,
    META: tl.constexpr,
):
    """Compute a tile of `out`: the convolution of x, or if transposed its gradient by x, where x is that of the result.

    Args:
        residual, sums: None, or tensors of the shape and strides of `out`; sums before ACTIVATION go to `sums`.
        channels: channels of `out`.
        depth, height, width: sizes of x.
        positions: runs of columns in a sample of `out`, of which every channel has `blocks` tiles.
    """
    wait_for_previous_launch()
    INDEX: tl.constexpr = META.index
    CHANNELS: tl.constexpr = META.channels
    POSITIONS: tl.constexpr = META.positions
    RUN: tl.constexpr = META.run
    DEPTH: tl.constexpr = META.depth
    HEIGHT: tl.constexpr = META.height
    WIDTH: tl.constexpr = META.width
    ROWS: tl.constexpr = DEPTH.taps * HEIGHT.taps
    TAPS: tl.constexpr = ROWS * WIDTH.taps
    FILTERS: tl.constexpr = META.multiplier if META.transposed else 1
    strides = numbers(x_strides, INDEX), filter_numbers(weight_strides, INDEX)
    channel_blocks = tl.cdiv(channels, CHANNELS)
    program = tl.program_id(0)
    batch = (program // (blocks * channel_blocks)).to(tl.int64)
    channel = (program // blocks % channel_blocks).to(INDEX) * CHANNELS + tl.arange(0, CHANNELS)
    position = (program % blocks).to(INDEX) * POSITIONS + tl.arange(0, POSITIONS)
    inside, valid, sizes = channel < channels, position < positions, Extents(depth, height, width)
    at = coordinates(position, out_height, tl.cdiv(out_width, RUN), META)
    at = Extents(at.depth, at.height, at.width * RUN)
    initial = tl.zeros((CHANNELS, POSITIONS), META.compute)
    if bias is not None:
        initial += tl.load(bias + channel * bias_stride, mask=inside, other=0.0).to(META.compute)[:, None]
    totals = ()
    for _ in tl.static_range(RUN):
        totals = totals + (initial,)
    for i in range(FILTERS):
        if META.transposed:
            source = channel * META.multiplier + i
            own = source
        else:
            source = channel // META.multiplier
            own = channel
        rows = x + batch * strides[0].batch + source * strides[0].channel
        if RUN > 1:
            for k in tl.static_range(ROWS):
                totals = _add_row(totals, k, rows, weight, own, strides, at, valid, inside, sizes, META)
        else:
            total = totals[0]
            if META.group == TAPS:
                for k in tl.static_range(TAPS):
                    total = _add_tap(total, k, rows, weight, own, strides, at, valid, inside, sizes, META)
            else:
                for k in range(TAPS):
                    total = _add_tap(total, k, rows, weight, own, strides, at, valid, inside, sizes, META)
            totals = (total,)
    for i in tl.static_range(RUN):
        column = at.width + i
        mask = inside[:, None] & (valid & (column < out_width))[None, :]
        offset = batch * out_strides.batch + channel[:, None] * out_strides.channel
        offset += offset_at(out_strides, Extents(at.depth, at.height, column))[None, :]
        store_results(totals[i], out, residual, sums, offset, mask, ACTIVATION)
