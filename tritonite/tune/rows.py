"""The blocks that rows are cut into, by the kind of device and the regime that `engine.rows.blocks` finds."""

from __future__ import annotations

from typing import NamedTuple


class Regime(NamedTuple):
    """A block of `tiles` times the device's `row_elements`, which a program of `warps` warps takes at a time."""

    tiles: float
    warps: int


class Cooperative(NamedTuple):
    """Programs that share a row have a few blocks of `block_bytes` each, so that a multiprocessor holds some in cache.

    A program of `warps` warps takes `blocks` of them, or more where `most` programs would not be enough for a row.
    """

    block_bytes: int
    blocks: int
    warps: int
    most: int = 8


class Rows(NamedTuple):
    """The regimes of a kind of device. An element that a thread has takes registers: 32 at a time are the usual.

    Rows that are reduced, in blocks of a tile:
      `reduced_warps`: of rows longer than a tile, whose state is one value or that are loaded element by element. What
      a thread has is less than usual, and more of them wait for memory: 5 to 10 % for sums, 1.6 to 2 times for losses.
    Rows that are transformed:
      `short`: up to so long; a warp by itself waits for no other.
      `held_tiles`: up to so long; a program has a row in registers and reads it once.
      `split`: longer ones that are few; a reduction finds their results before.
      `twice`: longer ones, which a program reads twice, in blocks by what registers and the L2 cache have room for:
      `twice_staged` where stages give a row's state, `twice_halves` for those of half types up to `halves_tiles` long,
      of which two programs to a multiprocessor are on their way, `twice_narrow` where operands are many or loaded
      element by element.
      `cooperative_bytes`: from more on, no cache would hold a row; `cooperative` programs share it, by stages
      `cooperative_staged` ones.
    `common_bytes`: so much that all rows have in common goes past a multiprocessor's own cache, which keeps the row.
    """

    reduced_warps: int
    short: Regime
    held_tiles: int
    split: Regime
    twice: Regime
    twice_staged: Regime
    twice_halves: Regime
    twice_narrow: Regime
    halves_tiles: int
    cooperative: Cooperative
    cooperative_staged: Cooperative
    cooperative_bytes: int
    common_bytes: int


_NVIDIA = Rows(
    reduced_warps=8,
    short=Regime(1 / 4, 1),
    held_tiles=4,
    split=Regime(2, 16),
    twice=Regime(4, 32),
    twice_staged=Regime(8, 32),
    twice_halves=Regime(4, 16),
    twice_narrow=Regime(2, 32),
    halves_tiles=16,
    cooperative=Cooperative(16 * 1024, 4, 16),
    cooperative_staged=Cooperative(16 * 1024, 3, 8),
    cooperative_bytes=192 * 1024,
    common_bytes=128 * 1024,
)
_AMD = _NVIDIA._replace(
    split=Regime(2, 8),
    twice=Regime(4, 16),
    twice_staged=Regime(8, 16),
    twice_halves=Regime(4, 8),
    twice_narrow=Regime(2, 16),
)

ROWS: dict[str, Rows] = {"nvidia": _NVIDIA, "none": _NVIDIA, "amd": _AMD, "interpreter": _NVIDIA}
