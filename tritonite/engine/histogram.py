"""How many elements fall into each of several bins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from tritonite.dispatch.call import empty, zeros
from tritonite.dtypes import TRITON_DTYPES
from tritonite.engine.indexing.places import in_row_major
from tritonite.engine.iteration import power_of_2
from tritonite.language.math import true_divide
from tritonite.language.places import strided_offset
from tritonite.launch import libentry

_BLOCK = 1024
# Bins that a program counts for itself before it adds them to all others'.
_OWN = 1024


@libentry()
@triton.jit(do_not_specialize=["least", "most"])
def _write_edges(edges, flag, least, most, extrema, apart):
    """One program: two edges, moved `apart` where they are equal; a flag below 0 where one is not finite.

    They are the `extrema` where there are any.
    """
    if len(extrema) > 0:
        low, high = tl.load(extrema[0]), tl.load(extrema[1])
        if not edges.dtype.element_ty.is_int():
            low, high = low.to(tl.float64), high.to(tl.float64)
    else:
        low, high = least, most
    equal = low == high
    low, high = tl.where(equal, low - apart, low), tl.where(equal, high + apart, high)
    if not edges.dtype.element_ty.is_int():
        finite = ((high - low) == (high - low)) & (tl.abs(low) < float("inf")) & (tl.abs(high) < float("inf"))
        tl.store(flag, tl.where(finite, 0, -1).to(tl.int64))
    tl.store(edges, low.to(edges.dtype.element_ty))
    tl.store(edges + 1, high.to(edges.dtype.element_ty))


@libentry()
@triton.jit(do_not_specialize=["n", "bins"])
def _count(
    counts,
    x,
    edges,
    shape,
    strides,
    n,
    bins,
    OWN: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program counts its elements, in bins as wide as each other, of which the last has its upper edge too."""
    linear = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + strided_offset(linear, shape, strides), mask=linear < n, other=0).to(COMPUTE)
    low, high = tl.load(edges).to(COMPUTE), tl.load(edges + 1).to(COMPUTE)
    inside = (value >= low) & (value <= high) & (linear < n)
    distance = tl.where(inside, value, low) - low
    if COMPUTE.is_int():
        place = distance * bins // (high - low)
    else:
        place = true_divide(distance * bins.to(COMPUTE), high - low)
    place = tl.minimum(place.to(tl.int64), bins - 1).to(tl.int32)
    if OWN > 0:
        own = tl.histogram(place, OWN, mask=inside)
        tl.atomic_add(counts + tl.arange(0, OWN), own, mask=own > 0, sem="relaxed")
    else:
        tl.atomic_add(counts + place, 1, mask=inside, sem="relaxed")


@libentry()
@triton.jit(do_not_specialize=["n"])
def _add_at(totals, x, weights, stride, weight_stride, n, BLOCK: tl.constexpr):
    """A program adds 1, or the weight of each of its elements, where the element tells."""
    linear = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = linear < n
    place = tl.load(x + linear * stride, mask=mask, other=0).to(tl.int64)
    if len(weights) > 0:
        weight = tl.load(weights[0] + linear * weight_stride, mask=mask, other=0).to(totals.dtype.element_ty)
    else:
        weight = tl.full((BLOCK,), 1, tl.int64)
    tl.atomic_add(totals + place, weight, mask=mask, sem="relaxed")


@libentry()
@triton.jit(do_not_specialize=["minimum"])
def _write_bins(out, least, largest, minimum: tl.int64):
    """One program: how many bins there are up to the largest; less than none where the least is below 0."""
    needed = tl.maximum(tl.load(largest).to(tl.int64) + 1, minimum)
    tl.store(out, tl.where(tl.load(least).to(tl.int64) < 0, -1, needed))


def edges_of(
    dtype: torch.dtype, device: torch.device, least: Any, most: Any, extrema: tuple[torch.Tensor, ...], apart: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(two edges, a flag that is below 0 where they are infinite or nan): those given, or the extrema of elements."""
    edges = empty((2,), torch.int64 if not dtype.is_floating_point else dtype, device)
    flag = zeros((1,), torch.int64, device)
    _write_edges[(1,)](edges, flag, least, most, extrema, int(apart) if not dtype.is_floating_point else float(apart))
    return edges, flag


def count_in_bins(x: torch.Tensor, edges: torch.Tensor, bins: int) -> torch.Tensor:
    """How many elements each of so many bins has."""
    own = power_of_2(bins) if bins <= _OWN else 0
    counts = zeros((own or bins,), torch.int32, x.device)
    if x.numel():
        shape, strides, integer = in_row_major(x)
        _count[(-(-x.numel() // _BLOCK),)](
            *(counts, x, edges, shape, strides, x.numel(), bins),
            OWN=max(own, 2) if own else 0,
            COMPUTE=TRITON_DTYPES[edges.dtype],
            INDEX=integer,
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return counts[:bins]


def bins_of(least: torch.Tensor, largest: torch.Tensor, minimum: int) -> torch.Tensor:
    """How many bins integers from 0 need, a number on the device that is below 0 where one is."""
    out = empty((1,), torch.int64, least.device)
    _write_bins[(1,)](out, least, largest, minimum)
    return out


def add_at(totals: torch.Tensor, x: torch.Tensor, weights: torch.Tensor | None) -> None:
    """Add to the totals that the elements of a vector tell: 1, or their weights."""
    _add_at[(-(-x.numel() // _BLOCK),)](
        *(totals, x, () if weights is None else (weights,), x.stride(0)),
        *(0 if weights is None else weights.stride(0), x.numel()),
        BLOCK=_BLOCK,
        num_warps=4,
    )


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
        _add_between[(-(-n // _BLOCK),)](
            *(totals, x, tuple(edges), () if weights is None else (weights,), x.stride()),
            *(0 if weights is None else weights.stride(0), tuple(bins), n),
            ROUNDS=(max(bins) + 1).bit_length(),
            COMPUTE=TRITON_DTYPES[x.dtype],
            BLOCK=_BLOCK,
            num_warps=4,
        )
