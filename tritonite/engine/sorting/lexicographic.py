"""Slices of a tensor in order, compared element by element, the first difference deciding.

Runs are merged, several at a time: a slice's place among them is the number of those in each run that come before it,
which a binary search finds. Equal slices stay in their order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.dtypes import TRITON_DTYPES, opmath
from tritonite.engine.iteration import power_of_2
from tritonite.engine.sorting.keys import words
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import empty
from tritonite.runtime.libentry import libentry
from tritonite.runtime.symbols import Size

# Runs that are merged at a time, and slices of them that a program places.
_RUNS, _PLACED = 16, 16


@triton.jit
def _comes_before(x, a, b, mask, n_columns, COMPUTE: tl.constexpr):
    """Whether slices `a` come before slices `b`, where a mask is set; nan comes behind all numbers."""
    undecided = mask
    before = mask & False
    column = tl.zeros((), tl.int64)
    while (column < n_columns) & (tl.max(tl.max(undecided.to(tl.int32), axis=1), axis=0) > 0):
        left = tl.load(x + a * n_columns + column, mask=undecided, other=0).to(COMPUTE)
        right = tl.load(x + b * n_columns + column, mask=undecided, other=0).to(COMPUTE)
        smaller = (left < right) | ((left == left) & (right != right))
        larger = (right < left) | ((right == right) & (left != left))
        before = before | (undecided & smaller)
        undecided = undecided & (smaller == 0) & (larger == 0)
        column += 1
    return before, undecided


@libentry()
@triton.jit(do_not_specialize=["n", "n_columns", "length", "steps"])
def _merge(
    merged,
    order,
    x,
    n,
    n_columns,
    length,
    steps,
    COMPUTE: tl.constexpr,
    RUNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program finds the places of BLOCK slices among RUNS runs of `length`, which become one."""
    wait_for_previous_launch()
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(order + place, mask=place < n, other=0)
    first = place // (length * RUNS) * (length * RUNS)
    begin = first[None, :] + tl.arange(0, RUNS)[:, None] * length
    low = begin * 0
    high = tl.minimum(tl.maximum(n - begin, 0), length)
    for _ in range(steps):
        middle = low + (high - low) // 2
        searching = (low < high) & (place < n)[None, :]
        other = tl.load(order + begin + middle, mask=searching, other=0)
        mine = tl.broadcast_to(own[None, :], (RUNS, BLOCK))
        before, equal = _comes_before(x, other, mine, searching, n_columns, COMPUTE)
        # No two numbers of slices are equal.
        before = before | (equal & (other < mine))
        low = tl.where(searching & before, middle + 1, low)
        high = tl.where(searching & (before == 0), middle, high)
    tl.store(merged + first + tl.sum(low, axis=0), own, mask=place < n)


@libentry()
@triton.jit(do_not_specialize=["n"])
def _count_up(out, n, BLOCK: tl.constexpr):
    wait_for_previous_launch()
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + place, place, mask=place < n)


@libentry()
@triton.jit(do_not_specialize=["n", "n_columns"])
def _note_different(flags, order, x, n, n_columns, COMPUTE: tl.constexpr, BLOCK: tl.constexpr):
    """A program notes where a slice differs from the one before it in order."""
    wait_for_previous_launch()
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < n
    earlier = tl.maximum(place - 1, 0)
    own, before = place, earlier
    if len(order) > 0:
        own = tl.load(order[0] + place, mask=mask, other=0)
        before = tl.load(order[0] + earlier, mask=mask, other=0)
    same = mask & (place > 0)
    column = tl.zeros((), tl.int64)
    while (column < n_columns) & (tl.max(same.to(tl.int32), axis=0) > 0):
        left = tl.load(x + own * n_columns + column, mask=same, other=0).to(COMPUTE)
        right = tl.load(x + before * n_columns + column, mask=same, other=0).to(COMPUTE)
        same = same & (left == right)
        column += 1
    tl.store(flags + place, same == 0, mask=mask)


def order_of(x: torch.Tensor) -> torch.Tensor:
    """The numbers of the rows of a contiguous matrix, in order."""
    n, n_columns = x.shape
    order = empty((n,), torch.int64, x.device)
    _count_up[(-(-n // 1024),)](order, n, BLOCK=1024)
    runs, placed = _RUNS, 256 if devices.current.interpreted else _PLACED
    length = 1
    while length < n:
        merged = empty((n,), torch.int64, x.device)
        _merge[(-(-n // placed),)](
            *(merged, order, x, n, n_columns, length, length.bit_length()),
            COMPUTE=TRITON_DTYPES[opmath(x.dtype)],
            RUNS=min(runs, power_of_2(-(-n // length))),
            BLOCK=placed,
            num_warps=4,
        )
        order, length = merged, length * runs
    return order


def differences(x: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """Flags, set where a row of a contiguous matrix differs from the one before it."""
    n, n_columns = x.shape
    flags = empty((n,), torch.bool, x.device)
    block = 1024 if devices.current.interpreted else 128
    _note_different[(-(-n // block),)](
        *(flags, () if order is None else (order,), x, n, n_columns),
        COMPUTE=TRITON_DTYPES[opmath(x.dtype)],
        BLOCK=block,
        num_warps=4,
    )
    return flags


@libentry()
@triton.jit(do_not_specialize=["count", "n_columns", "inner"])
def _take_rows(out, x, rows, count: tl.int64, n_columns, inner, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A program copies its columns of its rows, `inner` of which lie next to each other in the result."""
    wait_for_previous_launch()
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.load(rows + place, mask=place < count, other=0)
    mask = (place < count)[:, None] & (column < n_columns)[None, :]
    word = tl.load(x + row[:, None] * n_columns + column[None, :], mask=mask, other=0)
    block = (column // inner * inner * count + column % inner)[None, :]
    tl.store(out + place[:, None] * inner + block, word, mask=mask)


def take_rows(out: torch.Tensor, x: torch.Tensor, rows: torch.Tensor, count: Size, inner: int) -> None:
    """Copy those rows of a contiguous matrix to the memory of `out`.

    There `inner` columns of all rows come before the next ones: all columns, where rows stay as they are.
    """
    n_columns = x.shape[1]
    columns = min(256, max(16, power_of_2(n_columns)))
    n_rows = max(1, 1024 // columns)
    _take_rows[(count.blocks(n_rows), -(-n_columns // columns))](
        words(out), words(x), rows, count, n_columns, inner, ROWS=n_rows, COLUMNS=columns, num_warps=4
    )
