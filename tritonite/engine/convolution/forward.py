"""The kernel of convolutions and of transposed convolutions: one tile of an implicit product a program.

Rows are output positions (image, depth, height, width), columns output channels of a group. K runs over taps and, for
each tap, over blocks of input channels. With few channels (META.folded) taps and channels are one dimension, so that a
block of K is full.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tritonite.engine.convolution.epilogue import store_results
from tritonite.engine.convolution.meta import FilterStrides, ImageStrides, Walk
from tritonite.engine.gemm.kernels.epilogue import tile_index
from tritonite.language.indices import aligned_to, quotient
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry


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


@triton.jit
def _aligned_filters(strides, MULTIPLE: tl.constexpr, INNER: tl.constexpr):
    """Return `FilterStrides` of which MULTIPLE divides all but the channel's if INNER, otherwise but the column's."""
    column = aligned_to(strides.column, MULTIPLE if INNER else 1)
    channel = aligned_to(strides.channel, 1 if INNER else MULTIPLE)
    group, depth = aligned_to(strides.group, MULTIPLE), aligned_to(strides.depth, MULTIPLE)
    height, width = aligned_to(strides.height, MULTIPLE), aligned_to(strides.width, MULTIPLE)
    return FilterStrides(group, column, channel, depth, height, width)


# Which taps


@triton.jit
def _walk(axis):
    """Return the taps of a convolution along an axis: all of them."""
    return Walk(1, 0, axis.stride, axis.origin, axis.dilation, axis.taps, 0, 1)


@triton.jit
def _phase(axis, phase):
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
    axes,
    strides,
    batches,
    channels,
    columns,
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
        axes: `Axes`.
        strides: `Strides`.
        batches: N.
        channels, columns: input and output channels of a group.
        ACTIVATION: a device function of a block, or None.
        META: `ForwardMeta`.
    """
    wait_for_previous_launch()
    BLOCK_M: tl.constexpr = META.block_m
    BLOCK_N: tl.constexpr = META.block_n
    BLOCK_K: tl.constexpr = META.block_k
    INNER: tl.constexpr = META.input_inner
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
        along_d, along_h, along_w = _phase(depth, phase_d), _phase(height, phase_h), _phase(width, phase_w)
    else:
        group = unit.to(INDEX)
        along_d, along_h, along_w = _walk(depth), _walk(height), _walk(width)

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

    taps = along_d.taps * along_h.taps * along_w.taps
    if META.folded:
        steps = tl.cdiv(taps * channels, BLOCK_K)
    else:
        steps = taps * tl.cdiv(channels, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), META.accumulator)
    # The tap and the first channel of a step, counted up because divisions take longer.
    next_d, next_h, next_w = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    next_channel = tl.full((), 0, tl.int32)
    for k in range(0, steps):
        if META.folded:
            inner = k * BLOCK_K + tl.arange(0, BLOCK_K)
            tap, channel = divided(inner, channels)
            inner_mask = inner < taps * channels
            tap_d, tap_h, tap_w = indices_of(tap, along_h.taps, along_w.taps)
        else:
            channel = next_channel + tl.arange(0, BLOCK_K)
            inner_mask = channel < aligned_to(channels, max(MULTIPLE, FILTERS_MULTIPLE if FILTERS_INNER else 1))
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
        mask = across(valid, INNER) & along(inner_mask, INNER)
        if META.bounded:
            mask = meets_image(mask, from_d, from_h, from_w, move_d, move_h, move_w, axes, INNER, META)
        offset = across(start, INNER) + along(moved + channel.to(INDEX) * own.channel, INNER)
        x = tl.load(input + offset, mask=mask, other=0.0)
        if not INNER:
            x = tl.trans(x)
        pointers = at_column[None, :] + (at_tap + channel.to(INDEX) * taken.channel)[:, None]
        y = tl.load(pointers, mask=inner_mask[:, None] & in_group[None, :], other=0.0)
        total = tl.dot(x, y, total, META.precision, out_dtype=META.accumulator)

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
    store_results(total, out, residual, sums, across(to, OUT_INNER) + along(out_column, OUT_INNER), mask, ACTIVATION)
