"""Deterministic scatter-add: add rows to the slots that index tensors select, in the order of the rows.

A slot is the linear index, over the indexed dimensions, of a target row. `_sort_blocks` and `_merge_runs` sort int64
keys: a row's slot in the upper half, its number in the lower half. So no two keys are equal, and rows of a slot stay in
order. In a merge, a key's position is the number of smaller keys in each run, which a binary search finds.

`_add_rows` adds up a chunk of the sorted rows by a program, so that one slot with all rows takes no longer than many
slots. Sums that cross chunks are stored as partial sums, which `_add_partial_sums` adds up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.dtypes import TRITON_DTYPES, opmath
from tritonite.engine.indexing.indices import Index
from tritonite.engine.indexing.table import indexing_table
from tritonite.engine.iteration import INT32_LIMIT, collapse, power_of_2, span
from tritonite.engine.rows.formulas import add_states
from tritonite.errors import Decline
from tritonite.language.indices import strided_offset
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import empty
from tritonite.runtime.launch import ASSERTING
from tritonite.runtime.libentry import libentry

# The slot of rows that are not added, which sort behind all others.
_NO_SLOT = 2**31 - 1


@libentry()
@triton.jit(do_not_specialize=["n", "skipped"])
def _sort_blocks(
    order,
    indices,
    shape,
    index_strides,
    ranges,
    n,
    skipped,
    WRAPS: tl.constexpr,
    MESSAGE: tl.constexpr,
    NO_SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the sorted keys of a block of rows.

    `ranges` has (size, stride in slots) of each index. Rows whose index is `skipped` get no slot.
    """
    wait_for_previous_launch()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < n
    slot = tl.zeros((BLOCK,), tl.int64)
    for k in tl.static_range(len(indices)):
        index = tl.load(indices[k] + strided_offset(row.to(tl.int64), shape, index_strides[k]), mask=mask, other=0)
        index = index.to(tl.int64)
        size, slot_stride = ranges[k]
        if WRAPS:
            index = tl.where(index < 0, index + size, index)
        inside = (index >= 0) & (index < size)
        tl.device_assert(inside | (mask == 0) | (index == skipped), MESSAGE)
        mask = mask & inside
        slot += index * slot_stride
    slot = tl.where(mask & (slot != skipped), slot, NO_SLOT)
    tl.store(order + row, tl.sort((slot << 32) | row.to(tl.int64)))


@libentry()
@triton.jit(do_not_specialize=["n", "length"])
def _merge_runs(merged, order, n, length, STEPS: tl.constexpr, RUNS: tl.constexpr, BLOCK: tl.constexpr):
    """Merge RUNS runs of `length` keys, of n in all: write BLOCK keys to their positions in the merged run."""
    wait_for_previous_launch()
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = tl.load(order + index)
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
    """Return the sorted keys of n rows, padded to whole blocks with keys without a slot."""
    device, blocks = indices[0].tensor.device, indexing_table().segments
    block = min(blocks.sorted, max(128, power_of_2(n)))
    padded = -(-n // block) * block
    order = empty((padded,), torch.int64, device)
    ranges, slots = [], 1
    for i in reversed(indices):
        ranges.append((i.size, slots))
        slots *= i.size
    _sort_blocks[(padded // block,)](
        *(order, tuple([i.tensor for i in indices]), shape, strides, tuple(ranges[::-1]), n, skipped),
        WRAPS=wraps,
        MESSAGE=message,
        NO_SLOT=_NO_SLOT,
        BLOCK=block,
        num_warps=4,
        **ASSERTING,
    )
    length = block
    while length < padded:
        merged = empty((padded,), torch.int64, device)
        runs = min(blocks.runs, power_of_2(-(-padded // length)))
        _merge_runs[(padded // blocks.merged,)](
            *(merged, order, padded, length), STEPS=length.bit_length(), RUNS=runs, BLOCK=blocks.merged, num_warps=4
        )
        order, length = merged, length * runs
    return order


@dataclass(frozen=True)
class _AddMeta:
    """Compile-time facts of the kernels that add up rows.

    A chunk has `rows` and `columns`. `compute` is the dtype of sums, `index` that of offsets.
    `added` adds the target's elements to the sums; without it they are overwritten.
    `averaged` divides a sum by the number of its rows. `flags` says that elements are bools.
    `bagged` says that a row's values are those of its bag, times a factor "of rows" or divided by one "of bags".
    """

    rows: int
    columns: int
    compute: Any
    index: Any
    added: bool
    averaged: bool
    no_slot: int
    flags: bool
    bagged: bool = False
    factor: str = ""


@triton.jit
def _keys_below(order, wanted, n):
    """Return the number of sorted keys below one that is wanted, by binary search."""
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
def _store_sum(target, total, slot, order, n, column_offset, mask, slots, META: tl.constexpr):
    """Write the sum of a slot's rows. `slots` is (inner sizes, strides) of the target over slots."""
    offset = strided_offset(slot.to(META.index), slots[0], slots[1]) + column_offset
    if META.averaged:
        begin = _keys_below(order, slot << 32, n)
        total = total / (_keys_below(order, (slot + 1) << 32, n) - begin).to(META.compute)
    if META.added:
        total = total + tl.load(target + offset, mask=mask, other=0).to(META.compute)
    else:
        # ATen adds to 0, which makes 0 of -0.
        total = total + tl.zeros_like(total)
    if META.flags:
        total = (total != 0).to(META.compute)
    tl.store(target + offset, total.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _load_rows(values, order, mask, shape, strides, bags, factors, n_bags, META: tl.constexpr):
    """Return (the slots, the values) of a chunk's rows, with all loads in flight at once.

    A row without a slot, or whose bag is not one of the `n_bags`, is 0.
    """
    ROWS: tl.constexpr = META.rows
    slots = ()
    rows = ()
    for i in tl.static_range(ROWS):
        element = tl.load(order + i)
        slot = element >> 32
        number = (element & 0xFFFFFFFF).to(META.index)
        valid = slot != META.no_slot
        own = number
        if META.bagged:
            bag = tl.load(bags + number, mask=valid, other=0).to(tl.int64)
            valid = valid & (bag >= 0) & (bag < n_bags)
            own = tl.where(valid, bag, 0).to(META.index)
        offset = strided_offset(own, shape, strides)
        slots = slots + (slot,)
        row = tl.load(values + offset, mask=mask & valid, other=0)
        if META.factor == "of rows":
            row = row.to(META.compute) * tl.load(factors + number, mask=valid, other=0).to(META.compute)
        elif META.factor == "of bags":
            row = row.to(META.compute) / tl.load(factors + own, mask=valid, other=1).to(META.compute)
        rows = rows + (row,)
    return slots, rows


@libentry()
@triton.jit(do_not_specialize=["n", "n_bags"])
def _add_rows(
    target,
    partial_sums,
    values,
    order,
    shape,
    row_strides,
    column_shape,
    column_strides,
    slots_of_target,
    n,
    n_columns,
    bags,
    factors,
    n_bags,
    META: tl.constexpr,
):
    """Add up the rows of a chunk, slot by slot, in a block of columns.

    A chunk has two `partial_sums`: of the slot that began in an earlier chunk, and of the one that a later chunk
    continues. Other sums are complete, and are written to the target.
    """
    wait_for_previous_launch()
    blocks = tl.cdiv(n_columns, META.columns)
    chunk = tl.program_id(0) // blocks
    first = chunk * META.rows
    column = (tl.program_id(0) % blocks).to(META.index) * META.columns + tl.arange(0, META.columns)
    mask = column < n_columns
    value_offset = strided_offset(column, column_shape, column_strides[0])
    target_offset = strided_offset(column, column_shape, column_strides[1])
    ROWS: tl.constexpr = META.rows
    slots, rows = _load_rows(
        *(values + value_offset, order + first, mask, shape, row_strides, bags, factors, n_bags, META)
    )
    partial = partial_sums + chunk.to(tl.int64) * 2 * n_columns + column
    before = tl.load(order + first - 1, mask=first > 0, other=-1) >> 32
    after = tl.load(order + first + META.rows, mask=first + META.rows < n, other=-1) >> 32
    total = rows[0].to(META.compute)
    begun = before == slots[0]
    for i in tl.static_range(1, ROWS):
        goes_on = slots[i] == slots[i - 1]
        if goes_on == 0:
            if begun:
                tl.store(partial, total, mask=mask)
            elif slots[i - 1] != META.no_slot:
                _store_sum(target, total, slots[i - 1], order, n, target_offset, mask, slots_of_target, META)
            begun = begun & False
        row = rows[i].to(META.compute)
        total = tl.where(goes_on, total + row, row)
    last = slots[ROWS - 1]
    if begun:
        tl.store(partial, total, mask=mask)
    elif after == last:
        tl.store(partial + n_columns, total, mask=mask)
    elif last != META.no_slot:
        _store_sum(target, total, last, order, n, target_offset, mask, slots_of_target, META)


@libentry()
@triton.jit(do_not_specialize=["n"])
def _add_partial_sums(
    target,
    partial_sums,
    order,
    column_shape,
    column_strides,
    slots_of_target,
    n,
    n_columns,
    AT_ONCE: tl.constexpr,
    META: tl.constexpr,
):
    """Add up the partial sums of the slot that begins in the program's chunk and goes on in later ones."""
    wait_for_previous_launch()
    blocks = tl.cdiv(n_columns, META.columns)
    chunk = tl.program_id(0) // blocks
    end = (chunk + 1) * META.rows
    slot = tl.load(order + end - 1) >> 32
    before = tl.load(order + end - META.rows - 1, mask=chunk > 0, other=-1) >> 32
    begins = (before != slot) | ((tl.load(order + end - META.rows) >> 32) != slot)
    after = tl.load(order + end, mask=end < n, other=-1) >> 32
    if begins & (after == slot) & (slot != META.no_slot):
        column = (tl.program_id(0) % blocks).to(META.index) * META.columns + tl.arange(0, META.columns)
        mask = column < n_columns
        total = tl.load(partial_sums + (chunk.to(tl.int64) * 2 + 1) * n_columns + column, mask=mask, other=0)
        stop = tl.cdiv(_keys_below(order, (slot + 1) << 32, n), META.rows)
        for start in range(chunk + 1, stop, AT_ONCE):
            other = start + tl.arange(0, AT_ONCE)
            pointers = partial_sums + other.to(tl.int64)[:, None] * 2 * n_columns + column[None, :]
            # -0 is the identity of sums of -0, too, of which the interpreter's `tl.sum` would make 0.
            several = tl.load(pointers, mask=(other < stop)[:, None] & mask[None, :], other=-0.0)
            total += tl.reduce(several, 0, add_states).to(META.compute)
        target_offset = strided_offset(column, column_shape, column_strides[1])
        _store_sum(target, total, slot, order, n, target_offset, mask, slots_of_target, META)


class Bags(NamedTuple):
    """The bags of rows, whose values are those of the bag, times the `row_factors` or divided by the bag's size.

    `numbers`, a vector, has the bag of each row.
    """

    numbers: torch.Tensor
    row_factors: torch.Tensor | None = None
    sizes: torch.Tensor | None = None


def add_rows_at(
    target: torch.Tensor,
    shape: Sequence[int],
    row_dims: Sequence[int],
    target_strides: Sequence[int],
    indices: Sequence[Index],
    values: torch.Tensor,
    value_strides: Sequence[int],
    *,
    overwrite: str = "",
    skipped: int = -(2**31),
    wraps: bool = False,
    message: str,
    bags: Bags | None = None,
) -> None:
    """Add rows of `values` to the rows of `target` that the indices select, in order of the rows.

    Strides are over the space `shape`, as in `write_at`; indices address the dimensions `row_dims` of it. With
    `overwrite`, "sum" or "mean", the sum or the mean of the selected rows overwrites a target row. Rows whose index is
    `skipped` are left out. With `bags`, `values` has a row for each bag. Calls whose keys do not fit in 64 bits are
    declined.
    """
    shape = tuple(shape)
    kept = [d for d in range(len(shape)) if d not in row_dims]
    n, n_columns = math.prod([shape[d] for d in row_dims]), math.prod([shape[d] for d in kept])
    if not n or not n_columns:
        return
    n_slots = math.prod([i.size for i in indices])
    if n >= 2**30 or n_slots >= _NO_SLOT:
        raise Decline(
            f"{n} rows for {n_slots} slots, of at most {2**30 - 1} and {_NO_SLOT - 1} whose keys have 64 bits"
        )

    def over(dims: Sequence[int], strides: Sequence[int]) -> list[int]:
        return [strides[d] for d in dims]

    row_sizes, rows = collapse(
        over(row_dims, shape), [over(row_dims, value_strides), *[over(row_dims, i.strides) for i in indices]]
    )
    column_sizes, columns = collapse(over(kept, shape), [over(kept, value_strides), over(kept, target_strides)])
    inner = tuple(row_sizes[:-1])
    order = _sorted_rows(indices, inner, tuple(map(tuple, rows[1:])), n, skipped, wraps, message)
    reach = max(span(shape, value_strides), span(target.shape, target.stride()), n_columns, *row_sizes)
    blocks, dtype = indexing_table().segments, target.dtype
    compute = torch.int32 if dtype is torch.bool else opmath(dtype)
    width = min(blocks.columns, power_of_2(n_columns))
    numbers, row_factors, bag_sizes = (None, None, None) if bags is None else bags
    meta = _AddMeta(
        rows=blocks.rows,
        columns=width,
        compute=TRITON_DTYPES[compute],
        index=tl.int64 if reach >= INT32_LIMIT else tl.int32,
        added=not overwrite,
        averaged=overwrite == "mean",
        no_slot=_NO_SLOT,
        flags=dtype is torch.bool,
        bagged=bags is not None,
        factor="" if row_factors is None and bag_sizes is None else "of bags" if row_factors is None else "of rows",
    )
    chunks = len(order) // blocks.rows
    partial_sums = empty((chunks, 2, n_columns), compute, target.device)
    # The last indexed dimension is the fastest of a slot.
    slots_of_target = (tuple([i.size for i in indices[:0:-1]]), tuple([i.steps[0] for i in reversed(indices)]))
    space = (tuple(column_sizes[:-1]), tuple(map(tuple, columns)), slots_of_target, len(order), n_columns)
    grid = (chunks * -(-n_columns // width),)
    warps = 4 if devices.current.interpreted else devices.warps(width // 4)
    bagged = (numbers, bag_sizes if row_factors is None else row_factors, 0 if bags is None else len(values))
    _add_rows[grid](
        *(target, partial_sums, values, order, inner, tuple(rows[0]), *space, *bagged), META=meta, num_warps=warps
    )
    _add_partial_sums[grid](
        target, partial_sums, order, *space, AT_ONCE=blocks.partial_sums, META=meta, num_warps=warps
    )
