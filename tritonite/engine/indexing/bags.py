"""Bags of rows of a table: what the rows of each come to, and the gradients of that.

A program takes a bag and a block of columns. The rows of a bag come in its order, several of them on their way at once.

Offsets are trusted nowhere. On a CPU, where ATen checks some of them and reads beyond the indices for others, a call
whose offsets do not divide the indices into bags is declined. On a GPU the first bag begins with the indices and the
last one ends with them, as in ATen's kernel; the others are cut to the indices, and one that ends before it begins is
empty. Numbers of bags and of rows that are out of range count for nothing in gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.dtypes import TRITON_DTYPES, opmath
from tritonite.engine.indexing.places import IN_RANGE
from tritonite.engine.iteration import INT32_LIMIT, power_of_2, span
from tritonite.engine.movement import move
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import zeros
from tritonite.runtime.launch import ASSERTING
from tritonite.runtime.libentry import libentry

# Rows that are on their way at once.
_ROWS = 8


@dataclass(frozen=True)
class _Facts:
    """What kernels are compiled for: "sum", "mean" or "max", the columns of a block, the dtype computed in.

    The largest rows of empty bags are `nothing`. Bags are told where `tells`, their sizes where `sizes`. What ATen
    refuses on a CPU is asserted where it `checks`; the offsets have the end of the last bag, too, where `last`.
    """

    mode: str
    columns: int
    rows: int
    compute: Any
    index: Any
    weighted: bool
    tells: bool
    sizes: bool
    nothing: int
    message: str
    checks: bool
    last: bool


def _facts(mode: str, *tensors: torch.Tensor, **others: Any) -> _Facts:
    columns = tensors[0].shape[1]
    reach = max([span(x.shape, x.stride()) for x in tensors])
    return _Facts(
        mode,
        columns=min(512, power_of_2(columns)),
        rows=_ROWS,
        compute=TRITON_DTYPES[opmath(tensors[0].dtype)],
        index=tl.int64 if reach >= INT32_LIMIT else tl.int32,
        weighted=others.get("weighted", False),
        tells=others.get("tells", False),
        sizes=others.get("sizes", False),
        nothing=others.get("nothing", -1),
        message=IN_RANGE,
        checks=devices.current.type == "cpu",
        last=others.get("last", False),
    )


def _warps(facts: _Facts) -> int:
    return 4 if devices.current.interpreted else max(1, facts.columns // 128)


@libentry()
@triton.jit(do_not_specialize=["n", "n_bags", "n_rows", "padding"])
def _combine_bags(
    out,
    bags,
    sizes,
    largest,
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
    FACTS: tl.constexpr,
):
    """A program combines the rows of a bag in a block of columns. The last bag ends with the indices."""
    wait_for_previous_launch()
    blocks = tl.cdiv(n_columns, FACTS.columns)
    bag = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * FACTS.columns + tl.arange(0, FACTS.columns)
    inside = column < n_columns
    # Of the programs of a bag the first tells of it.
    first = tl.program_id(0) % blocks == 0
    begin = tl.load(offsets + bag, mask=bag > 0, other=0).to(tl.int64)
    end = tl.load(offsets + bag + 1, mask=bag < n_bags - 1, other=n).to(tl.int64)
    if FACTS.checks:
        tl.device_assert(tl.load(offsets) == 0, "a first bag that does not begin with the indices")
        tl.device_assert((begin >= 0) & (begin <= end) & (end <= n), "bags that are not one after the other")
        if FACTS.last:
            tl.device_assert(tl.load(offsets + n_bags) == n, "a last bag that does not end with the indices")
    begin = tl.maximum(begin, 0)
    end = tl.minimum(end, n)
    far = column.to(FACTS.index) * strides[1]
    ROWS: tl.constexpr = FACTS.rows
    total = tl.full((FACTS.columns,), 0, FACTS.compute)
    word = tl.full((FACTS.columns,), FACTS.nothing, tl.int64)
    size = tl.full((), 0, tl.int64)
    for start in range(begin, end, ROWS):
        numbers = ()
        rows = ()
        scales = ()
        for i in tl.static_range(ROWS):
            place = start + i
            number = tl.load(indices + place, mask=place < end, other=0).to(tl.int64)
            known = (number >= 0) & (number < n_rows)
            # A padding index below 0 is no row, which ATen refuses on a CPU alone.
            padded = (number == padding) & (number < 0)
            tl.device_assert(known | (place >= end) | (padded & (FACTS.checks == 0)), FACTS.message)
            counts = (place < end) & known & (number != padding)
            row = weight + tl.where(known, number, 0).to(FACTS.index) * strides[0] + far
            rows = rows + (tl.load(row, mask=inside & counts, other=0).to(FACTS.compute),)
            numbers = numbers + (tl.where(counts, number, -1),)
            if FACTS.weighted:
                factor = tl.load(factors + place.to(FACTS.index) * strides[2], mask=place < end, other=0)
                scales = scales + (factor.to(FACTS.compute),)
        for i in tl.static_range(ROWS):
            counts = numbers[i] >= 0
            if FACTS.mode == "max":
                better = counts & ((size == 0) | (rows[i] > total))
                total = tl.where(better, rows[i], total)
                word = tl.where(better, numbers[i], word)
            elif FACTS.weighted:
                total = tl.where(counts, total + rows[i] * scales[i], total)
            else:
                total = tl.where(counts, total + rows[i], total)
            size += tl.where(counts, 1, 0)
        if FACTS.tells:
            several = start + tl.arange(0, ROWS)
            told = tl.full((ROWS,), 0, tl.int64) + bag
            tl.store(bags + several, told.to(bags.dtype.element_ty), mask=(several < end) & first)
    if FACTS.mode == "mean":
        total = total / tl.maximum(size, 1).to(FACTS.compute)
    near = bag * n_columns + column
    tl.store(out + near, total.to(out.dtype.element_ty), mask=inside)
    if FACTS.mode == "max":
        tl.store(largest + near, word.to(largest.dtype.element_ty), mask=inside)
    if FACTS.sizes:
        tl.store(sizes + bag, size.to(sizes.dtype.element_ty), mask=first)


def combine_bags(
    mode: str,
    out: torch.Tensor,
    bags: torch.Tensor | None,
    sizes: torch.Tensor | None,
    largest: torch.Tensor | None,
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    factors: torch.Tensor | None,
    padding: int,
    nothing: int,
    last: bool,
) -> None:
    """Write what bags of rows of `weight` come to, which bag each index is in, how many of each count, and which rows
    have the largest elements, as far as there are tensors for them. The last offset is the last bag's end if `last`.
    """
    facts = _facts(
        *(mode, weight, out),
        weighted=factors is not None,
        tells=bags is not None,
        sizes=sizes is not None,
        nothing=nothing,
        last=last,
    )
    steps = (*weight.stride(), 0 if factors is None else factors.stride(0))
    n_columns = weight.shape[1]
    _combine_bags[(len(out) * -(-n_columns // facts.columns),)](
        *(out, bags, sizes, largest, weight, indices, offsets, factors, steps),
        *(len(indices), len(out), len(weight), n_columns, padding),
        FACTS=facts,
        num_warps=_warps(facts),
        **ASSERTING,
    )


@libentry()
@triton.jit(do_not_specialize=["n_rows", "padding"])
def _add_to_largest(total, grad, largest, sizes, strides, n_rows, n_columns, padding, FACTS: tl.constexpr):
    """A program adds a bag's gradients to the elements that were the largest, unless the bag was empty."""
    wait_for_previous_launch()
    blocks = tl.cdiv(n_columns, FACTS.columns)
    bag = (tl.program_id(0) // blocks).to(FACTS.index)
    column = (tl.program_id(0) % blocks).to(FACTS.index) * FACTS.columns + tl.arange(0, FACTS.columns)
    inside = column < n_columns
    if FACTS.sizes:
        inside = inside & (tl.load(sizes + bag) > 0)
    word = tl.load(largest + bag * strides[2] + column * strides[3], mask=inside, other=-1).to(tl.int64)
    if FACTS.checks:
        tl.device_assert(word < n_rows, FACTS.message)
    value = tl.load(grad + bag * strides[0] + column * strides[1], mask=inside, other=0).to(FACTS.compute)
    counts = inside & (word >= 0) & (word < n_rows) & (word != padding)
    place = tl.where(counts, word, 0) * n_columns + column
    tl.atomic_add(total + place, value, mask=counts, sem="relaxed")


def add_to_largest(
    grad: torch.Tensor, largest: torch.Tensor, sizes: torch.Tensor | None, n_rows: int, padding: int
) -> torch.Tensor:
    """The gradient of a table of which bags took the largest elements, in no order; of bags without `sizes` all."""
    total = zeros((n_rows, grad.shape[1]), opmath(grad.dtype), grad.device)
    facts = _facts("max", grad, largest, total, sizes=sizes is not None)
    n_columns = grad.shape[1]
    if grad.numel():
        _add_to_largest[(len(grad) * -(-n_columns // facts.columns),)](
            *(total, grad, largest, sizes, (*grad.stride(), *largest.stride()), n_rows, n_columns, padding),
            FACTS=facts,
            num_warps=_warps(facts),
            **ASSERTING,
        )
    if total.dtype is grad.dtype:
        return total
    result = zeros(total.shape, grad.dtype, grad.device)
    move(total, result)
    return result


@libentry()
@triton.jit(do_not_specialize=["n", "n_bags", "n_rows", "padding"])
def _weigh(out, grad, weight, indices, bags, strides, n, n_bags, n_rows, n_columns, padding, FACTS: tl.constexpr):
    """A program multiplies a row of the table with the gradient of the bag that an index is in."""
    wait_for_previous_launch()
    place = tl.program_id(0).to(tl.int64)
    number = tl.load(indices + place).to(tl.int64)
    bag = tl.load(bags + place).to(tl.int64)
    known = (number >= 0) & (number < n_rows) & (bag >= 0) & (bag < n_bags)
    if FACTS.checks:
        tl.device_assert(known | (number == padding), FACTS.message)
    counts = known & (number != padding)
    row = tl.where(counts, number, 0).to(FACTS.index) * strides[2]
    own = tl.where(counts, bag, 0).to(FACTS.index) * strides[0]
    total = tl.full((FACTS.columns,), 0, FACTS.compute)
    for start in range(0, n_columns, FACTS.columns):
        column = (start + tl.arange(0, FACTS.columns)).to(FACTS.index)
        mask = (column < n_columns) & counts
        given = tl.load(grad + own + column * strides[1], mask=mask, other=0).to(FACTS.compute)
        total += given * tl.load(weight + row + column * strides[3], mask=mask, other=0).to(FACTS.compute)
    tl.store(out + place, tl.sum(total, axis=0).to(out.dtype.element_ty))


def weigh(
    out: torch.Tensor,
    grad: torch.Tensor,
    weight: torch.Tensor,
    indices: torch.Tensor,
    bags: torch.Tensor,
    padding: int,
) -> None:
    """Write the gradients of the factors of each row in a bag."""
    facts = _facts("sum", grad, weight)
    _weigh[(len(indices),)](
        *(out, grad, weight, indices, bags, (*grad.stride(), *weight.stride())),
        *(len(indices), len(grad), len(weight), grad.shape[1], padding),
        FACTS=facts,
        num_warps=_warps(facts),
        **ASSERTING,
    )
