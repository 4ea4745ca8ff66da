"""Block shapes of rows for each kind of device; `engine.rows.blocks` chooses among them."""

from __future__ import annotations

from typing import NamedTuple

from tritonite.devices.tables import Tables


class Regime(NamedTuple):
    """A block of `tiles` * `row_elements` (a field of the device) elements of a row, and the warps of a program."""

    tiles: float
    warps: int


class Cooperative(NamedTuple):
    """A program of `warps` warps reads `blocks` blocks of `block_bytes` each of a row.

    At most `most` programs share a row; longer rows get more blocks per program. Several such programs fit on a
    multiprocessor and leave their slices in its L1 cache, so that others load while one waits.
    """

    block_bytes: int
    blocks: int
    warps: int
    most: int = 8


class Invariant(NamedTuple):
    """Blocks of invariant mode, the same for any number of rows and any layout.

    A block has `tiles` * `row_elements` elements of a row, or the whole of a shorter row. A program reads `steps`
    blocks of a row. In a column reduction it has up to `rows` rows.
    """

    tiles: float
    steps: int
    rows: int


class RowsTable(NamedTuple):
    """Block shapes of a kind of device. A thread has 32 elements of a block, unless a field says otherwise.

    Column reductions:
      `short_columns`: longest row that a single thread reduces, if there are many rows.
    Row reductions, in blocks of a tile (`row_elements`):
      `reduced_warps`: warps for rows longer than a tile with a state of one value. A thread has 16 elements, so that
      more threads have loads in flight. regressions: mse_loss_warps, sum_rows_warps
      `indexed`: many rows of up to a tile, whose elements have an index (argmin). A program has one row per warp. The
      final reduction of a block dominates; with several blocks it happens once. regressions: min_short_rows,
      argmax_short_rows
      `reduced_long`: many longer rows whose elements have an index, or whose last tile would be mostly empty.
      regressions: var_mean_rows_beyond_tile, argmin_rows_beyond_tile
    Row operators (softmax, norms), by the length of their rows:
      `short`: one warp has one row or several, and waits for no other warp. regressions: layer_norm_one_warp
      `held_tiles`: longest row in tiles that a program holds in registers and reads once.
      `looped`: rows whose block would be partly empty. A program reads such a row twice, the second time from L1.
      regressions: layer_norm_looped
      `split`: longer rows, far too few to fill the device. A reduction in two launches computes their results first.
      regressions: softmax_split_row
      `few`: somewhat more of these rows. A program has one. regressions: log_softmax_few_rows
      `odd_segments`: long rows whose segments have an odd length, such as 7 x 7 images. Rows held in registers would
      keep a quotient for each element. regressions: batch_norm_odd_segments
      `twice`: longer rows, which a program reads twice. L2 must hold the rows in flight for the second reading.
      `twice_16bit`: those of 16-bit floats with stages, up to `twice_16bit_tiles` tiles. regressions:
      softmax_two_programs_16bit
      `twice_staged`: those with a state by stages, which takes fewer registers and so allows larger blocks.
      regressions: softmax_large_staged_blocks
      `twice_narrow`: those with several operands to reduce, or scalar loads, which take more registers. regressions:
      layer_norm_backward_narrow_blocks
      `cooperative_bytes`: longest row that caches keep. Programs share longer rows by `cooperative`, by
      `cooperative_staged` if stages give the state, and by `cooperative_16bit` if these are 16-bit floats or moments.
      regressions: softmax_cooperative, log_softmax_cooperative_blocks_16bit
      `cooperative_moments_bytes`: the same limit for states of three values, which spill in large blocks.
    Row operators on misaligned rows with stages. Finding the whole vectors of a row takes registers:
      `misaligned_held`: rows of float32 or wider of up to two tiles, held in registers.
      `misaligned`: longer ones, read twice, 32 bytes per thread. regressions: softmax_misaligned
      `misaligned_16bit`: the same for 16-bit floats, which are read twice whatever their length.
      `misaligned_short_16bit`, `misaligned_middle_16bit`: those of up to one tile, and of up to two. regressions:
      softmax_misaligned_short_16bit
      `misaligned_long`, `misaligned_long_16bit`: rows above `misaligned_bytes`. Two programs run on a multiprocessor,
      and the L2 cache keeps their rows for the second reading. Rows above `misaligned_most_bytes` take `twice`.
    All rows:
      `most_unrolled`: loops over more blocks are not unrolled.
      `scarcity`: scanned rows are split if this number of times their programs would not fill the device.
      `copied_elements`: inputs across the results' grain with more elements are copied first. For fewer, another launch
      costs as much. regressions: log_softmax_copied_along_the_grain
      `weight_bytes`: size from which operands that are the same for every row bypass L1, which then keeps the row.
      regressions: rms_norm_weight_bypasses_l1
      `invariant`: blocks of invariant mode.
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
    odd_segments: Regime
    twice: Regime
    twice_staged: Regime
    twice_16bit: Regime
    twice_narrow: Regime
    twice_16bit_tiles: int
    misaligned_held: Regime
    misaligned: Regime
    misaligned_16bit: Regime
    misaligned_short_16bit: Regime
    misaligned_middle_16bit: Regime
    misaligned_long: Regime
    misaligned_long_16bit: Regime
    misaligned_bytes: int
    misaligned_most_bytes: int
    cooperative: Cooperative
    cooperative_staged: Cooperative
    cooperative_16bit: Cooperative
    cooperative_bytes: int
    cooperative_moments_bytes: int
    weight_bytes: int
    invariant: Invariant
    most_unrolled: int = 4
    scarcity: int = 4
    copied_elements: int = 2**17


_NVIDIA = RowsTable(
    short_columns=32,
    reduced_warps=8,
    indexed=Regime(1 / 16, 4),
    reduced_long=Regime(1 / 8, 2),
    short=Regime(1 / 4, 1),
    held_tiles=4,
    looped=Regime(1 / 4, 4),
    split=Regime(1 / 2, 8),
    few=Regime(1, 16),
    odd_segments=Regime(1 / 2, 8),
    twice=Regime(4, 32),
    twice_staged=Regime(8, 32),
    twice_16bit=Regime(4, 16),
    twice_narrow=Regime(2, 32),
    twice_16bit_tiles=16,
    misaligned_held=Regime(2, 4),
    misaligned=Regime(1, 16),
    misaligned_16bit=Regime(1, 8),
    misaligned_short_16bit=Regime(1 / 8, 1),
    misaligned_middle_16bit=Regime(1 / 4, 4),
    misaligned_long=Regime(2, 16),
    misaligned_long_16bit=Regime(4, 16),
    misaligned_bytes=48 * 1024,
    misaligned_most_bytes=128 * 1024,
    cooperative=Cooperative(16 * 1024, 4, 16),
    cooperative_staged=Cooperative(32 * 1024, 3, 8),
    cooperative_16bit=Cooperative(16 * 1024, 3, 8),
    cooperative_bytes=192 * 1024,
    cooperative_moments_bytes=128 * 1024,
    weight_bytes=128 * 1024,
    invariant=Invariant(1, 4, 4),
)
_AMD = _NVIDIA._replace(
    few=Regime(1, 8),
    twice=Regime(4, 16),
    twice_staged=Regime(8, 16),
    twice_16bit=Regime(4, 8),
    twice_narrow=Regime(2, 16),
)

ROWS: Tables[RowsTable] = Tables("rows", {"nvidia": _NVIDIA, "none": _NVIDIA, "amd": _AMD, "interpreter": _NVIDIA})
