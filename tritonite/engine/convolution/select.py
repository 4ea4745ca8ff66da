"""Choices for a convolution: the tile and slices of K, merged groups, copies, and where ATen is faster."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tritonite import devices
from tritonite.engine.convolution.problem import Problem
from tritonite.engine.convolution.table import Tile, table
from tritonite.engine.iteration import power_of_2
from tritonite.runtime.contract import settings

# The least rows, columns and elements along K of a tensor core product.
_LEAST_DOT = 16

# Tiles


def forward_tile(problem: Problem, device: torch.device, splits: bool = True) -> Tile:
    """Return the tile of a convolution, with slices of K if `splits`.

    In invariant mode it does not depend on the number of images.
    """
    if settings().invariant:
        problem = problem._replace(batches=table().any_batches)
    candidates = [
        tile._replace(splits=count)
        for tile in table().forward[problem.dtype.itemsize]
        for count in possible_splits(problem, tile, device, splits)
    ]
    chosen = min(candidates, key=lambda tile: estimate(problem, tile, device))
    return fitting(chosen, problem, device)


def filter_tile(problem: Problem, device: torch.device) -> Tile:
    """Return the tile of the filters' gradient, whose rows are taps and channels."""
    tiles = table().filters[problem.dtype.itemsize]
    chosen = min(tiles, key=lambda tile: estimate_filters(problem, tile, device))
    return fitting(chosen, problem, device, filters=True)


def fitting(tile: Tile, problem: Problem, device: torch.device, filters: bool = False) -> Tile:
    """Return a tile with a block of K and stages that suit the problem and the device.

    With `filters` the tile is one of the filters' gradient, whose K are the positions.
    """
    tile = _shortened(tile, problem.rows if filters else _along_k(problem))
    while tile.num_stages > 1 and tile.shared(problem.dtype.itemsize) > devices.shared_memory(device):
        tile = tile._replace(num_stages=tile.num_stages - 1)
    return tile


def is_folded(problem: Problem) -> bool:
    """Return whether taps and channels are one dimension of the product."""
    return problem.channels < table().folded_channels


def _along_k(problem: Problem) -> int:
    """Return the elements that blocks of K divide: channels of a tap, or all."""
    return problem.inner if is_folded(problem) else problem.channels


def possible_splits(problem: Problem, tile: Tile, device: torch.device, splits: bool = True) -> list[int]:
    """Return the numbers of slices of K worth considering: 1, and powers of 2 while multiprocessors would be idle."""
    limits, found = table(), [1]
    steps = _steps(problem, _shortened(tile, _along_k(problem)))
    bytes_of_slice = 4 * problem.rows * problem.columns * problem.units
    resident = tile.programs * devices.multiprocessors(device)
    while splits and (count := 2 * found[-1]) <= min(limits.most_splits, steps // limits.least_steps):
        if count * bytes_of_slice > limits.slices_bytes or count * _programs(problem, tile) > resident:
            break
        found.append(count)
    return found


# Estimated times in microseconds, but for what all tiles of a problem share


def estimate(problem: Problem, tile: Tile, device: torch.device) -> float:
    """Return the estimated time of a convolution: rounds of resident programs, and the sum of slices of K."""
    steps, length, programs = forward_load(problem, tile)
    time = _on_one_multiprocessor(
        tile, steps * _share(length), tile.splits * programs / devices.multiprocessors(device)
    )
    if tile.splits > 1:
        limits, results = table(), problem.rows * problem.columns * problem.units
        time += limits.adding + 8 * tile.splits * results / limits.bytes_per_us
    return time


def estimate_filters(problem: Problem, tile: Tile, device: torch.device) -> float:
    """Return the estimated time of the filters' gradient: slices of the positions fill the device."""
    steps, length, programs = filter_load(problem, tile)
    busy = max(tile.busy, tile.alone / tile.programs)
    return programs / devices.multiprocessors(device) * steps * _share(length) * busy + tile.ends


def forward_load(problem: Problem, tile: Tile) -> tuple[int, float, int]:
    """Return the blocks of K of a program, their length over that of a whole one, and the programs of a slice."""
    short = _shortened(tile, _along_k(problem))
    return -(-_steps(problem, short) // tile.splits), short.block_k / tile.block_k, _programs(problem, tile)


def filter_load(problem: Problem, tile: Tile) -> tuple[int, float, int]:
    """Return what `forward_load` does for the filters' gradient, with blocks of all slices."""
    short = _shortened(tile, problem.rows)
    return -(-problem.rows // short.block_k), short.block_k / tile.block_k, _filter_programs(problem, tile)


def _on_one_multiprocessor(tile: Tile, steps: float, programs: float) -> float:
    """Return the time of a multiprocessor's programs. From four rounds on the last one may be a part of one."""

    def resident(count: float) -> float:
        return steps * max(tile.alone, count * tile.busy) + tile.ends if count else 0.0

    if programs >= 4 * tile.programs:
        return programs / tile.programs * resident(tile.programs)
    rounds, rest = divmod(-(-programs // 1), tile.programs)
    return rounds * resident(tile.programs) + resident(rest)


def _programs(problem: Problem, tile: Tile) -> int:
    """Return the programs of a convolution without slices of K."""
    return problem.units * -(-problem.rows // tile.block_m) * -(-problem.columns // tile.block_n)


def _filter_programs(problem: Problem, tile: Tile) -> int:
    """Return the programs of a slice of the filters' gradient."""
    folded = -(-problem.inner // tile.block_m)
    rows = folded if is_folded(problem) else problem.taps * -(-problem.channels // tile.block_m)
    return rows * -(-problem.columns // tile.block_n) * problem.units


def _steps(problem: Problem, tile: Tile) -> int:
    """Return the blocks of K of a convolution."""
    blocks = -(-_along_k(problem) // tile.block_k)
    return blocks if is_folded(problem) else problem.taps * blocks


def _share(length: float) -> float:
    """Return the time of a block of K over that of a whole one, from its length over that of a whole one."""
    fixed = table().fixed_share
    return fixed + (1 - fixed) * length


def _shortened(tile: Tile, inner: int) -> Tile:
    """Shorten a tile's block along K to what there is."""
    return tile._replace(block_k=max(_LEAST_DOT, min(tile.block_k, power_of_2(inner))))


# Slices, groups, copies


def slices(problem: Problem, tile: Tile, device: torch.device) -> tuple[int, int]:
    """Return the blocks of positions of a slice of the filters' gradient, and the number of slices."""
    limits = table()
    blocks = max(1, -(-problem.rows // tile.block_k))
    resident = limits.rounds * tile.programs * devices.multiprocessors(device)
    bytes_of_slice = 4 * problem.units * problem.columns * problem.inner
    most = max(1, min(blocks // limits.least_blocks, limits.slices_bytes // max(1, bytes_of_slice), 65535))
    wanted = min(most, max(1, resident // _filter_programs(problem, tile)))
    steps = -(-blocks // wanted)
    return steps, -(-blocks // steps)


def merged(problem: Problem) -> Problem:
    """Return the problem with narrow groups merged, as many as a tile of the fewest columns has room for.

    A product of tensor cores has at least as many columns, whether they are used or not.
    """
    room = table().merged_columns // problem.columns
    return problem.merging(max([count for count in range(1, room + 1) if problem.groups % count == 0], default=1))


def copies_filters(problem: Problem, filters: torch.Tensor) -> bool:
    """Return whether to copy filters so that their columns are contiguous: neither dimension of the product is."""
    if 1 in filters.stride()[:2] or filters.numel() == 0:
        return False
    batches = table().any_batches if settings().invariant else problem.batches
    return batches * problem.positions >= table().copied_positions


def copies_images(problem: Problem, images: torch.Tensor) -> bool:
    """Return whether to copy images to channels-last order, because loads of single elements would be slow.

    The choice does not depend on the number of images.
    """
    if images.dtype.itemsize > 4 or images.stride(1) == 1 or is_folded(problem):
        return False
    return problem.columns * problem.taps >= table().copied_work


# ATen


class Kind(NamedTuple):
    """Properties of a call, besides sizes, by which ATen may be faster.

    exact: float32 operands without TF32.
    channels_last: the input's channels are contiguous.
    gradient: the call is for gradients.
    patches: taps neither overlap nor leave out positions, and there is no padding, as in a vision transformer.
    pointwise: a product of channels, one tap at every position.
    sequence: one dimension.
    """

    exact: bool
    channels_last: bool
    gradient: bool
    patches: bool = False
    pointwise: bool = False
    sequence: bool = False


def aten_is_faster(problem: Problem, kind: Kind) -> bool:
    """Return whether ATen is expected to be faster than the kernels here; no other function decides this.

    Measured on an H200 beside cuDNN's own heuristic. What has not been measured is left to ATen.
    """
    grouped, folded, limits = problem.groups * problem.merged > 1, is_folded(problem), table()
    if problem.dtype is torch.float64:
        return True
    if problem.dtype is torch.float32:
        served = kind.exact and kind.channels_last and not folded
        few = problem.merged == 1 and (grouped or problem.channels <= limits.exact_gradient_channels)
        return not (served and (few or not kind.gradient))
    if folded:
        return not (kind.patches or kind.channels_last)
    if not kind.channels_last or problem.merged > 1:
        return True
    if kind.gradient:
        return not kind.pointwise
    long = kind.sequence and problem.phases == 1 and problem.taps >= limits.long_taps
    return not (grouped or long)
