"""Reading at places that index tensors tell."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from tritonite.dispatch.call import Size
from tritonite.engine.indexing.places import IN_RANGE, Index, Space
from tritonite.engine.movement import words
from tritonite.errors import Decline
from tritonite.language.places import aligned_to, strided_offset
from tritonite.launch import ASSERTING, libentry


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
    row, column = rows_and_columns(n_columns, FACTS)
    _copy(out, source, row, column, n_rows, n_columns, indices, shape, strides, columns, counted, FACTS)


@libentry()
@triton.jit(do_not_specialize=["n_rows"])
def _read_rows_at(
    out, source, indices, shape, strides, columns, counted, n_rows: tl.int64, n_columns, FACTS: tl.constexpr
):
    """The same, of as many rows as data decides: a grid of blocks of rows by blocks of columns."""
    row = tl.program_id(0).to(FACTS.index) * FACTS.block[0] + tl.arange(0, FACTS.block[0])
    column = tl.program_id(1).to(FACTS.index) * FACTS.block[1] + tl.arange(0, FACTS.block[1])
    _copy(out, source, row, column, n_rows, n_columns, indices, shape, strides, columns, counted, FACTS)


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
