"""What is not 0: where it is, and what else stands there.

The elements of each block are counted, and the counts added up, so that every block knows how many come before its own.
Only then does the host wait for the number of all, where it has to know it, and the blocks are gone through once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from tritonite.dtypes import TRITON_DTYPES, opmath
from tritonite.engine.indexing.places import row_major
from tritonite.engine.iteration import INT32_LIMIT, power_of_2, span
from tritonite.engine.movement import words
from tritonite.language.indices import strided_offset
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import empty
from tritonite.runtime.launch import ASSERTING
from tritonite.runtime.libentry import libentry

_BLOCK = 4096
# Counts that are added up at a time, and elements that a program fills: each costs it two divisions of 64 bits.
_COUNTS, _FILLED = 4096, 1024


@triton.jit
def _found(x, n, shape, strides, COMPUTE: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr):
    """(the indices of a program's elements, which of them are not 0)."""
    linear = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    mask = linear < n
    value = tl.load(x + strided_offset(linear, shape, strides), mask=mask, other=0)
    return linear, (value.to(COMPUTE) != 0) & mask


@triton.jit
def _ranked(starts, found):
    """How many elements that are not 0 come before each, all blocks counted."""
    return tl.load(starts + tl.program_id(0)) + tl.cumsum(found.to(tl.int32), axis=0) - 1


@libentry()
@triton.jit(do_not_specialize=["n"])
def _count(
    counts, x, shape, strides, n, ALONE: tl.constexpr, COMPUTE: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr
):
    """A program counts what is not 0 in its block. One that is ALONE leaves what `_add_up` would."""
    wait_for_previous_launch()
    _, found = _found(x, n, shape, strides, COMPUTE, INDEX, BLOCK)
    count = tl.sum(found.to(tl.int32), axis=0).to(tl.int64)
    if ALONE:
        tl.store(counts, count * 0)
        tl.store(counts + 1, count)
    else:
        tl.store(counts + tl.program_id(0), count)


@libentry()
@triton.jit(do_not_specialize=["n"])
def _add_up(starts, counts, n, BLOCK: tl.constexpr):
    """One program: what all counts before each come to, and last of all the total."""
    wait_for_previous_launch()
    before = tl.zeros((), tl.int64)
    for begin in range(0, n, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        count = tl.load(counts + place, mask=place < n, other=0)
        tl.store(starts + place, before + tl.cumsum(count, axis=0) - count, mask=place < n)
        before += tl.sum(count, axis=0)
    tl.store(starts + n, before)


@libentry()
@triton.jit(do_not_specialize=["n", "limit", "step"])
def _write_coordinates(
    out,
    starts,
    x,
    shape,
    strides,
    sizes,
    n,
    limit,
    apart,
    step: tl.int64,
    LIMITED: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program writes where what is not 0 in its block is: places so far `apart`, whose coordinates are a `step`.

    `sizes` are all of x's but the first's, the last first. If LIMITED the first `limit` are written, and otherwise all.
    """
    wait_for_previous_launch()
    if LIMITED:
        # Most programs have nothing to write where few are wanted. Where all are, this condition would take registers
        # for nothing: with 136 a multiprocessor has one program, and with 100 two.
        before = tl.load(starts + tl.program_id(0))
        if before >= limit:
            return
    linear, found = _found(x, n, shape, strides, COMPUTE, INDEX, BLOCK)
    rank = _ranked(starts, found)
    if LIMITED:
        found = found & (rank < limit)
    rest = linear
    for d in tl.static_range(len(sizes)):
        tl.store(out + (len(sizes) - d) * step + rank * apart, (rest % sizes[d]).to(tl.int64), mask=found)
        rest = rest // sizes[d]
    tl.store(out + rank * apart, rest.to(tl.int64), mask=found)


@libentry()
@triton.jit(do_not_specialize=["n"])
def _write_ranks(
    out, starts, order, x, shape, strides, n, COMPUTE: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr
):
    """A program writes for each element of its block how many that are not 0 come before it, itself aside.

    Where elements have another place in an `order`, it writes there.
    """
    wait_for_previous_launch()
    linear, found = _found(x, n, shape, strides, COMPUTE, INDEX, BLOCK)
    rank = _ranked(starts, found)
    place = linear.to(tl.int64)
    if len(order) > 0:
        place = tl.load(order[0] + linear, mask=linear < n, other=0).to(tl.int64)
    tl.store(out + place, rank.to(tl.int64), mask=linear < n)


@libentry()
@triton.jit(do_not_specialize=["n", "limit"])
def _move(
    target,
    source,
    starts,
    mask,
    shape,
    strides,
    source_shape,
    n,
    limit,
    GATHERS: tl.constexpr,
    CHECKS: tl.constexpr,
    MESSAGE: tl.constexpr,
    PARTS: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program moves the elements of its block where the mask is set: from `source` to the next place of `target`.

    Unless it GATHERS, it moves them from the next place of `source` to `target`. Places are below `limit`. An element
    has so many PARTS, words next to each other.
    """
    wait_for_previous_launch()
    linear, found = _found(mask, n, shape, strides[0], tl.int1, INDEX, BLOCK)
    rank = _ranked(starts, found)
    if CHECKS:
        tl.device_assert((rank < limit) | (found == 0), MESSAGE)
        found = found & (rank < limit)
    rank = rank.to(INDEX)
    if GATHERS:
        read, written = strided_offset(linear, shape, strides[1]), rank * PARTS
    else:
        read, written = strided_offset(rank, source_shape, strides[2]), strided_offset(linear, shape, strides[1])
    for part in tl.static_range(PARTS):
        tl.store(target + written + part, tl.load(source + read + part, mask=found, other=0), mask=found)


@libentry()
@triton.jit(do_not_specialize=["value"])
def _fill_rest(out, total, value, n, columns, strides, BLOCK: tl.constexpr):
    """A program writes a value to the elements of its block that are not of the first `total` rows."""
    wait_for_previous_launch()
    linear = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = linear // columns
    rest = (row >= tl.load(total)) & (linear < n)
    place = row * strides[0] + linear % columns * strides[1]
    tl.store(out + place, tl.full((BLOCK,), value, tl.int64), mask=rest)


def fill_rest(out: torch.Tensor, total: torch.Tensor, value: int) -> None:
    """Write a value to all rows of a matrix of int64 but the first `total`."""
    if out.numel():
        _fill_rest[(-(-out.numel() // _FILLED),)](
            out, total, value, out.numel(), out.shape[1], out.stride(), BLOCK=_FILLED
        )


class Found:
    """What is not 0 in a tensor, in row-major order of `shape`, to which the tensor is broadcast by `strides`."""

    def __init__(self, x: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> None:
        self.x, self.shape, self.strides = x, tuple(shape), tuple(strides)
        self.n = torch.Size(self.shape).numel()
        self._block = min(_BLOCK, max(128, power_of_2(self.n)))
        blocks = -(-self.n // self._block)
        self._grid = (blocks,)
        # The total comes last.
        self._starts = empty((blocks + 1,), torch.int64, x.device)
        sizes, (own,) = row_major(self.shape, [self.strides])
        self._arguments = (tuple(sizes[:-1]), tuple(own))
        self._facts = {
            "COMPUTE": TRITON_DTYPES[opmath(x.dtype)],
            "INDEX": tl.int64 if max(self.n, span(self.shape, self.strides)) >= INT32_LIMIT else tl.int32,
            "BLOCK": self._block,
            "num_warps": 8,
        }
        alone = blocks == 1
        counts = self._starts if alone else empty((blocks,), torch.int64, x.device)
        if blocks:
            _count[self._grid](counts, x, *self._arguments, self.n, ALONE=alone, **self._facts)
        if not alone:
            _add_up[(1,)](self._starts, counts, blocks, BLOCK=min(_COUNTS, max(16, power_of_2(blocks))), num_warps=8)

    @property
    def total(self) -> torch.Tensor:
        """How many there are, on the device."""
        return self._starts[-1:]

    def write_linear(self, out: torch.Tensor) -> None:
        """Write the number of each, in row-major order, to a vector of int64."""
        if self.n:
            _write_coordinates[self._grid](
                *(out, self._starts, self.x, *self._arguments, (), self.n, -1, 1, 1), LIMITED=False, **self._facts
            )

    def write_ranks(self, out: torch.Tensor, order: torch.Tensor | None = None) -> None:
        """Write the number of the last at or before each element, to a vector of int64, by an order of its places."""
        if self.n:
            _write_ranks[self._grid](
                *(out, self._starts, () if order is None else (order,), self.x, *self._arguments, self.n), **self._facts
            )

    def write_coordinates(self, out: torch.Tensor, apart: int, step: Any, limit: int = -1) -> None:
        """Write where they are, of all or the first `limit`: elements `apart` in `out`, coordinates by a `step`."""
        sizes = self.shape[:0:-1]
        if self.n and self.shape:
            _write_coordinates[self._grid](
                *(out, self._starts, self.x, *self._arguments, sizes, self.n, limit, apart, step),
                LIMITED=limit >= 0,
                **self._facts,
            )

    def move(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        strides: Sequence[int],
        *,
        gathers: bool,
        limit: int = -1,
        message: str = "",
    ) -> None:
        """Copy elements of `source` where there are any to `target`, one after the other; or the reverse.

        `strides` are over the shape: of the source where it `gathers`, which may be broadcast, and else of the target.
        With a `limit` of 0 or more the program is stopped, in the words of `message`, where there are more.
        """
        if not self.n:
            return
        parts = 2 if target.dtype.itemsize == 16 else 1
        spread = [stride * parts for stride in strides]
        sizes, (own, other) = row_major(self.shape, [self.strides, spread])
        packed, (steps,) = row_major(source.shape, [[stride * parts for stride in source.stride()]])
        reach = max(self.n, span(self.shape, self.strides), span(self.shape, spread), span(packed, steps)) * parts
        _move[self._grid](
            *(words(target), words(source), self._starts, self.x, tuple(sizes[:-1])),
            *((tuple(own), tuple(other), () if gathers else tuple(steps)), () if gathers else tuple(packed[:-1])),
            *(self.n, limit),
            GATHERS=gathers,
            CHECKS=limit >= 0,
            MESSAGE=message,
            PARTS=parts,
            INDEX=tl.int64 if reach >= INT32_LIMIT else tl.int32,
            BLOCK=self._block,
            num_warps=8,
            **ASSERTING,
        )
