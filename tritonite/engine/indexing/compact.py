"""Stream compaction: the indices of nonzero elements, and other tensors' elements at these indices.

A first launch counts the nonzero elements of each block, a second one scans the counts. If the total is the size of a
result, the host waits for it. A third launch goes over the blocks again and writes results at the scanned offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from tritonite.dtypes import TRITON_DTYPES, opmath
from tritonite.engine.indexing.indices import row_major
from tritonite.engine.indexing.table import indexing_table
from tritonite.engine.iteration import INT32_LIMIT, power_of_2, span
from tritonite.engine.movement import words
from tritonite.language.indices import strided_offset
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import empty
from tritonite.runtime.launch import ASSERTING
from tritonite.runtime.libentry import libentry


@triton.jit
def _nonzero(x, n, shape, strides, COMPUTE: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr):
    """Return (the linear indices of a program's elements, the mask of those that are not 0)."""
    linear = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    mask = linear < n
    value = tl.load(x + strided_offset(linear, shape, strides), mask=mask, other=0)
    return linear, (value.to(COMPUTE) != 0) & mask


@triton.jit
def _ranks(starts, found):
    """Return the rank of each nonzero element among those of all blocks."""
    return tl.load(starts + tl.program_id(0)) + tl.cumsum(found.to(tl.int32), axis=0) - 1


@libentry()
@triton.jit(do_not_specialize=["n"])
def _count(
    counts, x, shape, strides, n, ALONE: tl.constexpr, COMPUTE: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr
):
    """Count the nonzero elements of a block. If the block is ALONE, write what `_scan_counts` would."""
    wait_for_previous_launch()
    _, found = _nonzero(x, n, shape, strides, COMPUTE, INDEX, BLOCK)
    count = tl.sum(found.to(tl.int32), axis=0).to(tl.int64)
    if ALONE:
        tl.store(counts, count * 0)
        tl.store(counts + 1, count)
    else:
        tl.store(counts + tl.program_id(0), count)


@libentry()
@triton.jit(do_not_specialize=["n"])
def _scan_counts(starts, counts, n, BLOCK: tl.constexpr):
    """Write the exclusive prefix sums of the counts, and behind those the total, by one program."""
    wait_for_previous_launch()
    before = tl.zeros((), tl.int64)
    for begin in range(0, n, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        count = tl.load(counts + index, mask=index < n, other=0)
        tl.store(starts + index, before + tl.cumsum(count, axis=0) - count, mask=index < n)
        before += tl.sum(count, axis=0)
    tl.store(starts + n, before)


@libentry()
@triton.jit(do_not_specialize=["n", "limit", "coordinate_stride"])
def _write_coordinates(
    out,
    starts,
    x,
    shape,
    strides,
    sizes,
    n,
    limit,
    stride,
    coordinate_stride: tl.int64,
    LIMITED: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the coordinates of the nonzero elements of a block, or the linear indices if there are no `sizes`.

    `sizes` are x's without the first, the last one first. In `out`, elements are a `stride` and coordinates a
    `coordinate_stride` from each other. If LIMITED, only the first `limit` elements are written.
    """
    wait_for_previous_launch()
    if LIMITED:
        # With a low limit, most programs have nothing to write. Without a limit, the test would only take registers.
        before = tl.load(starts + tl.program_id(0))
        if before >= limit:
            return
    linear, found = _nonzero(x, n, shape, strides, COMPUTE, INDEX, BLOCK)
    rank = _ranks(starts, found)
    if LIMITED:
        found = found & (rank < limit)
    rest = linear
    for d in tl.static_range(len(sizes)):
        target = out + (len(sizes) - d) * coordinate_stride + rank * stride
        tl.store(target, (rest % sizes[d]).to(tl.int64), mask=found)
        rest = rest // sizes[d]
    tl.store(out + rank * stride, rest.to(tl.int64), mask=found)


@libentry()
@triton.jit(do_not_specialize=["n"])
def _write_ranks(
    out, starts, order, x, shape, strides, n, COMPUTE: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr
):
    """Write for each element of a block the rank of the last nonzero element up to it.

    With an `order`, the rank is written at the index that the order gives for the element.
    """
    wait_for_previous_launch()
    linear, found = _nonzero(x, n, shape, strides, COMPUTE, INDEX, BLOCK)
    rank = _ranks(starts, found)
    target = linear.to(tl.int64)
    if len(order) > 0:
        target = tl.load(order[0] + linear, mask=linear < n, other=0).to(tl.int64)
    tl.store(out + target, rank.to(tl.int64), mask=linear < n)


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
    INTEGERS: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the elements of a block where the mask is set.

    If it GATHERS, an element of `source` goes to its rank in a contiguous `target`. Otherwise the element of `source`
    at the rank, in row-major order, goes to `target`. CHECKS asserts that ranks are below `limit`. An element has
    INTEGERS contiguous integers.
    """
    wait_for_previous_launch()
    linear, found = _nonzero(mask, n, shape, strides[0], tl.int1, INDEX, BLOCK)
    rank = _ranks(starts, found)
    if CHECKS:
        tl.device_assert((rank < limit) | (found == 0), MESSAGE)
        found = found & (rank < limit)
    rank = rank.to(INDEX)
    if GATHERS:
        read, written = strided_offset(linear, shape, strides[1]), rank * INTEGERS
    else:
        read, written = strided_offset(rank, source_shape, strides[2]), strided_offset(linear, shape, strides[1])
    for i in tl.static_range(INTEGERS):
        tl.store(target + written + i, tl.load(source + read + i, mask=found, other=0), mask=found)


@libentry()
@triton.jit(do_not_specialize=["value"])
def _fill_rest(out, total, value, n, columns, strides, BLOCK: tl.constexpr):
    """Write a value to the elements of a block that are behind the first `total` rows."""
    wait_for_previous_launch()
    linear = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = linear // columns
    rest = (row >= tl.load(total)) & (linear < n)
    target = row * strides[0] + linear % columns * strides[1]
    tl.store(out + target, tl.full((BLOCK,), value, tl.int64), mask=rest)


def fill_rest(out: torch.Tensor, total: torch.Tensor, value: int) -> None:
    """Write a value to all rows of an int64 matrix behind the first `total`, a number on the device."""
    if out.numel():
        block = indexing_table().compact.filled
        _fill_rest[(-(-out.numel() // block),)](out, total, value, out.numel(), out.shape[1], out.stride(), BLOCK=block)


class Found:
    """The nonzero elements of a tensor, in row-major order of the `shape` to which `strides` broadcast it.

    The constructor launches the count and the scan; the methods launch the third kernel.
    """

    def __init__(self, x: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> None:
        self.x, self.shape, self.strides = x, tuple(shape), tuple(strides)
        self.n = torch.Size(self.shape).numel()
        chosen = indexing_table().compact
        self._block = min(chosen.block, max(128, power_of_2(self.n)))
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
            block = min(chosen.counts, max(16, power_of_2(blocks)))
            _scan_counts[(1,)](self._starts, counts, blocks, BLOCK=block, num_warps=8)

    @property
    def total(self) -> torch.Tensor:
        """The number of nonzero elements, as a tensor on the device."""
        return self._starts[-1:]

    def write_linear(self, out: torch.Tensor) -> None:
        """Write the linear index of each nonzero element, in row-major order, to an int64 vector."""
        if self.n:
            _write_coordinates[self._grid](
                *(out, self._starts, self.x, *self._arguments, (), self.n, -1, 1, 1), LIMITED=False, **self._facts
            )

    def write_ranks(self, out: torch.Tensor, order: torch.Tensor | None = None) -> None:
        """Write for each element the rank of the last nonzero element up to it, to an int64 vector.

        `order` has the index at which the rank of each element is written.
        """
        if self.n:
            _write_ranks[self._grid](
                *(out, self._starts, () if order is None else (order,), self.x, *self._arguments, self.n), **self._facts
            )

    def write_coordinates(self, out: torch.Tensor, stride: int, coordinate_stride: Any, limit: int = -1) -> None:
        """Write the coordinates of all nonzero elements, or of the first `limit`, with these strides of `out`."""
        sizes = self.shape[:0:-1]
        if self.n and self.shape:
            _write_coordinates[self._grid](
                *(out, self._starts, self.x, *self._arguments, sizes, self.n, limit, stride, coordinate_stride),
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
        """Copy elements of `source` at nonzero elements to a contiguous `target` (`gathers`), or the reverse.

        `strides` are over the shape: the source's if it `gathers`, which may be broadcast, otherwise the target's.
        With a `limit` of 0 or more, a larger number of nonzero elements stops the program with `message`.
        """
        if not self.n:
            return
        integers = 2 if target.dtype.itemsize == 16 else 1
        spread = [stride * integers for stride in strides]
        sizes, (own, other) = row_major(self.shape, [self.strides, spread])
        packed, (steps,) = row_major(source.shape, [[stride * integers for stride in source.stride()]])
        reach = max(self.n, span(self.shape, self.strides), span(self.shape, spread), span(packed, steps)) * integers
        _move[self._grid](
            *(words(target), words(source), self._starts, self.x, tuple(sizes[:-1])),
            *((tuple(own), tuple(other), () if gathers else tuple(steps)), () if gathers else tuple(packed[:-1])),
            *(self.n, limit),
            GATHERS=gathers,
            CHECKS=limit >= 0,
            MESSAGE=message,
            INTEGERS=integers,
            INDEX=tl.int64 if reach >= INT32_LIMIT else tl.int32,
            BLOCK=self._block,
            num_warps=8,
            **ASSERTING,
        )
