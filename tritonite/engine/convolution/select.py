"""Choices for a convolution: the tile, copies of filters, slices of the filters' gradient, and where ATen is faster."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tritonite import devices
from tritonite.engine.convolution.problem import Problem
from tritonite.engine.convolution.table import Tile, table
from tritonite.engine.iteration import power_of_2
from tritonite.runtime.contract import settings

# The least rows, columns and elements along K of a tensor core product.
_LEAST_DOT = 16


def forward_tile(problem: Problem, device: torch.device) -> Tile:
    """Return the tile of a convolution. In invariant mode it does not depend on the number of images."""
    if settings().invariant:
        problem = problem._replace(batches=table().any_batches)
    tiles = table().forward[problem.dtype.itemsize]
    chosen = _fastest(tiles, problem.rows, problem.columns, problem.units, device)
    inner = problem.inner if is_folded(problem) else problem.channels
    return _fitting(_shortened(chosen, inner), problem.dtype, device)


def filter_tile(problem: Problem, device: torch.device) -> Tile:
    """Return the tile of the filters' gradient, whose rows are taps and channels."""
    tiles, folded = table().filters[problem.dtype.itemsize], is_folded(problem)
    rows, units = (problem.inner, 1) if folded else (problem.channels, problem.taps)
    chosen = _fastest(tiles, rows, problem.columns, units * problem.units, device, whole=False)
    return _fitting(_shortened(chosen, problem.rows), problem.dtype, device)


def is_folded(problem: Problem) -> bool:
    """Return whether taps and channels are one dimension of the product."""
    return problem.channels < table().folded_channels


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
    if images.dtype.itemsize != 2 or images.stride(1) == 1 or is_folded(problem):
        return False
    return problem.columns * problem.taps >= table().copied_work


def slices(problem: Problem, tile: Tile, device: torch.device) -> tuple[int, int]:
    """Return the blocks of positions of a slice of the filters' gradient, and the number of slices."""
    limits = table()
    blocks = max(1, -(-problem.rows // tile.block_k))
    folded = is_folded(problem)
    rows = -(-problem.inner // tile.block_m) if folded else problem.taps * -(-problem.channels // tile.block_m)
    tiles = rows * -(-problem.columns // tile.block_n) * problem.units
    resident = limits.rounds * tile.programs * devices.multiprocessors(device)
    bytes_of_slice = 4 * problem.units * problem.columns * problem.inner
    most = max(1, min(blocks // limits.least_blocks, limits.slices_bytes // max(1, bytes_of_slice), 65535))
    wanted = min(most, max(1, resident // tiles))
    steps = -(-blocks // wanted)
    return steps, -(-blocks // steps)


def _fastest(
    tiles: Sequence[Tile], rows: int, columns: int, units: int, device: torch.device, whole: bool = True
) -> Tile:
    """Return the tile with the lowest estimated time: rounds of programs times a tile's elements over its rate.

    Without `whole` rounds may be parts of one, because slices along K fill the device.
    """
    resident = devices.multiprocessors(device)

    def time(tile: Tile) -> float:
        count = units * -(-rows // tile.block_m) * -(-columns // tile.block_n)
        rounds = count / (resident * tile.programs)
        rounds = -(-count // (resident * tile.programs)) if whole and rounds < 4 else rounds
        return rounds * tile.programs * tile.block_m * tile.block_n / tile.rate

    return min(tiles, key=time)


def _shortened(tile: Tile, inner: int) -> Tile:
    """Shorten a tile's block along K to what there is."""
    return tile._replace(block_k=max(_LEAST_DOT, min(tile.block_k, power_of_2(inner))))


def _fitting(tile: Tile, dtype: torch.dtype, device: torch.device) -> Tile:
    """Reduce a tile's stages to what shared memory has room for."""
    while tile.num_stages > 1 and tile.shared(dtype.itemsize) > devices.shared_memory(device):
        tile = tile._replace(num_stages=tile.num_stages - 1)
    return tile


def aten_is_faster(problem: Problem, precision: str, channels_last: bool, gradient: bool) -> bool:
    """Return whether ATen is expected to be faster than the kernels here; no other function decides this.

    Exact float32 convolutions in channels-last order, by bf16x6 products, are faster than cuDNN's. cuDNN is faster with
    16-bit floats. Where speeds have not been measured, as with groups and for some gradients, ATen serves the call.
    """
    exact = problem.dtype is torch.float32 and precision == "ieee"
    return gradient or not exact or not channels_last or problem.groups > 1 or is_folded(problem)
