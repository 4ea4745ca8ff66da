"""Histograms: the number, or the sum of weights, of the elements in each bin.

`_count` runs if the bins fit in a program's shared memory, `_count_outside` if they do not. If the number of bins is
known on the device only, both are launched, and one of them ends at once. `_add_between` counts points in bins of
several dimensions, with edges that a vector gives for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.devices.tables import Tables
from tritonite.dtypes import TRITON_DTYPES
from tritonite.engine.indexing.indices import in_row_major
from tritonite.engine.iteration import INT32_LIMIT, power_of_2, span
from tritonite.engine.movement import fill_zero, move
from tritonite.language.indices import strided_offset
from tritonite.language.math import true_divide
from tritonite.language.order import wait_for_previous_launch
from tritonite.language.shared import SHARED_BYTES, add_shared, alloc_shared, load_shared, store_shared
from tritonite.runtime.contract import empty, zeros
from tritonite.runtime.libentry import libentry
from tritonite.runtime.symbols import Size

# Dtypes with an atomic addition, and the count up to which they represent all integers.
_EXACT = {torch.int32: INT32_LIMIT, torch.int64: 2**63, torch.float32: 2**24, torch.float64: 2**53}
# Distance between the bins at which programs start to add to the totals, so that few collide.
_STAGGER = tl.constexpr(64)


class HistogramTable(NamedTuple):
    """Blocks of a kind of device.

    `block`: elements of a block.
    `least_blocks`: the fewest blocks of a program if there are more than `own_bins` bins.
    `own_bins`: the most bins that a program counts in registers, without shared memory.
    `points`: points of a program of a histogram over several dimensions.
    """

    block: int = 4096
    least_blocks: int = 2
    own_bins: int = 1024
    points: int = 1024


HISTOGRAM: Tables[HistogramTable] = Tables("histogram", dict.fromkeys(devices.KINDS, HistogramTable()))


def histogram_table() -> HistogramTable:
    """Return the table of the current device."""
    return HISTOGRAM[devices.current.kind]


class Limits(NamedTuple):
    """The lower edge of the first bin and the upper edge of the last one.

    They are two `edges` on the device, or the numbers `least` and `most`, or the integers `first` and `last`.
    """

    edges: tuple[torch.Tensor, ...] = ()
    least: float = 0.0
    most: float = 0.0
    first: int = 0
    last: int = 0

    @classmethod
    def of_numbers(cls, least: float, most: float, floating: bool) -> Limits:
        """Return limits of two numbers, of which `least` is below `most`."""
        return cls((), float(least), float(most)) if floating else cls((), 0.0, 0.0, int(least), int(most))


@libentry()
@triton.jit
def _write_edges(edges, flag, extrema):
    """Write the extrema as two edges, by one program; equal extrema are moved by 1 down and up.

    The flag is -1 if an edge is not finite, if the dtype of integers cannot represent it, or if integers are 2**32 or
    more apart; otherwise 0.
    """
    wait_for_previous_launch()
    WIDE: tl.constexpr = tl.int64 if edges.dtype.element_ty.is_int() else tl.float64
    OWN: tl.constexpr = extrema[0].dtype.element_ty
    low, high = tl.load(extrema[0]).to(WIDE), tl.load(extrema[1]).to(WIDE)
    equal = low == high
    low, high = tl.where(equal, low - 1, low), tl.where(equal, high + 1, high)
    if tl.float64 == WIDE:
        held = ((high - low) == (high - low)) & (tl.abs(low) < float("inf")) & (tl.abs(high) < float("inf"))
    else:
        # The distance of an integer from `low` is multiplied by the number of bins, below 2**31, in int64.
        near = (low < high) & (high - low > 0) & (high - low < 2**32)
        held = near & (low.to(OWN).to(WIDE) == low) & (high.to(OWN).to(WIDE) == high)
    tl.store(flag, tl.where(held, 0, -1).to(tl.int64))
    tl.store(edges, low.to(edges.dtype.element_ty))
    tl.store(edges + 1, high.to(edges.dtype.element_ty))


@triton.jit
def _bin_between(value, low, high, bins, COMPUTE: tl.constexpr):
    """Return (the bins of values, the mask of values inside). Bins have equal width; the last includes `high`."""
    inside = (value >= low) & (value <= high)
    distance = tl.where(inside, value, low) - low
    if COMPUTE.is_int():
        bin = distance * bins // (high - low)
    else:
        bin = true_divide(distance * bins.to(COMPUTE), high - low)
    return tl.minimum(bin.to(tl.int64), bins - 1).to(tl.int32), inside


@triton.jit
def _bins_and_weights(
    x, limits, weights, shape, strides, weight_step, n, bins, linear, COUNTING: tl.constexpr, DTYPE: tl.constexpr
):
    """Return (bins, weights, mask) of elements, which fall between `limits` or are bin numbers themselves."""
    mask = linear < n
    value = tl.load(x + strided_offset(linear, shape, strides), mask=mask, other=0)
    COMPUTE: tl.constexpr = COUNTING.compute
    edges, least, most, first, last = limits
    if COUNTING.limits != "none":
        if COUNTING.limits == "edges":
            low, high = tl.load(edges[0]).to(COMPUTE), tl.load(edges[0] + 1).to(COMPUTE)
        elif COMPUTE.is_int():
            low, high = tl.full((), first, tl.int64).to(COMPUTE), tl.full((), last, tl.int64).to(COMPUTE)
        else:
            low, high = tl.full((), least, tl.float64).to(COMPUTE), tl.full((), most, tl.float64).to(COMPUTE)
        bin, inside = _bin_between(value.to(COMPUTE), low, high, bins, COMPUTE)
        mask = mask & inside
    else:
        bin = value.to(tl.int64)
    weight = tl.full(linear.shape, 1, DTYPE)
    if len(weights) > 0:
        weight = tl.load(weights[0] + linear * weight_step, mask=mask, other=0).to(DTYPE)
    return bin, weight, mask


@libentry()
@triton.jit(do_not_specialize=["n", "bins", "counted", "first", "last"])
def _count(
    totals,
    x,
    edges,
    least: tl.float64,
    most: tl.float64,
    first: tl.int64,
    last: tl.int64,
    weights,
    shape,
    strides,
    weight_step,
    n,
    bins: tl.int64,
    counted,
    COUNTING: tl.constexpr,
):
    """Count the elements of `counted` blocks in shared memory, and add the counts to the totals.

    Bins that do not fit in shared memory are left to `_count_outside`. A program that is alone writes the totals.
    """
    wait_for_previous_launch()
    TOTAL: tl.constexpr = totals.dtype.element_ty
    DTYPE: tl.constexpr = COUNTING.sum
    BLOCK: tl.constexpr = COUNTING.block
    limits = (edges, least, most, first, last)
    lane = tl.arange(0, BLOCK)
    step = tl.num_programs(0).to(COUNTING.index) * BLOCK
    begun = tl.program_id(0).to(COUNTING.index) * BLOCK + lane
    if bins < COUNTING.room:
        own = alloc_shared(COUNTING.room, DTYPE)
        few = bins.to(tl.int32)
        # The bin after the last is for elements that are not counted.
        for begin in range(0, few, BLOCK):
            store_shared(own, tl.minimum(begin + lane, few), tl.zeros((BLOCK,), DTYPE))
        tl.debug_barrier()
        for j in range(counted):
            bin, weight, mask = _bins_and_weights(
                *(x, limits, weights, shape, strides, weight_step, n, bins, begun + j * step, COUNTING, DTYPE)
            )
            add_shared(own, tl.where(mask, bin.to(tl.int32), few), weight)
        tl.debug_barrier()
        # Each program begins at another bin, so that few add to the same totals at a time.
        turned = tl.program_id(0) * _STAGGER % few
        for begin in range(0, few, BLOCK):
            bin = begin + lane
            mask = bin < few
            bin = (tl.minimum(bin, few - 1) + turned) % few
            count = load_shared(own, bin, tl.zeros((BLOCK,), DTYPE))
            if COUNTING.alone:
                tl.store(totals + bin, count.to(TOTAL), mask=mask)
            else:
                tl.atomic_add(totals + bin, count.to(TOTAL), mask=mask & (count != 0), sem="relaxed")


@libentry()
@triton.jit(do_not_specialize=["n", "bins", "counted", "first", "last"])
def _count_outside(
    totals,
    x,
    edges,
    least: tl.float64,
    most: tl.float64,
    first: tl.int64,
    last: tl.int64,
    weights,
    shape,
    strides,
    weight_step,
    n,
    bins: tl.int64,
    counted,
    COUNTING: tl.constexpr,
):
    """Count the elements of `counted` blocks in registers if the bins fit there, otherwise by atomics in memory."""
    wait_for_previous_launch()
    TOTAL: tl.constexpr = totals.dtype.element_ty
    OWN: tl.constexpr = COUNTING.own
    limits = (edges, least, most, first, last)
    step = tl.num_programs(0).to(COUNTING.index) * COUNTING.block
    begun = tl.program_id(0).to(COUNTING.index) * COUNTING.block + tl.arange(0, COUNTING.block)
    if OWN > 0:
        sums = tl.zeros((OWN,), tl.int32)
        for j in range(counted):
            own_bin, _, mask = _bins_and_weights(
                *(x, limits, weights, shape, strides, weight_step, n, bins, begun + j * step, COUNTING, TOTAL)
            )
            sums += tl.histogram(own_bin.to(tl.int32), OWN, mask=mask)
        bin = tl.arange(0, OWN)
        if COUNTING.alone:
            tl.store(totals + bin, sums.to(TOTAL), mask=bin < bins)
        else:
            tl.atomic_add(totals + bin, sums.to(TOTAL), mask=(sums > 0) & (bin < bins), sem="relaxed")
    elif bins >= COUNTING.room:
        for j in range(counted):
            bin, weight, mask = _bins_and_weights(
                *(x, limits, weights, shape, strides, weight_step, n, bins, begun + j * step, COUNTING, TOTAL)
            )
            tl.atomic_add(totals + bin, weight, mask=mask, sem="relaxed")


@libentry()
@triton.jit(do_not_specialize=["minimum"])
def _write_bins(out, least, largest, minimum: tl.int64):
    """Write the number of bins that integers need, by one program; -1 if an integer is negative."""
    wait_for_previous_launch()
    needed = tl.maximum(tl.load(largest).to(tl.int64) + 1, minimum)
    tl.store(out, tl.where(tl.load(least).to(tl.int64) < 0, -1, needed))


def limits_of_extrema(dtype: torch.dtype, extrema: Sequence[torch.Tensor]) -> tuple[Limits, torch.Tensor]:
    """Return (limits at the extrema of elements, a flag): -1 if the dtype cannot represent the limits, 0 if not."""
    device = extrema[0].device
    edges = empty((2,), torch.int64 if not dtype.is_floating_point else dtype, device)
    flag = empty((1,), torch.int64, device)
    _write_edges[(1,)](edges, flag, tuple(extrema))
    return Limits((edges,)), flag


@dataclass(frozen=True)
class _Counting:
    """Compile-time facts of the counting kernels.

    `limits` is "edges" (on the device), "numbers", or "none" if elements are bin numbers; `compute` is their dtype.
    `sum` is the dtype of counts in shared memory, which has room for `room` counts. `index` is the dtype of offsets.
    `block` is the elements of a block. `own` is the counts in registers, 0 for none.
    `alone` says that one program counts everything and writes the totals, instead of adding to them.
    """

    limits: str
    compute: Any
    sum: Any
    index: Any
    block: int
    room: int
    own: int
    alone: bool


def _programs(n: int, bins: int | None, device: torch.device) -> int:
    """Return the number of programs, each of which has counts of its own that it adds to the totals.

    With many bins a program has several blocks, so that less is added to the totals.
    """
    table = histogram_table()
    least = 1 if bins is not None and bins <= table.own_bins else table.least_blocks
    return max(1, min(2 * devices.multiprocessors(device), -(-n // table.block) // least))


def _counts_alone(n: int, bins: int) -> bool:
    """Return whether one program can count all elements in bins of its own."""
    table = histogram_table()
    room = SHARED_BYTES // 8 if devices.current.ptx else table.own_bins + 1
    return 0 < n <= table.block and bins < room


def _add_counts(
    totals: torch.Tensor,
    x: torch.Tensor,
    limits: Limits | None,
    weights: torch.Tensor | None,
    bins: int | Size,
    compute: torch.dtype,
    alone: bool = False,
) -> None:
    """Add the counts of the bins to totals of int32, int64, float32 or float64.

    With `alone`, one program writes totals of any dtype instead.
    """
    n = x.numel()
    if not n:
        return
    ptx, table = devices.current.ptx, histogram_table()
    known = bins if isinstance(bins, int) else None
    # Counts in shared memory are int32.
    total = TRITON_DTYPES[torch.int32 if weights is None else totals.dtype]
    room = SHARED_BYTES // (8 if total == tl.float64 else 4) if ptx else 0
    shape, strides, integer = in_row_major(x)
    for kernel in (_count, _count_outside):
        inside = kernel is _count
        if (inside and not room) or (known is not None and (known < room) != inside):
            continue
        own = 0
        if known is not None and not room and known <= table.own_bins and weights is None:
            own = power_of_2(known)
        programs = _programs(n, known, x.device) if inside or own else -(-n // table.block)
        programs = 1 if alone else programs
        reach = max(n + programs * table.block, 0 if weights is None else span(weights.shape, weights.stride()))
        counting = _Counting(
            limits="none" if limits is None else "edges" if limits.edges else "numbers",
            compute=TRITON_DTYPES[compute],
            sum=total,
            index=tl.int64 if reach >= INT32_LIMIT else integer,
            block=table.block,
            room=room,
            own=own and max(2, own),
            alone=alone,
        )
        kernel[(programs,)](
            *(totals, x, *(limits or Limits()), () if weights is None else (weights,), shape, strides),
            *(0 if weights is None else weights.stride(0), n, bins, -(-n // (programs * table.block))),
            COUNTING=counting,
            # No more threads than elements: threads with the same element would add it twice.
            num_warps=min(16 if inside else 8, devices.warps(table.block)),
        )


def count_in_bins(out: torch.Tensor, x: torch.Tensor, limits: Limits, compute: torch.dtype) -> None:
    """Write to a vector the number of elements in each bin; elements and limits are compared as `compute`."""
    bins = len(out)
    if out.is_contiguous() and _counts_alone(x.numel(), bins):
        _add_counts(out, x, limits, None, bins, compute, alone=True)
        return
    if out.is_contiguous() and x.numel() < _EXACT.get(out.dtype, 0):
        fill_zero(out)
        _add_counts(out, x, limits, None, bins, compute)
        return
    counts = zeros((bins,), torch.int32 if x.numel() < INT32_LIMIT else torch.int64, x.device)
    _add_counts(counts, x, limits, None, bins, compute)
    move(counts, out)


def bins_of(least: torch.Tensor, largest: torch.Tensor, minimum: int) -> torch.Tensor:
    """Return the number of bins that integers need, at least `minimum`, on the device; -1 if one is negative."""
    out = empty((1,), torch.int64, least.device)
    _write_bins[(1,)](out, least, largest, minimum)
    return out


def add_at(totals: torch.Tensor, bins: Size, x: torch.Tensor, weights: torch.Tensor | None) -> None:
    """Add 1, or a weight, to the total that each element of a vector numbers."""
    _add_counts(totals, x, None, weights, bins, x.dtype)


@libentry()
@triton.jit(do_not_specialize=["n"])
def _add_between(
    totals,
    x,
    edges,
    weights,
    steps,
    weight_step,
    sizes,
    n,
    ROUNDS: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add 1, or a weight, for each point of a block, whose bin along each dimension a binary search finds."""
    wait_for_previous_launch()
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < n
    bin = tl.zeros((BLOCK,), tl.int64)
    for d in tl.static_range(len(edges)):
        bins = sizes[d]
        value = tl.load(x + row * steps[0] + d * steps[1], mask=row < n, other=0).to(COMPUTE)
        inside = inside & (value >= tl.load(edges[d]).to(COMPUTE)) & (value <= tl.load(edges[d] + bins).to(COMPUTE))
        low = tl.zeros((BLOCK,), tl.int64)
        high = low + bins + 1
        for _ in tl.static_range(ROUNDS):
            middle = low + (high - low) // 2
            searching = low < high
            stops = tl.load(edges[d] + middle, mask=searching, other=0).to(COMPUTE) > value
            low = tl.where(searching & (stops == 0), middle + 1, low)
            high = tl.where(searching & stops, middle, high)
        bin = bin * bins + tl.minimum(tl.maximum(low - 1, 0), bins - 1)
    weight = tl.full((BLOCK,), 1, totals.dtype.element_ty)
    if len(weights) > 0:
        weight = tl.load(weights[0] + row * weight_step, mask=row < n, other=0)
    tl.atomic_add(totals + bin, weight, mask=inside, sem="relaxed")


def add_between(
    totals: torch.Tensor, x: torch.Tensor, edges: Sequence[torch.Tensor], weights: torch.Tensor | None
) -> None:
    """Add points, the rows of a matrix, to contiguous totals that have a dimension for each column.

    `edges` has a contiguous vector of bin edges for each column.
    """
    n, bins = x.shape[0], [edge.numel() - 1 for edge in edges]
    if n:
        block = histogram_table().points
        _add_between[(-(-n // block),)](
            *(totals, x, tuple(edges), () if weights is None else (weights,), x.stride()),
            *(0 if weights is None else weights.stride(0), tuple(bins), n),
            ROUNDS=(max(bins) + 1).bit_length(),
            COMPUTE=TRITON_DTYPES[x.dtype],
            BLOCK=block,
            num_warps=4,
        )
