"""Loss that balances the load of experts, and the router's z-loss, with their gradients by the logits.

The load-balancing loss is experts * sum over experts of f P: f is the number of slots that chose the expert per token,
and P the mean of the expert's probability, over the tokens that count (Fedus et al. 2021). f has no gradient. With p
the probabilities of a token, the gradient by its logits is experts / tokens * p (f - sum(f p)).

The z-loss is the mean over tokens of the squared logsumexp z of their logits (Zoph et al. 2022), with gradient
2 / tokens * z p.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.dtypes import TRITON_DTYPES, opmath
from tritonite.engine.iteration import offset_type, power_of_2
from tritonite.engine.moe.routing import LogitStrides
from tritonite.engine.moe.table import moe_table
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import empty
from tritonite.runtime.libentry import libentry


@dataclass(frozen=True)
class _BalanceMeta:
    """Compile-time facts of the kernels.

    A step has `rows` tokens, `lanes` is the number of experts rounded up to a power of 2, `partials` rows of partial
    sums are read at a time, and a token chose `k` experts; with a `k` of 0 the loss is the z-loss.
    """

    index: Any
    compute: Any
    rows: int
    lanes: int
    partials: int
    k: int


@triton.jit
def _own_tokens(logits, strides, mask, token, tokens, experts, META: tl.constexpr):
    """Return (probabilities, logsumexp, counted) of a step's tokens; `counted` is 0 for tokens that do not count."""
    expert = tl.arange(0, META.lanes)
    present = token < tokens
    inside = present[:, None] & (expert < experts)[None, :]
    offset = token[:, None] * strides.token + expert[None, :].to(META.index) * strides.expert
    value = tl.load(logits + offset, mask=inside, other=0).to(META.compute)
    value = tl.where((expert < experts)[None, :], value, -float("inf"))
    most = tl.max(value, axis=1)
    power = tl.exp(value - most[:, None])
    total = tl.sum(power, axis=1)
    counted = present
    if len(mask) > 0:
        counted = present & (tl.load(mask[0] + token, mask=present, other=0) != 0)
    return power / total[:, None], most + tl.log(total), counted


@libentry()
@triton.jit(do_not_specialize=["tokens", "steps"])
def sum_by_expert(partials, logits, strides, chosen, mask, tokens, experts, steps, META: tl.constexpr):
    """Write a program's sums over its tokens to a row of `partials`, (programs, 2 * experts + 1).

    A row has each expert's sum of probabilities, each expert's number of slots, and the number of tokens that count.
    For the z-loss the first sum is that of squared logsumexps.
    """
    wait_for_previous_launch()
    expert = tl.arange(0, META.lanes)
    sums = tl.full((META.rows, META.lanes), 0, META.compute)
    slots = tl.full((META.rows, META.lanes), 0, tl.int32)
    squares = tl.full((META.rows,), 0, META.compute)
    used = tl.full((META.rows,), 0, tl.int32)
    first = tl.program_id(0).to(META.index) * steps * META.rows
    for step in range(steps):
        token = first + step * META.rows + tl.arange(0, META.rows)
        share, z, counted = _own_tokens(logits, strides, mask, token, tokens, experts, META)
        used += counted.to(tl.int32)
        if META.k == 0:
            squares += tl.where(counted, z * z, 0.0)
        else:
            sums += tl.where(counted[:, None], share, 0.0)
        for i in range(META.k):
            own = tl.load(chosen + token * META.k + i, mask=counted, other=-1)
            slots += (own[:, None] == expert[None, :]).to(tl.int32)
    row = partials + tl.program_id(0) * (2 * experts + 1)
    if META.k == 0:
        tl.store(row, tl.sum(squares, axis=0))
    else:
        tl.store(row + expert, tl.sum(sums, axis=0), mask=expert < experts)
        tl.store(row + experts + expert, tl.sum(slots, axis=0).to(META.compute), mask=expert < experts)
    tl.store(row + 2 * experts, tl.sum(used, axis=0).to(META.compute))


@libentry()
@triton.jit(do_not_specialize=["programs"])
def write_loss(loss, factors, partials, programs, experts, META: tl.constexpr):
    """Add up the programs' sums, by one program, and write the loss and each expert's factor in the gradient."""
    wait_for_previous_launch()
    expert = tl.arange(0, META.lanes)
    sums = tl.full((META.partials, META.lanes), 0, META.compute)
    slots = tl.full((META.partials, META.lanes), 0, META.compute)
    used = tl.full((META.partials,), 0, META.compute)
    for first in range(0, programs, META.partials):
        program = first + tl.arange(0, META.partials)
        row = partials + program[:, None] * (2 * experts + 1)
        inside = (program < programs)[:, None] & (expert < experts)[None, :]
        if META.k == 0:
            sums += tl.load(row + expert[None, :], mask=inside & (expert == 0)[None, :], other=0)
        else:
            sums += tl.load(row + expert[None, :], mask=inside, other=0)
            slots += tl.load(row + experts + expert[None, :], mask=inside, other=0)
        used += tl.load(partials + program * (2 * experts + 1) + 2 * experts, mask=program < programs, other=0)
    total = tl.sum(used, axis=0)
    if META.k == 0:
        tl.store(loss, (tl.sum(tl.sum(sums, axis=0), axis=0) / total).to(loss.dtype.element_ty))
        tl.store(factors + expert, tl.full((META.lanes,), 0, META.compute) + 2.0 / total, mask=expert < experts)
    else:
        # The quotients are near 1, unlike the square of the number of tokens.
        factor = tl.sum(slots, axis=0) / total * (experts / total)
        tl.store(loss, tl.sum(factor * tl.sum(sums, axis=0), axis=0).to(loss.dtype.element_ty))
        tl.store(factors + expert, factor, mask=expert < experts)


@libentry()
@triton.jit(do_not_specialize=["tokens"])
def balance_backward(grad_logits, grad, factors, logits, strides, mask, tokens, experts, META: tl.constexpr):
    """Write the gradients by the logits of META.rows tokens to a contiguous matrix; `grad` is one number."""
    wait_for_previous_launch()
    expert = tl.arange(0, META.lanes)
    token = tl.program_id(0).to(META.index) * META.rows + tl.arange(0, META.rows)
    share, z, counted = _own_tokens(logits, strides, mask, token, tokens, experts, META)
    factor = tl.load(factors + expert, mask=expert < experts, other=0)[None, :] * tl.load(grad).to(META.compute)
    if META.k == 0:
        result = factor * z[:, None] * share
    else:
        result = share * (factor - tl.sum(factor * share, axis=1)[:, None])
    result = tl.where(counted[:, None], result, 0.0).to(grad_logits.dtype.element_ty)
    inside = (token < tokens)[:, None] & (expert < experts)[None, :]
    tl.store(grad_logits + token[:, None] * experts + expert[None, :], result, mask=inside)


def _meta(logits: torch.Tensor, k: int, *others: torch.Tensor) -> _BalanceMeta:
    lanes, elements = power_of_2(logits.shape[1]), moe_table().balanced
    return _BalanceMeta(
        index=offset_type(logits, *others),
        compute=TRITON_DTYPES[opmath(logits.dtype)],
        rows=max(1, min(elements // lanes, power_of_2(logits.shape[0]))),
        lanes=lanes,
        partials=max(1, elements // lanes),
        k=k,
    )


def loss_of_load(
    logits: torch.Tensor, chosen: torch.Tensor | None, mask: torch.Tensor | None, loss: torch.Tensor
) -> torch.Tensor:
    """Write the load-balancing loss to `loss`, of one element, or without `chosen` the z-loss.

    `logits` is (tokens, experts), and `chosen`, (tokens, k), and `mask`, (tokens,), are contiguous. Returns each
    expert's factor in the gradient.
    """
    tokens, experts = logits.shape
    meta = _meta(logits, 0 if chosen is None else chosen.shape[1])
    dtype = opmath(logits.dtype)
    every = -(-tokens // meta.rows)
    programs = max(1, min(every, devices.multiprocessors(logits.device)))
    partials, factors = (
        empty((programs, 2 * experts + 1), dtype, logits.device),
        empty((experts,), dtype, logits.device),
    )
    sum_by_expert[(programs,)](
        *(partials, logits, LogitStrides(*logits.stride()), logits if chosen is None else chosen),
        *(() if mask is None else (mask,), tokens, experts, -(-every // programs)),
        META=meta,
        num_warps=4,
    )
    write_loss[(1,)](*(loss, factors, partials, programs, experts), META=meta, num_warps=4)
    return factors


def loss_of_load_backward(
    grad: torch.Tensor,
    factors: torch.Tensor,
    logits: torch.Tensor,
    mask: torch.Tensor | None,
    k: int,
    grad_logits: torch.Tensor,
) -> None:
    """Write the gradient by logits to a contiguous matrix; a `k` of 0 is for the z-loss."""
    tokens, experts = logits.shape
    if not tokens:
        return
    meta = _meta(logits, k, grad_logits)
    balance_backward[(-(-tokens // meta.rows),)](
        *(grad_logits, grad, factors, logits, LogitStrides(*logits.stride())),
        *(() if mask is None else (mask,), tokens, experts),
        META=meta,
        num_warps=4,
    )
