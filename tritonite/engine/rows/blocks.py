"""The choice of blocks for a space of rows, by the device's `RowsTable`.

`for_reduction` and `for_transform` are the entries. Each tries the special cases first and ends with the general one.
"""

# Over 500 lines: one choice, read from the entries down; reductions and transforms share most of its cases.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tritonite import devices
from tritonite.engine.iteration import SECTOR, power_of_2
from tritonite.engine.rows.meta import BOTH, REDUCED
from tritonite.engine.rows.space import RowSpace
from tritonite.engine.rows.table import ROWS, Cooperative, Regime
from tritonite.runtime.contract import fusion, settings

# Threads of most programs.
_THREADS = 128


def with_aligned_loads(space: RowSpace, tensors: Sequence[torch.Tensor], staged: bool) -> RowSpace:
    """Return the space, marked `misaligned` if its rows are to be read in aligned vectors of 16 bytes.

    Rows must start off the vector boundary by the same number of elements in all `tensors`, and be long or many.
    Finding a row's vectors takes instructions. With stages (`staged`), which take many registers, only longer rows
    gain.
    """
    device, first = devices.current, tensors[0]
    itemsize = first.dtype.itemsize
    tiles = (1 / 2 if itemsize < 4 else 1) if staged else 1 / 4
    least = device.row_elements * (
        tiles if tile_elements(space) == device.row_elements else ROWS[device.kind].held_tiles
    )
    if space.n_reduced <= least or space.vector_width * itemsize >= 16 or not space.inner or settings().invariant:
        return space
    alike = all(x.dtype.itemsize == itemsize and x.stride() == first.stride() for x in tensors)
    if not alike or space.reduced[0][0] != (1,) or any(kind != BOTH for kind in space.kinds):
        return space
    return space._replace(aligned=16 // itemsize, misaligned=True)


class RowBlocks(NamedTuple):
    """The cut of a space: a program reads `steps` blocks of `rows` rows by `columns` elements.

    With `splits` above 1, a row has that number of slices; each program stores a state, and a second launch combines
    them. With `programs_per_row` above 1, that number of programs share a cooperative row and wait for each other.
    """

    rows: int
    columns: int
    warps: int
    programs: int
    steps: int
    splits: int = 1
    programs_per_row: int = 1

    @property
    def grid(self) -> tuple[int, int]:
        return self.programs, self.splits

    @property
    def options(self) -> dict[str, Any]:
        """The options for the compiler."""
        return {"num_warps": min(devices.current.most_warps, self.warps), **devices.current.options, **fusion()}

    def groups(self, space: RowSpace) -> tuple[int, bool]:
        """Return the elements of a row that a thread reduces as one group, and whether they are contiguous.

        In a column reduction one load of a thread, 16 bytes, has elements of several rows.
        """
        full_width, threads = 16 // space.itemsize, devices.warp_size() * self.warps
        if not space.inner:
            return max(1, min(self.columns, self.rows * self.columns // (threads * full_width))), False
        consecutive = (
            space.vector_width == full_width
            or self.rows > 1
            or self.columns < threads * space.vector_width * full_width
        )
        return min(full_width, self.columns), consecutive

    def meta_fields(self, space: RowSpace) -> dict[str, Any]:
        """Return the fields of `RowsMeta` that depend on the blocks."""
        whole = (
            space.n_kept % self.rows == 0,
            space.n_reduced % self.columns == 0 != space.n_reduced and not space.misaligned,
        )
        single_block = self.steps <= 1
        # The elements in whole vectors, at least.
        length = space.n_reduced - 2 * space.aligned * space.misaligned
        held = single_block and self.splits == self.programs_per_row == 1 and 2 * length > self.columns
        # A thread with more elements has no registers for the next block.
        threads = devices.warp_size() * self.warps
        prefetch = not space.inner and self.rows * self.columns <= 16 * threads
        # A few loads of 16 bytes in flight are enough, as long as other programs of the multiprocessor have some too.
        loads_first = space.vector_width * space.itemsize < 16 or self.programs <= devices.current.programs
        found = {
            "block": self[:2],
            "whole": whole,
            "single_block": single_block,
            "held": held,
            "loads_first": loads_first,
            "prefetch": prefetch,
        }
        # As `_row_per_thread` chooses blocks.
        row_per_thread = not space.inner and self.rows >= threads
        return found | {
            "programs_per_row": self.programs_per_row,
            "row_per_thread": row_per_thread,
            "odd_strides": row_per_thread and space.odd_strides,
        }


class RowTraits(NamedTuple):
    """The properties of a row operator, other than its space, that decide its blocks.

    Its reduction takes `leaf_operands` operands, the first with elements of `itemsize` bytes. It computes in the dtype
    `compute` and keeps a state of `states` values. It is `staged` if it has stages.
    """

    itemsize: int
    staged: bool
    leaf_operands: int
    compute: torch.dtype
    states: int = 1


def tile_elements(space: RowSpace) -> int:
    """Return the elements of a program's block: a quarter for small spaces, so that more of the device works."""
    tile = devices.current.row_elements
    return tile // 4 if space.n_kept * space.n_reduced <= 64 * tile else tile


def _elements_per_program(space: RowSpace, most: int) -> int:
    """Return the elements of a program, up to `most`, so that all of the device works.

    A thread has one vector, or two elements. More scalar loads in a thread would each belong to another row.
    """
    each = power_of_2(space.n_kept * space.n_reduced // devices.current.programs)
    if space.vector_width == 1 and space.n_reduced <= devices.warp_size():
        # At most four scalar loads a thread (regressions: log_softmax_scalar_loads).
        each = min(each, 4 * _THREADS)
    return min(most, max(_THREADS * max(2, space.vector_width), each))


def _row_per_warp(space: RowSpace) -> RowBlocks | None:
    """Return blocks of one row per warp for rows longer than a warp's vector load, up to 16 elements a thread, or None.

    Several warps would exchange their states at barriers. A program of one warp has rows with 16 elements a thread in
    total, or up to four rows with 32. If such programs would not fill the device they have more warps. If these still
    would not, they have fewer rows. regressions: log_softmax_four_rows_per_warp, log_softmax_eight_rows_per_warp,
    log_softmax_several_warps
    """
    columns, enough, lanes = power_of_2(space.n_reduced), devices.current.programs, devices.warp_size()
    if not lanes * space.vector_width < columns <= 16 * lanes:
        return None
    rows = max(min(4, 32 * lanes // columns), 16 * lanes // columns)
    warps = 1 if space.n_kept > rows * enough else max(2, 8 * lanes // columns)
    while rows * columns > 4 * lanes and rows > 1 and 3 * -(-space.n_kept // rows) < enough:
        rows, warps = rows // 2, max(1, warps // 2)
    return cut(space, min(power_of_2(space.n_kept), rows), columns, warps)


def cut(
    space: RowSpace, rows: int, columns: int, warps: int, scarcity: int = 2, least: int = 8, states: int = 1
) -> RowBlocks:
    """Return blocks of `rows` by `columns` for programs of `warps` warps, with rows split if programs are few.

    If `scarcity` times the programs would not fill the device, a row of `least` blocks or more is split; 0 never
    splits. A program that stores several `states` has at least two blocks, because adding up states costs as much as
    finding them (regressions: batch_norm_channels_last_splits).
    """
    device = devices.current
    programs, splits, steps = -(-space.n_kept // rows), 1, -(-space.n_reduced // columns)
    if scarcity and scarcity * programs <= device.programs and steps >= least:
        each = max(1 if states == 1 else 2, -(-steps // min(-(-device.programs // programs), steps)))
        splits, steps = -(-steps // each), each
    return RowBlocks(rows, columns, warps, programs, steps, splits)


def tiled(space: RowSpace, rows: int, columns: int, states: int = 1) -> RowBlocks:
    """Return the same as `cut`, with a thread for each 32 elements and at least four warps."""
    return cut(space, rows, columns, max(4, devices.warps(rows * columns // 32)), states=states)


def invariant(space: RowSpace) -> RowBlocks:
    """Return blocks that give a row the same bits in any number of rows and any layout.

    Columns and splits depend on the row's length alone. Reductions in a fixed order do not depend on `rows`.
    """
    device, regime = devices.current, ROWS[devices.current.kind].invariant
    most = max(1, int(regime.tiles * device.row_elements))
    columns = min(power_of_2(space.n_reduced), most)
    # A program has several short rows, a quarter of a block in all, so that more of the device works.
    rows = min(power_of_2(space.n_kept), max(1, most // 4 // columns) if space.inner else regime.rows)
    steps = -(-space.n_reduced // columns)
    splits = max(1, -(-steps // regime.steps))
    # In a loop over blocks a thread holds the running states too.
    warps = max(4, devices.warps(rows * columns // (32 if steps == 1 else 16)))
    return RowBlocks(rows, columns, warps, -(-space.n_kept // rows), min(steps, regime.steps), splits)


def for_reduction(space: RowSpace, states: int) -> RowBlocks:
    """Return the blocks of a reduction whose state has `states` values."""
    if settings().invariant:
        return invariant(space)
    device, tile = devices.current, tile_elements(space)
    if not space.inner:
        if found := _row_per_thread(space):
            return found
        # With 16 elements per thread, all programs run at a time.
        columns, elements = device.row_columns, device.row_elements // 2
        if tile < device.row_elements:
            # More of a column at a time, so that one launch reduces it.
            columns, elements = max(1, columns // 4), tile
        elif 4 * _contiguous_rows(space) <= device.row_columns:
            return _narrow_columns(space, tile, states)
        rows = min(power_of_2(space.n_kept), columns)
        blocks = tiled(space, rows, min(power_of_2(space.n_reduced), max(1, elements // rows)), states)
        if blocks.splits > 1 and 4 * space.n_reduced <= device.row_elements and _is_in_cache(space):
            # Narrower blocks save the second launch (regressions: mean_columns_without_split).
            rows = min(
                power_of_2(space.n_kept),
                columns // 2 if space.n_kept > 2 * device.row_elements else columns // 4,
            )
            return cut(space, rows, device.row_elements // rows, 8, scarcity=0)
        return blocks
    if space.n_kept >= device.programs and space.n_reduced > device.row_elements:
        # Masked elements beyond a row's end cost as much as others, and more if elements have an index.
        waste = -space.n_reduced % device.row_elements
        if space.index_strides or 16 * waste > space.n_reduced:
            return _regime(space, ROWS[device.kind].reduced_long)
    if space.index_strides and space.n_kept >= 2 * device.programs:
        columns, warps = int(ROWS[device.kind].indexed.tiles * device.row_elements), ROWS[device.kind].indexed.warps
        if columns < space.n_reduced <= device.row_elements:
            # A row per warp.
            return cut(space, warps, columns, warps)
    columns = min(power_of_2(space.n_reduced), tile)
    if columns < tile:
        tile = _elements_per_program(space, tile)
        return _row_per_warp(space) or tiled(space, min(power_of_2(space.n_kept), max(1, tile // columns)), columns)
    if tile < device.row_elements and tile < space.n_reduced <= 8 * tile:
        # Few rows: a program reads a whole row in one block, eight elements per thread.
        columns = power_of_2(space.n_reduced)
        return cut(space, 1, columns, max(4, devices.warps(columns // 8)))
    if space.n_reduced <= tile or tile < device.row_elements or (space.aligned and states > 1):
        return tiled(space, 1, columns)
    warps = ROWS[device.kind].reduced_warps
    if space.vector_width * space.itemsize < 16:
        # A thread has eight narrow loads in flight, not sixteen.
        columns //= 2
    while not space.aligned and columns > 1024 and 4 * (-space.n_reduced % columns) > space.n_reduced:
        # A scalar load that is masked off takes as long as any other.
        warps, columns = warps // 2, columns // 2
    return cut(space, 1, columns, max(4, warps))


def _row_per_thread(space: RowSpace, held_bytes: int = 0) -> RowBlocks | None:
    """Return blocks of a column reduction with each short row in one thread, or None.

    No data passes between threads. A thread loads 16 bytes at a time, elements of several rows. It has up to 32
    elements of them in one block, or else blocks of 16. Rows that are held until they are written have at most
    `held_bytes`. If programs would not fill the device, a thread has fewer rows, and rows of more than four elements
    have other blocks.
    """
    length, enough = space.n_reduced, devices.current.programs // 2 * devices.warp_size()
    columns, each = power_of_2(length), 16 // space.itemsize
    if held_bytes:
        fits = max(1, held_bytes // (columns * space.itemsize))
        each = min(each, 1 << fits.bit_length() - 1)
    if not 0 < length <= ROWS[devices.current.kind].short_columns:
        return None
    if length > 4 and space.n_kept < enough * each:
        return None
    while each > 1 and space.n_kept < enough * each:
        each //= 2
    warps = 4
    while warps > 1 and space.n_kept < 2 * enough * warps * each:
        warps //= 2
    if columns * each > 32 and not held_bytes:
        columns = 16 // each
    return cut(space, devices.warp_size() * warps * each, columns, warps, scarcity=0)


def for_states(space: RowSpace) -> RowBlocks:
    """Return the blocks of the reduction that combines the states of split rows, which are stored split by split."""
    if settings().invariant:
        # One program combines all splits, whatever their number.
        blocks = invariant(space)
        return blocks._replace(steps=blocks.steps * blocks.splits, splits=1)
    # All splits in one block if they fit, for a single wait for memory.
    device = devices.current
    tile, splits = device.row_elements, power_of_2(space.n_reduced)
    rows = min(power_of_2(space.n_kept), max(8, min(32, tile // splits)))
    # With few rows a program has fewer of them, and then all splits in one block.
    while rows > 1 and 16 * space.n_kept < rows * device.programs and splits > tile // rows:
        rows //= 2
    columns = min(splits, max(1, tile // rows))
    # These few programs have the device to themselves: eight splits per thread.
    warps = max(4, devices.warps(rows * columns // 8))
    return RowBlocks(rows, columns, warps, -(-space.n_kept // rows), -(-space.n_reduced // columns))


def for_transform(space: RowSpace, traits: RowTraits) -> RowBlocks:
    """Return the blocks of a row operator."""
    if settings().invariant:
        return invariant(space)
    device, tile, regimes = devices.current, tile_elements(space), ROWS[devices.current.kind]
    if not space.inner:
        return _column_transform(space, traits)
    if space.misaligned and traits.staged and _enough_misaligned_rows(space, traits):
        return _misaligned_staged(space, traits)
    if _has_odd_segments(space) and 16 * space.n_kept > device.programs:
        return _regime(space, regimes.odd_segments)
    if space.n_reduced > regimes.held_tiles * device.row_elements:
        return _long_rows(space, traits)
    columns = power_of_2(space.n_reduced)
    if (
        found := _transposed_operand(space)
        or _weighted_in_small_blocks(space, traits)
        or _staged_scalar_loads(space, traits)
        or _row_per_warp(space)
    ):
        return found
    short = int(regimes.short.tiles * tile)
    # Elements per program if all programs of the device get some.
    each = power_of_2(space.n_kept * space.n_reduced // device.programs)
    in_vectors = space.vector_width > 1 or columns > devices.warp_size()
    if in_vectors and space.full_operands == 1 and each >= device.row_elements and columns <= short:
        # At least two rows of 16-bit floats.
        return cut(
            space,
            min(power_of_2(space.n_kept), max(short // columns, 4 // traits.itemsize)),
            columns,
            regimes.short.warps,
        )
    rows = (
        1 if space.misaligned else min(power_of_2(space.n_kept), max(1, _elements_per_program(space, tile) // columns))
    )
    blocks = tiled(space, rows, columns)
    blocks = _with_more_warps(blocks, space, blocks.warps > 1 and (rows > 1 or traits.states > 1))
    if not (space.aligned or traits.staged) and space.n_reduced > device.row_elements:
        blocks = blocks._replace(warps=2 * blocks.warps)
    return blocks


def _has_odd_segments(space: RowSpace) -> bool:
    """Return whether rows of a single full operand are long and have several segments of unaligned length."""
    several = bool(space.shapes[1]) and not space.segmented and not space.aligned
    return several and space.full_operands == 1 and space.n_reduced > 2 * devices.current.row_elements


def _transposed_operand(space: RowSpace) -> RowBlocks | None:
    """Return blocks for short rows of which some operand is contiguous along the kept dimensions, or None.

    A program has at least four rows, so that a sector of that operand serves several, and eight elements per thread.
    regressions: log_softmax_backward_transposed
    """
    columns = power_of_2(space.n_reduced)
    transposed = [
        kind == BOTH and 0 < kept[0] < own[0]
        for kind, own, kept in zip(space.kinds, space.reduced[0], space.kept[0], strict=True)
    ]
    if not any(transposed) or 4 * columns > devices.current.row_elements:
        return None
    rows = min(power_of_2(space.n_kept), max(4, devices.current.row_elements // 4 // columns))
    return cut(space, rows, columns, devices.warps(rows * columns // 8))


def _staged_scalar_loads(space: RowSpace, traits: RowTraits) -> RowBlocks | None:
    """Return blocks for many rows with stages whose elements come by narrow loads, or None.

    A thread has 64 bytes of one row. regressions: softmax_scalar_loads, softmax_scalar_loads_16bit
    """
    length, tile = space.n_reduced, devices.current.row_elements
    few = tile_elements(space) < tile or 2 * space.n_kept < devices.current.programs
    if space.misaligned or few or space.has_weights or not traits.staged or space.vector_width * traits.itemsize >= 16:
        return None
    if not tile // 4 < length <= tile:
        return None
    columns = power_of_2(length)
    return cut(space, 1, columns, devices.warps(columns * traits.itemsize // 64))


def _with_more_warps(blocks: RowBlocks, space: RowSpace, wanted: bool) -> RowBlocks:
    """Return the blocks with twice the warps, if `wanted` and several operands have elements of their own.

    The assembler keeps few loads in flight in a thread with 32 elements of each operand. Operands that many rows share,
    such as a group norm's weights, come from a cache and do not count. regressions: masked_softmax_warps
    """
    several = len(space.kinds) == space.full_operands > 1 and all(all(own) for own in space.kept[0])
    return blocks._replace(warps=2 * blocks.warps) if several and wanted else blocks


def _enough_misaligned_rows(space: RowSpace, traits: RowTraits) -> bool:
    """Return whether misaligned rows are enough to fill the device with programs that read one row twice.

    Rows of up to a tile must be of 16-bit floats; each takes a warp.
    """
    programs = devices.current.programs
    if space.n_reduced <= devices.current.row_elements:
        return traits.itemsize < 4 and space.n_kept >= 4 * programs
    return 2 * space.n_kept > programs


def _misaligned_staged(space: RowSpace, traits: RowTraits) -> RowBlocks:
    """Return blocks for many misaligned rows with stages."""
    regimes, tiles = ROWS[devices.current.kind], space.n_reduced / devices.current.row_elements
    row_bytes, narrow = space.n_reduced * traits.itemsize, traits.itemsize < 4
    if tiles > regimes.misaligned_held.tiles and row_bytes > regimes.misaligned_bytes:
        long = regimes.misaligned_long_16bit if narrow else regimes.misaligned_long
        return _regime(space, long if row_bytes <= regimes.misaligned_most_bytes else regimes.twice)
    if narrow:
        short, middle = regimes.misaligned_short_16bit, regimes.misaligned_middle_16bit
        return _regime(space, short if tiles <= 1 else middle if tiles <= 2 else regimes.misaligned_16bit)
    return _regime(space, regimes.misaligned_held if tiles <= regimes.misaligned_held.tiles else regimes.misaligned)


def _weighted_in_small_blocks(space: RowSpace, traits: RowTraits) -> RowBlocks | None:
    """Return small blocks, which waste little, for many rows with weights, or None.

    They serve 16-bit rows whose length is far below a power of 2. They also serve short rows with scalar loads, of any
    dtype, if L1 has room for a row of each warp. regressions: layer_norm_looped, layer_norm_scalar_loads
    """
    device, length, regime = devices.current, space.n_reduced, ROWS[devices.current.kind].looped
    if not space.has_weights or 2 * space.n_kept < device.programs:
        return None
    if space.vector_width * space.itemsize < 8:
        many = space.n_kept >= 4 * device.programs and space.full_operands == 1
        fits = device.row_elements // 4 < length <= 2 * device.row_elements // traits.itemsize
        return cut(space, 1, device.row_elements // 16, 1) if many and fits else None
    if traits.itemsize >= 4 or length <= device.row_elements or 8 * (power_of_2(length) - length) < length:
        return None
    columns, warps = int(regime.tiles * device.row_elements), regime.warps
    if 16 * (-length % columns) > length:
        columns, warps = columns // 2, warps // 2
    return cut(space, 1, columns, warps)


def are_segmented(space: RowSpace, traits: RowTraits, blocks: RowBlocks) -> bool:
    """Return whether rows whose operands have one element per segment are transformed segment by segment.

    Their results are computed first, by a launch that reads the reduced operands once more. A program that holds a
    whole row would need each element's segment number and a load for each such operand. Short rows and segments are
    better held. So are gradients, which reduce two operands. regressions: group_norm_segments
    """
    if not space.segmented:
        return False
    held, tile = blocks.steps * blocks.splits == 1, devices.current.row_elements
    long = 4 * space.n_reduced >= 3 * tile and 32 * space.shapes[1][0] >= tile
    return not held or (traits.leaf_operands == 1 and long)


def for_segments(space: RowSpace) -> RowBlocks:
    """Return blocks for segments of rows whose results are known. Each segment is transformed by itself.

    With scalar loads, neighbouring threads have elements of one row. Every thread then has elements of all rows of a
    block, and operands for each of them. More than 16 rows would spill.
    """
    if settings().invariant:
        return invariant(space)
    tile = devices.current.row_elements
    columns = min(power_of_2(space.n_reduced), tile)
    while columns > tile // 8 and 4 * (-space.n_reduced % columns) > space.n_reduced:
        columns //= 2
    splits = -(-space.n_reduced // columns)
    rows = min(power_of_2(space.n_kept), tile // columns, 16 if space.vector_width == 1 else tile)
    return tiled(space, rows, columns)._replace(splits=splits, steps=1)


def _is_in_cache(space: RowSpace) -> bool:
    """Return whether an operand probably is in the L2 cache."""
    return space.n_kept * space.n_reduced <= 2048 * devices.current.row_elements


def _contiguous_rows(space: RowSpace) -> int:
    """Return the number of rows of a column reduction that are contiguous, or within a sector of each other."""
    sizes, strides = space.shapes[0], space.kept[0][0]
    if not sizes:
        return space.n_kept
    near = [stride * space.itemsize < SECTOR for stride in strides]
    return math.prod(sizes[: max(1, near.index(False) if False in near else len(sizes))])


def _narrow_columns(space: RowSpace, elements: int, states: int) -> RowBlocks:
    """Return blocks for few contiguous rows of a column reduction: all of them in a program, 16 `elements` a thread.

    With more rows, a program would read a few elements at each of many distant addresses. regressions:
    softmax_two_columns, softmax_eight_columns
    """
    rows = min(power_of_2(space.n_kept), power_of_2(_contiguous_rows(space)))
    columns = min(power_of_2(space.n_reduced), max(1, elements // rows))
    return cut(space, rows, columns, devices.warps(rows * columns // 16), states=states)


def _column_transform(space: RowSpace, traits: RowTraits) -> RowBlocks:
    """Return the blocks of a row operator along a strided dimension.

    A program has few rows, which caches keep for a second reading.
    """
    device, tile = devices.current, tile_elements(space)
    if found := _row_per_thread(space, held_bytes=128 // max(1, space.full_operands)):
        return found
    rows, length = min(power_of_2(space.n_kept), device.row_columns // 4), power_of_2(space.n_reduced)
    held = min(rows, int(ROWS[device.kind].held_tiles) * device.row_elements // length)
    if _contiguous_rows(space) < device.row_columns // 4 and rows * length > tile:
        if 8 * space.n_kept >= held * device.programs:
            return _narrow_columns(space, device.row_elements * min(2, space.full_operands) // 2, traits.states)
        # In a small space a program holds fewer rows, so that all of the device works.
        while held > 1 and 8 * space.n_kept < held * device.programs:
            held //= 2
        return cut(space, held, length, max(1, held * length // 512))
    blocks = tiled(space, rows, min(length, max(1, tile // rows)))
    if blocks.splits > 1:
        # A reduction computes the results first, so only the contiguous elements of a program count here.
        rows = min(power_of_2(space.n_kept), 4 * device.row_columns // traits.itemsize)
        return cut(space, rows, max(1, tile // rows), 4, states=traits.states)
    return _with_more_warps(blocks, space, traits.states > 1)


def _long_rows(space: RowSpace, traits: RowTraits) -> RowBlocks:
    """Return blocks for rows that no program holds in registers."""
    device, regimes = devices.current, ROWS[devices.current.kind]
    tiles, itemsize, staged = space.n_reduced / device.row_elements, traits.itemsize, traits.staged
    if 16 * space.n_kept <= device.programs and for_reduction(space, traits.states).splits > 1:
        return _regime(space, regimes.split, least=2)
    if 2 * space.n_kept <= device.programs:
        return _regime(space, regimes.few, scarcity=0)
    if space.vector_width * itemsize < 16 and not (staged and space.aligned and itemsize < 4):
        return _regime(space, regimes.twice_narrow)
    if device.forward_progress and _gains_by_cooperation(space, traits):
        small = itemsize < 4 or traits.states > 2
        shared = regimes.cooperative_16bit if small else regimes.cooperative_staged
        return _cooperative(space, itemsize, shared if staged else regimes.cooperative)
    if staged and itemsize < 4 and tiles <= regimes.twice_16bit_tiles:
        return _regime(space, regimes.twice_16bit)
    if staged and traits.states < 3 and itemsize <= 4 and tiles > regimes.twice_staged.tiles:
        return _regime(space, regimes.twice_staged)
    return _regime(space, regimes.twice_narrow if not staged and len(space.kinds) > 2 else regimes.twice)


def _regime(space: RowSpace, regime: Regime, scarcity: int = 2, least: int = 8) -> RowBlocks:
    return cut(space, 1, int(regime.tiles * devices.current.row_elements), regime.warps, scarcity, least)


def _gains_by_cooperation(space: RowSpace, traits: RowTraits) -> bool:
    """Return whether no cache holds a row, and reading it from memory once outweighs the costs of cooperation.

    A word of the exchange holds a state of 32 bits. Weights come from a cache for every row, and with 16-bit floats
    they are a third of all bytes read. Several reduced operands of 16-bit floats take the registers of a
    whole multiprocessor, whose one program idles while it waits.
    """
    row_bytes, regimes = space.n_reduced * traits.itemsize, ROWS[devices.current.kind]
    most = regimes.cooperative_bytes if traits.states < 3 else regimes.cooperative_moments_bytes
    if row_bytes <= most or space.shapes[1]:
        return False
    if traits.compute is not torch.float32:
        return False
    if traits.itemsize < 4 and (space.has_weights or (traits.leaf_operands > 1 and not traits.staged)):
        return False
    return traits.staged or (space.full_operands > 1 and not space.has_weights)


def _cooperative(space: RowSpace, itemsize: int, regime: Cooperative) -> RowBlocks:
    columns = regime.block_bytes // itemsize
    blocks = -(-space.n_reduced // columns)
    steps = max(regime.blocks, -(-blocks // regime.most))
    programs_per_row = -(-blocks // steps)
    return RowBlocks(
        1, columns, regime.warps, space.n_kept * programs_per_row, steps, programs_per_row=programs_per_row
    )


def unrolled(space: RowSpace, traits: RowTraits, blocks: RowBlocks) -> int:
    """Return the blocks per program of a row if a loop over them is better unrolled, else 0.

    Unrolling pays if operands that are not reduced are read for the second pass. Then it saves registers, and a
    multiprocessor has two programs. Elsewhere it spills.
    """
    even = -(-space.n_reduced // blocks.columns) == blocks.steps * blocks.splits * blocks.programs_per_row
    if (
        not even
        or not 1 < blocks.steps <= ROWS[devices.current.kind].most_unrolled
        or blocks.splits > 1
        or traits.leaf_operands == len(space.kinds)
    ):
        return 0
    if blocks.programs_per_row > 1:
        return 0 if traits.staged else blocks.steps
    whole = space.inner and space.n_reduced % blocks.columns == 0
    few = blocks.steps == ROWS[devices.current.kind].most_unrolled or not traits.staged
    return blocks.steps if whole and few and traits.itemsize < 4 and space.full_operands == 1 else 0


def weight_modifier(space: RowSpace, inputs: Sequence[torch.Tensor]) -> str:
    """Return the cache modifier for operands that are the same for every row, in the second reading of a row."""
    itemsizes = [x.dtype.itemsize for x, kind in zip(inputs, space.kinds, strict=True) if kind == REDUCED]
    return ".cg" if sum(itemsizes) * space.n_reduced >= ROWS[devices.current.kind].weight_bytes else ""
