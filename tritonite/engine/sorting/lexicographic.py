"""Rows of a matrix in lexicographic order, by a stable merge sort of row numbers.

A launch merges several sorted runs into one. A row's position in the merged run is the number of rows of each run that
come before it, which a binary search finds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.dtypes import TRITON_DTYPES, opmath
from tritonite.engine.iteration import power_of_2
from tritonite.engine.sorting.keys import as_integers
from tritonite.engine.sorting.table import sorting_table
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import empty
from tritonite.runtime.libentry import libentry
from tritonite.runtime.symbols import Size


@triton.jit
def _comes_before(x, a, b, mask, n_columns, COMPUTE: tl.constexpr):
    """Compare rows with numbers `a` and `b`; return masks of (a before b, a equal to b). nan sorts last."""
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
    """Merge RUNS runs of `length` rows: write BLOCK row numbers to their positions in the merged run."""
    wait_for_previous_launch()
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(order + index, mask=index < n, other=0)
    first = index // (length * RUNS) * (length * RUNS)
    begin = first[None, :] + tl.arange(0, RUNS)[:, None] * length
    low = begin * 0
    high = tl.minimum(tl.maximum(n - begin, 0), length)
    for _ in range(steps):
        middle = low + (high - low) // 2
        searching = (low < high) & (index < n)[None, :]
        other = tl.load(order + begin + middle, mask=searching, other=0)
        mine = tl.broadcast_to(own[None, :], (RUNS, BLOCK))
        before, equal = _comes_before(x, other, mine, searching, n_columns, COMPUTE)
        # Equal rows stay in the order of their numbers.
        before = before | (equal & (other < mine))
        low = tl.where(searching & before, middle + 1, low)
        high = tl.where(searching & (before == 0), middle, high)
    tl.store(merged + first + tl.sum(low, axis=0), own, mask=index < n)


@libentry()
@triton.jit(do_not_specialize=["n"])
def _count_up(out, n, BLOCK: tl.constexpr):
    wait_for_previous_launch()
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + index, index, mask=index < n)


@libentry()
@triton.jit(do_not_specialize=["n", "n_columns"])
def _flag_different(flags, order, x, n, n_columns, COMPUTE: tl.constexpr, BLOCK: tl.constexpr):
    """Set a flag for each row that differs from the row before it in the order."""
    wait_for_previous_launch()
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < n
    earlier = tl.maximum(index - 1, 0)
    own, before = index, earlier
    if len(order) > 0:
        own = tl.load(order[0] + index, mask=mask, other=0)
        before = tl.load(order[0] + earlier, mask=mask, other=0)
    same = mask & (index > 0)
    column = tl.zeros((), tl.int64)
    while (column < n_columns) & (tl.max(same.to(tl.int32), axis=0) > 0):
        left = tl.load(x + own * n_columns + column, mask=same, other=0).to(COMPUTE)
        right = tl.load(x + before * n_columns + column, mask=same, other=0).to(COMPUTE)
        same = same & (left == right)
        column += 1
    tl.store(flags + index, same == 0, mask=mask)


def order_of(x: torch.Tensor) -> torch.Tensor:
    """Return the row numbers of a contiguous matrix, in lexicographic order of the rows."""
    n, n_columns = x.shape
    order = empty((n,), torch.int64, x.device)
    _count_up[(-(-n // 1024),)](order, n, BLOCK=1024)
    runs, block = sorting_table().merge
    length = 1
    while length < n:
        merged = empty((n,), torch.int64, x.device)
        _merge[(-(-n // block),)](
            *(merged, order, x, n, n_columns, length, length.bit_length()),
            COMPUTE=TRITON_DTYPES[opmath(x.dtype)],
            RUNS=min(runs, power_of_2(-(-n // length))),
            BLOCK=block,
            num_warps=4,
        )
        order, length = merged, length * runs
    return order


def differences(x: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """Return a flag for each row of a contiguous matrix: whether it differs from the row before it in the order."""
    n, n_columns = x.shape
    flags = empty((n,), torch.bool, x.device)
    block = 1024 if devices.current.interpreted else 128
    _flag_different[(-(-n // block),)](
        *(flags, () if order is None else (order,), x, n, n_columns),
        COMPUTE=TRITON_DTYPES[opmath(x.dtype)],
        BLOCK=block,
        num_warps=4,
    )
    return flags


@libentry()
@triton.jit(do_not_specialize=["count", "n_columns", "inner"])
def _take_rows(out, x, rows, count: tl.int64, n_columns, inner, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Copy ROWS of the `count` selected rows; the result has `inner` contiguous columns of a row."""
    wait_for_previous_launch()
    index = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.load(rows + index, mask=index < count, other=0)
    mask = (index < count)[:, None] & (column < n_columns)[None, :]
    value = tl.load(x + row[:, None] * n_columns + column[None, :], mask=mask, other=0)
    block = (column // inner * inner * count + column % inner)[None, :]
    tl.store(out + index[:, None] * inner + block, value, mask=mask)


def take_rows(out: torch.Tensor, x: torch.Tensor, rows: torch.Tensor, count: Size, inner: int) -> None:
    """Copy `rows` of a contiguous matrix to the memory of `out`, which has shape (columns / inner, count, inner).

    `inner` is the number of all columns if rows stay rows.
    """
    n_columns = x.shape[1]
    columns = min(256, max(16, power_of_2(n_columns)))
    n_rows = max(1, 1024 // columns)
    _take_rows[(count.blocks(n_rows), -(-n_columns // columns))](
        as_integers(out), as_integers(x), rows, count, n_columns, inner, ROWS=n_rows, COLUMNS=columns, num_warps=4
    )
