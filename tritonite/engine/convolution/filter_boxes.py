"""Host functions of filters' gradients by boxes of positions, which TMA copies: what they serve, tiles, the launch."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tritonite import devices
from tritonite.engine.convolution import boxes, hopper, hopper_filters, slices
from tritonite.engine.convolution.groups import merged_strides
from tritonite.engine.convolution.meta import Axes, Axis
from tritonite.engine.convolution.problem import Problem, filter_strides, image_strides
from tritonite.engine.convolution.table import FilterBoxTile, table
from tritonite.engine.iteration import offset_type
from tritonite.runtime.contract import fusion

_CONSUMERS = hopper.CONSUMERS.value


@dataclass(frozen=True, kw_only=True)
class FilterBoxMeta:
    """Facts of `hopper_filters.filter_gradient_boxes`.

    box: images, depths, heights and widths of a box, powers of two.
    block_m, block_n, block_k: input channels of a warp group, output channels, and positions of a box.
    strides: 1 or 2, along height and width.
    index: the dtype of element offsets within a slice.
    """

    box: tuple[int, int, int, int]
    block_m: int
    block_n: int
    block_k: int
    stages: int
    group_m: int
    strides: tuple[int, int]
    index: Any


class Choice(NamedTuple):
    """A tile of a gradient, the boxes of a slice, and the number of slices."""

    tile: FilterBoxTile
    steps: int
    splits: int


def choose(problem: Problem, input: torch.Tensor, grad: torch.Tensor, axes: Axes) -> Choice | None:
    """Return the choice with the least estimated time, or None for a gradient that the kernel does not serve.

    It serves 16-bit floats, one group, strides that `boxes.serves_strides` is true for, and rows of channels of whole
    16 bytes.
    """
    served = (
        bool(table().filter_boxes)
        and problem.dtype.itemsize == 2
        and devices.has_wgmma(grad.device)
        and problem.units == problem.merged == 1
        and problem.rows > 0
        and min(problem.channels, problem.columns) >= table().box_channels
        and boxes.serves_strides(axes)
        and boxes.is_addressable(input, problem.channels, image_strides(input), "channel")
        and boxes.is_addressable(grad, problem.columns, image_strides(grad), "channel")
    )
    return _fastest(problem, axes, table().filter_boxes, devices.multiprocessors(grad.device)) if served else None


@functools.lru_cache(maxsize=4096)
def _fastest(problem: Problem, axes: Axes, tiles: tuple[FilterBoxTile, ...], multiprocessors: int) -> Choice | None:
    found = [
        (_estimate(problem, choice, multiprocessors), choice)
        for tile in tiles
        if _is_exact(problem, axes, tile)
        for choice in _possible(problem, axes, tile, multiprocessors)
    ]
    return min(found, default=(0.0, None))[1]


def _is_exact(problem: Problem, axes: Axes, tile: FilterBoxTile) -> bool:
    """Return whether positions of boxes that do not exist multiply nothing: their taps are outside of the input.

    A box serves two taps if the blocks of input channels are odd in number. Then all positions have to exist.
    """
    for axis, empty in zip(axes, _empty(problem, axes, tile), strict=True):
        outside = all(_misses(axis, axis.origin + tap * axis.dilation) for tap in range(axis.taps))
        if empty and not (outside and _blocks(problem, tile) % _CONSUMERS == 0):
            return False
    return True


def _misses(axis: Axis, offset: int) -> bool:
    """Return whether a tap at `offset` meets no input before the first position, or none after the last one."""
    move, first = divmod(offset, axis.stride)
    return move <= 0 or (move + axis.positions) * axis.stride + first >= axis.size


def _sizes(problem: Problem, axes: Axes) -> boxes.Sizes:
    depth, height, width = axes
    return boxes.Sizes(problem.batches, depth.positions, height.positions, width.positions, problem.columns)


def _empty(problem: Problem, axes: Axes, tile: FilterBoxTile) -> list[int]:
    """Return how far boxes along depth, height and width reach beyond the positions."""
    box, _ = boxes.box_of(tile.block_k, _sizes(problem, axes))
    return [-(-axis.positions // side) * side - axis.positions for axis, side in zip(axes, box[1:], strict=True)]


def _blocks(problem: Problem, tile: FilterBoxTile) -> int:
    """Return the blocks of input channels of a tap, of which a warp group multiplies one."""
    return -(-problem.channels // (tile.block_m // _CONSUMERS))


def _tiles(problem: Problem, tile: FilterBoxTile) -> tuple[int, int]:
    """Return the pairs of (tap, block of input channels), and the blocks of output channels."""
    return -(-problem.taps * _blocks(problem, tile) // _CONSUMERS), -(-problem.columns // tile.block_n)


def _possible(problem: Problem, axes: Axes, tile: FilterBoxTile, multiprocessors: int) -> list[Choice]:
    """Return one slice, and those numbers of slices that fill rounds of one program a multiprocessor."""
    _, count = boxes.box_of(tile.block_k, _sizes(problem, axes))
    tiles_m, tiles_n = _tiles(problem, tile)
    bytes_of_slice = 4 * problem.columns * problem.inner
    most = min(count // table().least_blocks, table().slices_bytes // max(1, bytes_of_slice))
    wanted = {1, *[rounds * multiprocessors // (tiles_m * tiles_n) for rounds in range(1, 5)]}
    steps = {-(-count // min(max(1, splits), max(1, most))) for splits in wanted}
    return [Choice(tile, each, -(-count // each)) for each in sorted(steps)]


def _estimate(problem: Problem, choice: Choice, multiprocessors: int) -> float:
    """Return the estimated time in microseconds: rounds of tiles, and the sum of slices."""
    tile, limits = choice.tile, table()
    tiles_m, tiles_n = _tiles(problem, tile)
    rounds = -(-tiles_m * tiles_n * choice.splits // multiprocessors)
    time = rounds * (choice.steps * tile.time + tile.ends)
    if choice.splits > 1:
        time += limits.adding + 8 * choice.splits * problem.columns * problem.inner / limits.bytes_per_us
    return time


def filter_gradient(
    problem: Problem, input: torch.Tensor, grad: torch.Tensor, out: torch.Tensor, axes: Axes, choice: Choice
) -> None:
    """Write the gradient of the filters to `out`, as `choose` chose."""
    tile, steps, splits = choice
    sizes = _sizes(problem, axes)
    box, every = boxes.box_of(tile.block_k, sizes)
    tiles_m, tiles_n = _tiles(problem, tile)
    boxes_d, boxes_h, boxes_w = [-(-size // side) for size, side in zip(sizes[1:4], box[1:], strict=True)]
    tiles = tiles_m * tiles_n * splits
    programs = min(tiles, devices.multiprocessors(out.device))
    result, strides = out, filter_strides(out, 1)
    if splits > 1:
        result = slices.partial_gradients(out, problem, splits)
        strides = merged_strides(result)
    empty_d, empty_h, empty_w = _empty(problem, axes, tile)
    walk = hopper_filters.FilterWalk(
        boxes_d=boxes_d,
        boxes_h=boxes_h,
        boxes_w=boxes_w,
        empty_d=empty_d,
        empty_h=empty_h,
        empty_w=empty_w,
        **boxes.tap_fields(problem, axes),
        blocks=_blocks(problem, tile),
        tiles_m=tiles_m,
        tiles_n=tiles_n,
    )
    slice_stride = result[0].numel() if splits > 1 else 0
    hopper_filters.filter_gradient_boxes[(programs,)](
        *boxes.input_blocks(input, axes, box, tile.block_m // _CONSUMERS),
        boxes.image_blocks(grad, box, tile.block_n),
        result,
        boxes=every,
        steps=steps,
        tiles=tiles,
        programs=programs,
        walk=walk,
        strides=strides,
        sizes=hopper_filters.FilterSizes(problem.channels, problem.columns, slice_stride),
        META=FilterBoxMeta(
            box=box,
            block_m=tile.block_m // _CONSUMERS,
            block_n=tile.block_n,
            block_k=tile.block_k,
            stages=tile.stages,
            group_m=table().group_m,
            strides=(axes.height.stride, axes.width.stride),
            index=offset_type(result),
        ),
        num_warps=4,
        **fusion(),
    )
    if splits > 1:
        slices.add(result, out, problem, axes)
