"""Reading at places that index tensors tell."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.engine.indexing.places import IN_RANGE, Facts, Index, Space
from tritonite.engine.iteration import SECTOR, power_of_2
from tritonite.engine.movement import words
from tritonite.errors import Decline
from tritonite.language.indices import aligned_to, strided_offset
from tritonite.language.order import wait_for_previous_launch
from tritonite.language.shared import alloc_shared, load_shared, store_shared
from tritonite.runtime.launch import ASSERTING
from tritonite.runtime.libentry import libentry
from tritonite.runtime.symbols import Size


@triton.jit
def rows_and_columns(n_columns, FACTS: tl.constexpr):
    """The indices of a program's rows and columns."""
    program = tl.program_id(0)
    blocks = tl.cdiv(n_columns, FACTS.block[1])
    row = (program // blocks).to(FACTS.index) * FACTS.block[0] + tl.arange(0, FACTS.block[0])
    column = (program % blocks).to(FACTS.index) * FACTS.block[1] + tl.arange(0, FACTS.block[1])
    return row, column


@triton.jit
def _counted_by(index, mask, counted, FACTS: tl.constexpr):
    """(the offsets that numbers of an index tell, which of them do); stops the program where one is out of range."""
    place = tl.load(index, mask=mask, other=0).to(tl.int64)
    if FACTS.wraps:
        place = tl.where(place < 0, place + counted[0], place)
    inside = (place >= 0) & (place < counted[0])
    tl.device_assert(inside | (mask == 0), FACTS.message)
    return strided_offset(tl.where(inside, place, 0).to(FACTS.index), counted[1], counted[2]), mask & inside


@triton.jit
def places(indices, row, column, n_rows, n_columns, shape, strides, columns, counted, FACTS: tl.constexpr):
    """(offsets of a block's elements side by side, which there are, offsets where indices tell, which of them do)."""
    row_mask = row < n_rows
    column_mask = (column < aligned_to(n_columns, FACTS.aligned))[None, :]
    near = aligned_to(strided_offset(row, shape, strides[0]), FACTS.aligned)[:, None] + column[None, :] * columns[0]
    mask = row_mask[:, None] & column_mask
    far = strided_offset(row, shape, strides[1])
    if FACTS.across:
        there = column < n_columns
        apart = column * columns[1]
        for k in tl.static_range(len(indices)):
            offset, there = _counted_by(indices[k] + column * columns[2][k], there, counted[k], FACTS)
            apart += offset
        far = far[:, None] + apart[None, :]
        exists = mask & there[None, :]
    elif FACTS.deep:
        far = far[:, None] + column[None, :] * columns[1]
        exists = mask
        for k in tl.static_range(len(indices)):
            offset = strided_offset(row, shape, strides[2][k])[:, None] + column[None, :] * columns[2][k]
            offset, exists = _counted_by(indices[k] + offset, exists, counted[k], FACTS)
            far += offset
    else:
        exists = row_mask
        for k in tl.static_range(len(indices)):
            offset = strided_offset(row, shape, strides[2][k])
            offset, exists = _counted_by(indices[k] + offset, exists, counted[k], FACTS)
            far += offset
        far = aligned_to(far, FACTS.aligned)[:, None] + column[None, :] * columns[1]
        exists = exists[:, None] & column_mask
    return near, mask, far, exists


@triton.jit
def _copy(out, source, row, column, n_rows, n_columns, indices, shape, strides, columns, counted, FACTS: tl.constexpr):
    """Copy a block from the places of its indices."""
    near, mask, far, exists = places(indices, row, column, n_rows, n_columns, shape, strides, columns, counted, FACTS)
    tl.store(out + near, tl.load(source + far, mask=exists, other=0), mask=mask)


@libentry()
@triton.jit(do_not_specialize=["n_rows"])
def _read_at(out, source, indices, shape, strides, columns, counted, n_rows, n_columns, FACTS: tl.constexpr):
    """A program copies a block of the space."""
    wait_for_previous_launch()
    row, column = rows_and_columns(n_columns, FACTS)
    _copy(out, source, row, column, n_rows, n_columns, indices, shape, strides, columns, counted, FACTS)


@libentry()
@triton.jit(do_not_specialize=["n_rows"])
def _read_rows_at(
    out, source, indices, shape, strides, columns, counted, n_rows: tl.int64, n_columns, FACTS: tl.constexpr
):
    """The same, of as many rows as data decides: a grid of blocks of rows by blocks of columns."""
    wait_for_previous_launch()
    row = tl.program_id(0).to(FACTS.index) * FACTS.block[0] + tl.arange(0, FACTS.block[0])
    column = tl.program_id(1).to(FACTS.index) * FACTS.block[1] + tl.arange(0, FACTS.block[1])
    _copy(out, source, row, column, n_rows, n_columns, indices, shape, strides, columns, counted, FACTS)


@libentry()
@triton.jit(do_not_specialize=["n_rows"])
def _read_from_shared(out, source, indices, shape, strides, columns, counted, n_rows, n_columns, FACTS: tl.constexpr):
    """A program has whole rows of the source in shared memory, and copies from there what an index of columns tells.

    Of places that lie apart in memory each is a lookup of a line in the nearest cache, one after the other; in shared
    memory, 32 of them take some four cycles.
    """
    wait_for_previous_launch()
    ROWS: tl.constexpr = FACTS.block[0]
    ITEM: tl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
    WORD: tl.constexpr = tl.int64 if ITEM == 8 else tl.int32
    EACH: tl.constexpr = (8 if ITEM == 8 else 4) // ITEM
    own = alloc_shared(ROWS * FACTS.held, WORD)
    place = tl.arange(0, ROWS * FACTS.held)
    row = tl.program_id(0).to(FACTS.index) * ROWS + place // FACTS.held
    start = strided_offset(row, shape, strides[1]) // EACH
    inside = (place % FACTS.held < aligned_to(counted[0][0] // EACH, FACTS.aligned)) & (row < n_rows)
    within = aligned_to(start, FACTS.aligned) + place % FACTS.held
    whole = source.to(tl.pointer_type(WORD), bitcast=True)
    store_shared(own, place, tl.load(whole + within, mask=inside, other=0))
    tl.debug_barrier()
    for begin in range(0, n_columns, FACTS.block[1]):
        column = begin + tl.arange(0, FACTS.block[1])
        mask = column < n_columns
        at, exists = _counted_by(indices[0] + column * columns[2][0], mask, counted[0], FACTS)
        at = tl.where(exists, at, 0).to(tl.int32)
        for i in tl.static_range(ROWS):
            one = tl.program_id(0).to(FACTS.index) * ROWS + i
            found = load_shared(own, i * FACTS.held + at // EACH, at.to(WORD))
            if EACH > 1:
                found = found >> (at % EACH * (8 * ITEM))
            near = out + strided_offset(one, shape, strides[0]) + column
            tl.store(near, found.to(out.dtype.element_ty), mask=mask & (one < n_rows))


@libentry()
@triton.jit(do_not_specialize=["n_rows"])
def _read_from_parts(out, source, indices, shape, strides, columns, counted, n_rows, n_columns, FACTS: tl.constexpr):
    """The same of a row that is too long, by parts of it one after the other; a program has all columns of a row."""
    wait_for_previous_launch()
    ITEM: tl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
    WORD: tl.constexpr = tl.int64 if ITEM == 8 else tl.int32
    EACH: tl.constexpr = (8 if ITEM == 8 else 4) // ITEM
    COLUMNS: tl.constexpr = FACTS.block[1]
    own = alloc_shared(FACTS.held, WORD)
    row = tl.program_id(0).to(FACTS.index)
    start = aligned_to(strided_offset(row, shape, strides[1]) // EACH, FACTS.aligned)
    whole = source.to(tl.pointer_type(WORD), bitcast=True) + start
    words_of_row = aligned_to(counted[0][0] // EACH, FACTS.aligned)
    column = tl.arange(0, COLUMNS)
    mask = column < n_columns
    at, exists = _counted_by(indices[0] + column * columns[2][0], mask, counted[0], FACTS)
    at = tl.where(exists, at, 0).to(tl.int32)
    result = tl.zeros((COLUMNS,), out.dtype.element_ty)
    for begin in range(0, words_of_row, FACTS.held):
        place = begin + tl.arange(0, FACTS.held)
        part = tl.load(whole + place, mask=place < words_of_row, other=0)
        # All threads have looked up what they want of the part before.
        tl.debug_barrier()
        store_shared(own, tl.arange(0, FACTS.held), part)
        tl.debug_barrier()
        here = at // EACH - begin
        inside = (here >= 0) & (here < FACTS.held)
        found = load_shared(own, tl.where(inside, here, 0), at.to(WORD))
        if EACH > 1:
            found = found >> (at % EACH * (8 * ITEM))
        result = tl.where(inside, found.to(out.dtype.element_ty), result)
    tl.store(out + strided_offset(row, shape, strides[0]) + column, result, mask=mask)


# What programs have of the source in shared memory, the least bytes of a row that are worth it, since shorter ones come
# from few lines of the nearest cache, and the most rows that share what is read of an index.
_HELD_BYTES, _LEAST_BYTES, _MOST_ROWS = 32 * 1024, 1024, 8
# The columns that programs look up at a time: four to a thread, whose indices come from few lines for a warp.
_LOOKED_UP = 1024
# Of longer rows, the most parts that there may be, and the most bytes of the result and columns that registers hold.
_MOST_PARTS, _RESULT_BYTES, _RESULT_COLUMNS = 4, 64 * 1024, 2**14


def _held(space: Space, itemsize: int, facts: Facts, source: torch.Tensor) -> Facts | None:
    """How programs hold rows of the source in shared memory, or None where they would not."""
    device = devices.current
    if not device.ptx or not facts.across or len(space.indices) != 1 or itemsize > 8:
        return None
    (index,) = space.indices
    word = max(itemsize, 4)
    width, each = index.size * itemsize, word // itemsize
    if index.steps != (1,) or index.inner or space.far[0] or space.near[0] != 1 or source.data_ptr() % 16:
        return None
    if width < _LEAST_BYTES or any(n % each for n in (index.size, *space.far[1:])):
        return None
    held = min(_HELD_BYTES // word, power_of_2(width // word))
    rows = min(_HELD_BYTES // word // held, _MOST_ROWS)
    looked_up = min(_LOOKED_UP, power_of_2(space.n_columns))
    if width > _HELD_BYTES:
        looked_up = power_of_2(space.n_columns)
        if width > _MOST_PARTS * _HELD_BYTES or looked_up > min(_RESULT_COLUMNS, _RESULT_BYTES // itemsize):
            return None
    # Of a row that has many more sectors than there are indices, most would be read for nothing.
    if space.n_columns * SECTOR < width or space.n_rows * 4 < rows * device.programs:
        return None
    aligned = math.gcd(16 // word, *(n // each for n in (index.size, *space.far[1:])))
    return dataclasses.replace(facts, block=(rows, looked_up), aligned=aligned, held=held)


def read_at(
    out: torch.Tensor,
    source: torch.Tensor,
    source_strides: Sequence[int],
    indices: Sequence[Index],
    wraps: bool = False,
    message: str = IN_RANGE,
) -> None:
    """Copy to each element of `out` that of `source` at the place that its strides over `out`, and indices, tell.

    Index tensors are of int32 or int64. Negative numbers count from the end where an index `wraps`; those out of range
    stop the program, and nothing is read there.
    """
    if not out.numel():
        return
    itemsize = out.dtype.itemsize
    space = Space.of(out.shape, out.stride(), source_strides, indices, itemsize)
    facts = space.facts(itemsize, wraps, message)
    held = _held(space, itemsize, facts, source)
    if held is not None:
        parts = space.indices[0].size * itemsize > _HELD_BYTES
        kernel = _read_from_parts if parts else _read_from_shared
        kernel[(-(-space.n_rows // held.block[0]),)](
            words(out), words(source), *space.arguments(), FACTS=held, num_warps=16 if parts else 8, **ASSERTING
        )
        return
    _read_at[(space.programs(facts),)](
        words(out), words(source), *space.arguments(), FACTS=facts, num_warps=4, **ASSERTING
    )


def read_rows_at(out: torch.Tensor, n_rows: Size, source: torch.Tensor, n_columns: int, index: Index) -> None:
    """The same for a contiguous `out` of as many rows as data decides, of contiguous columns of `source`."""
    itemsize, parts = min(out.dtype.itemsize, 8), max(1, out.dtype.itemsize // 8)
    width, counted = n_columns * parts, index._replace(steps=tuple([parts * step for step in index.steps]))
    # There are at most as many as the index counts.
    space = Space.of((index.size, width), (width, 1), (0, 1), [counted._replace(strides=(1, 0))], itemsize)
    if space.n_columns != width:
        raise Decline("one row")
    facts = space.facts(itemsize, False, IN_RANGE)
    *arguments, _, columns = space.arguments()
    _read_rows_at[(n_rows.blocks(facts.block[0]), -(-width // facts.block[1]))](
        words(out), words(source), *arguments, n_rows, columns, FACTS=facts, num_warps=4, **ASSERTING
    )
