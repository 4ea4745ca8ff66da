"""Filters of several groups as block-diagonal filters of one, so that the tiles of narrow groups are full."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonite.engine.convolution.coordinates import position_indices
from tritonite.engine.convolution.meta import Axes, FilterStrides
from tritonite.engine.convolution.problem import Problem, filter_strides
from tritonite.engine.convolution.table import table
from tritonite.engine.iteration import offset_type
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import empty
from tritonite.runtime.libentry import libentry


@libentry()
@triton.jit
def write_block_diagonal(
    filters,
    out,
    axes,
    strides,
    channels,
    columns,
    elements,
    MERGED: tl.constexpr,
    BLOCK: tl.constexpr,
    INDEX: tl.constexpr,
):
    """Write the filters of MERGED groups to the diagonal of a matrix of blocks, with zeros elsewhere.

    Args:
        filters: as `FilterStrides` describe them.
        out: (groups / MERGED, kernel depth, height, width, MERGED * channels, MERGED * columns), contiguous.
        axes: `Axes`, for the numbers of taps.
        strides: `FilterStrides` of `filters`.
        channels, columns: channels and columns of a group.
        elements: elements of `out`.
    """
    wait_for_previous_launch()
    element = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    mask = element < elements
    column, rest = element % (MERGED * columns), element // (MERGED * columns)
    channel, rest = rest % (MERGED * channels), rest // (MERGED * channels)
    group, at_d, at_h, at_w = position_indices(rest, axes.depth.taps, axes.height.taps, axes.width.taps)
    own = column // columns
    at = (group * MERGED + own) * strides.group + column % columns * strides.column
    at += channel % channels * strides.channel
    at += at_d * strides.depth + at_h * strides.height + at_w * strides.width
    value = tl.load(filters + at, mask=mask & (channel // channels == own), other=0.0)
    tl.store(out + element, value, mask=mask)


def block_diagonal(
    filters: torch.Tensor, problem: Problem, axes: Axes, groups: int, transposed: bool
) -> tuple[torch.Tensor, FilterStrides]:
    """Return the filters of a problem with merged groups, and their strides.

    `filters` have `groups` groups; their dimensions are those of `filter_strides`.
    """
    sizes = (problem.groups, *filters.shape[2:], problem.channels, problem.columns)
    out = empty(sizes, filters.dtype, filters.device)
    write_block_diagonal[(-(-out.numel() // table().added),)](
        *(filters, out, axes),
        strides=filter_strides(filters, groups, transposed),
        channels=problem.channels // problem.merged,
        columns=problem.columns // problem.merged,
        elements=out.numel(),
        MERGED=problem.merged,
        BLOCK=table().added,
        INDEX=offset_type(filters, out),
    )
    return out, merged_strides(out)


def merged_strides(filters: torch.Tensor) -> FilterStrides:
    """Return the strides of contiguous filters, (groups, kernel depth, height, width, channels, columns)."""
    group, *spatial, channel, column = filters.stride()[-6:]
    return FilterStrides(group, column, channel, *spatial)
