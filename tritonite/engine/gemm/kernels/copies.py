"""Triton's kernel for copies of operands into rows that begin at multiples of 16 bytes."""

from __future__ import annotations

import triton
import triton.language as tl

from tritonite.language.indices import aligned_to
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry


@libentry()
@triton.jit(do_not_specialize=["batches", "rows"])
def copy_rows(
    source,
    out,
    source_strides,
    out_strides,
    batches,
    rows,
    columns,
    width,
    INDEX: tl.constexpr,
    SOURCE_MULTIPLE: tl.constexpr,
    OUT_MULTIPLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Copy batches of rows, and fill each result row with zeros from the source's `columns` up to `width`.

    SOURCE_MULTIPLE divides `columns` and the source's strides, OUT_MULTIPLE `width` and the result's strides.
    """
    wait_for_previous_launch()
    columns, width = aligned_to(columns, SOURCE_MULTIPLE), aligned_to(width, OUT_MULTIPLE)
    blocks = tl.cdiv(width, BLOCK_N)
    row = (tl.program_id(0) // blocks).to(INDEX) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (tl.program_id(0) % blocks).to(INDEX) * BLOCK_N + tl.arange(0, BLOCK_N)
    batch, row, mask = row // rows, row % rows, (row < batches * rows)[:, None]
    first = batch * aligned_to(source_strides.batch, SOURCE_MULTIPLE) + row * aligned_to(
        source_strides.row, SOURCE_MULTIPLE
    )
    pointers = source + first[:, None] + (column * source_strides.column)[None, :]
    value = tl.load(pointers, mask=mask & (column < columns)[None, :], other=0)
    first = batch * aligned_to(out_strides.batch, OUT_MULTIPLE) + row * aligned_to(out_strides.row, OUT_MULTIPLE)
    pointers = out + first[:, None] + (column * out_strides.column)[None, :]
    tl.store(pointers, value, mask=mask & (column < width)[None, :])
