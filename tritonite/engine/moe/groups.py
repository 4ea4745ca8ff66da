"""Rows after a product of groups: each gets its group's bias, and rows of no group become 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.dtypes import TRITON_DTYPES, opmath
from tritonite.engine.iteration import offset_type, power_of_2
from tritonite.engine.moe.table import moe_table
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry


@dataclass(frozen=True)
class _FinishMeta:
    """Compile-time facts of the kernels.

    A block has `rows` and `columns`. `lanes` is the number of groups rounded up to a power of 2.
    """

    index: Any
    compute: Any
    rows: int
    columns: int
    lanes: int


@libentry()
@triton.jit(do_not_specialize=["rows"])
def clear_rows(out, ends, rows, n_columns, groups, META: tl.constexpr):
    """Write 0 to the rows behind the last group of a contiguous matrix."""
    wait_for_previous_launch()
    first = tl.minimum(tl.maximum(tl.load(ends + groups - 1), 0), rows)
    program = tl.program_id(0)
    for begin in range(first + program * META.rows, rows, tl.num_programs(0) * META.rows):
        row = (begin + tl.arange(0, META.rows)).to(META.index)
        for start in range(0, n_columns, META.columns):
            column = (start + tl.arange(0, META.columns)).to(META.index)
            mask = (row < rows)[:, None] & (column < n_columns)[None, :]
            zero = tl.full((META.rows, META.columns), 0, META.compute).to(out.dtype.element_ty)
            tl.store(out + row[:, None] * n_columns + column[None, :], zero, mask=mask)


@libentry()
@triton.jit(do_not_specialize=["rows"])
def add_group_bias(out, product, row_stride, bias, bias_strides, ends, rows, n_columns, groups, META: tl.constexpr):
    """Write the product plus the bias of each row's group, and 0 to the rows behind the last group."""
    wait_for_previous_launch()
    blocks = tl.cdiv(n_columns, META.columns)
    row = (tl.program_id(0) // blocks).to(META.index) * META.rows + tl.arange(0, META.rows)
    column = (tl.program_id(0) % blocks).to(META.index) * META.columns + tl.arange(0, META.columns)
    lane = tl.arange(0, META.lanes)
    end = tl.load(ends + lane, mask=lane < groups, other=0)
    past = (end[None, :] <= row[:, None]) & (lane < groups)[None, :]
    group = tl.sum(past.to(tl.int32), axis=1)
    inside = (column < n_columns)[None, :]
    mask = (group < groups)[:, None] & (row < rows)[:, None] & inside
    value = tl.load(product + row[:, None] * row_stride + column[None, :], mask=mask, other=0)
    offset = group.to(META.index)[:, None] * bias_strides[0] + column[None, :] * bias_strides[1]
    added = tl.load(bias + offset, mask=mask, other=0)
    result = tl.where(mask, value.to(META.compute) + added.to(META.compute), 0.0)
    tl.store(
        out + row[:, None] * n_columns + column[None, :],
        result.to(out.dtype.element_ty),
        mask=(row < rows)[:, None] & inside,
    )


def _meta(out: torch.Tensor, groups: int, *others: torch.Tensor) -> _FinishMeta:
    rows, n_columns = out.shape
    elements, columns = moe_table().finished, min(256, power_of_2(n_columns))
    return _FinishMeta(
        index=offset_type(out, *others),
        compute=TRITON_DTYPES[opmath(out.dtype)],
        rows=max(1, min(elements // columns, power_of_2(rows))),
        columns=columns,
        lanes=power_of_2(groups),
    )


def clear_ungrouped(out: torch.Tensor, ends: torch.Tensor) -> None:
    """Write 0 to the rows of a contiguous matrix that follow the last of `ends`."""
    if not out.numel():
        return
    meta = _meta(out, len(ends))
    programs = min(-(-out.shape[0] // meta.rows), devices.multiprocessors(out.device))
    clear_rows[(programs,)](*(out, ends, *out.shape, len(ends)), META=meta, num_warps=4)


def add_bias(product: torch.Tensor, bias: torch.Tensor, ends: torch.Tensor, out: torch.Tensor) -> None:
    """Write `product` plus the bias of each row's group to a contiguous `out`; rows of no group are 0.

    `product` has contiguous elements in a row, and may be `out`. `bias` is (groups, columns).
    """
    if not out.numel():
        return
    rows, n_columns = out.shape
    meta = _meta(out, len(ends), product, bias)
    add_group_bias[(-(-rows // meta.rows) * -(-n_columns // meta.columns),)](
        *(out, product, product.stride(0), bias, bias.stride(), ends, rows, n_columns, len(ends)),
        META=meta,
        num_warps=4,
    )
