"""How many elements fall into each of several bins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.dtypes import TRITON_DTYPES
from tritonite.engine.indexing.places import in_row_major
from tritonite.engine.iteration import INT32_LIMIT, power_of_2, span
from tritonite.engine.movement import fill_zero, move
from tritonite.language.indices import strided_offset
from tritonite.language.math import true_divide
from tritonite.language.order import wait_for_previous_launch
from tritonite.language.shared import SHARED_BYTES, add_shared, alloc_shared, load_shared, store_shared
from tritonite.runtime.contract import empty, zeros
from tritonite.runtime.libentry import libentry
from tritonite.runtime.symbols import Size

# Elements that a program takes at a time, and how often at least where there are many.
_BLOCK, _LEAST = 4096, 2
# Points that a program takes.
_POINTS = 1024
# Bins that a program counts in registers, where it cannot in shared memory.
_OWN = 1024
# Counts up to which these dtypes have all integers. Devices add to them in memory.
_EXACT = {torch.int32: INT32_LIMIT, torch.int64: 2**63, torch.float32: 2**24, torch.float64: 2**53}
# How far apart programs begin to add to the totals.
_APART = tl.constexpr(64)


class Limits(NamedTuple):
    """Where bins begin and end: two `edges` on the device, or numbers, as floats and as integers."""

    edges: tuple[torch.Tensor, ...] = ()
    least: float = 0.0
    most: float = 0.0
    first: int = 0
    last: int = 0

    @classmethod
    def of_numbers(cls, least: float, most: float, floating: bool) -> Limits:
        """Two numbers, of which least is below most."""
        return cls((), float(least), float(most)) if floating else cls((), 0.0, 0.0, int(least), int(most))


@libentry()
@triton.jit
def _write_edges(edges, flag, extrema):
    """One program: two edges, the extrema, moved apart by 1 where these are equal; a flag below 0 where one is not
    finite, or of integers where the dtype has no such numbers.
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
        held = (low < high) & (low.to(OWN).to(WIDE) == low) & (high.to(OWN).to(WIDE) == high)
    tl.store(flag, tl.where(held, 0, -1).to(tl.int64))
    tl.store(edges, low.to(edges.dtype.element_ty))
    tl.store(edges + 1, high.to(edges.dtype.element_ty))


@triton.jit
def _place_between(value, low, high, bins, COMPUTE: tl.constexpr):
    """(the bins of values, whether they have one): all are as wide, and the last has its upper edge too."""
    inside = (value >= low) & (value <= high)
    distance = tl.where(inside, value, low) - low
    if COMPUTE.is_int():
        place = distance * bins // (high - low)
    else:
        place = true_divide(distance * bins.to(COMPUTE), high - low)
    return tl.minimum(place.to(tl.int64), bins - 1).to(tl.int32), inside


@triton.jit
def _counted_at(
    x, limits, weights, shape, strides, weight_step, n, bins, linear, COUNTING: tl.constexpr, DTYPE: tl.constexpr
):
    """(bins, weights, whether there are any) of elements: bins that they are in, or that they tell themselves."""
    mask = linear < n
    value = tl.load(x + strided_offset(linear, shape, strides), mask=mask, other=0)
    COMPUTE: tl.constexpr = COUNTING.compute
    if COUNTING.limits != "none":
        if COUNTING.limits == "edges":
            low, high = tl.load(limits[0][0]).to(COMPUTE), tl.load(limits[0][0] + 1).to(COMPUTE)
        elif COMPUTE.is_int():
            low, high = tl.full((), limits[3], tl.int64).to(COMPUTE), tl.full((), limits[4], tl.int64).to(COMPUTE)
        else:
            low, high = tl.full((), limits[1], tl.float64).to(COMPUTE), tl.full((), limits[2], tl.float64).to(COMPUTE)
        place, inside = _place_between(value.to(COMPUTE), low, high, bins, COMPUTE)
        mask = mask & inside
    else:
        place = value.to(tl.int64)
    weight = tl.full(linear.shape, 1, DTYPE)
    if len(weights) > 0:
        weight = tl.load(weights[0] + linear * weight_step, mask=mask, other=0).to(DTYPE)
    return place, weight, mask


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
    """A program adds 1, or a weight, to the bin of each element of so many blocks: first in shared memory.

    Where that has no room for the bins, `_count_outside` does so. A program that is alone writes the totals.
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
        # The one after the last is for what is not counted.
        for begin in range(0, few, BLOCK):
            store_shared(own, tl.minimum(begin + lane, few), tl.zeros((BLOCK,), DTYPE))
        tl.debug_barrier()
        for j in range(counted):
            place, weight, mask = _counted_at(
                *(x, limits, weights, shape, strides, weight_step, n, bins, begun + j * step, COUNTING, DTYPE)
            )
            add_shared(own, tl.where(mask, place.to(tl.int32), few), weight)
        tl.debug_barrier()
        # Each program begins elsewhere, so that not all add to the same places at a time.
        turned = tl.program_id(0) * _APART % few
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
    """The same where there is no room in shared memory: first in registers, where a program has bins of its own."""
    wait_for_previous_launch()
    TOTAL: tl.constexpr = totals.dtype.element_ty
    OWN: tl.constexpr = COUNTING.own
    limits = (edges, least, most, first, last)
    step = tl.num_programs(0).to(COUNTING.index) * COUNTING.block
    begun = tl.program_id(0).to(COUNTING.index) * COUNTING.block + tl.arange(0, COUNTING.block)
    if OWN > 0:
        sums = tl.zeros((OWN,), tl.int32)
        for j in range(counted):
            place, _, mask = _counted_at(
                *(x, limits, weights, shape, strides, weight_step, n, bins, begun + j * step, COUNTING, TOTAL)
            )
            sums += tl.histogram(place.to(tl.int32), OWN, mask=mask)
        bin = tl.arange(0, OWN)
        if COUNTING.alone:
            tl.store(totals + bin, sums.to(TOTAL), mask=bin < bins)
        else:
            tl.atomic_add(totals + bin, sums.to(TOTAL), mask=(sums > 0) & (bin < bins), sem="relaxed")
    elif bins >= COUNTING.room:
        for j in range(counted):
            place, weight, mask = _counted_at(
                *(x, limits, weights, shape, strides, weight_step, n, bins, begun + j * step, COUNTING, TOTAL)
            )
            tl.atomic_add(totals + place, weight, mask=mask, sem="relaxed")


@libentry()
@triton.jit(do_not_specialize=["minimum"])
def _write_bins(out, least, largest, minimum: tl.int64):
    """One program: how many bins there are up to the largest; less than none where the least is below 0."""
    wait_for_previous_launch()
    needed = tl.maximum(tl.load(largest).to(tl.int64) + 1, minimum)
    tl.store(out, tl.where(tl.load(least).to(tl.int64) < 0, -1, needed))


def limits_of_extrema(dtype: torch.dtype, extrema: Sequence[torch.Tensor]) -> tuple[Limits, torch.Tensor]:
    """(the extrema of elements as limits, a flag below 0 where they are no numbers of the dtype)."""
    device = extrema[0].device
    edges = empty((2,), torch.int64 if not dtype.is_floating_point else dtype, device)
    flag = empty((1,), torch.int64, device)
    _write_edges[(1,)](edges, flag, tuple(extrema))
    return Limits((edges,)), flag


@dataclass(frozen=True)
class _Counting:
    """What kernels that count are compiled for.

    `limits` are "edges" on the device, "numbers", or "none" where elements are bins themselves, in the dtype `compute`.
    A program has a block of elements at a time, and sums of dtype `sum` in shared memory, which has `room` for so many,
    or in `own` registers. One that is `alone` writes the totals, to which others add.
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
    """As few programs as fill the device, where they have counts of their own, so that there is little to add up.

    With few bins there is little to add up anyway, and a program may have one block.
    """
    least = 1 if bins is not None and bins <= _OWN else _LEAST
    return max(1, min(2 * devices.multiprocessors(device), -(-n // _BLOCK) // least))


def _counts_alone(n: int, bins: int) -> bool:
    """Whether one program counts all elements in bins of its own."""
    room = SHARED_BYTES // 8 if devices.current.ptx else _OWN + 1
    return 0 < n <= _BLOCK and bins < room


def _add_counts(
    totals: torch.Tensor,
    x: torch.Tensor,
    limits: Limits | None,
    weights: torch.Tensor | None,
    bins: int | Size,
    compute: torch.dtype,
    alone: bool = False,
) -> None:
    """Add to totals of int32, int64, float32 or float64 what there is in each bin.

    One program that counts `alone` writes totals of any dtype instead.
    """
    n = x.numel()
    if not n:
        return
    ptx = devices.current.ptx
    known = bins if isinstance(bins, int) else None
    # A sum of integers in shared memory has 32 bits, and so has a count.
    total = TRITON_DTYPES[torch.int32 if weights is None else totals.dtype]
    room = SHARED_BYTES // (8 if total == tl.float64 else 4) if ptx else 0
    shape, strides, integer = in_row_major(x)
    for kernel in (_count, _count_outside):
        inside = kernel is _count
        if (inside and not room) or (known is not None and (known < room) != inside):
            continue
        own = power_of_2(known) if known is not None and not room and known <= _OWN and weights is None else 0
        programs = _programs(n, known, x.device) if inside or own else -(-n // _BLOCK)
        programs = 1 if alone else programs
        reach = max(n + programs * _BLOCK, 0 if weights is None else span(weights.shape, weights.stride()))
        counting = _Counting(
            limits="none" if limits is None else "edges" if limits.edges else "numbers",
            compute=TRITON_DTYPES[compute],
            sum=total,
            index=tl.int64 if reach >= INT32_LIMIT else integer,
            block=_BLOCK,
            room=room,
            own=own and max(2, own),
            alone=alone,
        )
        kernel[(programs,)](
            *(totals, x, *(limits or Limits()), () if weights is None else (weights,), shape, strides),
            *(0 if weights is None else weights.stride(0), n, bins, -(-n // (programs * _BLOCK))),
            COUNTING=counting,
            # An addition to shared memory is made by every thread that has its element.
            num_warps=min(16 if inside else 8, max(1, _BLOCK // 32)),
        )


def count_in_bins(out: torch.Tensor, x: torch.Tensor, limits: Limits, compute: torch.dtype) -> None:
    """Write how many elements each bin of a vector has, whose limits are compared in the dtype `compute`."""
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
    """How many bins integers from 0 need, a number on the device that is below 0 where one is."""
    out = empty((1,), torch.int64, least.device)
    _write_bins[(1,)](out, least, largest, minimum)
    return out


def add_at(totals: torch.Tensor, bins: Size, x: torch.Tensor, weights: torch.Tensor | None) -> None:
    """Add to as many totals what the elements of a vector tell: 1, or their weights."""
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
    """A program adds 1, or a weight, for each of its rows, in a bin for each coordinate, found by binary search."""
    wait_for_previous_launch()
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < n
    place = tl.zeros((BLOCK,), tl.int64)
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
        place = place * bins + tl.minimum(tl.maximum(low - 1, 0), bins - 1)
    weight = tl.full((BLOCK,), 1, totals.dtype.element_ty)
    if len(weights) > 0:
        weight = tl.load(weights[0] + row * weight_step, mask=row < n, other=0)
    tl.atomic_add(totals + place, weight, mask=inside, sem="relaxed")


def add_between(
    totals: torch.Tensor, x: torch.Tensor, edges: Sequence[torch.Tensor], weights: torch.Tensor | None
) -> None:
    """Add to contiguous totals, a dimension for each column of a matrix, what rows have between contiguous edges."""
    n, bins = x.shape[0], [edge.numel() - 1 for edge in edges]
    if n:
        _add_between[(-(-n // _POINTS),)](
            *(totals, x, tuple(edges), () if weights is None else (weights,), x.stride()),
            *(0 if weights is None else weights.stride(0), tuple(bins), n),
            ROUNDS=(max(bins) + 1).bit_length(),
            COMPUTE=TRITON_DTYPES[x.dtype],
            BLOCK=_POINTS,
            num_warps=4,
        )
