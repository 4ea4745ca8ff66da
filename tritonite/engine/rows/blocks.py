"""The blocks that a space of rows is cut into: a rule over `tune.rows`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tritonite import devices
from tritonite.engine.iteration import SECTOR, power_of_2
from tritonite.engine.rows.facts import BOTH, REDUCED
from tritonite.engine.rows.space import Space
from tritonite.engine.rows.table import ROWS, Cooperative, Regime
from tritonite.runtime.contract import fusion, settings

# Loops over at most so many blocks are unrolled.
_MOST_UNROLLED = 4
# How many threads most programs have, and a warp.
_THREADS = 128
_WARP = 32


def by_words(space: Space, tensors: Sequence[torch.Tensor], staged: bool) -> Space:
    """The same, `shifted` where rows begin in the middle of words, all operands' in the same, and are long or many.

    Loads are of 16 bytes then, where they were of an element each: of halves those were most of a kernel's time. But to
    find a row's words takes instructions. Where states come from stages, which take many, only longer rows gain.
    """
    device, first = devices.current, tensors[0]
    itemsize = first.dtype.itemsize
    share = (1 / 2 if itemsize < 4 else 1) if staged else 1 / 4
    least = device.row_elements * (
        share if tile_elements(space) == device.row_elements else ROWS[device.kind].held_tiles
    )
    if space.n_reduced <= least or space.word * itemsize >= 16 or not space.inner or settings().invariant:
        return space
    alike = all(x.dtype.itemsize == itemsize and x.stride() == first.stride() for x in tensors)
    if not alike or space.reduced[0][0] != (1,) or any(kind != BOTH for kind in space.kinds):
        return space
    return space._replace(aligned=16 // itemsize, shifted=True)


class Blocks(NamedTuple):
    """How a space is cut: a program takes `steps` blocks of `rows` rows, `columns` elements of each at a time.

    Where rows are `splits` for several programs each leaves its state, and another launch combines those. Programs that
    are `sharing` a row wait for each other.
    """

    rows: int
    columns: int
    warps: int
    programs: int
    steps: int
    splits: int = 1
    sharing: int = 1

    @property
    def grid(self) -> tuple[int, int]:
        return self.programs, self.splits

    @property
    def options(self) -> dict[str, Any]:
        """What the compiler is told."""
        return {"num_warps": min(devices.current.most_warps, self.warps), **devices.current.options, **fusion()}

    def groups(self, space: Space) -> tuple[int, bool]:
        """How many of a row's elements a thread has, and whether they are next to each other or else far apart.

        What it loads at once, 16 bytes, are elements of as many rows where those stand upright.
        """
        word, threads = 16 // space.itemsize, _WARP * self.warps
        if not space.inner:
            return max(1, min(self.columns, self.rows * self.columns // (threads * word))), False
        consecutive = space.word == word or self.rows > 1 or self.columns < threads * space.word * word
        return min(word, self.columns), consecutive

    def facts(self, space: Space) -> dict[str, Any]:
        """The fields of `Facts`."""
        whole = (
            space.n_kept % self.rows == 0,
            space.n_reduced % self.columns == 0 != space.n_reduced and not space.shifted,
        )
        once = self.steps <= 1
        # All but what is in no whole word.
        length = space.n_reduced - 2 * space.aligned * space.shifted
        held = once and self.splits == self.sharing == 1 and 2 * length > self.columns
        # Where a thread has more elements, there are registers for none besides.
        ahead = not space.inner and self.rows * self.columns <= 16 * 32 * self.warps
        # With loads of 16 bytes a few at a time are enough, as long as other programs have theirs on the way.
        at_once = space.word * space.itemsize < 16 or self.programs <= devices.current.programs
        found = {"block": self[:2], "whole": whole, "once": once, "held": held, "at_once": at_once, "ahead": ahead}
        # A row of `_of_short_columns` is in one thread.
        in_threads = not space.inner and self.rows >= _WARP * self.warps
        return found | {"sharing": self.sharing, "in_threads": in_threads, "odd": in_threads and space.odd}


class Traits(NamedTuple):
    """What the blocks of a row operator depend on besides the space.

    It reduces `folded` operands, the first with elements of `itemsize` bytes, in the dtype `compute`, to so many
    `states`, and is `staged` where the reduction has stages.
    """

    itemsize: int
    staged: bool
    folded: int
    compute: torch.dtype
    states: int = 1


def tile_elements(space: Space) -> int:
    """What a program takes at a time: of small spaces a quarter, so that more of the device works."""
    tile = devices.current.row_elements
    return tile // 4 if space.n_kept * space.n_reduced <= 64 * tile else tile


def _spread(space: Space, most: int) -> int:
    """Of how many elements a program is, at `most`, so that all of the device works.

    A thread has what it loads at once, or two elements: with eight that are loaded one by one, each of a row of its
    own, softmax of (420, 13) took 480 instructions, and they most of its 2.6 us.
    """
    each = power_of_2(space.n_kept * space.n_reduced // devices.current.programs)
    if space.word == 1 and space.n_reduced <= _WARP:
        # With more than four a thread log_softmax of (400001, 17) in float32 took 62 us, and takes 41.
        each = min(each, 4 * _THREADS)
    return min(most, max(_THREADS * max(2, space.word), each))


def _of_warps(space: Space) -> Blocks | None:
    """Rows that are longer than what a warp loads at once, but have no more than 16 elements a thread, by a warp each.

    Several warps would exchange at barriers what each has folded, and each would fold as many rows as one. A warp has
    rows of 16 elements a thread in all, or four rows where those have no more than 32: log_softmax of (400001, 65) in
    float32 takes 72 us with four and 83 with eight, and of (61001, 33) 9.0 with eight and 11.4 with 16. Where programs
    of a warp would not fill the device they have several, and where they still would not, fewer rows: of (4001, 33) 1.9
    us for 2.5.
    """
    columns, enough = power_of_2(space.n_reduced), devices.current.programs
    if not _WARP * space.word < columns <= 16 * _WARP:
        return None
    rows = max(min(4, 32 * _WARP // columns), 16 * _WARP // columns)
    warps = 1 if space.n_kept > rows * enough else max(2, 8 * _WARP // columns)
    while rows * columns > 4 * _WARP and rows > 1 and 3 * -(-space.n_kept // rows) < enough:
        rows, warps = rows // 2, max(1, warps // 2)
    return cut(space, min(power_of_2(space.n_kept), rows), columns, warps)


def cut(
    space: Space, rows: int, columns: int, warps: int, scarcity: int = 2, least: int = 8, states: int = 1
) -> Blocks:
    """Blocks of this shape, by `warps` or as many as a program has.

    Where `scarcity` times the programs would not fill the device, a row of `least` blocks or more is split; none is if
    `scarcity` is 0. A program that leaves several `states` has two blocks at least: adding those up took as long as
    finding them, and batch norm of channels last 26 us, where it takes 20.
    """
    device = devices.current
    programs, splits, steps = -(-space.n_kept // rows), 1, -(-space.n_reduced // columns)
    if scarcity and scarcity * programs <= device.programs and steps >= least:
        each = max(1 if states == 1 else 2, -(-steps // min(-(-device.programs // programs), steps)))
        splits, steps = -(-steps // each), each
    return Blocks(rows, columns, warps, programs, steps, splits)


def tiled(space: Space, rows: int, columns: int, states: int = 1) -> Blocks:
    """The same by as many warps as that many elements want."""
    return cut(space, rows, columns, max(4, rows * columns // 1024), states=states)


def invariant(space: Space) -> Blocks:
    """Blocks by which a row's bits are the same in any number of rows and any layout.

    Its columns and splits are of a row's length alone. What is folded in one order is alike for any `rows`.
    """
    device, regime = devices.current, ROWS[devices.current.kind].invariant
    most = max(1, int(regime.tiles * device.row_elements))
    columns = min(power_of_2(space.n_reduced), most)
    # Short rows are several in a program, of a fourth of a block in all, so that more of the device works.
    rows = min(power_of_2(space.n_kept), max(1, most // 4 // columns) if space.inner else regime.rows)
    steps = -(-space.n_reduced // columns)
    splits = max(1, -(-steps // regime.steps))
    # Where a block is followed by another a thread has the states of as many elements besides.
    warps = max(4, rows * columns // (1024 if steps == 1 else 512))
    return Blocks(rows, columns, warps, -(-space.n_kept // rows), min(steps, regime.steps), splits)


def for_reduction(space: Space, states: int) -> Blocks:
    """The blocks of a reduction to so many states."""
    if settings().invariant:
        return invariant(space)
    device, tile = devices.current, tile_elements(space)
    if not space.inner:
        if found := _of_short_columns(space):
            return found
        # With 16 elements in each of its threads so many programs run at a time that all do.
        beside, elements = device.row_columns, device.row_elements // 2
        if tile < device.row_elements:
            # More of a column at a time, so that one launch reduces it.
            beside, elements = max(1, beside // 4), tile
        elif 4 * _neighbours(space) <= device.row_columns:
            return _of_neighbours(space, tile, states)
        rows = min(power_of_2(space.n_kept), beside)
        blocks = tiled(space, rows, min(power_of_2(space.n_reduced), max(1, elements // rows)), states)
        if blocks.splits > 1 and 4 * space.n_reduced <= device.row_elements and _is_in_cache(space):
            # Narrower blocks in place of a second launch: mean of (490, 11819) halves took 6.7 us, and takes 4.9.
            rows = min(power_of_2(space.n_kept), beside // 2 if space.n_kept > 2 * device.row_elements else beside // 4)
            return cut(space, rows, device.row_elements // rows, 8, scarcity=0)
        return blocks
    if space.n_kept >= device.programs and space.n_reduced > device.row_elements:
        # Of what a block has beyond a row's end each element costs as much as others, and of an index more than that.
        waste = -space.n_reduced % device.row_elements
        if space.index_strides or 16 * waste > space.n_reduced:
            return _regime(space, ROWS[device.kind].reduced_long)
    if space.index_strides and space.n_kept >= 2 * device.programs:
        columns, warps = int(ROWS[device.kind].indexed.tiles * device.row_elements), ROWS[device.kind].indexed.warps
        if columns < space.n_reduced <= device.row_elements:
            # A warp has a row.
            return cut(space, warps, columns, warps)
    columns = min(power_of_2(space.n_reduced), tile)
    if columns < tile:
        tile = _spread(space, tile)
        return _of_warps(space) or tiled(space, min(power_of_2(space.n_kept), max(1, tile // columns)), columns)
    if tile < device.row_elements and tile < space.n_reduced <= 8 * tile:
        # Few rows: a program has all of one at once, and a thread eight elements.
        columns = power_of_2(space.n_reduced)
        return cut(space, 1, columns, max(4, columns // 256))
    if space.n_reduced <= tile or tile < device.row_elements or (space.aligned and states > 1):
        return tiled(space, 1, columns)
    warps = ROWS[device.kind].reduced_warps
    if space.word * space.itemsize < 16:
        # A thread has eight loads on their way, not sixteen: nansum of (6086, 7050) halves took 54 us, and takes 37.
        columns //= 2
    while not space.aligned and columns > 1024 and 4 * (-space.n_reduced % columns) > space.n_reduced:
        # Element by element a program loads as long for those that there are not.
        warps, columns = warps // 2, columns // 2
    return cut(space, 1, columns, max(4, warps))


def _of_short_columns(space: Space, held_bytes: int = 0) -> Blocks | None:
    """The blocks of short upright rows, or None: one thread has all of a row, so that nothing passes between threads.

    A thread loads 16 bytes at once, which are elements of as many rows. It has 32 elements of them, or 16 where it
    loads others before it combines those; of rows that are held until they are written, at most `held_bytes`. Where
    programs would not fill the device a thread has fewer rows, and rows of more than four elements have other blocks.
    """
    length, enough = space.n_reduced, devices.current.programs // 2
    columns, each = power_of_2(length), 16 // space.itemsize
    if held_bytes:
        each = max(1, min(each, held_bytes // (columns * space.itemsize)))
    if not 0 < length <= ROWS[devices.current.kind].short_columns:
        return None
    if length > 4 and space.n_kept < enough * _WARP * each:
        return None
    while each > 1 and space.n_kept < enough * _WARP * each:
        each //= 2
    warps = 4
    while warps > 1 and space.n_kept < 2 * enough * warps * _WARP * each:
        warps //= 2
    if columns * each > 32 and not held_bytes:
        columns = 16 // each
    return cut(space, warps * _WARP * each, columns, warps, scarcity=0)


def for_states(space: Space) -> Blocks:
    """The blocks of the reduction that combines the states of programs, which lie in columns."""
    if settings().invariant:
        # One program has all of them, however many.
        blocks = invariant(space)
        return blocks._replace(steps=blocks.steps * blocks.splits, splits=1)
    # All splits at once where they fit: they are waited for once.
    device = devices.current
    tile, splits = device.row_elements, power_of_2(space.n_reduced)
    rows = min(power_of_2(space.n_kept), max(8, min(32, tile // splits)))
    # Fewer rows a program where there are few of those, which then has all splits at once.
    while rows > 1 and 16 * space.n_kept < rows * device.programs and splits > tile // rows:
        rows //= 2
    columns = min(splits, max(1, tile // rows))
    # Few programs, which nothing else fills the device beside: a thread has eight splits.
    warps = max(4, rows * columns // 256)
    return Blocks(rows, columns, warps, -(-space.n_kept // rows), -(-space.n_reduced // columns))


def for_transform(space: Space, traits: Traits) -> Blocks:
    """The blocks of a row operator."""
    if settings().invariant:
        return invariant(space)
    device, tile, regimes = devices.current, tile_elements(space), ROWS[devices.current.kind]
    if not space.inner:
        return _columns(space, traits)
    if space.shifted and traits.staged and _are_many(space, traits):
        return _shifted(space, traits)
    if _are_of_odd_parts(space) and 16 * space.n_kept > device.programs:
        return _regime(space, regimes.odd_parts)
    if space.n_reduced > regimes.held_tiles * device.row_elements:
        return _long_rows(space, traits)
    columns = power_of_2(space.n_reduced)
    if found := _across(space) or _without_waste(space, traits) or _unaligned(space, traits) or _of_warps(space):
        return found
    short = int(regimes.short.tiles * tile)
    # Where a program would have less than that, it has fewer elements, so that more of the device works.
    each = power_of_2(space.n_kept * space.n_reduced // device.programs)
    in_words = space.word > 1 or columns > _WARP
    if in_words and space.full_operands == 1 and each >= device.row_elements and columns <= short:
        # Half types want two rows.
        return cut(
            space,
            min(power_of_2(space.n_kept), max(short // columns, 4 // traits.itemsize)),
            columns,
            regimes.short.warps,
        )
    rows = 1 if space.shifted else min(power_of_2(space.n_kept), max(1, _spread(space, tile) // columns))
    blocks = tiled(space, rows, columns)
    blocks = _of_more_threads(blocks, space, blocks.warps > 1 and (rows > 1 or traits.states > 1))
    if not (space.aligned or traits.staged) and space.n_reduced > device.row_elements:
        blocks = blocks._replace(warps=2 * blocks.warps)
    return blocks


def _are_of_odd_parts(space: Space) -> bool:
    """Whether rows of one operand are long and in several parts of a length that no word divides."""
    several = bool(space.shapes[1]) and not space.in_parts and not space.aligned
    return several and space.full_operands == 1 and space.n_reduced > 2 * devices.current.row_elements


def _across(space: Space) -> Blocks | None:
    """Short rows of which an operand's lie upright: four at least, so that a sector of it serves a few of them.

    Eight elements a thread: a gradient of log_softmax of (683, 305) halves took 6.8 us, and takes 2.0.
    """
    columns = power_of_2(space.n_reduced)
    upright = [
        kind == BOTH and 0 < kept[0] < own[0]
        for kind, own, kept in zip(space.kinds, space.reduced[0], space.kept[0], strict=True)
    ]
    if not any(upright) or 4 * columns > devices.current.row_elements:
        return None
    rows = min(power_of_2(space.n_kept), max(4, devices.current.row_elements // 4 // columns))
    return cut(space, rows, columns, max(1, rows * columns // (8 * _WARP)))


def _unaligned(space: Space, traits: Traits) -> Blocks | None:
    """Many rows whose states come from stages, of which a thread loads elements one by one.

    A thread has 64 bytes of one: softmax of (57761, 1069) took 174 us by words and takes 131 (halves 151 and 87).
    """
    length, tile = space.n_reduced, devices.current.row_elements
    few = tile_elements(space) < tile or 2 * space.n_kept < devices.current.programs
    if space.shifted or few or space.has_weights or not traits.staged or space.word * traits.itemsize >= 16:
        return None
    if not tile // 4 < length <= tile:
        return None
    columns = power_of_2(length)
    return cut(space, 1, columns, max(1, columns * traits.itemsize // (64 * _WARP)))


def _of_more_threads(blocks: Blocks, space: Space, wanted: bool) -> Blocks:
    """Twice the warps where they are wanted and there are several operands, with elements of their own each.

    The assembler has few loads of theirs on their way in a thread that has 32 elements of each: masked softmax of
    (1048576, 64) halves took 140 us, and takes 119 (H100). Weights of groups, which many rows share, are in a cache.
    """
    several = len(space.kinds) == space.full_operands > 1 and all(all(own) for own in space.kept[0])
    return blocks._replace(warps=2 * blocks.warps) if several and wanted else blocks


def _are_many(space: Space, traits: Traits) -> bool:
    """Whether rows are enough for programs that read one twice: of up to a tile, halves alone, by a warp each."""
    programs = devices.current.programs
    if space.n_reduced <= devices.current.row_elements:
        return traits.itemsize < 4 and space.n_kept >= 4 * programs
    return 2 * space.n_kept > programs


def _shifted(space: Space, traits: Traits) -> Blocks:
    """Many rows that begin in the middle of words, and whose states come from stages."""
    regimes, tiles = ROWS[devices.current.kind], space.n_reduced / devices.current.row_elements
    row_bytes, halves = space.n_reduced * traits.itemsize, traits.itemsize < 4
    if tiles > regimes.shifted_held.tiles and row_bytes > regimes.shifted_bytes:
        long = regimes.shifted_long_halves if halves else regimes.shifted_long
        return _regime(space, long if row_bytes <= regimes.shifted_most_bytes else regimes.twice)
    if halves:
        short, middle = regimes.shifted_short_halves, regimes.shifted_middle_halves
        return _regime(space, short if tiles <= 1 else middle if tiles <= 2 else regimes.shifted_halves)
    return _regime(space, regimes.shifted_held if tiles <= regimes.shifted_held.tiles else regimes.shifted)


def _without_waste(space: Space, traits: Traits) -> Blocks | None:
    """Many rows with weights, in blocks that waste little: of a half type whose length is far from a power of 2.

    Or of any type, where a thread loads elements one by one and rows are so short that a multiprocessor's own cache has
    one for each of its warps: layer norm of (57761, 2501) halves took 365 us, and takes 206.
    """
    device, length, regime = devices.current, space.n_reduced, ROWS[devices.current.kind].looped
    if not space.has_weights or 2 * space.n_kept < device.programs:
        return None
    if space.word * space.itemsize < 8:
        many = space.n_kept >= 4 * device.programs and space.full_operands == 1
        fits = device.row_elements // 4 < length <= 2 * device.row_elements // traits.itemsize
        return cut(space, 1, device.row_elements // 16, 1) if many and fits else None
    if traits.itemsize >= 4 or length <= device.row_elements or 8 * (power_of_2(length) - length) < length:
        return None
    columns, warps = int(regime.tiles * device.row_elements), regime.warps
    if 16 * (-length % columns) > length:
        columns, warps = columns // 2, warps // 2
    return cut(space, 1, columns, warps)


def are_in_parts(space: Space, traits: Traits, blocks: Blocks) -> bool:
    """Whether rows with operands that have one element for each part are transformed part by part.

    Their results are found before, in a launch that reads what is folded once more. In one that holds a row each
    element would need its part's number, and a load of each such operand: group norm of 51 halves of 960x12x12 in 32
    groups took 49 us, and takes 24. Shorter rows and parts are better held, and so are gradients, which fold two
    operands.
    """
    if not space.in_parts:
        return False
    held, tile = blocks.steps * blocks.splits == 1, devices.current.row_elements
    long = 4 * space.n_reduced >= 3 * tile and 32 * space.shapes[1][0] >= tile
    return not held or (traits.folded == 1 and long)


def for_parts(space: Space) -> Blocks:
    """The blocks of rows whose results are known, as parts of longer rows are: each is transformed by itself.

    Where elements are loaded one by one, threads next to each other have elements of the same row. Each has elements of
    every row of its block then, and all operands of those rows, which spilled with more than 16 rows.
    """
    if settings().invariant:
        return invariant(space)
    tile = devices.current.row_elements
    columns = min(power_of_2(space.n_reduced), tile)
    while columns > tile // 8 and 4 * (-space.n_reduced % columns) > space.n_reduced:
        columns //= 2
    splits = -(-space.n_reduced // columns)
    rows = min(power_of_2(space.n_kept), tile // columns, 16 if space.word == 1 else tile)
    return tiled(space, rows, columns)._replace(splits=splits, steps=1)


def _is_in_cache(space: Space) -> bool:
    """Whether an operand is likely in the L2 cache."""
    return space.n_kept * space.n_reduced <= 2048 * devices.current.row_elements


def _neighbours(space: Space) -> int:
    """How many rows that stand upright are next to each other, or in the same sector of memory."""
    sizes, strides = space.shapes[0], space.kept[0][0]
    if not sizes:
        return space.n_kept
    near = [stride * space.itemsize < SECTOR for stride in strides]
    return math.prod(sizes[: max(1, near.index(False) if False in near else len(sizes))])


def _of_neighbours(space: Space, elements: int, states: int) -> Blocks:
    """Few rows that are next to each other, all of them in a program, and 16 of a block's `elements` in a thread.

    With more rows a program would read a few elements at each of many places: softmax of halves of (275, 43320, 2)
    took 296 us, and takes 72 (H100). With whole rows in its registers, of (4000, 1024, 8), 113 us, and 64.
    """
    rows = min(power_of_2(space.n_kept), power_of_2(_neighbours(space)))
    columns = min(power_of_2(space.n_reduced), max(1, elements // rows))
    return cut(space, rows, columns, max(1, rows * columns // 512), states=states)


def _columns(space: Space, traits: Traits) -> Blocks:
    """Rows that stand upright: a few next to each other, so that a cache holds them until they are read again."""
    device, tile = devices.current, tile_elements(space)
    if found := _of_short_columns(space, held_bytes=128 // max(1, space.full_operands)):
        return found
    rows, length = min(power_of_2(space.n_kept), device.row_columns // 4), power_of_2(space.n_reduced)
    held = min(rows, int(ROWS[device.kind].held_tiles) * device.row_elements // length)
    if _neighbours(space) < device.row_columns // 4 and rows * length > tile:
        if 8 * space.n_kept >= held * device.programs:
            return _of_neighbours(space, device.row_elements * min(2, space.full_operands) // 2, traits.states)
        # Of a small space a program holds so many that all of the device works.
        while held > 1 and 8 * space.n_kept < held * device.programs:
            held //= 2
        return cut(space, held, length, max(1, held * length // 512))
    blocks = tiled(space, rows, min(length, max(1, tile // rows)))
    if blocks.splits > 1:
        # A reduction finds their results before: what counts is how many elements next to each other a program takes.
        rows = min(power_of_2(space.n_kept), 4 * device.row_columns // traits.itemsize)
        return cut(space, rows, max(1, tile // rows), 4, states=traits.states)
    return _of_more_threads(blocks, space, traits.states > 1)


def _long_rows(space: Space, traits: Traits) -> Blocks:
    """Rows that no program holds in registers."""
    device, regimes = devices.current, ROWS[devices.current.kind]
    tiles, itemsize, staged = space.n_reduced / device.row_elements, traits.itemsize, traits.staged
    if 16 * space.n_kept <= device.programs and for_reduction(space, traits.states).splits > 1:
        return _regime(space, regimes.split, least=2)
    if 2 * space.n_kept <= device.programs:
        return _regime(space, regimes.few, scarcity=0)
    if space.word * itemsize < 16 and not (staged and space.aligned and itemsize < 4):
        return _regime(space, regimes.twice_narrow)
    if device.forward_progress and _gains_by_sharing(space, traits):
        small = itemsize < 4 or traits.states > 2
        shared = regimes.cooperative_halves if small else regimes.cooperative_staged
        return _shared(space, itemsize, shared if staged else regimes.cooperative)
    if staged and itemsize < 4 and tiles <= regimes.halves_tiles:
        return _regime(space, regimes.twice_halves)
    if staged and traits.states < 3 and itemsize <= 4 and tiles > regimes.twice_staged.tiles:
        return _regime(space, regimes.twice_staged)
    return _regime(space, regimes.twice_narrow if not staged and len(space.kinds) > 2 else regimes.twice)


def _regime(space: Space, regime: Regime, scarcity: int = 2, least: int = 8) -> Blocks:
    return cut(space, 1, int(regime.tiles * devices.current.row_elements), regime.warps, scarcity, least)


def _gains_by_sharing(space: Space, traits: Traits) -> bool:
    """Whether no cache holds a row, and nothing outweighs that it is read from memory once.

    A word holds a state of 32 bits. Weights come from a cache for every row, and of half types they are a third of what
    is read: layer norm loses up to 13 %. Several operands of half types that are folded take 84 registers, so that a
    multiprocessor has one program, and is idle while that waits.
    """
    row_bytes, regimes = space.n_reduced * traits.itemsize, ROWS[devices.current.kind]
    most = regimes.cooperative_bytes if traits.states < 3 else regimes.cooperative_moments_bytes
    if row_bytes <= most or space.shapes[1]:
        return False
    if traits.compute is not torch.float32:
        return False
    if traits.itemsize < 4 and (space.has_weights or (traits.folded > 1 and not traits.staged)):
        return False
    return traits.staged or (space.full_operands > 1 and not space.has_weights)


def _shared(space: Space, itemsize: int, regime: Cooperative) -> Blocks:
    columns = regime.block_bytes // itemsize
    blocks = -(-space.n_reduced // columns)
    steps = max(regime.blocks, -(-blocks // regime.most))
    sharing = -(-blocks // steps)
    return Blocks(1, columns, regime.warps, space.n_kept * sharing, steps, sharing=sharing)


def unrolled(space: Space, traits: Traits, blocks: Blocks) -> int:
    """How many blocks of a row each program has, where a loop over them is better unrolled, or 0.

    That is where operands besides the folded ones come in for the second reading. Root mean square norm of half types
    needs 32 registers in place of 51, so that a multiprocessor has two programs, and went from 79 to 90 % of copy
    bandwidth; elsewhere unrolling spills.
    """
    even = -(-space.n_reduced // blocks.columns) == blocks.steps * blocks.splits * blocks.sharing
    if not even or not 1 < blocks.steps <= _MOST_UNROLLED or blocks.splits > 1 or traits.folded == len(space.kinds):
        return 0
    if blocks.sharing > 1:
        return 0 if traits.staged else blocks.steps
    whole = space.inner and space.n_reduced % blocks.columns == 0
    few = blocks.steps == _MOST_UNROLLED or not traits.staged
    return blocks.steps if whole and few and traits.itemsize < 4 and space.full_operands == 1 else 0


def modifier_of_common(space: Space, inputs: Sequence[torch.Tensor]) -> str:
    """The cache modifier for what is the same in every row, when it is read with a row for the second time."""
    itemsizes = [x.dtype.itemsize for x, kind in zip(inputs, space.kinds, strict=True) if kind == REDUCED]
    return ".cg" if sum(itemsizes) * space.n_reduced >= ROWS[devices.current.kind].common_bytes else ""
