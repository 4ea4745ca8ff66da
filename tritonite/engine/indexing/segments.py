"""Adding up the rows that index tensors send to the same place, in order: the same bits every time.

Rows are sorted by their place, with their number in the low bits, so that no two are equal and rows of one place stay
in order. Programs sort blocks of them, and then merge runs: an element's place among several runs is the number of
smaller elements in each of them, which a binary search finds. A program adds up a few rows of the order, so that one
place with all rows takes no longer than many with one each; what begins in one program and ends in another is put
together by a second launch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.dtypes import TRITON_DTYPES, opmath
from tritonite.engine.indexing.places import Index
from tritonite.engine.iteration import INT32_LIMIT, collapse, power_of_2, span
from tritonite.engine.rows.kernels import strided_offset
from tritonite.errors import Decline
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import empty
from tritonite.runtime.launch import ASSERTING
from tritonite.runtime.libentry import libentry

# Rows without a place sort behind all others.
_NOWHERE = 2**31 - 1
# Elements that a program sorts, runs that are merged at a time, elements of each that a program places.
_SORTED, _RUNS, _PLACED = 1024, 32, 64
# Rows of the order that a program adds up, and columns; partial sums that are added up at a time.
_ROWS, _COLUMNS, _PARTS = 16, 512, 32


@libentry()
@triton.jit(do_not_specialize=["n", "skipped"])
def _sort_blocks(
    order,
    indices,
    shape,
    index_strides,
    counted,
    n,
    skipped,
    WRAPS: tl.constexpr,
    MESSAGE: tl.constexpr,
    NOWHERE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program sorts a block of rows by their place; one that is `skipped` goes nowhere."""
    wait_for_previous_launch()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < n
    slot = tl.zeros((BLOCK,), tl.int64)
    for k in tl.static_range(len(indices)):
        place = tl.load(indices[k] + strided_offset(row.to(tl.int64), shape, index_strides[k]), mask=mask, other=0)
        place = place.to(tl.int64)
        size = counted[k][0]
        if WRAPS:
            place = tl.where(place < 0, place + size, place)
        inside = (place >= 0) & (place < size)
        tl.device_assert(inside | (mask == 0) | (place == skipped), MESSAGE)
        mask = mask & inside
        slot += place * counted[k][1]
    slot = tl.where(mask & (slot != skipped), slot, NOWHERE)
    tl.store(order + row, tl.sort((slot << 32) | row.to(tl.int64)))


@libentry()
@triton.jit(do_not_specialize=["n", "length"])
def _merge_runs(merged, order, n, length, STEPS: tl.constexpr, RUNS: tl.constexpr, BLOCK: tl.constexpr):
    """A program finds the places of BLOCK elements among RUNS runs of `length`, which become one; `n` is all."""
    wait_for_previous_launch()
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = tl.load(order + place)
    first = tl.program_id(0) * BLOCK // (length * RUNS) * (length * RUNS)
    begin = first + tl.arange(0, RUNS)[:, None] * length
    size = tl.minimum(tl.maximum(n - begin, 0), length)
    smaller = tl.zeros((RUNS, BLOCK), tl.int32)
    for i in tl.static_range(STEPS):
        further = smaller + (1 << (STEPS - 1 - i))
        inside = further <= size
        other = tl.load(order + begin + further - 1, mask=inside, other=0)
        smaller = tl.where(inside & (other < mine[None, :]), further, smaller)
    tl.store(merged + first + tl.sum(smaller, axis=0), mine)


def _sorted_rows(
    indices: Sequence[Index],
    shape: tuple[int, ...],
    strides: tuple[tuple[int, ...], ...],
    n: int,
    skipped: int,
    wraps: bool,
    message: str,
) -> torch.Tensor:
    """The numbers of rows below their slots, in order, padded to whole blocks with rows that go nowhere."""
    device = indices[0].tensor.device
    block = min(_SORTED, max(128, power_of_2(n)))
    padded = -(-n // block) * block
    order = empty((padded,), torch.int64, device)
    counted, slots = [], 1
    for i in reversed(indices):
        counted.append((i.size, slots))
        slots *= i.size
    _sort_blocks[(padded // block,)](
        *(order, tuple([i.tensor for i in indices]), shape, strides, tuple(counted[::-1]), n, skipped),
        WRAPS=wraps,
        MESSAGE=message,
        NOWHERE=_NOWHERE,
        BLOCK=block,
        num_warps=4,
        **ASSERTING,
    )
    length = block
    while length < padded:
        merged = empty((padded,), torch.int64, device)
        runs = min(_RUNS, power_of_2(-(-padded // length)))
        _merge_runs[(padded // _PLACED,)](
            *(merged, order, padded, length), STEPS=length.bit_length(), RUNS=runs, BLOCK=_PLACED, num_warps=4
        )
        order, length = merged, length * runs
    return order


@dataclass(frozen=True)
class _Facts:
    """What the kernels that add up are compiled for: the rows and columns of a program, and the dtype added up in.

    What is there already is `added`, too, or overwritten. Sums are divided by the number of their rows where it is
    `averaged`. Rows that are `bagged` are those of their bags, times a factor "of rows", or divided by one "of bags".
    """

    rows: int
    columns: int
    compute: Any
    index: Any
    added: bool
    averaged: bool
    nowhere: int
    flags: bool
    bagged: bool = False
    factor: str = ""


@triton.jit
def _first_from(order, wanted, n):
    """How many elements of an order are smaller than one that is wanted."""
    low = tl.zeros((), tl.int32)
    high = tl.zeros((), tl.int32) + n
    while low < high:
        middle = low + (high - low) // 2
        if tl.load(order + middle) < wanted:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit
def _put(target, total, slot, order, n, column_offset, mask, counted, FACTS: tl.constexpr):
    """Write the sum of a slot's rows."""
    offset = strided_offset(slot.to(FACTS.index), counted[0], counted[1]) + column_offset
    if FACTS.averaged:
        begin = _first_from(order, slot << 32, n)
        total = total / (_first_from(order, (slot + 1) << 32, n) - begin).to(FACTS.compute)
    if FACTS.added:
        total = total + tl.load(target + offset, mask=mask, other=0).to(FACTS.compute)
    else:
        # ATen adds to 0, which makes 0 of -0.
        total = total + tl.zeros_like(total)
    if FACTS.flags:
        total = (total != 0).to(FACTS.compute)
    tl.store(target + offset, total.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _load_rows(values, order, mask, shape, strides, bags, factors, n_bags, FACTS: tl.constexpr):
    """The next rows of an order, all on their way at once, and their slots; zeros for a row that goes nowhere, and for
    one of no bag of the `n_bags`.
    """
    ROWS: tl.constexpr = FACTS.rows
    slots = ()
    rows = ()
    for i in tl.static_range(ROWS):
        element = tl.load(order + i)
        slot = element >> 32
        number = (element & 0xFFFFFFFF).to(FACTS.index)
        there = slot != FACTS.nowhere
        own = number
        if FACTS.bagged:
            bag = tl.load(bags + number, mask=there, other=0).to(tl.int64)
            there = there & (bag >= 0) & (bag < n_bags)
            own = tl.where(there, bag, 0).to(FACTS.index)
        place = strided_offset(own, shape, strides)
        slots = slots + (slot,)
        row = tl.load(values + place, mask=mask & there, other=0)
        if FACTS.factor == "of rows":
            row = row.to(FACTS.compute) * tl.load(factors + number, mask=there, other=0).to(FACTS.compute)
        elif FACTS.factor == "of bags":
            row = row.to(FACTS.compute) / tl.load(factors + own, mask=there, other=1).to(FACTS.compute)
        rows = rows + (row,)
    return slots, rows


@libentry()
@triton.jit(do_not_specialize=["n", "n_bags"])
def _add_rows(
    target,
    parts,
    values,
    order,
    shape,
    row_strides,
    column_shape,
    column_strides,
    counted,
    n,
    n_columns,
    bags,
    factors,
    n_bags,
    FACTS: tl.constexpr,
):
    """A program adds up the next FACTS.rows rows of an order, in a block of columns.

    Sums that began before, or go on, are its two `parts`.
    """
    wait_for_previous_launch()
    blocks = tl.cdiv(n_columns, FACTS.columns)
    chunk = tl.program_id(0) // blocks
    first = chunk * FACTS.rows
    column = (tl.program_id(0) % blocks).to(FACTS.index) * FACTS.columns + tl.arange(0, FACTS.columns)
    mask = column < n_columns
    near = strided_offset(column, column_shape, column_strides[0])
    far = strided_offset(column, column_shape, column_strides[1])
    ROWS: tl.constexpr = FACTS.rows
    slots, rows = _load_rows(values + near, order + first, mask, shape, row_strides, bags, factors, n_bags, FACTS)
    part = parts + chunk.to(tl.int64) * 2 * n_columns + column
    before = tl.load(order + first - 1, mask=first > 0, other=-1) >> 32
    after = tl.load(order + first + FACTS.rows, mask=first + FACTS.rows < n, other=-1) >> 32
    total = rows[0].to(FACTS.compute)
    begun = before == slots[0]
    for i in tl.static_range(1, ROWS):
        goes_on = slots[i] == slots[i - 1]
        if goes_on == 0:
            if begun:
                tl.store(part, total, mask=mask)
            elif slots[i - 1] != FACTS.nowhere:
                _put(target, total, slots[i - 1], order, n, far, mask, counted, FACTS)
            begun = begun & False
        row = rows[i].to(FACTS.compute)
        total = tl.where(goes_on, total + row, row)
    last = slots[ROWS - 1]
    if begun:
        tl.store(part, total, mask=mask)
    elif after == last:
        tl.store(part + n_columns, total, mask=mask)
    elif last != FACTS.nowhere:
        _put(target, total, last, order, n, far, mask, counted, FACTS)


@triton.jit
def _added(a, b):
    """Add two sums: the interpreter's `tl.sum` makes 0 of -0."""
    return a + b


@libentry()
@triton.jit(do_not_specialize=["n"])
def _add_parts(
    target, parts, order, column_shape, column_strides, counted, n, n_columns, PARTS: tl.constexpr, FACTS: tl.constexpr
):
    """A program puts together the sum that begins in one program of `_add_rows` and goes on in others."""
    wait_for_previous_launch()
    blocks = tl.cdiv(n_columns, FACTS.columns)
    chunk = tl.program_id(0) // blocks
    end = (chunk + 1) * FACTS.rows
    slot = tl.load(order + end - 1) >> 32
    before = tl.load(order + end - FACTS.rows - 1, mask=chunk > 0, other=-1) >> 32
    begins = (before != slot) | ((tl.load(order + end - FACTS.rows) >> 32) != slot)
    after = tl.load(order + end, mask=end < n, other=-1) >> 32
    if begins & (after == slot) & (slot != FACTS.nowhere):
        column = (tl.program_id(0) % blocks).to(FACTS.index) * FACTS.columns + tl.arange(0, FACTS.columns)
        mask = column < n_columns
        total = tl.load(parts + (chunk.to(tl.int64) * 2 + 1) * n_columns + column, mask=mask, other=0)
        stop = tl.cdiv(_first_from(order, (slot + 1) << 32, n), FACTS.rows)
        for start in range(chunk + 1, stop, PARTS):
            part = start + tl.arange(0, PARTS)
            pointers = parts + part.to(tl.int64)[:, None] * 2 * n_columns + column[None, :]
            # The identity of sums of -0, too.
            several = tl.load(pointers, mask=(part < stop)[:, None] & mask[None, :], other=-0.0)
            total += tl.reduce(several, 0, _added).to(FACTS.compute)
        far = strided_offset(column, column_shape, column_strides[1])
        _put(target, total, slot, order, n, far, mask, counted, FACTS)


def add_rows_at(
    target: torch.Tensor,
    shape: Sequence[int],
    row_dims: Sequence[int],
    target_strides: Sequence[int],
    indices: Sequence[Index],
    values: torch.Tensor,
    value_strides: Sequence[int],
    *,
    added: bool = True,
    averaged: bool = False,
    skipped: int = -(2**31),
    wraps: bool = False,
    message: str,
    bags: torch.Tensor | None = None,
    row_factors: torch.Tensor | None = None,
    bag_sizes: torch.Tensor | None = None,
) -> None:
    """Add rows of `values` to the places of `target` that their indices tell, in the order in which they stand.

    As in `write_at`, strides are over `shape`, of which indices tell in the `row_dims`. What is there is overwritten
    unless `added`. Sums are divided by the number of their rows where it is `averaged`; rows whose index is `skipped`
    are left out. With `bags`, a vector, the values have a row for each bag and a row's are those of its own, times its
    `row_factors` or divided by the `bag_sizes`. Declines where rows or places are too many for one word of 64 bits.
    """
    shape = tuple(shape)
    kept = [d for d in range(len(shape)) if d not in row_dims]
    n, n_columns = math.prod([shape[d] for d in row_dims]), math.prod([shape[d] for d in kept])
    if not n or not n_columns:
        return
    if n >= 2**30 or math.prod([i.size for i in indices]) >= _NOWHERE:
        raise Decline("rows or places that 64 bits do not hold")

    def over(dims: Sequence[int], strides: Sequence[int]) -> list[int]:
        return [strides[d] for d in dims]

    row_sizes, rows = collapse(
        over(row_dims, shape), [over(row_dims, value_strides), *[over(row_dims, i.strides) for i in indices]]
    )
    column_sizes, columns = collapse(over(kept, shape), [over(kept, value_strides), over(kept, target_strides)])
    inner = tuple(row_sizes[:-1])
    order = _sorted_rows(indices, inner, tuple(map(tuple, rows[1:])), n, skipped, wraps, message)
    reach = max(span(shape, value_strides), span(target.shape, target.stride()), n_columns, *row_sizes)
    device, dtype = devices.current, target.dtype
    compute = torch.int32 if dtype is torch.bool else opmath(dtype)
    width = min(_COLUMNS, power_of_2(n_columns))
    facts = _Facts(
        rows=_ROWS,
        columns=width,
        compute=TRITON_DTYPES[compute],
        index=tl.int64 if reach >= INT32_LIMIT else tl.int32,
        added=added,
        averaged=averaged,
        nowhere=_NOWHERE,
        flags=dtype is torch.bool,
        bagged=bags is not None,
        factor="" if row_factors is None and bag_sizes is None else "of bags" if row_factors is None else "of rows",
    )
    chunks = len(order) // _ROWS
    parts = empty((chunks, 2, n_columns), compute, target.device)
    # Slots count the last of the indexed dimensions fastest.
    counted = (tuple([i.size for i in indices[:0:-1]]), tuple([i.steps[0] for i in reversed(indices)]))
    space = (tuple(column_sizes[:-1]), tuple(map(tuple, columns)), counted, len(order), n_columns)
    grid = (chunks * -(-n_columns // width),)
    warps = 4 if device.interpreted else max(1, width // 128)
    bagged = (bags, bag_sizes if row_factors is None else row_factors, 0 if bags is None else len(values))
    _add_rows[grid](target, parts, values, order, inner, tuple(rows[0]), *space, *bagged, FACTS=facts, num_warps=warps)
    _add_parts[grid](target, parts, order, *space, PARTS=_PARTS, FACTS=facts, num_warps=warps)
