"""Runs of equal elements next to each other: where they begin, how long they are, and the longest of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonite.dispatch.call import empty, read
from tritonite.dtypes import TRITON_DTYPES, opmath
from tritonite.engine.indexing.compact import Found
from tritonite.engine.indexing.places import in_row_major
from tritonite.engine.iteration import power_of_2
from tritonite.engine.sorting.keys import Rows
from tritonite.language.places import strided_offset
from tritonite.launch import libentry

_BLOCK = 1024
_LONGEST_BLOCK = 2048


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


@libentry()
@triton.jit(do_not_specialize=["n"])
def _note_beginnings(flags, x, shape, strides, n, COMPUTE: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr):
    """A program notes where an element of its block differs from the one before it."""
    linear = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    mask = linear < n
    value = tl.load(x + strided_offset(linear, shape, strides), mask=mask, other=0).to(COMPUTE)
    earlier = tl.maximum(linear - 1, 0)
    before = tl.load(x + strided_offset(earlier, shape, strides), mask=mask, other=0).to(COMPUTE)
    tl.store(flags + linear, (linear == 0) | (value != before), mask=mask)


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

    @classmethod
    def of(cls, x: torch.Tensor) -> Runs:
        """Those of equal elements, in row-major order."""
        flags = empty((x.numel(),), torch.bool, x.device)
        if x.numel():
            shape, strides, integer = in_row_major(x)
            _note_beginnings[(-(-x.numel() // _BLOCK),)](
                *(flags, x, shape, strides, x.numel()),
                COMPUTE=TRITON_DTYPES[opmath(x.dtype)],
                INDEX=integer,
                BLOCK=_BLOCK,
                num_warps=4,
            )
        return cls(flags)

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
