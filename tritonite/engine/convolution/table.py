"""Tables of devices: tiles of implicit products by the bytes of an element, and limits of sizes."""

from __future__ import annotations

from typing import NamedTuple

from tritonite import devices
from tritonite.devices.tables import Tables


class Tile(NamedTuple):
    """Triton's meta-parameters for an implicit product, and times in microseconds that `select` estimates with."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3
    # Programs resident on a multiprocessor.
    programs: int = 1
    # A block of K: the time that it keeps the multiprocessor busy, and the time that it takes a program alone.
    busy: float = 0.5
    alone: float = 0.5
    # All of a program but its blocks of K.
    ends: float = 2.0
    # Whether exact float32 is multiplied by six products of bfloat16 terms.
    bf16x6: bool = False
    # Slices of K with programs of their own.
    splits: int = 1

    def shared(self, size: int) -> int:
        """Return the bytes of shared memory for operands of `size` bytes an element."""
        return self.num_stages * (self.block_m + self.block_n) * self.block_k * size


class BoxTile(NamedTuple):
    """A tile of convolutions by boxes of positions, for both consumers, and its time relative to the others'."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    time: float

    def shared(self, size: int, result_size: int) -> int:
        """Return the bytes of shared memory for operands of `size` and results of `result_size` bytes an element.

        A warp group stores half of its columns at a time, in the dtype of the result.
        """
        operands = self.stages * (self.block_m + self.block_n) * self.block_k * size
        return operands + self.block_m * self.block_n // 2 * result_size


class FilterBoxTile(NamedTuple):
    """A tile of the filters' gradient by boxes of positions: input channels of both consumers, columns, positions.

    Times are microseconds: of a box, and of all of a tile but its boxes.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    time: float
    ends: float = 4.0


class ConvolutionTable(NamedTuple):
    """Tiles, and limits that decide among ways to compute a convolution."""

    # By the bytes of an element: tiles of convolutions, and those of the filters' gradient.
    forward: dict[int, tuple[Tile, ...]]
    filters: dict[int, tuple[Tile, ...]]
    # Tiles by boxes of positions, of convolutions and of the filters' gradient, and the fewest channels of these.
    boxes: tuple[BoxTile, ...] = ()
    filter_boxes: tuple[FilterBoxTile, ...] = ()
    box_channels: int = 32
    # Channels of a group below which taps and channels are one dimension of the product.
    folded_channels: int = 16
    # Columns that one product computes of narrow groups together.
    merged_columns: int = 32
    # Images assumed in invariant mode, where tiles must not depend on the batch.
    any_batches: int = 8
    # Positions from which on filters that no operand order reads well are copied.
    copied_positions: int = 4096
    # Columns times taps from which on images are copied to channels-last order: elements loaded one by one are not
    # copied to shared memory by vectors, and those of less than 4 bytes not asynchronously.
    copied_work: int = 128
    # Rows of tiles that consecutive programs go down.
    group_m: int = 8
    # Of a block of K's time the share that does not depend on the block's length.
    fixed_share: float = 0.28
    # Slices of K of a convolution: the most, the least blocks of a slice, and the time to add them up, in microseconds,
    # with the bytes that are read and written in a microsecond.
    most_splits: int = 16
    least_steps: int = 4
    adding: float = 2.1
    bytes_per_us: float = 5.8e6
    # The filters' gradient: rounds of programs to aim at by slices of positions, the least blocks of a slice, and the
    # most bytes of all slices.
    rounds: int = 2
    least_blocks: int = 4
    slices_bytes: int = 2**26
    # Channels of a group up to which exact float32 gradients are served, and taps of a sequence's filters from which on
    # 16-bit convolutions are.
    exact_gradient_channels: int = 64
    long_taps: int = 11
    # Elements of a program that adds slices up, or writes block-diagonal filters.
    added: int = 256


# No tile has 16 columns: Triton's warp-group products of 16 columns read beyond shared memory.
_FLOATS_16 = (
    Tile(128, 64, 64, 4, 4, 2, 0.288, 0.356, 3.22),
    Tile(64, 32, 64, 4, 4, 3, 0.139, 0.242, 2.16),
    Tile(128, 128, 64, 8, 3, 2, 0.429, 0.505, 3.71),
    Tile(128, 256, 64, 8, 3, 1, 0.671, 0.758, 4.17),
    Tile(64, 64, 64, 4, 4, 3, 0.173, 0.259, 2.62),
    Tile(128, 32, 64, 4, 4, 2, 0.242, 0.318, 2.75),
    Tile(128, 128, 64, 8, 4, 1, 0.471, 0.42, 3.2),
)
_FLOATS = (
    Tile(64, 64, 32, 4, 3, 3, 0.594, 1.36, 2.84, bf16x6=True),
    Tile(64, 32, 32, 4, 3, 3, 0.398, 0.723, 2.95, bf16x6=True),
    Tile(128, 64, 32, 8, 3, 1, 0.815, 1.06, 6.86, bf16x6=True),
    Tile(128, 128, 32, 8, 3, 1, 2.05, 2.1, 6.36, bf16x6=True),
    Tile(128, 32, 32, 4, 3, 3, 0.838, 1.19, 4.08, bf16x6=True),
)
_FILTERS_16 = (
    Tile(64, 64, 64, 4, 4, 3, 0.211, 0.633, 3.52),
    Tile(64, 32, 64, 4, 4, 3, 0.215, 0.645, 0.4),
    Tile(128, 128, 64, 8, 3, 2, 0.653, 1.31, 8.71),
    Tile(128, 256, 64, 8, 3, 1, 1.28, 1.28, 8.37),
    Tile(128, 128, 64, 8, 4, 1, 0.746, 0.746, 2.99),
    Tile(64, 128, 64, 4, 4, 2, 0.459, 0.917, 3.04),
)
_FILTERS = (
    Tile(64, 64, 32, 4, 3, 3, 1.0, 3.01, 6.59, bf16x6=True),
    Tile(64, 32, 32, 4, 3, 3, 0.817, 2.45, 4.72, bf16x6=True),
    Tile(64, 128, 32, 4, 3, 2, 1.73, 3.46, 6.99, bf16x6=True),
    Tile(128, 32, 32, 4, 3, 3, 1.48, 4.44, 9.72, bf16x6=True),
)
_BOXES = (
    BoxTile(256, 128, 64, 4, 1.6),
    BoxTile(128, 256, 64, 4, 1.6),
    BoxTile(128, 128, 64, 5, 1.0),
    BoxTile(128, 64, 64, 6, 0.93),
)
_FILTER_BOXES = (
    FilterBoxTile(256, 128, 64, 4, 0.75),
    FilterBoxTile(128, 256, 64, 4, 0.75),
    FilterBoxTile(128, 128, 64, 6, 0.45),
    FilterBoxTile(128, 64, 64, 8, 0.32),
)
_DOUBLES = (
    Tile(64, 64, 16, 4, 3, 1, 0.3, 0.3),
    Tile(64, 32, 16, 4, 3, 1, 0.18, 0.18),
    Tile(64, 16, 16, 4, 3, 1, 0.15, 0.15),
    Tile(32, 32, 16, 4, 3, 1, 0.13, 0.13),
)
_NVIDIA = {2: _FLOATS_16, 4: _FLOATS, 8: _DOUBLES}
_NVIDIA_FILTERS = {2: _FILTERS_16, 4: _FILTERS, 8: _DOUBLES}


def _for_amd(table: dict[int, tuple[Tile, ...]]) -> dict[int, tuple[Tile, ...]]:
    return {
        size: tuple([tile._replace(num_stages=2, programs=1, bf16x6=False) for tile in tiles])
        for size, tiles in table.items()
    }


_INTERPRETED: dict[int, tuple[Tile, ...]] = dict.fromkeys((2, 4, 8), (Tile(128, 64, 64), Tile(64, 16, 64)))
TABLE: Tables[ConvolutionTable] = Tables(
    "convolution",
    {
        "nvidia": ConvolutionTable(_NVIDIA, _NVIDIA_FILTERS, _BOXES, _FILTER_BOXES),
        "none": ConvolutionTable(_NVIDIA, _NVIDIA_FILTERS),
        "amd": ConvolutionTable(_for_amd(_NVIDIA), _for_amd(_NVIDIA_FILTERS)),
        "interpreter": ConvolutionTable(_INTERPRETED, _INTERPRETED, copied_positions=2**20, most_splits=1),
    },
)


def table() -> ConvolutionTable:
    """Return the table of the current kind of device."""
    return TABLE[devices.current.kind]
