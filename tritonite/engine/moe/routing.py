"""Choice of experts by their scores, and its gradient by the logits.

A token's scores s are the softmax or the sigmoid of its logits. The k experts with the largest keys are chosen: the
key is the logit, or with a bias the score plus the expert's bias. With groups of experts (DeepSeek-V3 2024) a group's
score is the sum of its two largest scores plus bias, and experts outside the best groups are not chosen. The weight of
a chosen expert is w = scale s, or renormalised w = scale s / (sum of chosen s).

With g the gradient by w, the gradient by a chosen score is d = scale g, or scale (g - sum(g s) / sum(s)) / sum(s). The
gradient by the logits is s (d - sum(d s)) for softmax and d s (1 - s) for sigmoid, with d = 0 for other experts.
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
from tritonite.runtime.contract import Number, settings
from tritonite.runtime.libentry import libentry

# Keeps a sum of sigmoids, all of which may be 0, from dividing by 0 (DeepSeek-V3 2024).
_LEAST_SUM = tl.constexpr(1e-20)


class Routing(NamedTuple):
    """Options of a choice of experts: k of them for each token, from the `chosen_groups` best of `groups` groups."""

    k: int
    sigmoid: bool = False
    groups: int = 1
    chosen_groups: int = 1
    renormalize: bool = True
    scale: float | Number = 1.0


class LogitStrides(NamedTuple):
    """Element strides of the tokens and the experts of logits."""

    token: int
    expert: int


@dataclass(frozen=True)
class _RoutingMeta:
    """Compile-time facts of the kernels.

    A program has `rows` tokens. An expert's lane is its group times `lanes` plus its index in the group; `group_lanes`
    and `lanes` are powers of 2. `slots` is k rounded up to a power of 2.
    """

    index: Any
    compute: Any
    rows: int
    group_lanes: int
    lanes: int
    slots: int
    k: int
    groups: int
    chosen_groups: int
    sigmoid: bool
    renormalize: bool


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _scores(logits, inside, META: tl.constexpr):
    """Return the scores of rows of logits, 0 for lanes that are not `inside`."""
    if META.sigmoid:
        score = _sigmoid(logits)
    else:
        masked = tl.where(inside, logits, -float("inf"))
        score = tl.exp(masked - tl.max(masked, axis=1)[:, None])
        score = score / tl.sum(score, axis=1)[:, None]
    return tl.where(inside, score, 0.0)


@triton.jit
def _orderable(key):
    """Return keys above -inf that order as `key` does, with nan as the largest."""
    return tl.where(key != key, float("inf"), tl.maximum(key, -3.4028234663852886e38))


@triton.jit
def _in_chosen_groups(biased, inside, experts, META: tl.constexpr):
    """Return the mask of lanes in the groups with the largest sums of their two largest scores."""
    ROWS: tl.constexpr = META.rows
    GROUPS: tl.constexpr = META.group_lanes
    LANES: tl.constexpr = META.lanes
    by_group = tl.reshape(tl.where(inside, biased, -float("inf")), (ROWS, GROUPS, LANES))
    first, place = tl.max(by_group, axis=2, return_indices=True, return_indices_tie_break_left=True)
    total = first
    if experts > META.groups:
        rest = tl.where(tl.arange(0, LANES)[None, None, :] == place[:, :, None], -float("inf"), by_group)
        total += tl.max(rest, axis=2)
    group = tl.arange(0, GROUPS)[None, :]
    key = tl.where(group < META.groups, _orderable(total), -float("inf"))
    chosen = tl.full((ROWS, GROUPS), 0, tl.int1)
    for _ in range(META.chosen_groups):
        _, best = tl.max(key, axis=1, return_indices=True, return_indices_tie_break_left=True)
        own = group == best[:, None]
        chosen = chosen | own
        key = tl.where(own, -float("inf"), key)
    spread = tl.broadcast_to(chosen.to(tl.int32)[:, :, None], (ROWS, GROUPS, LANES))
    return tl.reshape(spread, (ROWS, GROUPS * LANES)) > 0


@libentry()
@triton.jit(do_not_specialize=["tokens"])
def choose_experts(
    weights, chosen, logits, strides, bias, bias_stride, tokens, experts, scale: tl.float64, META: tl.constexpr
):
    """Choose the experts of META.rows tokens and write their weights, in descending order of keys.

    `bias` is a tuple of at most one vector. `weights` and `chosen` are contiguous.
    """
    wait_for_previous_launch()
    token = tl.program_id(0).to(META.index) * META.rows + tl.arange(0, META.rows)
    lane = tl.arange(0, META.group_lanes * META.lanes)
    size = experts // META.groups
    expert = lane // META.lanes * size + lane % META.lanes
    exists = (lane % META.lanes < size) & (lane // META.lanes < META.groups)
    present = token < tokens
    offset = token[:, None] * strides.token + expert[None, :].to(META.index) * strides.expert
    mask = present[:, None] & exists[None, :]
    value = tl.load(logits + offset, mask=mask, other=0).to(META.compute)
    score = _scores(value, exists[None, :], META)
    biased, key = score, value
    if len(bias) > 0:
        added = tl.load(bias[0] + expert * bias_stride, mask=exists, other=0).to(META.compute)
        biased = score + added[None, :]
        key = biased
    key = tl.where(exists[None, :], _orderable(key), -float("inf"))
    if META.groups > 1:
        key = tl.where(_in_chosen_groups(biased, exists[None, :], experts, META), key, -float("inf"))
    slot = tl.arange(0, META.slots)[None, :]
    own_scores = tl.full((META.rows, META.slots), 0, META.compute)
    own_experts = tl.full((META.rows, META.slots), 0, tl.int32)
    for i in range(META.k):
        _, best = tl.max(key, axis=1, return_indices=True, return_indices_tie_break_left=True)
        own = lane[None, :] == best[:, None]
        own_score = tl.sum(tl.where(own, score, 0.0), axis=1)
        own_scores = tl.where(slot == i, own_score[:, None], own_scores)
        own_experts = tl.where(slot == i, (best // META.lanes * size + best % META.lanes)[:, None], own_experts)
        key = tl.where(own, -float("inf"), key)
    factor = tl.full((META.rows,), scale, tl.float64).to(META.compute)
    if META.renormalize:
        factor = factor / (tl.sum(own_scores, axis=1) + _LEAST_SUM)
    out = token[:, None] * META.k + slot
    mask = present[:, None] & (slot < META.k)
    tl.store(weights + out, own_scores * factor[:, None], mask=mask)
    tl.store(chosen + out, own_experts, mask=mask)


@libentry()
@triton.jit(do_not_specialize=["tokens"])
def choose_experts_backward(
    grad_logits, grad, grad_strides, logits, strides, chosen, tokens, experts, scale: tl.float64, META: tl.constexpr
):
    """Write the gradients by the logits of META.rows tokens; `grad_logits` and `chosen` are contiguous."""
    wait_for_previous_launch()
    token = tl.program_id(0).to(META.index) * META.rows + tl.arange(0, META.rows)
    expert = tl.arange(0, META.lanes)
    exists = (expert < experts)[None, :]
    present = token < tokens
    mask = present[:, None] & exists
    offset = token[:, None] * strides.token + expert[None, :].to(META.index) * strides.expert
    value = tl.load(logits + offset, mask=mask, other=0).to(META.compute)
    score = _scores(value, exists, META)
    factor = tl.full((META.rows,), scale, tl.float64).to(META.compute)
    mean = tl.full((META.rows,), 0, META.compute)
    if META.renormalize:
        total = mean + _LEAST_SUM
        for i in range(META.k):
            own = expert[None, :] == tl.load(chosen + token * META.k + i, mask=present, other=0)[:, None]
            own_score = tl.sum(tl.where(own, score, 0.0), axis=1)
            own_grad = tl.load(grad + token * grad_strides.token + i * grad_strides.expert, mask=present, other=0)
            total += own_score
            mean += own_grad.to(META.compute) * own_score
        mean = mean / total
        factor = factor / total
    by_score = tl.full((META.rows, META.lanes), 0, META.compute)
    for i in range(META.k):
        own = expert[None, :] == tl.load(chosen + token * META.k + i, mask=present, other=0)[:, None]
        own_grad = tl.load(grad + token * grad_strides.token + i * grad_strides.expert, mask=present, other=0)
        by_score = tl.where(own, ((own_grad.to(META.compute) - mean) * factor)[:, None], by_score)
    if META.sigmoid:
        result = by_score * score * (1.0 - score)
    else:
        result = score * (by_score - tl.sum(by_score * score, axis=1)[:, None])
    out = token[:, None] * experts + expert[None, :]
    tl.store(grad_logits + out, result.to(grad_logits.dtype.element_ty), mask=mask)


def _meta(routing: Routing, dtype: torch.dtype, tokens: int, experts: int, index: Any, grouped: bool) -> _RoutingMeta:
    """Return the facts of a kernel, whose lanes have an order by group if it is `grouped`."""
    groups = routing.groups if grouped else 1
    group_lanes, lanes = power_of_2(groups), power_of_2(experts // groups)
    rows = max(1, moe_table().routed // (group_lanes * lanes))
    return _RoutingMeta(
        index=index,
        compute=TRITON_DTYPES[opmath(dtype)],
        # A sum's order depends on the block's shape.
        rows=rows if settings().invariant else min(rows, power_of_2(tokens)),
        group_lanes=group_lanes,
        lanes=lanes,
        slots=power_of_2(routing.k),
        k=routing.k,
        groups=groups,
        chosen_groups=routing.chosen_groups,
        sigmoid=routing.sigmoid,
        renormalize=routing.renormalize,
    )


def route(
    logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing, weights: torch.Tensor, chosen: torch.Tensor
) -> None:
    """Write the weights and the numbers of the experts chosen for each row of `logits`, (tokens, experts)."""
    tokens, experts = logits.shape
    if not tokens:
        return
    meta = _meta(routing, logits.dtype, tokens, experts, offset_type(logits, weights), True)
    choose_experts[(-(-tokens // meta.rows),)](
        *(weights, chosen, logits, LogitStrides(*logits.stride())),
        *(() if bias is None else (bias,), 0 if bias is None else bias.stride(0)),
        *(tokens, experts, routing.scale),
        META=meta,
        num_warps=4,
    )


def route_backward(
    grad: torch.Tensor, logits: torch.Tensor, chosen: torch.Tensor, routing: Routing, grad_logits: torch.Tensor
) -> None:
    """Write the gradient by logits; `grad` is that by the weights, of any strides, and `chosen` is contiguous."""
    tokens, experts = logits.shape
    if not tokens:
        return
    meta = _meta(routing, logits.dtype, tokens, experts, offset_type(logits, grad_logits, grad), False)
    choose_experts_backward[(-(-tokens // meta.rows),)](
        *(grad_logits, grad, LogitStrides(*grad.stride()), logits, LogitStrides(*logits.stride()), chosen),
        *(tokens, experts, routing.scale),
        META=meta,
        num_warps=4,
    )
