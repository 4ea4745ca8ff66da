"""Gather: copy the elements that index tensors select.

`read_at` chooses a kernel: `_read_at` for most calls; `_read_from_shared` and `_read_from_slices` if one index of
columns selects from all rows, which then are read once and looked up in shared memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.engine.indexing.indices import IN_RANGE, Index, IndexedMeta, IndexedSpace
from tritonite.engine.indexing.table import indexing_table
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
def rows_and_columns(n_columns, META: tl.constexpr):
    """Return the indices of a program's rows and columns."""
    program = tl.program_id(0)
    blocks = tl.cdiv(n_columns, META.block[1])
    row = (program // blocks).to(META.index) * META.block[0] + tl.arange(0, META.block[0])
    column = (program % blocks).to(META.index) * META.block[1] + tl.arange(0, META.block[1])
    return row, column


@triton.jit
def _offset_of_index(pointers, mask, index_range, META: tl.constexpr):
    """Load index values; return (the offsets in the indexed operand, the mask of values in range).

    `index_range` is (size, inner, steps) of the index. A value out of range stops the program.
    """
    value = tl.load(pointers, mask=mask, other=0).to(tl.int64)
    if META.wraps:
        value = tl.where(value < 0, value + index_range[0], value)
    inside = (value >= 0) & (value < index_range[0])
    tl.device_assert(inside | (mask == 0), META.message)
    return strided_offset(tl.where(inside, value, 0).to(META.index), index_range[1], index_range[2]), mask & inside


@triton.jit
def element_offsets(
    indices, row, column, n_rows, n_columns, shape, strides, column_strides, ranges, META: tl.constexpr
):
    """Return the direct operand's (offsets, mask) and the indexed operand's (offsets, mask) of a block.

    The second mask is also unset where an index is out of range.
    """
    direct_strides, indexed_strides, index_strides = strides
    direct_step, indexed_step, index_steps = column_strides
    row_mask = row < n_rows
    column_mask = (column < aligned_to(n_columns, META.aligned))[None, :]
    direct = aligned_to(strided_offset(row, shape, direct_strides), META.aligned)[:, None]
    direct = direct + column[None, :] * direct_step
    mask = row_mask[:, None] & column_mask
    indexed = strided_offset(row, shape, indexed_strides)
    if META.by_column_only:
        valid = column < n_columns
        of_column = column * indexed_step
        for k in tl.static_range(len(indices)):
            offset, valid = _offset_of_index(indices[k] + column * index_steps[k], valid, ranges[k], META)
            of_column += offset
        indexed = indexed[:, None] + of_column[None, :]
        valid = mask & valid[None, :]
    elif META.by_column:
        indexed = indexed[:, None] + column[None, :] * indexed_step
        valid = mask
        for k in tl.static_range(len(indices)):
            offset = strided_offset(row, shape, index_strides[k])[:, None] + column[None, :] * index_steps[k]
            offset, valid = _offset_of_index(indices[k] + offset, valid, ranges[k], META)
            indexed += offset
    else:
        valid = row_mask
        for k in tl.static_range(len(indices)):
            offset = strided_offset(row, shape, index_strides[k])
            offset, valid = _offset_of_index(indices[k] + offset, valid, ranges[k], META)
            indexed += offset
        indexed = aligned_to(indexed, META.aligned)[:, None] + column[None, :] * indexed_step
        valid = valid[:, None] & column_mask
    return direct, mask, indexed, valid


@triton.jit
def _copy(
    out, source, row, column, n_rows, n_columns, indices, shape, strides, column_strides, ranges, META: tl.constexpr
):
    """Copy a block of the space; elements whose index is out of range become 0."""
    direct, mask, indexed, valid = element_offsets(
        indices, row, column, n_rows, n_columns, shape, strides, column_strides, ranges, META
    )
    tl.store(out + direct, tl.load(source + indexed, mask=valid, other=0), mask=mask)


@libentry()
@triton.jit(do_not_specialize=["n_rows"])
def _read_at(out, source, indices, shape, strides, column_strides, ranges, n_rows, n_columns, META: tl.constexpr):
    """Copy one block of the space."""
    wait_for_previous_launch()
    row, column = rows_and_columns(n_columns, META)
    _copy(out, source, row, column, n_rows, n_columns, indices, shape, strides, column_strides, ranges, META)


@libentry()
@triton.jit(do_not_specialize=["n_rows"])
def _read_rows_at(
    out, source, indices, shape, strides, column_strides, ranges, n_rows: tl.int64, n_columns, META: tl.constexpr
):
    """Copy one block of a space whose number of rows is known on the device only; the grid has two dimensions."""
    wait_for_previous_launch()
    row = tl.program_id(0).to(META.index) * META.block[0] + tl.arange(0, META.block[0])
    column = tl.program_id(1).to(META.index) * META.block[1] + tl.arange(0, META.block[1])
    _copy(out, source, row, column, n_rows, n_columns, indices, shape, strides, column_strides, ranges, META)


@libentry()
@triton.jit(do_not_specialize=["n_rows"])
def _read_from_shared(
    out, source, indices, shape, strides, column_strides, ranges, n_rows, n_columns, META: tl.constexpr
):
    """Load whole rows of the source into shared memory, and look up the columns that an index selects there.

    Scattered loads of a warp from memory take one cache line after the other; shared memory serves them together.
    Shared memory has 4-byte or 8-byte integers, each of which has EACH elements.
    """
    wait_for_previous_launch()
    direct_strides, indexed_strides, _ = strides
    index_range, index_step = ranges[0], column_strides[2][0]
    ROWS: tl.constexpr = META.block[0]
    ITEM: tl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
    INTEGER: tl.constexpr = tl.int64 if ITEM == 8 else tl.int32
    EACH: tl.constexpr = (8 if ITEM == 8 else 4) // ITEM
    own = alloc_shared(ROWS * META.held, INTEGER)
    lane = tl.arange(0, ROWS * META.held)
    row = tl.program_id(0).to(META.index) * ROWS + lane // META.held
    start = strided_offset(row, shape, indexed_strides) // EACH
    inside = (lane % META.held < aligned_to(index_range[0] // EACH, META.aligned)) & (row < n_rows)
    within = aligned_to(start, META.aligned) + lane % META.held
    integers = source.to(tl.pointer_type(INTEGER), bitcast=True)
    store_shared(own, lane, tl.load(integers + within, mask=inside, other=0))
    tl.debug_barrier()
    for begin in range(0, n_columns, META.block[1]):
        column = begin + tl.arange(0, META.block[1])
        mask = column < n_columns
        at, valid = _offset_of_index(indices[0] + column * index_step, mask, index_range, META)
        at = tl.where(valid, at, 0).to(tl.int32)
        for i in tl.static_range(ROWS):
            out_row = tl.program_id(0).to(META.index) * ROWS + i
            found = load_shared(own, i * META.held + at // EACH, at.to(INTEGER))
            if EACH > 1:
                found = found >> (at % EACH * (8 * ITEM))
            pointers = out + strided_offset(out_row, shape, direct_strides) + column
            tl.store(pointers, found.to(out.dtype.element_ty), mask=mask & (out_row < n_rows))


@libentry()
@triton.jit(do_not_specialize=["n_rows"])
def _read_from_slices(
    out, source, indices, shape, strides, column_strides, ranges, n_rows, n_columns, META: tl.constexpr
):
    """Do what `_read_from_shared` does for one row that does not fit, slice by slice; keep all columns in registers."""
    wait_for_previous_launch()
    direct_strides, indexed_strides, _ = strides
    index_range, index_step = ranges[0], column_strides[2][0]
    ITEM: tl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
    INTEGER: tl.constexpr = tl.int64 if ITEM == 8 else tl.int32
    EACH: tl.constexpr = (8 if ITEM == 8 else 4) // ITEM
    COLUMNS: tl.constexpr = META.block[1]
    own = alloc_shared(META.held, INTEGER)
    row = tl.program_id(0).to(META.index)
    start = aligned_to(strided_offset(row, shape, indexed_strides) // EACH, META.aligned)
    integers = source.to(tl.pointer_type(INTEGER), bitcast=True) + start
    n_integers = aligned_to(index_range[0] // EACH, META.aligned)
    column = tl.arange(0, COLUMNS)
    mask = column < n_columns
    at, valid = _offset_of_index(indices[0] + column * index_step, mask, index_range, META)
    at = tl.where(valid, at, 0).to(tl.int32)
    result = tl.zeros((COLUMNS,), out.dtype.element_ty)
    for begin in range(0, n_integers, META.held):
        index = begin + tl.arange(0, META.held)
        loaded = tl.load(integers + index, mask=index < n_integers, other=0)
        # All threads have done their lookups in the previous slice.
        tl.debug_barrier()
        store_shared(own, tl.arange(0, META.held), loaded)
        tl.debug_barrier()
        here = at // EACH - begin
        inside = (here >= 0) & (here < META.held)
        found = load_shared(own, tl.where(inside, here, 0), at.to(INTEGER))
        if EACH > 1:
            found = found >> (at % EACH * (8 * ITEM))
        result = tl.where(inside, found.to(out.dtype.element_ty), result)
    tl.store(out + strided_offset(row, shape, direct_strides) + column, result, mask=mask)


def _held(space: IndexedSpace, itemsize: int, meta: IndexedMeta, source: torch.Tensor) -> IndexedMeta | None:
    """Return the facts of a kernel that has rows of the source in shared memory, or None if none would be faster."""
    device, limits = devices.current, indexing_table().shared_rows
    if not device.ptx or not meta.by_column_only or len(space.indices) != 1 or itemsize > 8:
        return None
    (index,) = space.indices
    integer = max(itemsize, 4)
    width, each = index.size * itemsize, integer // itemsize
    if index.steps != (1,) or index.inner or space.indexed[0] or space.direct[0] != 1 or source.data_ptr() % 16:
        return None
    if width < limits.least_bytes or any(n % each for n in (index.size, *space.indexed[1:])):
        return None
    held = min(limits.held_bytes // integer, power_of_2(width // integer))
    rows = min(limits.held_bytes // integer // held, limits.most_rows)
    looked_up = min(limits.columns, power_of_2(space.n_columns))
    if width > limits.held_bytes:
        looked_up = power_of_2(space.n_columns)
        most = min(limits.result_columns, limits.result_bytes // itemsize)
        if width > limits.most_slices * limits.held_bytes or looked_up > most:
            return None
    # With fewer indices than sectors in a row, loading whole rows reads more than the lookups need.
    if space.n_columns * SECTOR < width or space.n_rows * 4 < rows * device.programs:
        return None
    aligned = math.gcd(16 // integer, *(n // each for n in (index.size, *space.indexed[1:])))
    return dataclasses.replace(meta, block=(rows, looked_up), aligned=aligned, held=held)


def read_at(
    out: torch.Tensor,
    source: torch.Tensor,
    source_strides: Sequence[int],
    indices: Sequence[Index],
    wraps: bool = False,
    message: str = IN_RANGE,
) -> None:
    """Copy to each element of `out` the element of `source` that the indices select.

    `source_strides` are the source's strides over the shape of `out`, 0 along dimensions that only indices address.
    Index tensors are int32 or int64. `wraps` lets negative indices count from the end. An index out of range stops the
    program with `message`, and nothing is read for it.
    """
    if not out.numel():
        return
    itemsize = out.dtype.itemsize
    space = IndexedSpace.of(out.shape, out.stride(), source_strides, indices, itemsize)
    meta = space.meta(itemsize, wraps, message)
    held = _held(space, itemsize, meta, source)
    if held is not None:
        sliced = space.indices[0].size * itemsize > indexing_table().shared_rows.held_bytes
        kernel = _read_from_slices if sliced else _read_from_shared
        kernel[(-(-space.n_rows // held.block[0]),)](
            words(out), words(source), *space.arguments(), META=held, num_warps=16 if sliced else 8, **ASSERTING
        )
        return
    _read_at[(space.programs(meta),)](
        words(out), words(source), *space.arguments(), META=meta, num_warps=4, **ASSERTING
    )


def read_rows_at(out: torch.Tensor, n_rows: Size, source: torch.Tensor, n_columns: int, index: Index) -> None:
    """Copy the rows of `source` that an index selects to a contiguous `out`.

    `n_rows` is known on the device only, and at most `index.size`. Rows have `n_columns` contiguous elements.
    """
    # An element of 16 bytes is copied as two integers.
    itemsize, integers = min(out.dtype.itemsize, 8), max(1, out.dtype.itemsize // 8)
    width = n_columns * integers
    index = index._replace(strides=(1, 0), steps=tuple([integers * step for step in index.steps]))
    space = IndexedSpace.of((index.size, width), (width, 1), (0, 1), [index], itemsize)
    if space.n_columns != width:
        raise Decline("a single row, whose columns collapse with the rows")
    meta = space.meta(itemsize, False, IN_RANGE)
    *arguments, _, columns = space.arguments()
    _read_rows_at[(n_rows.blocks(meta.block[0]), -(-width // meta.block[1]))](
        words(out), words(source), *arguments, n_rows, columns, META=meta, num_warps=4, **ASSERTING
    )
