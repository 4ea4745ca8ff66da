"""The tile of elements that a program of a pointwise kernel handles."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from tritonite import devices
from tritonite.engine.iteration import INT32_LIMIT, power_of_2
from tritonite.engine.pointwise.layout import VARIANTS
from tritonite.engine.pointwise.table import pointwise_table


def is_contiguous_along(strides: Sequence[int], d: int) -> bool:
    """Return whether an operand is contiguous along dimension d and strided along the fastest.

    An operand that repeats along the fastest dimension does not count: it is read once per row of a tile in any case.
    """
    return strides[d] == 1 and strides[0] != 0


class Tile(NamedTuple):
    """The `columns` of dimension 0 and `rows` of dimension 1 of a tile; if `linear`, rows of all other dimensions."""

    rows: int
    columns: int
    linear: bool = False


def choose_tile(sizes: Sequence[int], strides: Sequence[Sequence[int]], itemsize: int) -> Tile | None:
    """Return the tile of an iteration space, or None for the flat kernel.

    A thread should have 32 bytes of the widest operand, whose elements have `itemsize` bytes. regressions:
    silu_and_mul_tile_bytes
    """
    device = devices.current
    n = math.prod(sizes)
    elements = block_size(n, device.tile_bytes // max(itemsize, 2))
    if len(sizes) < 2 or sizes[0] < 16:
        return None
    small = n <= device.small_elements
    # Rows beyond the size of dimension 1 only matter with many tiles; elsewhere one kernel serves all sizes.
    most_rows = power_of_2(sizes[1]) if len(sizes) > 2 or device.interpreted else elements
    if any(is_contiguous_along(own, 1) for own in strides):
        tile = device.small_transpose_tile if small else _transpose_tile(sizes, itemsize)
        rows, columns = min(tile[0], most_rows), min(tile[1], power_of_2(sizes[0]))
        return Tile(rows, columns) if small or _tiles_pay(rows, columns, sizes) else None
    columns = min(elements, power_of_2(sizes[0]))
    # Columns that do not divide the row leave lanes idle. Halve them while that wastes an eighth or more.
    while columns > 128 and -sizes[0] % columns * 8 >= sizes[0]:
        columns //= 2
    rows = max(1, min(elements // columns, most_rows))
    if n < INT32_LIMIT and not device.interpreted:
        # The flat kernel leaves no lanes idle. It costs nothing where no vector loads are possible.
        wasteful = sizes[0] % 16 != 0 and -sizes[0] % columns * 5 >= sizes[0]
        # Without contiguous elements, Triton 3.6 gives neighbouring threads of a tile different rows.
        if wasteful or (rows > 1 and any(own[0] > 1 for own in strides)):
            return None
    enough = min(elements // columns, power_of_2(math.prod(sizes[1:])))
    if len(sizes) > 2 and pointwise_table().linear_below * rows <= enough and n < INT32_LIMIT:
        return Tile(enough, columns, linear=True)
    return Tile(rows, columns)


def _covered(size: int, block: int) -> int:
    """Return the size rounded up to whole blocks."""
    return -(-size // block) * block


def _transpose_tile(sizes: Sequence[int], itemsize: int) -> tuple[int, int]:
    """Return the device's (rows, columns) for transposed reads.

    Columns are halved for elements of 4 bytes, or if fewer columns cover fewer masked elements. regressions:
    add_transposed_narrow_tiles, add_transposed_narrow_tiles_16bit
    """
    rows, columns = devices.current.transpose_tile
    half = columns // 2
    fewer = _covered(sizes[0], half) < _covered(sizes[0], columns)
    return rows, half if itemsize >= 4 or fewer else columns


def _tiles_pay(rows: int, columns: int, sizes: Sequence[int]) -> bool:
    """Return whether tiles of matrices pay: most tiles are full, or the matrices are too large to be read flat.

    L1 holds a small matrix of a batch, whichever way it is read. regressions: add_transposed_flat,
    add_transposed_flat_16, add_transposed_tiled
    """
    matrix, limits = sizes[0] * sizes[1], pointwise_table()
    if len(sizes) == 2 or matrix > limits.matrix_in_cache:
        return True
    tiles = -(-sizes[0] // columns) * -(-sizes[1] // rows)
    return matrix >= tiles * max(limits.least_tile, rows * columns * 11 // 20)


def block_size(n: int, most: int) -> int:
    """Return the elements per program of a flat space of n elements.

    Small programs spread a small space over the device; large ones have less work per element. So the block grows as
    the square root of n. Below `least_elements` a program is only worth it while the device is less than half full.
    regressions: neg_least_elements
    """
    device = devices.current
    least = device.small_block or most
    enough = min(pointwise_table().least_elements, power_of_2(-(-2 * n // device.programs)))
    return min(most, max(least, enough, power_of_2(math.isqrt(max(n - 1, 0)) // 2 + 1)))


@functools.lru_cache(maxsize=VARIANTS)
def inverse(divisor: int) -> tuple[int, int]:
    """Return (multiplier, shift) with (n + (multiplier * n >> 32)) >> shift == n // divisor for 0 <= n < 2**31.

    The multiplier has the bits of an int32.
    """
    shift = (divisor - 1).bit_length()
    multiplier = ((1 << 32) * ((1 << shift) - divisor)) // divisor + 1
    return multiplier - (1 << 32 if multiplier >= 1 << 31 else 0), shift
