"""Copies of many pairs of tensors by few launches, as `cat` and `split` need.

A program finds its pair by where the programs of each pair end, and selects the pair's address, sizes and strides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.engine.iteration import INT32_LIMIT, collapse, power_of_2, span
from tritonite.engine.movement import check_conversion, move, words
from tritonite.language.indices import aligned_to
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry

# The most pairs of a launch, whose addresses are its arguments, and the most dimensions of a pair.
_MOST_PAIRS = 64
_MOST_DIMENSIONS = 4
# The pairs that a program selects among, after a branch to their group.
_GROUP = 8
# Tiles that a program handles in sequence if accesses are scalar. In one tile of that size a thread would hold too many
# addresses for several programs to fit a multiprocessor.
_STEPS = 8


@triton.jit
def _chosen(condition, a, b):
    """Return tuple `a` where the condition holds, else `b`, element by element."""
    found = ()
    for d in tl.static_range(len(a)):
        found = found + (tl.where(condition, a[d], b[d]),)
    return found


def _encoded(numbers: Sequence[int]) -> tuple[int, ...]:
    """Return numbers as odd ones other than 1, for tuples of a kernel, so that all numbers share a compiled kernel."""
    return tuple([2 * n + 3 for n in numbers])


@triton.jit
def _decoded(numbers):
    """Return the numbers that `_encoded` was given."""
    found = ()
    for d in tl.static_range(len(numbers)):
        found = found + ((numbers[d] - 3) >> 1,)
    return found


@triton.jit
def _since(program, i, ends, ALIKE: tl.constexpr):
    """Return whether a program handles pair `i` or a later one."""
    return program >= (i if ALIKE else ends[i - 1])


@triton.jit
def _choose(program, first, sources, destinations, ends, sizes, read, written, ALIKE: tl.constexpr, MOST: tl.constexpr):
    """Return addresses, first program, sizes and strides of a program's pair, one of the MOST from pair `first` on."""
    of: tl.constexpr = 0 if ALIKE else first
    source, destination, begin = sources[first], destinations[first], program * 0 + 3
    shape, strides, others = sizes[of], read[of], written[of]
    if first and not ALIKE:
        begin += ends[first - 1] - 3
    for i in tl.static_range(first + 1, first + MOST):
        later = _since(program, i, ends, ALIKE)
        source = tl.where(later, sources[i], source)
        destination = tl.where(later, destinations[i], destination)
        if not ALIKE:
            begin = tl.where(later, ends[i - 1], begin)
            shape = _chosen(later, sizes[i], shape)
            strides = _chosen(later, read[i], strides)
            others = _chosen(later, written[i], others)
    return source, destination, begin, shape, strides, others


@libentry()
@triton.jit(do_not_specialize=["count"])
def move_pairs(
    sources,
    destinations,
    ends,
    sizes,
    read_strides,
    written_strides,
    count,
    ALIKE: tl.constexpr,
    IN_TURNS: tl.constexpr,
    ALIGNED: tl.constexpr,
    INDEX: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Copy STEPS tiles of (ROWS, COLUMNS), along dimensions 1 and 0 of a pair, at one index of its other dimensions.

    `ends` are the programs where those of each pair end. If the pairs are ALIKE, all have the first pair's sizes and
    strides. IN_TURNS, programs take a tile of each of the `count` pairs in turn; else they take `count` tiles of each
    pair. Dimension 0 is contiguous in all pairs. ALIGNED divides all other strides and dimension 0. Numbers in tuples
    are encoded by `_encoded`.

    A program branches to the GROUP of pairs that has its own pair. Selecting among all pairs would take longer than
    copying a tile.
    """
    wait_for_previous_launch()
    number = tl.program_id(0)
    program = (number % count if IN_TURNS else number // count) if ALIKE else 2 * number + 3
    most: tl.constexpr = min(GROUP, len(sources))
    chosen = _choose(program, 0, sources, destinations, ends, sizes, read_strides, written_strides, ALIKE, most)
    source, destination, begin, shape, read, written = chosen
    for g in tl.static_range(GROUP, len(sources), GROUP):
        in_group = _since(program, g, ends, ALIKE)
        if g + GROUP < len(sources):
            in_group = in_group & (_since(program, g + GROUP, ends, ALIKE) == 0)
        if in_group:
            chosen = _choose(program, g, sources, destinations, ends, sizes, read_strides, written_strides, ALIKE, most)
            source, destination, begin, shape, read, written = chosen
    shape, read, written = _decoded(shape), _decoded(read), _decoded(written)
    if ALIGNED > 1:
        source, destination = tl.multiple_of(source, 16), tl.multiple_of(destination, 16)
    length = aligned_to(shape[0], ALIGNED)
    across = tl.cdiv(length, COLUMNS)
    tile = (number // count if IN_TURNS else number % count) if ALIKE else (program - begin) >> 1
    first = (tile % across).to(INDEX) * COLUMNS
    column = tl.arange(0, COLUMNS)[None, :]
    rest = tile // across
    begin_row = rest
    if len(shape) > 2:
        down = tl.cdiv(shape[1], STEPS * ROWS)
        begin_row = rest % down
        rest = (rest // down).to(INDEX)
    source, destination = source + (first + column), destination + (first + column)
    for d in tl.static_range(2, len(shape)):
        at = rest % shape[d]
        source += at * aligned_to(read[d - 1], ALIGNED)
        destination += at * aligned_to(written[d - 1], ALIGNED)
        rest = rest // shape[d]
    for step in range(STEPS):
        row = (begin_row.to(INDEX) * STEPS + step) * ROWS + tl.arange(0, ROWS)[:, None]
        mask = (column < length - first) & (row < shape[1])
        elements = tl.load(source + row * aligned_to(read[0], ALIGNED), mask=mask)
        tl.store(destination + row * aligned_to(written[0], ALIGNED), elements, mask=mask)


def move_each(sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> None:
    """Write each source to its destination, of the same shape, in as few launches as their layouts allow.

    No destination may overlap a source or another destination. Raises Decline, before anything is written, for dtypes
    that are not converted.
    """
    for source, destination in zip(sources, destinations, strict=True):
        check_conversion(source.dtype, destination.dtype)
    pairs = [pair for pair in zip(sources, destinations, strict=True) if pair[0].numel()]
    together: list[tuple[torch.Tensor, torch.Tensor, _Layout]] = []
    for source, destination in pairs:
        layout = _layout(source, destination)
        if layout is None or len(pairs) == 1:
            move(source, destination)
        else:
            together.append((words(source), words(destination), layout))
    for itemsize in sorted({source.dtype.itemsize for source, _, _ in together}):
        alike = [pair for pair in together if pair[0].dtype.itemsize == itemsize]
        for i in range(0, len(alike), _MOST_PAIRS):
            _launch(alike[i : i + _MOST_PAIRS])


class _Layout(NamedTuple):
    """Sizes of a pair, fastest dimension first, and the strides of source and destination except dimension 0's 1."""

    sizes: tuple[int, ...]
    read: tuple[int, ...]
    written: tuple[int, ...]


def _layout(source: torch.Tensor, destination: torch.Tensor) -> _Layout | None:
    """Return how a pair is copied together with others; None for a pair that is converted, or not contiguous."""
    if source.dtype is not destination.dtype:
        return None
    source, destination = words(source), words(destination)
    sizes, (written, read) = collapse(source.shape, [list(destination.stride()), list(source.stride())])
    if sizes[0] > 1 and (written[0] != 1 or read[0] != 1):
        return None
    if len(sizes) > _MOST_DIMENSIONS:
        return None
    more = max(0, 2 - len(sizes))
    return _Layout((*sizes, *[1] * more), (*read[1:], *[0] * more), (*written[1:], *[0] * more))


def _launch(pairs: Sequence[tuple[torch.Tensor, torch.Tensor, _Layout]]) -> None:
    """Launch `move_pairs` for pairs of one element width."""
    device = devices.current
    layouts = [layout for _, _, layout in pairs]
    rank = max(len(sizes) for sizes, _, _ in layouts)
    layouts = [
        _Layout(
            (*own.sizes, *[1] * (rank - len(own.sizes))),
            *((*strides, *[0] * (rank - 1 - len(strides))) for strides in (own.read, own.written)),
        )
        for own in layouts
    ]
    alignment = _alignment(layouts, [x for pair in pairs for x in pair[:2]])
    most_rows = power_of_2(max(sizes[1] for sizes, _, _ in layouts))
    steps = 1 if alignment > 1 or most_rows == 1 else _STEPS
    elements = device.tile_bytes // max(pairs[0][0].dtype.itemsize, 2)
    elements *= 1 if steps == 1 and len(pairs) <= _GROUP else 2
    columns = _columns([sizes[0] for sizes, _, _ in layouts], elements // steps)
    rows = min(elements // steps // columns, most_rows)
    counts = [
        -(-sizes[0] // columns) * -(-sizes[1] // (steps * rows)) * math.prod(sizes[2:]) for sizes, _, _ in layouts
    ]
    ends = list(itertools.accumulate(counts))
    # Pad the pairs to a power of 2, so that few kernels are compiled. No program reaches the added pairs.
    missing = power_of_2(len(pairs)) - len(pairs)
    sources = [pair[0] for pair in pairs] + [pairs[-1][0]] * missing
    destinations = [pair[1] for pair in pairs] + [pairs[-1][1]] * missing
    alike = len(set(layouts)) == 1
    in_turns = alike and _in_turns(layouts[0][0])
    distinct = layouts[:1] if alike else layouts + [layouts[-1]] * missing
    wide = any(span(x.shape, x.stride()) >= INT32_LIMIT for pair in pairs for x in pair[:2])
    move_pairs[(ends[-1],)](
        tuple(sources),
        tuple(destinations),
        _encoded((*ends, *[ends[-1]] * missing)),
        *(tuple([_encoded(layout[field]) for layout in distinct]) for field in range(3)),
        len(pairs) if in_turns else counts[0],
        ALIKE=alike,
        IN_TURNS=in_turns,
        ALIGNED=alignment,
        INDEX=tl.int64 if wide else tl.int32,
        STEPS=steps,
        ROWS=rows,
        COLUMNS=columns,
        GROUP=_GROUP,
    )


def _columns(lengths: Sequence[int], most: int) -> int:
    """Return the columns of a tile, halved while an eighth or more of the lanes are idle, but at least a warp's."""
    columns = min(most, power_of_2(max(lengths)))
    while columns > devices.warp_size() and 8 * sum(-length % columns for length in lengths) >= sum(lengths):
        columns //= 2
    return columns


def _in_turns(sizes: Sequence[int]) -> bool:
    """Return whether ALIKE pairs of these sizes are copied in turns.

    In turns, rows of a result that several pairs make up are written as a whole. Pairs of one contiguous run each are
    copied one after the other, which reads and writes fewer pages at a time.
    """
    return any(size > 1 for size in sizes[1:])


def _alignment(layouts: Sequence[_Layout], tensors: Sequence[torch.Tensor]) -> int:
    """Return the divisor, up to 16, of all strides and sizes of dimension 0; 1 if an address is unaligned."""
    if any(x.data_ptr() % 16 for x in tensors):
        return 1
    every = {n for sizes, read, written in layouts for n in (sizes[0], *read, *written)}
    return math.gcd(16, *every)
