"""Reading at places that index tensors tell."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from tritonite.dispatch.call import Size
from tritonite.engine.indexing.places import IN_RANGE, Index, Space, words
from tritonite.engine.rows.kernels import aligned_to, strided_offset
from tritonite.errors import Decline
from tritonite.launch import ASSERTING, libentry


@triton.jit
def rows_and_columns(n_rows, n_columns, FACTS: tl.constexpr):
    """The indices of a program's rows and columns, whose columns are none where it takes elements one by one."""
    program = tl.program_id(0)
    if len(FACTS.block) == 1:
        row = program.to(FACTS.index) * FACTS.block[0] + tl.arange(0, FACTS.block[0])
        column = tl.zeros((1,), FACTS.index)
    else:
        blocks = tl.cdiv(n_columns, FACTS.block[1])
        row = (program // blocks).to(FACTS.index) * FACTS.block[0] + tl.arange(0, FACTS.block[0])
        column = (program % blocks).to(FACTS.index) * FACTS.block[1] + tl.arange(0, FACTS.block[1])
    return row, column


@triton.jit
def places(indices, row, mask, shape, index_strides, counted, FACTS: tl.constexpr):
    """(the offset that indices tell for each row, which rows have one); stops the program where one is out of range."""
    offset = row * 0
    exists = mask
    for k in tl.static_range(len(indices)):
        place = tl.load(indices[k] + strided_offset(row, shape, index_strides[k]), mask=mask, other=0).to(tl.int64)
        size = counted[k][0]
        if FACTS.wraps:
            place = tl.where(place < 0, place + size, place)
        inside = (place >= 0) & (place < size)
        tl.device_assert(inside | (mask == 0), FACTS.message)
        exists = exists & inside
        offset += strided_offset(tl.where(inside, place, 0).to(FACTS.index), counted[k][1], counted[k][2])
    return offset, exists


@triton.jit
def spread(row_offset, column, stride, FACTS: tl.constexpr):
    """The offsets of a program's elements, from those of its rows."""
    if len(FACTS.block) == 1:
        offset = row_offset
    else:
        offset = aligned_to(row_offset, FACTS.aligned)[:, None] + column[None, :] * stride
    return offset


@triton.jit
def spread_mask(row_mask, column, n_columns, FACTS: tl.constexpr):
    """Which of a program's elements there are."""
    if len(FACTS.block) == 1:
        mask = row_mask
    else:
        mask = row_mask[:, None] & (column < aligned_to(n_columns, FACTS.aligned))[None, :]
    return mask


@triton.jit
def _copy(out, source, row, column, n_rows, n_columns, indices, shape, strides, columns, counted, FACTS: tl.constexpr):
    """Copy a block of rows and columns, or of elements one by one, from the places of their indices."""
    mask = row < n_rows
    place, exists = places(indices, row, mask, shape, strides[2], counted, FACTS)
    far = spread(strided_offset(row, shape, strides[1]) + place, column, columns[1], FACTS)
    near = spread(strided_offset(row, shape, strides[0]), column, columns[0], FACTS)
    value = tl.load(source + far, mask=spread_mask(exists, column, n_columns, FACTS), other=0)
    tl.store(out + near, value, mask=spread_mask(mask, column, n_columns, FACTS))


@libentry()
@triton.jit(do_not_specialize=["n_rows"])
def _read_at(out, source, indices, shape, strides, columns, counted, n_rows, n_columns, FACTS: tl.constexpr):
    """A program copies a block of the space."""
    row, column = rows_and_columns(n_rows, n_columns, FACTS)
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
    if not space.n_columns:
        raise Decline("rows of one element, or one row")
    facts = space.facts(itemsize, False, IN_RANGE)
    *arguments, _, columns = space.arguments()
    _read_rows_at[(n_rows.blocks(facts.block[0]), -(-width // facts.block[1]))](
        words(out), words(source), *arguments, n_rows, columns, FACTS=facts, num_warps=4, **ASSERTING
    )
