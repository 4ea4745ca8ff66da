"""Rows of tokens, moved to the positions of their experts and back.

A token has k slots, each with an expert. `inverse`, (tokens, k), has the position of each slot in the order of experts;
a slot without an expert has -1 - position, and its row is 0. All positions together are a permutation, so that each row
is written once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tritonite.dtypes import TRITON_DTYPES, opmath
from tritonite.engine.iteration import offset_type, power_of_2
from tritonite.engine.moe.table import moe_table
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry


class RowStrides(NamedTuple):
    """Element strides of a matrix."""

    row: int
    column: int


@dataclass(frozen=True)
class _ExchangeMeta:
    """Compile-time facts of the kernels.

    A program has `rows` rows in blocks of `columns` columns. A token has `k` slots, `unrolled` of which are in flight.
    `dots` says that the gradient by weights is wanted.
    """

    index: Any
    compute: Any
    rows: int
    columns: int
    k: int
    unrolled: int
    dots: bool


@triton.jit
def _own_block(n_columns, META: tl.constexpr):
    """Return the rows and the columns of the program's block."""
    blocks = tl.cdiv(n_columns, META.columns)
    row = (tl.program_id(0) // blocks).to(META.index) * META.rows + tl.arange(0, META.rows)
    column = (tl.program_id(0) % blocks).to(META.index) * META.columns + tl.arange(0, META.columns)
    return row, column


@triton.jit
def _load_places(inverse, token, first, present, META: tl.constexpr):
    """Return the elements of `inverse` of META.unrolled slots from `first` on, as a tuple of a block each."""
    UNROLLED: tl.constexpr = META.unrolled
    places = ()
    for j in tl.static_range(UNROLLED):
        own = tl.load(inverse + token * META.k + first + j, mask=present & (first + j < META.k), other=-1)
        places = places + (own,)
    return places


@triton.jit
def _position(place):
    """Return (the positions of slots, the mask of slots with an expert)."""
    return tl.where(place >= 0, place, -1 - place), place >= 0


@libentry()
@triton.jit(do_not_specialize=["tokens"])
def scatter_tokens(out, x, strides, inverse, tokens, n_columns, META: tl.constexpr):
    """Write the rows of META.rows tokens to the positions of all their slots in a contiguous matrix."""
    wait_for_previous_launch()
    token, column = _own_block(n_columns, META)
    present, inside = token < tokens, (column < n_columns)[None, :]
    offset = token[:, None] * strides.row + column[None, :] * strides.column
    value = tl.load(x + offset, mask=present[:, None] & inside, other=0)
    zero = tl.full((META.rows, META.columns), 0, META.compute).to(out.dtype.element_ty)
    UNROLLED: tl.constexpr = META.unrolled
    for first in range(0, META.k, UNROLLED):
        places = _load_places(inverse, token, first, present, META)
        for j in tl.static_range(UNROLLED):
            position, served = _position(places[j])
            target = position.to(META.index)[:, None] * n_columns + column[None, :]
            mask = (present & (first + j < META.k))[:, None] & inside
            tl.store(out + target, tl.where(served[:, None], value, zero), mask=mask)


@libentry()
@triton.jit(do_not_specialize=["tokens"])
def gather_slots(out, y, strides, inverse, weights, weight_strides, tokens, n_columns, META: tl.constexpr):
    """Add up the rows of META.rows tokens' slots, times their weights. `weights` is a tuple of at most one matrix."""
    wait_for_previous_launch()
    token, column = _own_block(n_columns, META)
    present, inside = token < tokens, (column < n_columns)[None, :]
    total = tl.full((META.rows, META.columns), 0, META.compute)
    UNROLLED: tl.constexpr = META.unrolled
    for first in range(0, META.k, UNROLLED):
        places = _load_places(inverse, token, first, present, META)
        for j in tl.static_range(UNROLLED):
            position, served = _position(places[j])
            offset = position.to(META.index)[:, None] * strides.row + column[None, :] * strides.column
            value = tl.load(y + offset, mask=served[:, None] & inside, other=0).to(META.compute)
            if len(weights) > 0:
                own = token * weight_strides.row + (first + j) * weight_strides.column
                weight = tl.load(weights[0] + own, mask=served, other=0).to(META.compute)
                value = weight[:, None] * value
            total += value
    target = token[:, None] * n_columns + column[None, :]
    tl.store(out + target, total.to(out.dtype.element_ty), mask=present[:, None] & inside)


@libentry()
@triton.jit(do_not_specialize=["slots"])
def gather_slots_backward(
    grad_y,
    grad_weights,
    grad,
    strides,
    y,
    y_strides,
    inverse,
    weights,
    weight_strides,
    slots,
    n_columns,
    META: tl.constexpr,
):
    """Write the gradients by the rows of META.rows slots: weight * grad; and by their weights: the product of rows."""
    wait_for_previous_launch()
    slot = tl.program_id(0).to(META.index) * META.rows + tl.arange(0, META.rows)
    present = slot < slots
    token = slot // META.k
    position, served = _position(tl.load(inverse + slot, mask=present, other=-1))
    position = position.to(META.index)
    own = token * weight_strides.row + slot % META.k * weight_strides.column
    weight = tl.load(weights + own, mask=served, other=0).to(META.compute)
    total = tl.full((META.rows, META.columns), 0, META.compute)
    for first in range(0, n_columns, META.columns):
        column = (first + tl.arange(0, META.columns)).to(META.index)
        inside = (column < n_columns)[None, :]
        offset = token[:, None] * strides.row + column[None, :] * strides.column
        value = tl.load(grad + offset, mask=served[:, None] & inside, other=0).to(META.compute)
        result = tl.where(served[:, None], weight[:, None] * value, 0.0).to(grad_y.dtype.element_ty)
        target = position[:, None] * n_columns + column[None, :]
        tl.store(grad_y + target, result, mask=present[:, None] & inside)
        if META.dots:
            offset = position[:, None] * y_strides.row + column[None, :] * y_strides.column
            total += value * tl.load(y + offset, mask=served[:, None] & inside, other=0).to(META.compute)
    if META.dots:
        dot = tl.sum(total, axis=1)
        tl.store(grad_weights + slot, dot.to(grad_weights.dtype.element_ty), mask=present)


def _meta(rows: int, n_columns: int, k: int, tensors: tuple[torch.Tensor, ...], dots: bool = False) -> _ExchangeMeta:
    columns = min(moe_table().columns, power_of_2(n_columns))
    return _ExchangeMeta(
        index=offset_type(*tensors),
        compute=TRITON_DTYPES[opmath(tensors[0].dtype)],
        rows=min(max(1, moe_table().columns // columns), power_of_2(rows)),
        columns=columns,
        k=k,
        unrolled=min(k, moe_table().unrolled),
        dots=dots,
    )


def to_experts(x: torch.Tensor, inverse: torch.Tensor, out: torch.Tensor) -> None:
    """Write the rows of x, (tokens, columns), to the positions of their slots in a contiguous `out`."""
    (tokens, n_columns), k = x.shape, inverse.shape[1]
    if not out.numel():
        return
    meta = _meta(tokens, n_columns, k, (x, out))
    scatter_tokens[(-(-tokens // meta.rows) * -(-n_columns // meta.columns),)](
        *(out, x, RowStrides(*x.stride()), inverse, tokens, n_columns), META=meta, num_warps=4
    )


def from_experts(y: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor | None, out: torch.Tensor) -> None:
    """Write the sum of each token's rows of y, times `weights` if given, to a contiguous `out`, (tokens, columns)."""
    (tokens, n_columns), k = out.shape, inverse.shape[1]
    if not out.numel():
        return
    meta = _meta(tokens, n_columns, k, (y, out))
    gather_slots[(-(-tokens // meta.rows) * -(-n_columns // meta.columns),)](
        *(out, y, RowStrides(*y.stride()), inverse, () if weights is None else (weights,)),
        *(RowStrides(0, 0) if weights is None else RowStrides(*weights.stride()), tokens, n_columns),
        META=meta,
        num_warps=4,
    )


def from_experts_backward(
    grad: torch.Tensor,
    y: torch.Tensor,
    inverse: torch.Tensor,
    weights: torch.Tensor,
    grad_y: torch.Tensor,
    grad_weights: torch.Tensor | None,
) -> None:
    """Write the gradients of `from_experts` by y and, unless None, by weights; both are contiguous."""
    slots, n_columns = inverse.numel(), grad.shape[1]
    if not slots:
        return
    meta = _meta(slots, n_columns, inverse.shape[1], (y, grad, grad_y), grad_weights is not None)
    gather_slots_backward[(-(-slots // meta.rows),)](
        *(grad_y, grad_y if grad_weights is None else grad_weights, grad, RowStrides(*grad.stride())),
        *(y, RowStrides(*y.stride()), inverse, weights, RowStrides(*weights.stride()), slots, n_columns),
        META=meta,
        num_warps=4,
    )
