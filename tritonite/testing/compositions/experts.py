"""Compositions of routers and layers of mixtures of experts, with loops over experts."""

from __future__ import annotations

import functools
from typing import Any

import torch

functional = torch.nn.functional
_ACTIVATIONS: dict[str, Any] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
}


def route(logits, k, *, scoring="softmax", bias=None, num_groups=None, topk_groups=None, renormalize=True, scale=1.0):
    """Return the weights and numbers of the k experts of each token, equal ones by number."""
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    choice = scores.detach() if bias is None else scores.detach() + bias
    if num_groups is not None:
        groups = choice.unflatten(-1, (num_groups, -1))
        best = groups.sort(-1, descending=True).values[..., :2].sum(-1)
        chosen = best.sort(dim=-1, descending=True, stable=True).indices[..., :topk_groups]
        kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, chosen, True)
        choice = torch.where(kept.unsqueeze(-1), groups, -torch.inf).flatten(-2)
    experts = choice.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    weights = scores.gather(-1, experts)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return scale * weights, experts.int()


def load_balancing_loss(logits, experts, mask=None):
    """Return E times the sum over experts of their share of choices times their mean probability."""
    n_experts = logits.shape[-1]
    counts = logits.new_ones(logits.shape[:-1]) if mask is None else (mask != 0).to(logits.dtype)
    total = counts.sum()
    chosen = functional.one_hot(experts.long(), n_experts).to(logits.dtype).sum(-2) * counts.unsqueeze(-1)
    shares = logits.softmax(-1) * counts.unsqueeze(-1)
    rows = tuple(range(logits.dim() - 1))
    sums = [each.sum(rows) if rows else each for each in (chosen, shares)]
    return n_experts * (sums[0] / total * (sums[1] / total)).sum()


def router_z_loss(logits, mask=None):
    """Return the mean over tokens of the squared logsumexp of their logits."""
    counts = logits.new_ones(logits.shape[:-1]) if mask is None else (mask != 0).to(logits.dtype)
    return (logits.logsumexp(-1).square() * counts).sum() / counts.sum()


def _order(experts, num_experts):
    """Return the slots in the order of their experts, and each slot's expert; those without one come last."""
    flat = experts.reshape(-1).long()
    flat = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    return flat.sort(stable=True).indices, flat


def moe_align(experts, num_experts, block_size):
    """Return slots sorted by expert and padded to blocks, the blocks' experts, and the number of slots."""
    order, flat = _order(experts, num_experts)
    slots = experts.numel()
    room = slots * block_size if slots < num_experts else slots + num_experts * (block_size - 1)
    blocks = -(-room // block_size)
    ids, numbers = [], []
    for expert in range(num_experts):
        own = [slot for slot in order.tolist() if flat[slot] == expert]
        count = -(-len(own) // block_size)
        ids += own + [slots] * (count * block_size - len(own))
        numbers += [expert] * count
    used = len(ids)
    ids += [slots] * (blocks * block_size - used)
    numbers += [-1] * (blocks - len(numbers))
    return tuple([torch.tensor(each, dtype=torch.int32, device=experts.device) for each in (ids, numbers, [used])])


def permute(x, experts, num_experts):
    """Return tokens' rows in the order of their experts, the ends of experts, and each slot's row."""
    order, flat = _order(experts, num_experts)
    k = experts.shape[1]
    known = flat[order] < num_experts
    permuted = torch.where(known.unsqueeze(-1), x[order // max(1, k)], 0.0)
    ends = torch.stack([(flat <= expert).sum() for expert in range(num_experts)]).int()
    inverse = torch.empty_like(flat)
    inverse[order] = torch.arange(len(flat), device=x.device)
    inverse = torch.where(flat < num_experts, inverse, -1 - inverse)
    return permuted, ends, inverse.int().view(experts.shape)


def unpermute(y, inverse, weights=None):
    """Return the sum of each token's rows of its experts, times their weights."""
    rows = torch.where((inverse >= 0).unsqueeze(-1), y[inverse.long().clamp(min=0)], 0.0)
    rows = rows if weights is None else rows * weights.unsqueeze(-1)
    return rows.sum(1) if rows.shape[1] else y.new_zeros(len(inverse), y.shape[1])


def grouped_linear(x, weight, offsets, bias=None):
    """Return rows times the transposed weight of their group, plus its bias; 0 for rows behind the last group."""
    rows, first = [], 0
    for group, end in enumerate(offsets.tolist()):
        own = x[first:end] @ weight[group].mT
        rows.append(own if bias is None else own + bias[group])
        first = max(first, end)
    return torch.cat([*rows, (x[first:] @ weight[0].mT) * 0])


def moe_experts(x, weights, experts, gate_up_weight, down_weight, *, activation="silu"):
    """Return the weighted sum of the chosen experts' gated layers of each token."""
    joint = torch.cat(list(gate_up_weight), 1) if isinstance(gate_up_weight, (tuple, list)) else gate_up_weight
    rows, slots = x.reshape(-1, x.shape[-1]), experts.reshape(-1, experts.shape[-1])
    factors, out = weights.reshape(slots.shape), 0 * rows
    for expert in range(len(down_weight)):
        gate, up = (rows @ joint[expert].mT).chunk(2, -1)
        own = (_ACTIVATIONS[activation](gate) * up) @ down_weight[expert].mT
        out = out + own * torch.where(slots == expert, factors, 0.0).sum(1, keepdim=True)
    return out.view(x.shape)


def moe(x, router_logits, gate_up_weight, down_weight, k, *, activation="silu", **routing):
    """Return the layer of a mixture of experts."""
    weights, experts = route(router_logits, k, **routing)
    return moe_experts(x, weights, experts, gate_up_weight, down_weight, activation=activation)
