"""Kernels of the gradient of the filters: an implicit product whose long dimension is output positions.

Rows are (tap, input channel), columns output channels of a group, and K runs over the output positions of all images.
Slices of K are summed by programs of their own in float32, and added up in their order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tritonite.engine.convolution.coordinates import (
    across,
    aligned_image,
    along,
    divided,
    indices_of,
    meets_image,
    position_indices,
)
from tritonite.engine.gemm.kernels.epilogue import tile_index
from tritonite.language.indices import aligned_to
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry


@libentry()
@triton.jit(do_not_specialize=["batches", "steps"])
def filter_gradient_tile(
    input, grad, out, axes, strides, batches, channels, columns, steps, slice_stride, META: tl.constexpr
):
    """Write the sums of one slice of positions for a tile of (tap, channel) and columns of a group.

    Args:
        input: (N, groups * channels, D, H, W), of any strides, like all tensors.
        grad: (N, groups * columns, D', H', W'), the gradient of the convolution's result.
        out: the gradient of the filters, or of each slice of them.
        axes: `Axes`.
        strides: `Strides`; those of `out` are `filters`, and those of `grad` are `out`.
        batches: N.
        channels, columns: channels of a group in `input` and `grad`.
        steps: blocks of K of a slice.
        slice_stride: elements between the results of slices.
        META: `FilterMeta`.
    """
    wait_for_previous_launch()
    BLOCK_M: tl.constexpr = META.block_m
    BLOCK_N: tl.constexpr = META.block_n
    BLOCK_K: tl.constexpr = META.block_k
    INDEX: tl.constexpr = META.index
    # Loads go along the contiguous dimension: channels, or positions.
    INNER: tl.constexpr = not META.input_inner
    OUT_INNER: tl.constexpr = META.out_inner
    depth, height, width = axes.depth, axes.height, axes.width
    INPUT_MULTIPLE: tl.constexpr = META.input_multiple
    GRAD_MULTIPLE: tl.constexpr = META.grad_multiple
    own, other = aligned_image(strides.input, INPUT_MULTIPLE), aligned_image(strides.out, GRAD_MULTIPLE)
    channels, columns = aligned_to(channels, INPUT_MULTIPLE), aligned_to(columns, GRAD_MULTIPLE)
    taps = depth.taps * height.taps * width.taps

    # The group, the slice and the tile of this program.
    blocks = tl.cdiv(channels, BLOCK_M)
    if META.folded:
        tiles_m = tl.cdiv(taps * channels, BLOCK_M)
    else:
        tiles_m = taps * blocks
    tiles_n = tl.cdiv(columns, BLOCK_N)
    group = (tl.program_id(0) // (tiles_m * tiles_n)).to(INDEX)
    tile_m, tile_n = tile_index(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, META.group_m)
    if META.folded:
        row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        tap, channel = divided(row, channels)
        valid = row < taps * channels
    else:
        tap = tile_m // blocks
        channel = tile_m % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
        valid = channel < channels
    tap_d, tap_h, tap_w = indices_of(tap, height.taps, width.taps)
    move_d = tap_d * depth.dilation + depth.origin
    move_h = tap_h * height.dilation + height.origin
    move_w = tap_w * width.dilation + width.origin
    moved = move_d.to(INDEX) * own.depth + move_h.to(INDEX) * own.height + move_w.to(INDEX) * own.width
    moved += (group * channels + channel) * own.channel
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    at_column = (group * columns + column) * other.channel

    positions = tl.full((), batches, INDEX) * depth.positions * height.positions * width.positions
    first = tl.program_id(1).to(INDEX) * steps * BLOCK_K
    end = tl.minimum(first + steps * BLOCK_K, positions)
    total = tl.zeros((BLOCK_M, BLOCK_N), META.accumulator)
    for k in range(first, end, BLOCK_K):
        position = k + tl.arange(0, BLOCK_K)
        within = position < end
        image, at_d, at_h, at_w = position_indices(position, depth.positions, height.positions, width.positions)
        from_d, from_h, from_w = at_d * depth.stride, at_h * height.stride, at_w * width.stride
        start = image * own.batch + from_d * own.depth + from_h * own.height + from_w * own.width
        mask = across(valid, INNER) & along(within, INNER)
        if META.bounded:
            # Positions are the block's inner elements here.
            mask = meets_image(mask, from_d, from_h, from_w, move_d, move_h, move_w, axes, not INNER, META)
        x = tl.load(input + (across(moved, INNER) + along(start, INNER)), mask=mask, other=0.0)
        if not INNER:
            x = tl.trans(x)
        at = image * other.batch + at_d * other.depth + at_h * other.height + at_w * other.width
        mask = across(within, OUT_INNER) & along(column < columns, OUT_INNER)
        y = tl.load(grad + (across(at, OUT_INNER) + along(at_column, OUT_INNER)), mask=mask, other=0.0)
        if not OUT_INNER:
            y = tl.trans(y)
        total = tl.dot(x, y, total, META.precision, out_dtype=META.accumulator)

    result = strides.filters
    to_row = tap_d.to(INDEX) * result.depth + tap_h.to(INDEX) * result.height + tap_w.to(INDEX) * result.width
    to_row += channel.to(INDEX) * result.channel
    out += group * result.group
    if META.split:
        out += tl.program_id(1).to(tl.int64) * slice_stride
    pointers = out + to_row[:, None] + (column.to(INDEX) * result.column)[None, :]
    tl.store(pointers, total.to(out.dtype.element_ty), mask=valid[:, None] & (column < columns)[None, :])


@libentry()
@triton.jit(do_not_specialize=["slices"])
def add_slices(
    partials,
    out,
    axes,
    strides,
    channels,
    columns,
    elements,
    slice_stride,
    slices,
    MERGED: tl.constexpr,
    BLOCK: tl.constexpr,
    INDEX: tl.constexpr,
):
    """Add up the slices of the filters' gradient, in their order.

    Args:
        partials: (slices, groups / MERGED, kernel depth, height, width, MERGED * channels, MERGED * columns),
            contiguous. Only the blocks of channels and columns of one group are read.
        out: the gradient of the filters.
        axes: `Axes`, for the numbers of taps.
        strides: `FilterStrides` of `out`.
        channels, columns: channels and columns of a group.
        elements: elements of `out`.
        slice_stride: elements of a slice.
        slices: their number.
        MERGED: groups that one product has computed.
    """
    wait_for_previous_launch()
    element = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    mask = element < elements
    column, rest = element % columns, element // columns
    channel, rest = rest % channels, rest // channels
    group, at_d, at_h, at_w = position_indices(rest, axes.depth.taps, axes.height.taps, axes.width.taps)
    if MERGED > 1:
        taps = axes.depth.taps * axes.height.taps * axes.width.taps
        row = group // MERGED * taps + rest % taps
        row = row * (MERGED * channels) + group % MERGED * channels + channel
        at = row * (MERGED * columns) + group % MERGED * columns + column
    else:
        at = element
    total = tl.zeros((BLOCK,), partials.dtype.element_ty)
    for i in range(0, slices):
        total += tl.load(partials + tl.full((), i, tl.int64) * slice_stride + at, mask=mask, other=0.0)
    to = group * strides.group + column * strides.column + channel * strides.channel
    to += at_d * strides.depth + at_h * strides.height + at_w * strides.width
    tl.store(out + to, total.to(out.dtype.element_ty), mask=mask)
