"""The kernel of convolutions and of transposed convolutions: one tile of an implicit product a program.

Rows are output positions (image, depth, height, width), columns output channels of a group. K runs over taps and, for
each tap, over blocks of input channels. With few channels (META.folded) taps and channels are one dimension, so that a
block of K is full. With few output positions (META.split) programs sum slices of K.
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
    phase_walk,
    position_indices,
    walk,
)
from tritonite.engine.convolution.epilogue import store_results
from tritonite.engine.convolution.meta import FilterStrides, TileColumns, TileRows, Walks
from tritonite.engine.gemm.kernels.epilogue import tile_index
from tritonite.language.indices import aligned_to
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry


@triton.jit
def _aligned_filters(strides, MULTIPLE: tl.constexpr, INNER: tl.constexpr):
    """Return `FilterStrides` of which MULTIPLE divides all but the channel's if INNER, otherwise but the column's."""
    column = aligned_to(strides.column, MULTIPLE if INNER else 1)
    channel = aligned_to(strides.channel, 1 if INNER else MULTIPLE)
    group, depth = aligned_to(strides.group, MULTIPLE), aligned_to(strides.depth, MULTIPLE)
    height, width = aligned_to(strides.height, MULTIPLE), aligned_to(strides.width, MULTIPLE)
    return FilterStrides(group, column, channel, depth, height, width)


# The sums


@triton.jit
def _sum_products(
    input,
    rows,
    columns,
    walks,
    axes,
    own,
    taken,
    channels,
    first_channel,
    last_channel,
    begin,
    end,
    ONE_GROUP: tl.constexpr,
    META: tl.constexpr,
):
    """Return a tile's sums of products over the steps of K from `begin` to `end`.

    Args:
        input: the first channel of the program's group.
        rows, columns: `TileRows`, `TileColumns`.
        walks, axes: the taps, and the axes that they walk along.
        own, taken: strides of the input and of the filters.
        channels: input channels.
        first_channel, last_channel: with ONE_GROUP the channels to add up; the others count as 0.
        META: `ForwardMeta`.
    """
    BLOCK_M: tl.constexpr = META.block_m
    BLOCK_N: tl.constexpr = META.block_n
    BLOCK_K: tl.constexpr = META.block_k
    INNER: tl.constexpr = META.input_inner
    INDEX: tl.constexpr = META.index
    MULTIPLE: tl.constexpr = max(META.input_multiple, META.filters_multiple if META.filters_inner else 1)
    along_d, along_h, along_w = walks.depth, walks.height, walks.width
    taps = along_d.taps * along_h.taps * along_w.taps
    total = tl.zeros((BLOCK_M, BLOCK_N), META.accumulator)
    # The tap and the first channel of a step, counted up because divisions take longer.
    next_d, next_h, next_w = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    next_channel = tl.full((), 0, tl.int32)
    if META.split and not META.folded:
        tap, block = divided(begin, tl.cdiv(channels, BLOCK_K))
        next_channel = block * BLOCK_K
        next_d, next_h, next_w = indices_of(tap, along_h.taps, along_w.taps)
    for k in range(begin, end):
        if META.folded:
            inner = k * BLOCK_K + tl.arange(0, BLOCK_K)
            tap, channel = divided(inner, channels)
            inner_mask = inner < taps * channels
            tap_d, tap_h, tap_w = indices_of(tap, along_h.taps, along_w.taps)
        else:
            channel = next_channel + tl.arange(0, BLOCK_K)
            inner_mask = channel < aligned_to(channels, MULTIPLE)
            tap_d, tap_h, tap_w = next_d, next_h, next_w
            next_channel += BLOCK_K
            is_last = next_channel >= channels
            next_channel = tl.where(is_last, 0, next_channel)
            next_w += is_last.to(tl.int32)
            is_last = next_w == along_w.taps
            next_w = tl.where(is_last, 0, next_w)
            next_h += is_last.to(tl.int32)
            is_last = next_h == along_h.taps
            next_h = tl.where(is_last, 0, next_h)
            next_d += is_last.to(tl.int32)
        move_d, move_h, move_w = tap_d * along_d.step, tap_h * along_h.step, tap_w * along_w.step
        moved = move_d.to(INDEX) * own.depth + move_h.to(INDEX) * own.height + move_w.to(INDEX) * own.width
        at_tap = (along_d.first_tap + tap_d * along_d.tap_step).to(INDEX) * taken.depth
        at_tap += (along_h.first_tap + tap_h * along_h.tap_step).to(INDEX) * taken.height
        at_tap += (along_w.first_tap + tap_w * along_w.tap_step).to(INDEX) * taken.width
        if ONE_GROUP:
            inner_mask &= (channel >= first_channel) & (channel < last_channel)
        mask = across(rows.valid, INNER) & along(inner_mask, INNER)
        if META.bounded:
            mask = meets_image(mask, rows.depth, rows.height, rows.width, move_d, move_h, move_w, axes, INNER, META)
        offset = across(rows.start, INNER) + along(moved + channel.to(INDEX) * own.channel, INNER)
        x = tl.load(input + offset, mask=mask, other=0.0)
        if not INNER:
            x = tl.trans(x)
        pointers = columns.filters[None, :] + (at_tap + channel.to(INDEX) * taken.channel)[:, None]
        y = tl.load(pointers, mask=inner_mask[:, None] & columns.valid[None, :], other=0.0)
        total = tl.dot(x, y, total, META.precision, out_dtype=META.accumulator)
    return total


@triton.jit
def _without_other_groups(
    total,
    column,
    columns,
    input,
    at_rows,
    at_columns,
    walks,
    axes,
    own,
    taken,
    channels,
    begin,
    end,
    META: tl.constexpr,
):
    """Return a tile's sums, computed group by group if one of them is nan.

    Filters of merged groups have zeros for the channels of other groups. The product of such a zero with an infinite
    input is nan, which the convolution of one group does not have.
    """
    # Triton (3.7) does not compile a maximum along one dimension of these sums for sm_100.
    is_nan = tl.reshape((total != total).to(tl.int32), (META.block_m * META.block_n,), can_reorder=True)
    if tl.max(is_nan, 0) > 0:
        each = channels // META.merged
        for i in range(META.merged):
            first = i * each
            last = first + each
            sums = _sum_products(
                input, at_rows, at_columns, walks, axes, own, taken, channels, first, last, begin, end, True, META
            )
            total = tl.where((column // (columns // META.merged) == i)[None, :], sums, total)
    return total


# The kernel


@libentry()
@triton.jit(do_not_specialize=["batches"])
def convolve_tile(
    input,
    filters,
    bias,
    out,
    residual,
    sums,
    more,
    axes,
    strides,
    batches,
    channels,
    columns,
    slice_stride,
    ACTIVATION: tl.constexpr,
    META: tl.constexpr,
):
    """Write ACTIVATION(convolution + bias + residual) for a tile of positions and columns of one group and phase.

    Args:
        input: (N, groups * channels, D, H, W), of any strides, like all tensors.
        filters: as `FilterStrides` describe them.
        bias: (groups * columns,), contiguous, or None.
        out: (N, groups * columns, D', H', W').
        residual, sums: None, or tensors of the shape and strides of `out`; sums before ACTIVATION go to `sums`.
        more: operands of META.program.
        axes: `Axes`.
        strides: `Strides`.
        batches: N.
        channels, columns: input and output channels of a group.
        slice_stride: elements between the results of slices of K, with META.split.
        ACTIVATION: a device function of a block, or None.
        META: `ForwardMeta`.
    """
    wait_for_previous_launch()
    BLOCK_M: tl.constexpr = META.block_m
    BLOCK_N: tl.constexpr = META.block_n
    BLOCK_K: tl.constexpr = META.block_k
    INDEX: tl.constexpr = META.index
    PHASED: tl.constexpr = META.phased
    # Sizes and strides of tensors whose channels are contiguous may be multiples of a vector.
    MULTIPLE: tl.constexpr = META.input_multiple
    FILTERS_INNER: tl.constexpr = META.filters_inner
    FILTERS_MULTIPLE: tl.constexpr = META.filters_multiple
    own, taken = (
        aligned_image(strides.input, MULTIPLE),
        _aligned_filters(strides.filters, FILTERS_MULTIPLE, FILTERS_INNER),
    )

    # The group, the phase and the tile of this program.
    depth, height, width = axes.depth, axes.height, axes.width
    if PHASED:
        positions_d = tl.cdiv(depth.positions, depth.stride)
        positions_h = tl.cdiv(height.positions, height.stride)
        positions_w = tl.cdiv(width.positions, width.stride)
    else:
        positions_d, positions_h, positions_w = depth.positions, height.positions, width.positions
    rows = tl.full((), batches, INDEX) * positions_d * positions_h * positions_w
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M).to(tl.int32), tl.cdiv(columns, BLOCK_N)
    unit = tl.program_id(0) // (tiles_m * tiles_n)
    tile_m, tile_n = tile_index(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, META.group_m)
    if PHASED:
        phases = depth.stride * height.stride * width.stride
        group, phase = (unit // phases).to(INDEX), unit % phases
        phase_d, phase_h, phase_w = indices_of(phase, height.stride, width.stride)
        along_d, along_h, along_w = phase_walk(depth, phase_d), phase_walk(height, phase_h), phase_walk(width, phase_w)
    else:
        group = unit.to(INDEX)
        along_d, along_h, along_w = walk(depth), walk(height), walk(width)

    # Where its rows meet the input with the first tap.
    row = tile_m.to(INDEX) * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = row < rows
    image, at_d, at_h, at_w = position_indices(row, positions_d, positions_h, positions_w)
    from_d = at_d * along_d.stride + along_d.origin
    from_h = at_h * along_h.stride + along_h.origin
    from_w = at_w * along_w.stride + along_w.origin
    start = image * own.batch + from_d * own.depth + from_h * own.height + from_w * own.width
    input += group * aligned_to(channels, MULTIPLE) * own.channel
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    in_group = column < aligned_to(columns, 1 if FILTERS_INNER else FILTERS_MULTIPLE)
    at_column = filters + group * taken.group + column.to(INDEX) * taken.column

    # The steps of K of this program.
    taps = along_d.taps * along_h.taps * along_w.taps
    if META.folded:
        steps = tl.cdiv(taps * channels, BLOCK_K)
    else:
        steps = taps * tl.cdiv(channels, BLOCK_K)
    begin, end = tl.full((), 0, tl.int32), tl.full((), steps, tl.int32)
    if META.split:
        each = tl.cdiv(end, tl.num_programs(1))
        begin = tl.program_id(1) * each
        end = tl.minimum(begin + each, end)
        out += tl.program_id(1).to(tl.int64) * slice_stride

    walks = Walks(along_d, along_h, along_w)
    at_rows, at_columns = TileRows(start, from_d, from_h, from_w, valid), TileColumns(at_column, in_group)
    total = _sum_products(
        input, at_rows, at_columns, walks, axes, own, taken, channels, 0, channels, begin, end, False, META
    )
    if META.merged > 1:
        total = _without_other_groups(
            total, column, columns, input, at_rows, at_columns, walks, axes, own, taken, channels, begin, end, META
        )
    if bias is not None:
        total += tl.load(bias + group * columns + column, mask=column < columns, other=0.0).to(total.dtype)[None, :]
    to_d, to_h = at_d * along_d.period + along_d.first, at_h * along_h.period + along_h.first
    to_w = at_w * along_w.period + along_w.first
    to = image * strides.out.batch + to_d * strides.out.depth + to_h * strides.out.height + to_w * strides.out.width
    if PHASED:
        valid &= (to_d < depth.positions) & (to_h < height.positions) & (to_w < width.positions)
    out_column = (group * columns + column) * strides.out.channel
    OUT_INNER: tl.constexpr = META.out_inner
    if not OUT_INNER:
        total = tl.trans(total)
    mask = across(valid, OUT_INNER) & along(column < columns, OUT_INNER)
    offset = across(to, OUT_INNER) + along(out_column, OUT_INNER)
    PROGRAM: tl.constexpr = META.program
    CHANNELS: tl.constexpr = META.program_channels
    if PROGRAM is not None:
        channel = (along(group * columns + column, OUT_INNER), along(column < columns, OUT_INNER))
        store_results(total, out, residual, sums, offset, mask, ACTIVATION, more, channel, PROGRAM, CHANNELS)
    else:
        store_results(total, out, residual, sums, offset, mask, ACTIVATION)
