"""Runs of equal elements next to each other: where they begin, how long they are, and the longest of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonite.dispatch.call import Size, empty, read
from tritonite.dtypes import TRITON_DTYPES, opmath
from tritonite.engine.indexing.compact import Found, _add_up
from tritonite.engine.indexing.places import in_row_major
from tritonite.engine.iteration import power_of_2
from tritonite.engine.sorting.keys import Rows
from tritonite.language.places import strided_offset
from tritonite.launch import libentry

_BLOCK = 1024
_LONGEST_BLOCK = 2048
_EQUALS_BLOCK = 4096


@triton.jit
def _largest(a, b):
    return tl.maximum(a, b)


@libentry()
@triton.jit(do_not_specialize=["n"])
def _longest_run(
    values,
    indices,
    x,
    places,
    shape,
    strides,
    steps,
    n,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program looks for the longest run of equals in its row, the first of several, and the place of its end."""
    row = tl.program_id(0).to(INDEX)
    source = strided_offset(row, shape, strides[2])
    begun = tl.zeros((), tl.int64)
    best = tl.zeros((), tl.int64)
    for begin in range(0, n, BLOCK):
        place = begin + tl.arange(0, BLOCK).to(INDEX)
        mask = place < n
        value = tl.load(x + source + place * steps[2], mask=mask, other=0)
        before = tl.load(x + source + (place - 1) * steps[2], mask=mask & (place > 0), other=0)
        differs = (place == 0) | (value.to(COMPUTE) != before.to(COMPUTE))
        start = tl.associative_scan(tl.where(differs, place.to(tl.int64), 0), 0, _largest)
        start = tl.maximum(start, begun)
        # The length, and then how early a run begins.
        length = place.to(tl.int64) - start + 1
        best = tl.maximum(best, tl.max(tl.where(mask, (length << 32) | (n - start), 0), axis=0))
        begun = tl.max(start, axis=0)
    last = (n - (best & 0xFFFFFFFF) + (best >> 32) - 1).to(INDEX)
    word = tl.load(x + source + last * steps[2])
    tl.store(values + strided_offset(row, shape, strides[0]), word)
    tl.store(indices + strided_offset(row, shape, strides[1]), tl.load(places + source + last * steps[2]))


@triton.jit
def _beginnings(x, shape, strides, n, COMPUTE: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr):
    """(a program's places in row-major order, the elements there, which of them differ from the one before)."""
    linear = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    mask = linear < n
    value = tl.load(x + strided_offset(linear, shape, strides), mask=mask, other=0)
    earlier = tl.maximum(linear - 1, 0)
    before = tl.load(x + strided_offset(earlier, shape, strides), mask=mask, other=0)
    return linear, value, mask & ((linear == 0) | (value.to(COMPUTE) != before.to(COMPUTE)))


@libentry()
@triton.jit(do_not_specialize=["n"])
def _count_beginnings(counts, x, shape, strides, n, COMPUTE: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr):
    """A program counts the runs that begin in its block."""
    _, _, begins = _beginnings(x, shape, strides, n, COMPUTE, INDEX, BLOCK)
    tl.store(counts + tl.program_id(0), tl.sum(begins.to(tl.int32), axis=0).to(tl.int64))


@libentry()
@triton.jit(do_not_specialize=["n"])
def _write_runs(
    values,
    ranks,
    order,
    starts,
    before,
    x,
    shape,
    strides,
    n,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program writes what it knows of the runs that begin in its block: their elements, and where they begin.

    For each element it writes the number of its run: at its place, or at that which the order has for it.
    """
    linear, value, begins = _beginnings(x, shape, strides, n, COMPUTE, INDEX, BLOCK)
    rank = tl.load(before + tl.program_id(0)) + tl.cumsum(begins.to(tl.int32), axis=0) - 1
    tl.store(values + rank, value, mask=begins)
    if len(starts) > 0:
        tl.store(starts[0] + rank, linear.to(tl.int64), mask=begins)
    if len(ranks) > 0:
        place = linear.to(tl.int64)
        if len(order) > 0:
            place = tl.load(order[0] + linear, mask=linear < n, other=0).to(tl.int64)
        tl.store(ranks[0] + place, rank, mask=linear < n)


@libentry()
@triton.jit(do_not_specialize=["count", "n"])
def _measure(lengths, starts, count: tl.int64, n, BLOCK: tl.constexpr):
    """A program writes how far each start is from the next, or from the end."""
    run = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(starts + run, mask=run < count, other=0)
    after = tl.load(starts + run + 1, mask=run + 1 < count, other=0)
    tl.store(lengths + run, tl.where(run + 1 < count, after, n) - start, mask=run < count)


class Runs:
    """The runs of a vector of flags, set where one begins; `count` is read from the device."""

    def __init__(self, flags: torch.Tensor) -> None:
        self.n, self._device = flags.numel(), flags.device
        self.found = Found(flags, (self.n,), (1,))
        (self.count,) = read(self.found.total)

    def starts(self) -> torch.Tensor:
        """Where they begin."""
        result = empty((self.count,), torch.int64, self._device)
        self.found.write_linear(result)
        return result

    def lengths(self, starts: torch.Tensor) -> torch.Tensor:
        """How long they are."""
        return _lengths(starts, self.count, self.n)


def _lengths(starts: torch.Tensor, count: Size, n: int) -> torch.Tensor:
    """How long runs are that begin at so many places of n."""
    result = empty((count,), torch.int64, starts.device)
    if n:
        _measure[(count.blocks(_BLOCK),)](result, starts, count, n, BLOCK=_BLOCK)
    return result


class RunsOfEquals:
    """The runs of equal elements of a tensor in row-major order; `count` is read from the device."""

    def __init__(self, x: torch.Tensor) -> None:
        self._x = x
        shape, strides, integer = in_row_major(x)
        block = min(_EQUALS_BLOCK, max(128, power_of_2(x.numel())))
        blocks = -(-x.numel() // block)
        self._grid, self._space = (blocks,), (x, shape, strides, x.numel())
        self._facts = {"COMPUTE": TRITON_DTYPES[opmath(x.dtype)], "INDEX": integer, "BLOCK": block, "num_warps": 8}
        counts = empty((blocks,), torch.int64, x.device)
        # The total comes last.
        self._before = empty((blocks + 1,), torch.int64, x.device)
        _count_beginnings[self._grid](counts, *self._space, **self._facts)
        _add_up[(1,)](self._before, counts, blocks, BLOCK=_BLOCK)
        (self.count,) = read(self._before[-1:])

    def write(
        self, ranks: torch.Tensor | None, order: torch.Tensor | None, measures: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(their elements, their lengths if it measures); and to `ranks` the number of each element's, by an order."""
        x = self._x
        values = empty((self.count,), x.dtype, x.device)
        starts = empty((self.count,), torch.int64, x.device) if measures else None
        optional = [() if tensor is None else (tensor,) for tensor in (ranks, order, starts)]
        _write_runs[self._grid](values, *optional, self._before, *self._space, **self._facts)
        return values, None if starts is None else _lengths(starts, self.count, x.numel())


def longest_runs(x: torch.Tensor, places: torch.Tensor, dim: int, values: torch.Tensor, indices: torch.Tensor) -> None:
    """Of sorted rows, and the places that their elements came from: the most frequent element, and a place of it."""
    rows = Rows((values, indices, x), dim)
    _longest_run[(rows.n_rows,)](
        *(values, indices, x, places, rows.shape, rows.strides, rows.steps, x.shape[dim]),
        COMPUTE=TRITON_DTYPES[opmath(x.dtype)],
        INDEX=rows.index,
        BLOCK=min(_LONGEST_BLOCK, max(16, power_of_2(x.shape[dim]))),
        num_warps=4,
    )
