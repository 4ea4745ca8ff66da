"""Runs of equal neighbours: their starts and lengths, the unique elements of a sorted vector, the mode of a row."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.dtypes import TRITON_DTYPES, opmath
from tritonite.engine.indexing.compact import Found
from tritonite.engine.iteration import INT32_LIMIT, power_of_2, span
from tritonite.engine.sorting.keys import Rows
from tritonite.engine.sorting.lookback import TICKET_INT64, check_length, is_skipped, runs_before
from tritonite.engine.sorting.table import sorting_table
from tritonite.language.indices import strided_offset
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import empty, first, read, zeros
from tritonite.runtime.libentry import libentry


@triton.jit
def _largest(a, b):
    return tl.maximum(a, b)


@libentry()
@triton.jit(do_not_specialize=["n"])
def _longest_run(
    values,
    indices,
    x,
    x_indices,
    shape,
    strides,
    steps,
    n,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the element of the longest run of a sorted row, and the original index of the run's last element.

    Of several longest runs the first is taken. `x_indices` has the original indices of the row's elements.
    """
    wait_for_previous_launch()
    row = tl.program_id(0).to(INDEX)
    source = strided_offset(row, shape, strides[2])
    begun = tl.zeros((), tl.int64)
    best = tl.zeros((), tl.int64)
    for begin in range(0, n, BLOCK):
        index = begin + tl.arange(0, BLOCK).to(INDEX)
        mask = index < n
        value = tl.load(x + source + index * steps[2], mask=mask, other=0)
        before = tl.load(x + source + (index - 1) * steps[2], mask=mask & (index > 0), other=0)
        differs = (index == 0) | (value.to(COMPUTE) != before.to(COMPUTE))
        start = tl.associative_scan(tl.where(differs, index.to(tl.int64), 0), 0, _largest)
        start = tl.maximum(start, begun)
        # The maximum compares lengths first, and of equal lengths prefers the earlier start.
        length = index.to(tl.int64) - start + 1
        best = tl.maximum(best, tl.max(tl.where(mask, (length << 32) | (n - start), 0), axis=0))
        begun = tl.max(start, axis=0)
    last = (n - (best & 0xFFFFFFFF) + (best >> 32) - 1).to(INDEX)
    value = tl.load(x + source + last * steps[2])
    tl.store(values + strided_offset(row, shape, strides[0]), value)
    tl.store(indices + strided_offset(row, shape, strides[1]), tl.load(x_indices + source + last * steps[2]))


@triton.jit
def _split4(x):
    """Split a vector into four: element i of the k-th is element 4 i + k of the vector."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0] // 4, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _join4(x):
    """Join four vectors that `_split4` has split."""
    return tl.reshape(tl.join(tl.join(x[0], x[2]), tl.join(x[1], x[3])), (4 * x[0].shape[0],))


@triton.jit
def _two_maxima(last, before, other_last, other_before):
    """Combine states of a scan: (the maximum of all elements, the maximum of all but the last one)."""
    return tl.maximum(last, other_last), tl.maximum(last, other_before)


@libentry()
@triton.jit(do_not_specialize=["n"])
def _write_runs(
    values,
    ranks,
    order,
    lengths,
    skip_flag,
    total,
    scratch,
    x,
    step,
    n,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    TICKET: tl.constexpr,
    WHOLE: tl.constexpr,
    THREADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write an element of each run that begins in the block, and the length of the run before it.

    `ranks` gets the number of each element's run, at the element's index or at the index that `order` gives for it.
    `total` gets the number of all runs. WHOLE says that n is a multiple of BLOCK. Look-back (`lookback.py`) gives the
    number of runs in earlier blocks. A thread has four contiguous elements, so that it adds up most of them by itself.
    """
    wait_for_previous_launch()
    if is_skipped(skip_flag):
        return
    block = tl.atomic_add(scratch, 1, sem="relaxed").to(tl.int32)
    index = block * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    if WHOLE:
        value = tl.load(x + index.to(INDEX) * step)
    else:
        value = tl.load(x + index.to(INDEX) * step, mask=inside, other=0)
    four = block * BLOCK + tl.arange(0, BLOCK // 4) * 4
    before = tl.load(x + (four - 1).to(INDEX) * step, mask=(four > 0) & (four < n), other=0).to(COMPUTE)
    element = _split4(value)
    counts, starts, begun = (), (), ()
    count, start = tl.zeros((BLOCK // 4,), tl.int32), tl.full((BLOCK // 4,), -1, tl.int32)
    for k in tl.static_range(4):
        begins = (four + k < n) & ((four + k == 0) | (element[k].to(COMPUTE) != before))
        before = element[k].to(COMPUTE)
        count += begins.to(tl.int32)
        if len(lengths) > 0:
            # The start of the previous run, if that is among the same four elements.
            starts = starts + (start,)
            start = tl.where(begins, four + k, start)
        counts, begun = counts + (count,), begun + (begins,)
    own, latest = tl.sum(count, axis=0), tl.full((), -1, tl.int32)
    if len(lengths) > 0:
        latest = tl.max(start, axis=0)
    earlier, last = runs_before(scratch + TICKET, block, own, latest, THREADS)
    end = (block + 1) * BLOCK >= n
    tl.store(total, (earlier + own).to(tl.int64), mask=end)
    ahead = tl.cumsum(count, axis=0) - count + (earlier - 1)
    rank = _join4((ahead + counts[0], ahead + counts[1], ahead + counts[2], ahead + counts[3]))
    begins = _join4(begun)
    tl.store(values + rank, value, mask=begins)
    if len(lengths) > 0:
        _, previous = tl.associative_scan((start, tl.full((BLOCK // 4,), -1, tl.int32)), 0, _two_maxima)
        previous = tl.maximum(previous, last)
        lasts = ()
        for k in tl.static_range(4):
            lasts = lasts + (tl.maximum(previous, starts[k]),)
        tl.store(lengths[0] + (rank - 1), (index - _join4(lasts)).to(tl.int64), mask=begins & (index > 0))
        tl.store(lengths[0] + (earlier + own - 1), (n - tl.maximum(last, latest)).to(tl.int64), mask=end)
    if len(ranks) > 0:
        target = index
        if len(order) > 0:
            target = tl.load(order[0] + index, mask=inside, other=0)
        tl.store(ranks[0] + target, rank.to(tl.int64), mask=inside)


@libentry()
@triton.jit(do_not_specialize=["count", "n"])
def _measure(lengths, starts, count: tl.int64, n, BLOCK: tl.constexpr):
    """Write the distance of each run's start to the next start, or to the end."""
    wait_for_previous_launch()
    run = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(starts + run, mask=run < count, other=0)
    after = tl.load(starts + run + 1, mask=run + 1 < count, other=0)
    tl.store(lengths + run, tl.where(run + 1 < count, after, n) - start, mask=run < count)


class Runs:
    """Runs of a vector, whose starts have a flag that is set. `count` is their number, which the host reads."""

    def __init__(self, flags: torch.Tensor) -> None:
        self.n, self._device = flags.numel(), flags.device
        self.found = Found(flags, (self.n,), (1,))
        (self.count,) = read(self.found.total)

    def starts(self) -> torch.Tensor:
        """Return the index of each run's first element."""
        result = empty((self.count,), torch.int64, self._device)
        self.found.write_linear(result)
        return result

    def lengths(self, starts: torch.Tensor) -> torch.Tensor:
        """Return the length of each run."""
        result = empty((self.count,), torch.int64, self._device)
        if self.n:
            block = sorting_table().runs.measured
            _measure[(self.count.blocks(block),)](result, starts, self.count, self.n, BLOCK=block)
        return result


class Distinct(NamedTuple):
    """Memory for the unique elements of a vector.

    `total`, on the device, is their number, which is known only when all are written. So the vectors have memory for
    as many as the input has, like ATen's. `ranks` (the unique element's number for each element) and `lengths` (the
    number of equal elements) are None if the caller does not want them.
    """

    values: torch.Tensor
    ranks: torch.Tensor | None
    lengths: torch.Tensor | None
    total: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor, ranks: torch.Tensor | None, measures: bool) -> Distinct:
        """Allocate memory for the unique elements of x."""
        shape = (x.numel(),)
        lengths = empty(shape, torch.int64, x.device) if measures else None
        return cls(empty(shape, x.dtype, x.device), ranks, lengths, empty((1,), torch.int64, x.device))

    def results(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (values, lengths), cut to the number of unique elements, which the host waits for."""
        (count,) = read(self.total)
        return first(self.values, count), None if self.lengths is None else first(self.lengths, count)


def write_runs(
    out: Distinct, x: torch.Tensor, order: torch.Tensor | None, skip_flag: torch.Tensor | None = None
) -> None:
    """Write the runs of equal elements of a vector, and for each element the number of its run.

    `order` has the original index of each element, at which the number is written. If the value of the `skip_flag`, on
    the device, is 0, nothing is written.
    """
    n = x.numel()
    chosen = sorting_table().runs
    block = min(chosen.written, max(128, power_of_2(n)))
    blocks = -(-n // block)
    if blocks > 1:
        check_length(n)
    optional = [() if tensor is None else (tensor,) for tensor in (out.ranks, order, out.lengths, skip_flag)]
    scratch = zeros((TICKET_INT64 + blocks,), torch.int64, x.device)
    _write_runs[(blocks,)](
        *(out.values, *optional, out.total, scratch, x, x.stride(0), n),
        COMPUTE=TRITON_DTYPES[opmath(x.dtype)],
        INDEX=tl.int64 if span(x.shape, x.stride()) >= INT32_LIMIT else tl.int32,
        TICKET=TICKET_INT64,
        WHOLE=n % block == 0,
        THREADS=chosen.threads,
        BLOCK=block,
        num_warps=devices.warps(chosen.threads),
    )


def longest_runs(
    x: torch.Tensor, x_indices: torch.Tensor, dim: int, values: torch.Tensor, indices: torch.Tensor
) -> None:
    """Write the most frequent element of each sorted row, and the last original index that has it.

    `x_indices` has the original indices of the sorted elements.
    """
    rows = Rows((values, indices, x), dim)
    _longest_run[(rows.n_rows,)](
        *(values, indices, x, x_indices, rows.shape, rows.strides, rows.steps, x.shape[dim]),
        COMPUTE=TRITON_DTYPES[opmath(x.dtype)],
        INDEX=rows.index,
        BLOCK=min(sorting_table().runs.longest, max(16, power_of_2(x.shape[dim]))),
        num_warps=4,
    )
