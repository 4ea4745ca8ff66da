"""The blocks that rows are cut into, by the kind of device and the regime that `engine.rows.blocks` finds."""

from __future__ import annotations

from typing import NamedTuple


class Regime(NamedTuple):
    """A block of `tiles` times the device's `row_elements`, which a program of `warps` warps takes at a time."""

    tiles: float
    warps: int


class Cooperative(NamedTuple):
    """A program of `warps` warps has `blocks` blocks of `block_bytes` of a row, or more where `most` are not enough.

    A multiprocessor has several such programs, and their shares of rows in its own cache, so that others load while one
    waits: with all of a share in registers, one or two programs each, it takes 1.1 to 2 times as long.
    """

    block_bytes: int
    blocks: int
    warps: int
    most: int = 8


class Invariant(NamedTuple):
    """Blocks for any number of rows and any layout: `tiles` times `row_elements` of a row, or the whole of a shorter.

    A program takes `steps` of them, and up to `rows` rows that stand upright.
    """

    tiles: float
    steps: int
    rows: int


class Rows(NamedTuple):
    """The regimes of a kind of device. A thread has 32 elements of a block as a rule.

    Of columns that are reduced: `short_columns` is the longest that threads reduce by themselves, where there are many.
    Of rows that are reduced, in blocks of a tile:
      `reduced_warps`: for rows longer than a tile whose state is one value. A thread has 16 elements, so that more
      threads wait for memory: 5 to 10 % for sums, 1.6 to 2 times for losses of two operands.
      `indexed`: for many rows of up to a tile whose elements have an index, as argmin's have. A block is of so many
      elements of as many rows as warps. To fold a block is most of the work, and of several blocks only one is folded:
      min of (14025, 607) halves took 23 us, and takes 19, argmax of (8000, 1221) 20 and 14.
      `reduced_long`: for many longer rows whose elements have an index, or of which tiles would waste much: var_mean of
      (20001, 4500) took 191 us by whole tiles, and takes 95, argmin 183 and 90.
    Of rows that are transformed, by their length:
      `short`: a warp has such a row, or several, and waits for no other: layer norm of half types at (65536, 1024) went
      from 83 to 92 % of copy bandwidth.
      `held_tiles`: up to so many tiles a program has a row in registers and reads it once.
      `looped`: but where a block that holds a row would be empty in part a program reads it twice, from its own cache,
      in such blocks or half of them: layer norm of (6166, 5120) halves went from 64 to 38 us.
      `split`: longer rows that are far too few to fill the device. A reduction finds their results before, in two
      launches: 3 us and what memory takes, where a program by itself takes 0.2 us for a thousand elements. One row of
      47,816 with gaps took 22 us, and takes 4.
      `few`: somewhat more of them, of which a program has one: log_softmax of (300, 18000) took 14 us, and takes 12.
      `odd_parts`: long rows in parts of odd length, such as channels of images of 7 by 7. Held, they would keep a
      quotient for each element: batch norm of (256, 512, 7, 7) halves took 22 us, and takes 18.
      `twice`: longer rows, which a program reads twice. 34 MB of rows on their way are what the L2 cache keeps for the
      second reading: softmax of 65,536 halves has 88 % of copy bandwidth with two programs of 16 warps on each
      multiprocessor (`twice_halves`, for up to `halves_tiles`), 77 with three and 70 with one. States by stages take
      fewer registers, which larger blocks use (`twice_staged`: softmax in float32 84 to 89 %). Several operands that
      are folded, or elements that are loaded one by one, take more (`twice_narrow`: layer norm's gradient 512 to 288
      us).
      `cooperative_bytes`: no cache would keep longer rows. Programs share them, `cooperative` or, where stages give a
      state, `cooperative_staged` and, of half types and for moments, `cooperative_halves`: softmax of (2048, 128256) in
      float32 took 674 us, and takes 567; log_softmax of (4096, 128256) in float16 takes 557 us with four blocks, 542
      with three.
      Moments, of three values a state, spill in large blocks (`cooperative_moments_bytes`).
      `shifted_held`: rows of two tiles that begin in the middle of words, whose states come from stages. To find their
      whole words takes registers, so that fewer threads hold them than hold others.
      `shifted`: longer ones, read twice, 32 bytes a thread (of half types `shifted_halves`): softmax of
      (3096, 9818) in float32 took 144 us held, and takes 89 (H100). Halves are read twice whatever their length, those
      of a tile by a warp (`shifted_short_halves`: (57761, 2501) took 208 us held, and takes 152), of two tiles by four
      (`shifted_middle_halves`).
      `shifted_long` (16-bit floats: `shifted_long_halves`): such rows above `shifted_bytes`. Two programs run on a
      multiprocessor, and the L2 cache keeps their rows for the second reading; smaller blocks have six. Rows above
      `shifted_most_bytes` take `twice`, one program a multiprocessor.
    `common_bytes`: so much that is the same in every row goes past a multiprocessor's own cache, which then keeps the
    row: root mean square norm of (1024, 65536) in float32 went from 83 to 87 %.
    `invariant`: of all rows, where a row's bits may depend on nothing but the row.
    """

    short_columns: int
    reduced_warps: int
    indexed: Regime
    reduced_long: Regime
    short: Regime
    held_tiles: int
    looped: Regime
    split: Regime
    few: Regime
    odd_parts: Regime
    twice: Regime
    twice_staged: Regime
    twice_halves: Regime
    twice_narrow: Regime
    halves_tiles: int
    shifted_held: Regime
    shifted: Regime
    shifted_halves: Regime
    shifted_short_halves: Regime
    shifted_middle_halves: Regime
    shifted_long: Regime
    shifted_long_halves: Regime
    shifted_bytes: int
    shifted_most_bytes: int
    cooperative: Cooperative
    cooperative_staged: Cooperative
    cooperative_halves: Cooperative
    cooperative_bytes: int
    cooperative_moments_bytes: int
    common_bytes: int
    invariant: Invariant


_NVIDIA = Rows(
    short_columns=32,
    reduced_warps=8,
    indexed=Regime(1 / 16, 4),
    reduced_long=Regime(1 / 8, 2),
    short=Regime(1 / 4, 1),
    held_tiles=4,
    looped=Regime(1 / 4, 4),
    split=Regime(1 / 2, 8),
    few=Regime(1, 16),
    odd_parts=Regime(1 / 2, 8),
    twice=Regime(4, 32),
    twice_staged=Regime(8, 32),
    twice_halves=Regime(4, 16),
    twice_narrow=Regime(2, 32),
    halves_tiles=16,
    shifted_held=Regime(2, 4),
    shifted=Regime(1, 16),
    shifted_halves=Regime(1, 8),
    shifted_short_halves=Regime(1 / 8, 1),
    shifted_middle_halves=Regime(1 / 4, 4),
    shifted_long=Regime(2, 16),
    shifted_long_halves=Regime(4, 16),
    shifted_bytes=48 * 1024,
    shifted_most_bytes=128 * 1024,
    cooperative=Cooperative(16 * 1024, 4, 16),
    cooperative_staged=Cooperative(32 * 1024, 3, 8),
    cooperative_halves=Cooperative(16 * 1024, 3, 8),
    cooperative_bytes=192 * 1024,
    cooperative_moments_bytes=128 * 1024,
    common_bytes=128 * 1024,
    invariant=Invariant(1, 4, 4),
)
_AMD = _NVIDIA._replace(
    few=Regime(1, 8),
    twice=Regime(4, 16),
    twice_staged=Regime(8, 16),
    twice_halves=Regime(4, 8),
    twice_narrow=Regime(2, 16),
)

ROWS: dict[str, Rows] = {"nvidia": _NVIDIA, "none": _NVIDIA, "amd": _AMD, "interpreter": _NVIDIA}
