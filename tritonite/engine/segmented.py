"""Reductions of segments of consecutive rows, and their gradients.

A program reduces one segment in a block of columns: blocks of rows into a state of the same shape, and that to one row.

Kernels do not trust bounds. On a CPU, where ATen raises or reads out of bounds, calls with bounds that decrease or
exceed the rows are declined. On a GPU segments are clamped to the rows, and a segment whose end precedes its start is
empty, as in ATen's gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.devices.tables import Tables
from tritonite.dtypes import TRITON_DTYPES, opmath
from tritonite.engine.iteration import INT32_LIMIT, power_of_2
from tritonite.language.math import maximum_nan, minimum_nan
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.launch import ASSERTING
from tritonite.runtime.libentry import libentry

_MESSAGE = tl.constexpr("bounds of segments that decrease or exceed the rows")
# The result of each reduction for no rows.
IDENTITIES = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "max": -float("inf"), "min": float("inf")}


class SegmentedTable(NamedTuple):
    """Blocks of a kind of device: `elements` of a program, which has up to 256 columns."""

    elements: int = 1024


SEGMENTED: Tables[SegmentedTable] = Tables("segmented", dict.fromkeys(devices.KINDS, SegmentedTable()))


@dataclass(frozen=True)
class _SegmentMeta:
    """Compile-time facts of the kernels.

    A block has `rows` and `columns`. `compute` is the dtype computed in, `index` that of offsets.
    `cumulated` says that bounds are the ends of segments; otherwise they are the starts, and the end of the last one.
    `initial` says that the call has an initial value. `checks` asserts that bounds are in order.
    """

    reduction: str
    rows: int
    columns: int
    compute: Any
    index: Any
    cumulated: bool
    initial: bool
    checks: bool


class Segments(NamedTuple):
    """Segments of contiguous data of shape (outer, size, inner), along `size`.

    `bounds` has the bounds of `n` segments for each outer index; `cumulated` says that these are their ends.
    """

    bounds: torch.Tensor
    cumulated: bool
    outer: int
    size: int
    inner: int
    n: int

    def launch(self, kernel: Any, tensors: Any, initial: Any, reduction: str) -> None:
        """Launch a kernel on tensors, the last of which is the data."""
        device, data = devices.current, tensors[-1]
        columns = min(256, power_of_2(self.inner))
        rows = min(SEGMENTED[device.kind].elements // columns, power_of_2(-(-self.size // max(self.n, 1))))
        reach = max(self.outer * self.size * self.inner, self.outer * self.n * self.inner)
        meta = _SegmentMeta(
            reduction,
            rows=rows,
            columns=columns,
            compute=TRITON_DTYPES[opmath(data.dtype)],
            index=tl.int64 if reach >= INT32_LIMIT else tl.int32,
            cumulated=self.cumulated,
            initial=initial is not None,
            checks=device.aten == "cpu",
        )
        grid = (self.outer * self.n * -(-self.inner // columns),)
        number = IDENTITIES[reduction] if initial is None else initial
        if all(grid):
            kernel[grid](
                *(*tensors, self.bounds, number, self.size, self.inner, self.n),
                META=meta,
                num_warps=4 if device.interpreted else min(4, devices.warps(rows * columns // 8)),
                **ASSERTING,
            )


@triton.jit
def _add(x, y):
    return x + y


@triton.jit
def _multiply(x, y):
    return x * y


@triton.jit
def _combine(x, y, REDUCTION: tl.constexpr):
    if REDUCTION == "max":
        result = maximum_nan(x, y)
    elif REDUCTION == "min":
        result = minimum_nan(x, y)
    elif REDUCTION == "prod":
        result = x * y
    else:
        result = x + y
    return result


@triton.jit
def _reduce_rows(state, REDUCTION: tl.constexpr):
    """Reduce the rows of a block to one."""
    if REDUCTION == "max":
        result = tl.reduce(state, 0, maximum_nan)
    elif REDUCTION == "min":
        result = tl.reduce(state, 0, minimum_nan)
    elif REDUCTION == "prod":
        result = tl.reduce(state, 0, _multiply)
    else:
        result = tl.reduce(state, 0, _add)
    return result


@triton.jit
def _own_segment(bounds, size, inner, count, META: tl.constexpr):
    """Return the program's segment and columns.

    The tuple has: the first row, the row behind the last, the offset of the outer index in the data, the columns, their
    mask, the offsets of the result.
    """
    blocks = tl.cdiv(inner, META.columns)
    own = tl.program_id(0) // blocks
    column = (tl.program_id(0) % blocks).to(META.index) * META.columns + tl.arange(0, META.columns)
    outer, segment = own // count, own % count
    if META.cumulated:
        end = tl.load(bounds + own).to(tl.int64)
        begin = tl.load(bounds + own - 1, mask=segment > 0, other=0).to(tl.int64)
    else:
        # An outer index has one bound more than segments.
        begin = tl.load(bounds + own + outer).to(tl.int64)
        end = tl.load(bounds + own + outer + 1).to(tl.int64)
    if META.checks:
        tl.device_assert((begin >= 0) & (begin <= end) & (end <= size), _MESSAGE)
    begin = tl.maximum(begin, 0)
    end = tl.maximum(tl.minimum(end, size), begin)
    base = outer.to(META.index) * size * inner
    return begin, end, base, column, column < inner, own.to(META.index) * inner + column


@triton.jit
def _load_rows(data, start, end, base, column, inside, inner, META: tl.constexpr):
    """Return (the offsets, the mask, the elements) of a block of rows from `start` on."""
    row = start + tl.arange(0, META.rows)
    mask = (row < end)[:, None] & inside[None, :]
    offset = base + (row.to(META.index) * inner)[:, None] + column[None, :]
    return offset, mask, tl.load(data + offset, mask=mask, other=0).to(META.compute)


@libentry()
@triton.jit(do_not_specialize=["size", "count"])
def reduce_segments(out, data, bounds, initial: tl.float64, size, inner, count, META: tl.constexpr):
    """Reduce the program's segment, with `initial` as a first element."""
    wait_for_previous_launch()
    begin, end, base, column, inside, target = _own_segment(bounds, size, inner, count, META)
    REDUCTION: tl.constexpr = META.reduction
    if REDUCTION == "max":
        identity = -float("inf")
    elif REDUCTION == "min":
        identity = float("inf")
    elif REDUCTION == "prod":
        identity = 1.0
    else:
        identity = 0.0
    neutral = tl.full((META.rows, META.columns), identity, META.compute)
    if REDUCTION == "sum" or REDUCTION == "mean":
        # -0.0, which keeps the sign of a zero that is added to it.
        neutral = neutral * -1.0
    state = neutral
    for start in range(begin, end, META.rows):
        _, mask, value = _load_rows(data, start, end, base, column, inside, inner, META)
        state = _combine(state, tl.where(mask, value, neutral), REDUCTION)
    first = tl.full((META.columns,), initial, tl.float64).to(out.dtype.element_ty).to(META.compute)
    total = _combine(first, _reduce_rows(state, REDUCTION), REDUCTION)
    if REDUCTION == "mean":
        length = (end - begin).to(META.compute)
        if META.initial:
            total = tl.where(length > 0, total / tl.maximum(length, 1), total)
        else:
            total = total / length
    tl.store(out + target, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sign(value):
    """Return -1 for -0.0 and 1 for all other values."""
    return tl.where((value == 0) & (1.0 / value < 0), -1.0, 1.0).to(value.dtype)


@libentry()
@triton.jit(do_not_specialize=["size", "count"])
def segment_gradients(
    grad_input, grad, output, data, bounds, initial: tl.float64, size, inner, count, META: tl.constexpr
):
    """Write the gradients of the segment's rows.

    A positive gradient of an extremum is divided among all rows that have it, as ATen does. A row's gradient in a
    product is the product of the other rows. For a row that is zero or nan, that comes from the numbers of zeros and
    nans, the zeros' signs, and the product of all others.
    """
    wait_for_previous_launch()
    begin, end, base, column, inside, target = _own_segment(bounds, size, inner, count, META)
    REDUCTION: tl.constexpr = META.reduction
    dtype: tl.constexpr = grad_input.dtype.element_ty
    own = tl.load(grad + target, mask=inside, other=0).to(META.compute)
    result = tl.load(output + target, mask=inside, other=0).to(META.compute)
    zeros = tl.full((META.rows, META.columns), 0, tl.int32)
    nans = tl.full((META.rows, META.columns), 0, tl.int32)
    product = tl.full((META.rows, META.columns), 1.0, META.compute)
    if REDUCTION == "mean":
        own = own / (end - begin).to(META.compute)
    elif REDUCTION != "sum":
        for start in range(begin, end, META.rows):
            _, mask, value = _load_rows(data, start, end, base, column, inside, inner, META)
            if REDUCTION == "prod":
                zeros += (mask & (value == 0)).to(tl.int32)
                nans += (mask & (value != value)).to(tl.int32)
                product *= tl.where(mask & (value == value), tl.where(value == 0, _sign(value), value), 1.0)
            else:
                zeros += (mask & ((value != value) | (value == result[None, :]))).to(tl.int32)
    if REDUCTION == "prod":
        n_zeros = tl.sum(zeros, axis=0)
        n_nans = tl.sum(nans, axis=0)
        first = tl.full((META.columns,), initial, tl.float64).to(dtype).to(META.compute)
        product_of_all = tl.reduce(product, 0, _multiply) * first
    elif REDUCTION == "max" or REDUCTION == "min":
        n_extrema = tl.sum(zeros, axis=0)
        shared = tl.where((n_extrema > 1) & (own > 0), own / tl.maximum(n_extrema, 1).to(META.compute), own)
    for start in range(begin, end, META.rows):
        offset, mask, value = _load_rows(data, start, end, base, column, inside, inner, META)
        if REDUCTION == "prod":
            missing = n_nans[None, :] - (value != value).to(tl.int32)
            empty = n_zeros[None, :] - (value == 0).to(tl.int32)
            rest = product_of_all[None, :] * _sign(value)
            rest = tl.where(empty > 0, rest * 0.0, rest)
            rest = tl.where(missing > 0, float("nan"), rest)
            special = (value != value) | (value == 0)
            divisor = tl.where(special, 1.0, value)
            gradient = tl.where(special, own[None, :] * rest, (own * result)[None, :] / divisor)
        elif REDUCTION == "max" or REDUCTION == "min":
            gradient = tl.where((value != value) | (value == result[None, :]), shared[None, :], 0.0)
        else:
            gradient = tl.broadcast_to(own[None, :], value.shape)
        tl.store(grad_input + offset, gradient.to(dtype), mask=mask)
