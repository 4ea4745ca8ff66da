"""How many elements a program of a pointwise kernel takes, and of which shape."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from tritonite import devices
from tritonite.engine.iteration import INT32_LIMIT, power_of_2
from tritonite.engine.pointwise.layout import VARIANTS

# So many elements programs have before there are more than half of those that fill a device.
_ENOUGH = 1024
# How many elements a matrix may have to be read flat, and how many of them a tile has at least where it is not.
_MOST_IN_CACHE, _LEAST_OF_A_TILE = 4096, 512
# A tile whose second dimension leaves it less than one part of so many of its rows has rows of all dimensions.
_LEAST_SHARE = 4


def lies_along(strides: Sequence[int], d: int) -> bool:
    """Whether an operand's elements are next to each other along dimension d, and apart along the fastest.

    One that repeats along the fastest is read once for each row, whichever way a tile lies.
    """
    return strides[d] == 1 and strides[0] != 0


class Tile(NamedTuple):
    """A tile of dimension 0, its `columns`, and of dimension 1, or if `linear` of all others laid flat, its `rows`."""

    rows: int
    columns: int
    linear: bool = False


def choose_tile(sizes: Sequence[int], strides: Sequence[Sequence[int]], itemsize: int) -> Tile | None:
    """The tile of an iteration space, or None for the flat kernel.

    A thread wants 32 bytes of the widest operand, whose elements are of `itemsize`: silu_and_mul of 8,192 rows of 4,096
    bfloat16 takes 49 us so on an H200, and 54 with half as many.
    """
    device = devices.current
    n = math.prod(sizes)
    elements = block_size(n, device.tile_bytes // max(itemsize, 2))
    if len(sizes) < 2 or sizes[0] < 16:
        return None
    small = n <= device.small_elements
    # Fewer rows than a tile has matter where there are many tiles of them; elsewhere one kernel serves all.
    most_rows = power_of_2(sizes[1]) if len(sizes) > 2 or device.interpreted else elements
    if any(lies_along(own, 1) for own in strides):
        tile = device.small_transpose_tile if small else _transpose_tile(sizes, itemsize)
        rows, columns = min(tile[0], most_rows), min(tile[1], power_of_2(sizes[0]))
        return Tile(rows, columns) if small or _fills(rows, columns, sizes) else None
    columns = min(elements, power_of_2(sizes[0]))
    # A column block that does not divide the row leaves lanes idle; halve it while that wastes an eighth or more.
    while columns > 128 and -sizes[0] % columns * 8 >= sizes[0]:
        columns //= 2
    rows = max(1, min(elements // columns, most_rows))
    if n < INT32_LIMIT and not device.interpreted:
        # Where nothing is lost that could be read several elements at a time, the flat kernel leaves none idle.
        wasteful = sizes[0] % 16 != 0 and -sizes[0] % columns * 5 >= sizes[0]
        # Where no elements are next to each other, Triton 3.6 gives neighbouring threads of a tile different rows.
        if wasteful or (rows > 1 and any(own[0] > 1 for own in strides)):
            return None
    enough = min(elements // columns, power_of_2(math.prod(sizes[1:])))
    if len(sizes) > 2 and _LEAST_SHARE * rows <= enough and n < INT32_LIMIT:
        return Tile(enough, columns, linear=True)
    return Tile(rows, columns)


def _covered(size: int, block: int) -> int:
    return -(-size // block) * block


def _transpose_tile(sizes: Sequence[int], itemsize: int) -> tuple[int, int]:
    """A device's tile across the grain, with half as many columns for elements of 4 bytes, or where fewer stay empty.

    (3000, 100, 70) in float32 took 131 us by 64 columns, and takes 69 by 32; (700, 130, 130) halves 44 and 29.
    """
    rows, columns = devices.current.transpose_tile
    half = columns // 2
    fewer = _covered(sizes[0], half) < _covered(sizes[0], columns)
    return rows, half if itemsize >= 4 or fewer else columns


def _fills(rows: int, columns: int, sizes: Sequence[int]) -> bool:
    """Whether tiles are worth their empty places: most are full, or the matrices are too large to be read flat.

    Small matrices that lie one after another stay in a multiprocessor's cache, whichever way they are read:
    (10000, 17, 33) halves took 27 us by tiles, and takes 13; (200000, 16, 16) 125 and 81. But (3000, 64, 64) takes 19
    by tiles, and 59 flat.
    """
    matrix = sizes[0] * sizes[1]
    if len(sizes) == 2 or matrix > _MOST_IN_CACHE:
        return True
    tiles = -(-sizes[0] // columns) * -(-sizes[1] // rows)
    return matrix >= tiles * max(_LEAST_OF_A_TILE, rows * columns * 11 // 20)


def block_size(n: int, most: int) -> int:
    """How many elements a program takes of a space of n.

    Programs that take few are many, each soon done, and of small spaces all run at a time; those that take many have
    less to do for each element, which matters where they come one after another. So with four times the elements there
    are twice as many programs, of twice as many. But a space is cut into more than half of the programs that fill a
    device only where they have `_ENOUGH`: 10^6 halves in the cache took 2.2 us by 512 (H200), and take 1.6 by 1,024.
    """
    device = devices.current
    least = device.small_block or most
    enough = min(_ENOUGH, power_of_2(-(-2 * n // device.programs)))
    return min(most, max(least, enough, power_of_2(math.isqrt(max(n - 1, 0)) // 2 + 1)))


@functools.lru_cache(maxsize=VARIANTS)
def inverse(divisor: int) -> tuple[int, int]:
    """A multiplier, in the bits of an int32, and a shift: (n + (multiplier * n >> 32)) >> shift is n // divisor.

    For n below 2**31.
    """
    shift = (divisor - 1).bit_length()
    multiplier = ((1 << 32) * ((1 << shift) - divisor)) // divisor + 1
    return multiplier - (1 << 32 if multiplier >= 1 << 31 else 0), shift
