"""Embedding bags: the sum, mean or maximum of the rows of each bag, and its gradients.

A program computes a block of columns of one bag. It loads several rows of the bag at a time, in the bag's order.

Kernels do not trust offsets. On a CPU ATen checks some offsets and reads out of bounds for others; here a call is
declined if its offsets do not split the indices into bags. On a GPU the first bag starts with the first index and the
last one ends with the last index, as in ATen's kernel. Other bags are clamped to the indices; a bag whose end precedes
its start is empty. Gradients ignore bags and rows out of range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.dtypes import TRITON_DTYPES, opmath
from tritonite.engine.indexing.indices import IN_RANGE
from tritonite.engine.indexing.table import indexing_table
from tritonite.engine.iteration import INT32_LIMIT, power_of_2, span
from tritonite.engine.movement import move
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import zeros
from tritonite.runtime.launch import ASSERTING
from tritonite.runtime.libentry import libentry


@dataclass(frozen=True)
class _BagMeta:
    """Compile-time facts of the kernels.

    `mode` is "sum", "mean" or "max". A block has `columns`, of which a program loads `rows` at a time. `compute` is the
    dtype computed in, `index` that of offsets. `weighted` says that rows have factors.
    `writes_bags` and `sizes` say that the bag of each index, and the size of each bag, are written.
    `empty` is the row of the maximum of an empty bag.
    `checks` asserts what ATen refuses on a CPU, with `message` for an index.
    `last` says that the offsets end with the end of the last bag.
    """

    mode: str
    columns: int
    rows: int
    compute: Any
    index: Any
    weighted: bool
    writes_bags: bool
    sizes: bool
    empty: int
    message: str
    checks: bool
    last: bool


def _meta(mode: str, *tensors: torch.Tensor, **others: Any) -> _BagMeta:
    columns = tensors[0].shape[1]
    reach = max([span(x.shape, x.stride()) for x in tensors])
    return _BagMeta(
        mode,
        columns=min(512, power_of_2(columns)),
        rows=indexing_table().bag_rows,
        compute=TRITON_DTYPES[opmath(tensors[0].dtype)],
        index=tl.int64 if reach >= INT32_LIMIT else tl.int32,
        weighted=others.get("weighted", False),
        writes_bags=others.get("writes_bags", False),
        sizes=others.get("sizes", False),
        empty=others.get("empty", -1),
        message=IN_RANGE,
        checks=devices.current.aten == "cpu",
        last=others.get("last", False),
    )


def _warps(meta: _BagMeta) -> int:
    return 4 if devices.current.interpreted else devices.warps(meta.columns // 4)


@libentry()
@triton.jit(do_not_specialize=["n", "n_bags", "n_rows", "padding"])
def _combine_bags(
    out,
    bags,
    sizes,
    maximum_rows,
    weight,
    indices,
    offsets,
    factors,
    strides,
    n,
    n_bags,
    n_rows,
    n_columns,
    padding,
    META: tl.constexpr,
):
    """Combine the rows of a bag in a block of columns, and write what else is asked for about the bag.

    `strides` are (row stride of the weight, its column stride, stride of the factors).
    """
    wait_for_previous_launch()
    blocks = tl.cdiv(n_columns, META.columns)
    bag = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * META.columns + tl.arange(0, META.columns)
    inside = column < n_columns
    # The program of the first columns writes the bag's size and the bag of its indices.
    first = tl.program_id(0) % blocks == 0
    begin = tl.load(offsets + bag, mask=bag > 0, other=0).to(tl.int64)
    end = tl.load(offsets + bag + 1, mask=bag < n_bags - 1, other=n).to(tl.int64)
    if META.checks:
        tl.device_assert(tl.load(offsets) == 0, "the first offset is not 0")
        tl.device_assert((begin >= 0) & (begin <= end) & (end <= n), "offsets that decrease or exceed the indices")
        if META.last:
            tl.device_assert(tl.load(offsets + n_bags) == n, "the last offset is not the number of indices")
    begin = tl.maximum(begin, 0)
    end = tl.minimum(end, n)
    column_offset = column.to(META.index) * strides[1]
    ROWS: tl.constexpr = META.rows
    total = tl.full((META.columns,), 0, META.compute)
    maximum_row = tl.full((META.columns,), META.empty, tl.int64)
    size = tl.full((), 0, tl.int64)
    for start in range(begin, end, ROWS):
        numbers = ()
        rows = ()
        scales = ()
        for i in tl.static_range(ROWS):
            position = start + i
            number = tl.load(indices + position, mask=position < end, other=0).to(tl.int64)
            known = (number >= 0) & (number < n_rows)
            # A negative padding index is no row. ATen refuses it on a CPU only.
            padded = (number == padding) & (number < 0)
            tl.device_assert(known | (position >= end) | (padded & (META.checks == 0)), META.message)
            counts = (position < end) & known & (number != padding)
            row = weight + tl.where(known, number, 0).to(META.index) * strides[0] + column_offset
            rows = rows + (tl.load(row, mask=inside & counts, other=0).to(META.compute),)
            numbers = numbers + (tl.where(counts, number, -1),)
            if META.weighted:
                factor = tl.load(factors + position.to(META.index) * strides[2], mask=position < end, other=0)
                scales = scales + (factor.to(META.compute),)
        for i in tl.static_range(ROWS):
            counts = numbers[i] >= 0
            if META.mode == "max":
                better = counts & ((size == 0) | (rows[i] > total))
                total = tl.where(better, rows[i], total)
                maximum_row = tl.where(better, numbers[i], maximum_row)
            elif META.weighted:
                total = tl.where(counts, total + rows[i] * scales[i], total)
            else:
                total = tl.where(counts, total + rows[i], total)
            size += tl.where(counts, 1, 0)
        if META.writes_bags:
            positions = start + tl.arange(0, ROWS)
            own = tl.full((ROWS,), 0, tl.int64) + bag
            tl.store(bags + positions, own.to(bags.dtype.element_ty), mask=(positions < end) & first)
    if META.mode == "mean":
        total = total / tl.maximum(size, 1).to(META.compute)
    target = bag * n_columns + column
    tl.store(out + target, total.to(out.dtype.element_ty), mask=inside)
    if META.mode == "max":
        tl.store(maximum_rows + target, maximum_row.to(maximum_rows.dtype.element_ty), mask=inside)
    if META.sizes:
        tl.store(sizes + bag, size.to(sizes.dtype.element_ty), mask=first)


def combine_bags(
    mode: str,
    out: torch.Tensor,
    bags: torch.Tensor | None,
    sizes: torch.Tensor | None,
    maximum_rows: torch.Tensor | None,
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    factors: torch.Tensor | None,
    padding: int,
    empty: int,
    last: bool,
) -> None:
    """Combine the rows of `weight` in each bag by `mode`, and write the results to `out`.

    Optional outputs: `bags` gets the bag of each index. `sizes` gets the number of rows of each bag, without padding.
    `maximum_rows` gets the row of each maximum, or `empty` for an empty bag. `factors` are weights of the indices, and
    `padding` is the index to leave out. `last` says that the last offset is the end of the last bag.
    """
    meta = _meta(
        *(mode, weight, out),
        weighted=factors is not None,
        writes_bags=bags is not None,
        sizes=sizes is not None,
        empty=empty,
        last=last,
    )
    steps = (*weight.stride(), 0 if factors is None else factors.stride(0))
    n_columns = weight.shape[1]
    _combine_bags[(len(out) * -(-n_columns // meta.columns),)](
        *(out, bags, sizes, maximum_rows, weight, indices, offsets, factors, steps),
        *(len(indices), len(out), len(weight), n_columns, padding),
        META=meta,
        num_warps=_warps(meta),
        **ASSERTING,
    )


@libentry()
@triton.jit(do_not_specialize=["n_rows", "padding"])
def _add_to_maxima(total, grad, maximum_rows, sizes, strides, n_rows, n_columns, padding, META: tl.constexpr):
    """Add a bag's gradients to the elements that were its maxima, unless the bag was empty.

    `strides` are (row, column) of the gradient and (row, column) of `maximum_rows`.
    """
    wait_for_previous_launch()
    blocks = tl.cdiv(n_columns, META.columns)
    bag = (tl.program_id(0) // blocks).to(META.index)
    column = (tl.program_id(0) % blocks).to(META.index) * META.columns + tl.arange(0, META.columns)
    inside = column < n_columns
    if META.sizes:
        inside = inside & (tl.load(sizes + bag) > 0)
    row = tl.load(maximum_rows + bag * strides[2] + column * strides[3], mask=inside, other=-1).to(tl.int64)
    if META.checks:
        tl.device_assert(row < n_rows, META.message)
    value = tl.load(grad + bag * strides[0] + column * strides[1], mask=inside, other=0).to(META.compute)
    counts = inside & (row >= 0) & (row < n_rows) & (row != padding)
    target = tl.where(counts, row, 0) * n_columns + column
    tl.atomic_add(total + target, value, mask=counts, sem="relaxed")


def add_to_maxima(
    grad: torch.Tensor, maximum_rows: torch.Tensor, sizes: torch.Tensor | None, n_rows: int, padding: int
) -> torch.Tensor:
    """Return the gradient of a table with `n_rows` rows whose bags took maxima, added up in no order.

    Bags of size 0 get none; without `sizes` all bags count.
    """
    total = zeros((n_rows, grad.shape[1]), opmath(grad.dtype), grad.device)
    meta = _meta("max", grad, maximum_rows, total, sizes=sizes is not None)
    n_columns = grad.shape[1]
    if grad.numel():
        _add_to_maxima[(len(grad) * -(-n_columns // meta.columns),)](
            *(total, grad, maximum_rows, sizes, (*grad.stride(), *maximum_rows.stride()), n_rows, n_columns, padding),
            META=meta,
            num_warps=_warps(meta),
            **ASSERTING,
        )
    if total.dtype is grad.dtype:
        return total
    result = zeros(total.shape, grad.dtype, grad.device)
    move(total, result)
    return result


@libentry()
@triton.jit(do_not_specialize=["n", "n_bags", "n_rows", "padding"])
def _factor_gradients(
    out, grad, weight, indices, bags, strides, n, n_bags, n_rows, n_columns, padding, META: tl.constexpr
):
    """Write the dot product of an index's row of the table and the gradient of its bag.

    `strides` are (row, column) of the gradient and (row, column) of the weight.
    """
    wait_for_previous_launch()
    position = tl.program_id(0).to(tl.int64)
    number = tl.load(indices + position).to(tl.int64)
    bag = tl.load(bags + position).to(tl.int64)
    known = (number >= 0) & (number < n_rows) & (bag >= 0) & (bag < n_bags)
    if META.checks:
        tl.device_assert(known | (number == padding), META.message)
    counts = known & (number != padding)
    row = tl.where(counts, number, 0).to(META.index) * strides[2]
    grad_row = tl.where(counts, bag, 0).to(META.index) * strides[0]
    total = tl.full((META.columns,), 0, META.compute)
    for start in range(0, n_columns, META.columns):
        column = (start + tl.arange(0, META.columns)).to(META.index)
        mask = (column < n_columns) & counts
        gradient = tl.load(grad + grad_row + column * strides[1], mask=mask, other=0).to(META.compute)
        total += gradient * tl.load(weight + row + column * strides[3], mask=mask, other=0).to(META.compute)
    tl.store(out + position, tl.sum(total, axis=0).to(out.dtype.element_ty))


def factor_gradients(
    out: torch.Tensor,
    grad: torch.Tensor,
    weight: torch.Tensor,
    indices: torch.Tensor,
    bags: torch.Tensor,
    padding: int,
) -> None:
    """Write the gradient of each index's factor to a contiguous `out`."""
    meta = _meta("sum", grad, weight)
    _factor_gradients[(len(indices),)](
        *(out, grad, weight, indices, bags, (*grad.stride(), *weight.stride())),
        *(len(indices), len(grad), len(weight), grad.shape[1], padding),
        META=meta,
        num_warps=_warps(meta),
        **ASSERTING,
    )
