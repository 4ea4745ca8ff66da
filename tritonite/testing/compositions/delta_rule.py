"""The gated delta rule as a recurrence in torch's operators."""

from __future__ import annotations

import torch


def gated_delta_rule(query, key, value, g, beta, *, scale=None, initial_state=None, normalize_qk=False):
    """Return outputs and the last state of (..., tokens, heads, size) operands, token by token."""
    heads = value.shape[-2]
    ratio = heads // max(1, query.shape[-2])
    query, key = (each.repeat_interleave(ratio, -2) for each in (query, key))
    if normalize_qk:
        query, key = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (query, key))
    state = initial_state
    if state is None:
        state = value.new_zeros(*value.shape[:-3], heads, key.shape[-1], value.shape[-1])
    outs = []
    for t in range(value.shape[-3]):
        k = key[..., t, :, :].unsqueeze(-1)
        state = state * g[..., t, :].exp()[..., None, None]
        correction = beta[..., t, :].unsqueeze(-1) * (value[..., t, :, :] - (state * k).sum(-2))
        state = state + k * correction.unsqueeze(-2)
        outs.append((state * query[..., t, :, :].unsqueeze(-1)).sum(-2))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return torch.stack(outs, -3) * scale if outs else value * 1, state * 1
