"""Reducing segments of rows that lie one after the other, and the gradients of that.

A program takes one segment and a block of columns. It folds the segment's rows in as many places as a block has, and
those at last to one.

Bounds are trusted nowhere. On a CPU segments that are not one after the other within their rows are declined, which
ATen refuses or reads beyond the data for. On a GPU they are cut to the rows, and one that ends before it begins is
empty, as in ATen's gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.dtypes import TRITON_DTYPES, opmath
from tritonite.engine.iteration import INT32_LIMIT, power_of_2
from tritonite.language.math import maximum_nan, minimum_nan
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.launch import ASSERTING
from tritonite.runtime.libentry import libentry

_ELEMENTS = 1024
_MESSAGE = tl.constexpr("segments that are not one after the other within their rows")
# What a reduction gives of no rows.
IDENTITIES = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "max": -float("inf"), "min": float("inf")}


@dataclass(frozen=True)
class _Facts:
    """What kernels are compiled for: the reduction, the rows and columns of a block, the dtype computed in.

    Bounds of segments are their ends if `cumulated`, else the beginning of each and the end of the last. They are
    asserted to be in order where it `checks`.
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
    """Contiguous data of (outer, size, inner) elements, of which `bounds` tell `n` segments of each outer row."""

    bounds: torch.Tensor
    cumulated: bool
    outer: int
    size: int
    inner: int
    n: int

    def launch(self, kernel: Any, tensors: Any, initial: Any, reduction: str) -> None:
        """Launch a kernel on operands of which the data comes last."""
        device, data = devices.current, tensors[-1]
        columns = min(256, power_of_2(self.inner))
        rows = min(_ELEMENTS // columns, power_of_2(-(-self.size // max(self.n, 1))))
        reach = max(self.outer * self.size * self.inner, self.outer * self.n * self.inner)
        facts = _Facts(
            reduction,
            rows=rows,
            columns=columns,
            compute=TRITON_DTYPES[opmath(data.dtype)],
            index=tl.int64 if reach >= INT32_LIMIT else tl.int32,
            cumulated=self.cumulated,
            initial=initial is not None,
            checks=device.type == "cpu",
        )
        grid = (self.outer * self.n * -(-self.inner // columns),)
        number = IDENTITIES[reduction] if initial is None else initial
        if all(grid):
            kernel[grid](
                *(*tensors, self.bounds, number, self.size, self.inner, self.n),
                FACTS=facts,
                num_warps=4 if device.interpreted else max(1, min(4, rows * columns // 256)),
                **ASSERTING,
            )


@triton.jit
def _add(x, y):
    return x + y


@triton.jit
def _multiply(x, y):
    return x * y


@triton.jit
def _combined(x, y, REDUCTION: tl.constexpr):
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
def _folded(state, REDUCTION: tl.constexpr):
    """What the rows of a block come to."""
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
def _own_segment(bounds, size, inner, count, FACTS: tl.constexpr):
    """(the first row, the last row but one, where rows begin in the data, the columns, which there are, the result's
    offsets) of a program.
    """
    blocks = tl.cdiv(inner, FACTS.columns)
    own = tl.program_id(0) // blocks
    column = (tl.program_id(0) % blocks).to(FACTS.index) * FACTS.columns + tl.arange(0, FACTS.columns)
    outer, segment = own // count, own % count
    if FACTS.cumulated:
        end = tl.load(bounds + own).to(tl.int64)
        begin = tl.load(bounds + own - 1, mask=segment > 0, other=0).to(tl.int64)
    else:
        begin = tl.load(bounds + own + outer).to(tl.int64)
        end = tl.load(bounds + own + outer + 1).to(tl.int64)
    if FACTS.checks:
        tl.device_assert((begin >= 0) & (begin <= end) & (end <= size), _MESSAGE)
    begin = tl.maximum(begin, 0)
    end = tl.maximum(tl.minimum(end, size), begin)
    base = outer.to(FACTS.index) * size * inner
    return begin, end, base, column, column < inner, own.to(FACTS.index) * inner + column


@triton.jit
def _rows_of(data, start, end, base, column, inside, inner, FACTS: tl.constexpr):
    """(offsets of a block of rows, which there are, the elements)."""
    row = start + tl.arange(0, FACTS.rows)
    mask = (row < end)[:, None] & inside[None, :]
    offset = base + (row.to(FACTS.index) * inner)[:, None] + column[None, :]
    return offset, mask, tl.load(data + offset, mask=mask, other=0).to(FACTS.compute)


@libentry()
@triton.jit(do_not_specialize=["size", "count"])
def reduce_segments(out, data, bounds, initial: tl.float64, size, inner, count, FACTS: tl.constexpr):
    """A program writes what a segment comes to, `initial` included."""
    wait_for_previous_launch()
    begin, end, base, column, inside, place = _own_segment(bounds, size, inner, count, FACTS)
    REDUCTION: tl.constexpr = FACTS.reduction
    if REDUCTION == "max":
        identity = -float("inf")
    elif REDUCTION == "min":
        identity = float("inf")
    elif REDUCTION == "prod":
        identity = 1.0
    else:
        identity = 0.0
    nothing = tl.full((FACTS.rows, FACTS.columns), identity, FACTS.compute)
    if REDUCTION == "sum" or REDUCTION == "mean":
        # Next to which a zero keeps its sign.
        nothing = nothing * -1.0
    state = nothing
    for start in range(begin, end, FACTS.rows):
        _, mask, value = _rows_of(data, start, end, base, column, inside, inner, FACTS)
        state = _combined(state, tl.where(mask, value, nothing), REDUCTION)
    first = tl.full((FACTS.columns,), initial, tl.float64).to(out.dtype.element_ty).to(FACTS.compute)
    total = _combined(first, _folded(state, REDUCTION), REDUCTION)
    if REDUCTION == "mean":
        length = (end - begin).to(FACTS.compute)
        if FACTS.initial:
            total = tl.where(length > 0, total / tl.maximum(length, 1), total)
        else:
            total = total / length
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sign(value):
    """-1 for a zero below 0, else 1."""
    return tl.where((value == 0) & (1.0 / value < 0), -1.0, 1.0).to(value.dtype)


@libentry()
@triton.jit(do_not_specialize=["size", "count"])
def segment_gradients(
    grad_input, grad, output, data, bounds, initial: tl.float64, size, inner, count, FACTS: tl.constexpr
):
    """A program writes the gradients of a segment's rows.

    Extrema share theirs among all rows that have them, where it is positive, as ATen's do. Of a product the gradient is
    the product of the others, for which zeros and nans are counted, and the zeros' signs multiplied.
    """
    wait_for_previous_launch()
    begin, end, base, column, inside, place = _own_segment(bounds, size, inner, count, FACTS)
    REDUCTION: tl.constexpr = FACTS.reduction
    dtype: tl.constexpr = grad_input.dtype.element_ty
    own = tl.load(grad + place, mask=inside, other=0).to(FACTS.compute)
    result = tl.load(output + place, mask=inside, other=0).to(FACTS.compute)
    zeros = tl.full((FACTS.rows, FACTS.columns), 0, tl.int32)
    nans = tl.full((FACTS.rows, FACTS.columns), 0, tl.int32)
    others = tl.full((FACTS.rows, FACTS.columns), 1.0, FACTS.compute)
    if REDUCTION == "mean":
        own = own / (end - begin).to(FACTS.compute)
    elif REDUCTION != "sum":
        for start in range(begin, end, FACTS.rows):
            _, mask, value = _rows_of(data, start, end, base, column, inside, inner, FACTS)
            if REDUCTION == "prod":
                zeros += (mask & (value == 0)).to(tl.int32)
                nans += (mask & (value != value)).to(tl.int32)
                others *= tl.where(mask & (value == value), tl.where(value == 0, _sign(value), value), 1.0)
            else:
                zeros += (mask & ((value != value) | (value == result[None, :]))).to(tl.int32)
    if REDUCTION == "prod":
        n_zeros = tl.sum(zeros, axis=0)
        n_nans = tl.sum(nans, axis=0)
        first = tl.full((FACTS.columns,), initial, tl.float64).to(dtype).to(FACTS.compute)
        product = tl.reduce(others, 0, _multiply) * first
    elif REDUCTION == "max" or REDUCTION == "min":
        n_extrema = tl.sum(zeros, axis=0)
        shared = tl.where((n_extrema > 1) & (own > 0), own / tl.maximum(n_extrema, 1).to(FACTS.compute), own)
    for start in range(begin, end, FACTS.rows):
        offset, mask, value = _rows_of(data, start, end, base, column, inside, inner, FACTS)
        if REDUCTION == "prod":
            missing = n_nans[None, :] - (value != value).to(tl.int32)
            empty = n_zeros[None, :] - (value == 0).to(tl.int32)
            rest = product[None, :] * _sign(value)
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
