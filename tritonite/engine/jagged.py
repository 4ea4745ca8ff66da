"""Jagged sequences: rows of different numbers, stored end to end, to and from sequences padded to one length.

Sequence i has the rows from `offsets[i]` to `offsets[i + 1]`. A program copies a block of rows and columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.dtypes import TRITON_DTYPES, opmath
from tritonite.engine.iteration import offset_type, power_of_2
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.launch import ASSERTING
from tritonite.runtime.libentry import libentry


@libentry()
@triton.jit(do_not_specialize=["padding"])
def _pad(
    out,
    values,
    offsets,
    padding: tl.float64,
    n_rows,
    n_values,
    longest,
    n_columns,
    stride,
    CHECKS: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write a block of rows of sequences padded to `longest` rows each."""
    wait_for_previous_launch()
    blocks = tl.cdiv(n_columns, COLUMNS)
    row = (tl.program_id(0) // blocks).to(INDEX) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % blocks).to(INDEX) * COLUMNS + tl.arange(0, COLUMNS)
    mask = row < n_rows
    sequence = row // longest
    begin = tl.load(offsets + sequence, mask=mask, other=0).to(tl.int64)
    end = tl.load(offsets + sequence + 1, mask=mask, other=0).to(tl.int64)
    if CHECKS:
        last = tl.minimum(end, begin + longest)
        tl.device_assert((mask == 0) | ((begin >= 0) & (begin <= end) & (last <= n_values)), "a sequence out of range")
    own = begin + row % longest
    exists = mask & (own < end) & (own >= 0) & (own < n_values)
    pointers = values + ((tl.where(exists, own, 0) * stride).to(INDEX)[:, None] + column[None, :])
    column_mask = (column < n_columns)[None, :]
    value = tl.load(pointers, mask=exists[:, None] & column_mask, other=0)
    rest = tl.full((ROWS, COLUMNS), padding, tl.float64).to(COMPUTE).to(value.dtype)
    value = tl.where(exists[:, None], value, rest)
    tl.store(out + ((row * n_columns)[:, None] + column[None, :]), value, mask=mask[:, None] & column_mask)


@libentry()
@triton.jit(do_not_specialize=["n_rows", "n_sequences", "n_searched", "longest"])
def _unpad(
    out,
    dense,
    offsets,
    n_rows,
    n_sequences,
    n_searched,
    longest,
    n_columns,
    strides,
    CHECKS: tl.constexpr,
    STEPS: tl.constexpr,
    INDEX: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write a block of rows of jagged sequences; rows of no sequence, or beyond the padded length, are 0.

    A row's sequence is found by bisection of the first `n_searched` offsets after 0. The steps are ATen's, since the
    result depends on them if offsets are not in order.
    """
    wait_for_previous_launch()
    blocks = tl.cdiv(n_columns, COLUMNS)
    row = (tl.program_id(0) // blocks).to(INDEX) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % blocks).to(INDEX) * COLUMNS + tl.arange(0, COLUMNS)
    mask = row < n_rows
    sequence = tl.zeros((ROWS,), tl.int32)
    count = sequence + n_searched
    for _ in tl.static_range(STEPS):
        step = count // 2
        searching = mask & (count > 0)
        begin = tl.load(offsets + sequence + 1 + step, mask=searching, other=0).to(tl.int64)
        further = searching & (begin <= row)
        sequence = tl.where(further, sequence + 1 + step, sequence)
        count = tl.where(further, count - step - 1, step)
    position = row.to(tl.int64) - tl.load(offsets + sequence, mask=mask, other=0).to(tl.int64)
    if CHECKS:
        end = tl.load(offsets + sequence + 1, mask=mask, other=0).to(tl.int64)
        total = tl.load(offsets + n_sequences).to(tl.int64)
        fits = (position >= 0) & (position < longest) & (row < end) & (total == n_rows)
        tl.device_assert((mask == 0) | fits, "sequences longer than the padded ones, or not of total_L rows in all")
        for i in range(n_sequences):
            length = tl.load(offsets + i + 1).to(tl.int64) - tl.load(offsets + i).to(tl.int64)
            tl.device_assert((length >= 0) & (length <= longest), "a sequence longer than the padded ones, or below 0")
    exists = mask & (sequence < n_sequences) & (position >= 0) & (position < longest)
    begins = tl.where(exists, sequence, 0).to(INDEX) * strides[0] + tl.where(exists, position, 0).to(INDEX) * strides[1]
    column_mask = (column < n_columns)[None, :]
    column_offset = (column * strides[2])[None, :]
    value = tl.load(dense + begins[:, None] + column_offset, mask=exists[:, None] & column_mask, other=0)
    tl.store(out + (row * n_columns)[:, None] + column[None, :], value, mask=mask[:, None] & column_mask)


def _blocks(n_rows: int, n_columns: int) -> tuple[tuple[int], dict[str, Any]]:
    """Return (the grid, the rows and columns of a block)."""
    elements = devices.current.row_elements
    columns = min(elements, power_of_2(n_columns))
    rows = min(max(1, elements // columns), power_of_2(n_rows))
    return (-(-n_rows // rows) * -(-n_columns // columns),), {"ROWS": rows, "COLUMNS": columns, "num_warps": 4}


def pad(out: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor, padding: float, checks: bool) -> None:
    """Write jagged `values` to a contiguous `out` of shape (sequences, padded length, ...), with padding behind them.

    Elements of a row are contiguous. `checks` asserts that sequences are within the values.
    """
    n_rows, n_columns = len(out) * out.shape[1], values[0].numel()
    grid, block = _blocks(n_rows, n_columns)
    _pad[grid](
        *(out, values, offsets, padding, n_rows, len(values), out.shape[1], n_columns, values.stride(0)),
        CHECKS=checks,
        COMPUTE=TRITON_DTYPES[opmath(values.dtype)],
        INDEX=offset_type(out, values),
        **block,
        **ASSERTING,
    )


def unpad(out: torch.Tensor, dense: torch.Tensor, offsets: torch.Tensor, searched: int, checks: bool) -> None:
    """Write the rows of padded sequences, of shape (sequences, padded length, columns), to a contiguous matrix.

    `searched` is the number of offsets after 0 that are searched for a row's sequence. `checks` asserts that sequences
    fit in the padded length and that their rows are those of `out`.
    """
    n_rows, n_columns = out.shape
    grid, block = _blocks(n_rows, n_columns)
    _unpad[grid](
        *(out, dense, offsets, n_rows, len(dense), searched, dense.shape[1], n_columns, dense.stride()),
        CHECKS=checks,
        STEPS=searched.bit_length(),
        INDEX=offset_type(out, dense),
        **block,
        **ASSERTING,
    )
