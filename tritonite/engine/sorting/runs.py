"""Runs of equal elements next to each other: where they begin, how long they are, and the longest of a row."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tritonite.dtypes import TRITON_DTYPES, opmath
from tritonite.engine.indexing.compact import Found
from tritonite.engine.iteration import INT32_LIMIT, power_of_2, span
from tritonite.engine.sorting.keys import Rows
from tritonite.engine.sorting.radix import check_length, unwanted
from tritonite.language.indices import strided_offset
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import empty, first, read, zeros
from tritonite.runtime.libentry import libentry

_BLOCK = 1024
_LONGEST_BLOCK = 2048
_EQUALS_BLOCK, _EQUALS_THREADS = 4096, 256
# The words that the counter of tickets has for itself, so that it shares no cache line with others.
_COUNTER = 16


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
    wait_for_previous_launch()
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
def _word(count, start, kind):
    """What a program publishes: how many runs begin, where the last does (-1 if none), and what that is of.

    1 is its block, 2 all blocks up to it. Where nothing is published yet, there is 0.
    """
    return (count.to(tl.int64) << 32) | ((start + 1).to(tl.int64) << 2) | kind


@triton.jit
def runs_before(words, block, count, start, AT_ONCE: tl.constexpr):
    """(how many runs begin in all blocks before a program's, where the last does), publishing its own.

    Each thread looks at the word of another block, so that all of them go on or end together.
    """
    before = tl.zeros((), tl.int32)
    last = tl.full((), -1, tl.int32)
    tl.atomic_xchg(words + block, _word(count, start, tl.where(block == 0, 2, 1)), sem="relaxed")
    if block > 0:
        distance = tl.arange(0, AT_ONCE)
        nearest = block - 1
        while nearest >= 0:
            word = tl.load(words + (nearest - distance), mask=distance <= nearest, other=2, volatile=True)
            kind = (word & 3).to(tl.int32)
            end = tl.min(tl.where(kind == 1, AT_ONCE * 4, distance * 4 + kind), axis=0)
            known = (distance * 4 < end) & (kind != 0)
            before += tl.sum(tl.where(known, (word >> 32).to(tl.int32), 0), axis=0)
            last = tl.maximum(last, tl.max(tl.where(known, (word & 0xFFFFFFFF).to(tl.int32) // 4 - 1, -1), axis=0))
            nearest = tl.where((end & 3) == 2, -1, nearest - end // 4)
        tl.atomic_xchg(words + block, _word(before + count, tl.maximum(last, start), 2), sem="relaxed")
    return before, last


@triton.jit
def _apart(x):
    """The elements of every four next to each other, as four vectors."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0] // 4, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _together(x):
    """The reverse."""
    return tl.reshape(tl.join(tl.join(x[0], x[2]), tl.join(x[1], x[3])), (4 * x[0].shape[0],))


@triton.jit
def _later(last, before, other_last, other_before):
    """The largest of all, and of all but the last one."""
    return tl.maximum(last, other_last), tl.maximum(last, other_before)


@libentry()
@triton.jit(do_not_specialize=["n"])
def _write_runs(
    values,
    ranks,
    order,
    lengths,
    unless,
    total,
    scratch,
    x,
    step,
    n,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    COUNTER: tl.constexpr,
    WHOLE: tl.constexpr,
    THREADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program writes the elements of the runs that begin in its block, and the lengths of those before them.

    For each element it writes the number of its run: at its place, or at that which the order has for it. If blocks are
    WHOLE, n is a multiple of theirs. Programs take tickets, so that those before a program's own have begun. A thread
    has four elements next to each other at a time, so that it adds up most by itself.
    """
    wait_for_previous_launch()
    if unwanted(unless):
        return
    block = tl.atomic_add(scratch, 1, sem="relaxed").to(tl.int32)
    place = block * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    if WHOLE:
        value = tl.load(x + place.to(INDEX) * step)
    else:
        value = tl.load(x + place.to(INDEX) * step, mask=inside, other=0)
    four = block * BLOCK + tl.arange(0, BLOCK // 4) * 4
    before = tl.load(x + (four - 1).to(INDEX) * step, mask=(four > 0) & (four < n), other=0).to(COMPUTE)
    element = _apart(value)
    counts, starts, begun = (), (), ()
    count, start = tl.zeros((BLOCK // 4,), tl.int32), tl.full((BLOCK // 4,), -1, tl.int32)
    for k in tl.static_range(4):
        begins = (four + k < n) & ((four + k == 0) | (element[k].to(COMPUTE) != before))
        before = element[k].to(COMPUTE)
        count += begins.to(tl.int32)
        if len(lengths) > 0:
            # Where the run before this element's began, of those in the same four.
            starts = starts + (start,)
            start = tl.where(begins, four + k, start)
        counts, begun = counts + (count,), begun + (begins,)
    own, latest = tl.sum(count, axis=0), tl.full((), -1, tl.int32)
    if len(lengths) > 0:
        latest = tl.max(start, axis=0)
    earlier, last = runs_before(scratch + COUNTER, block, own, latest, THREADS)
    end = (block + 1) * BLOCK >= n
    tl.store(total, (earlier + own).to(tl.int64), mask=end)
    ahead = tl.cumsum(count, axis=0) - count + (earlier - 1)
    rank = _together((ahead + counts[0], ahead + counts[1], ahead + counts[2], ahead + counts[3]))
    begins = _together(begun)
    tl.store(values + rank, value, mask=begins)
    if len(lengths) > 0:
        _, previous = tl.associative_scan((start, tl.full((BLOCK // 4,), -1, tl.int32)), 0, _later)
        previous = tl.maximum(previous, last)
        lasts = ()
        for k in tl.static_range(4):
            lasts = lasts + (tl.maximum(previous, starts[k]),)
        tl.store(lengths[0] + (rank - 1), (place - _together(lasts)).to(tl.int64), mask=begins & (place > 0))
        tl.store(lengths[0] + (earlier + own - 1), (n - tl.maximum(last, latest)).to(tl.int64), mask=end)
    if len(ranks) > 0:
        target = place
        if len(order) > 0:
            target = tl.load(order[0] + place, mask=inside, other=0)
        tl.store(ranks[0] + target, rank.to(tl.int64), mask=inside)


@libentry()
@triton.jit(do_not_specialize=["count", "n"])
def _measure(lengths, starts, count: tl.int64, n, BLOCK: tl.constexpr):
    """A program writes how far each start is from the next, or from the end."""
    wait_for_previous_launch()
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
        result = empty((self.count,), torch.int64, self._device)
        if self.n:
            _measure[(self.count.blocks(_BLOCK),)](result, starts, self.count, self.n, BLOCK=_BLOCK)
        return result


class Distinct(NamedTuple):
    """Where kernels write what there is of a vector, each once, and how many that are.

    That is known when all has been written: vectors have the memory of as many as there may be, as ATen's have. `ranks`
    and `lengths`, the number of each element's among those and how often each is there, are what may not be wanted.
    """

    values: torch.Tensor
    ranks: torch.Tensor | None
    lengths: torch.Tensor | None
    total: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor, ranks: torch.Tensor | None, measures: bool) -> Distinct:
        """Memory for as many as x has elements."""
        shape = (x.numel(),)
        lengths = empty(shape, torch.int64, x.device) if measures else None
        return cls(empty(shape, x.dtype, x.device), ranks, lengths, empty((1,), torch.int64, x.device))

    def results(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(values, lengths), for whose number the host waits."""
        (count,) = read(self.total)
        return first(self.values, count), None if self.lengths is None else first(self.lengths, count)


def write_runs(out: Distinct, x: torch.Tensor, order: torch.Tensor | None, unless: torch.Tensor | None = None) -> None:
    """Write the runs of equal elements of a vector, and by an order the number of each element's.

    Nothing is written where a flag says `unless`, by being 0.
    """
    n = x.numel()
    block = min(_EQUALS_BLOCK, max(128, power_of_2(n)))
    blocks = -(-n // block)
    if blocks > 1:
        check_length(n)
    optional = [() if tensor is None else (tensor,) for tensor in (out.ranks, order, out.lengths, unless)]
    scratch = zeros((_COUNTER + blocks,), torch.int64, x.device)
    _write_runs[(blocks,)](
        *(out.values, *optional, out.total, scratch, x, x.stride(0), n),
        COMPUTE=TRITON_DTYPES[opmath(x.dtype)],
        INDEX=tl.int64 if span(x.shape, x.stride()) >= INT32_LIMIT else tl.int32,
        COUNTER=_COUNTER,
        WHOLE=n % block == 0,
        THREADS=_EQUALS_THREADS,
        BLOCK=block,
        num_warps=_EQUALS_THREADS // 32,
    )


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
