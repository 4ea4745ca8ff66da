"""Attention over paged caches, sequence by sequence, and writing to the caches."""

from __future__ import annotations

import torch


def paged_attention(
    query,
    key_cache,
    value_cache,
    block_table,
    lengths,
    *,
    cu_seqlens=None,
    key_scale=None,
    value_scale=None,
    scale=None,
    softcap=None,
    window=None,
):
    """Return the attention of the last tokens of sequences, 0 for tokens that see no key."""
    page, kv_heads = key_cache.shape[1:3]
    starts = list(range(len(lengths) + 1)) if cu_seqlens is None else cu_seqlens.tolist()
    out = query.new_zeros(*query.shape[:2], value_cache.shape[3])
    scale = query.shape[2] ** -0.5 if scale is None else scale
    for i, length in enumerate(lengths.tolist()):
        first, end = starts[i : i + 2]
        rows = query[first:end].transpose(0, 1)
        pages = block_table[i, : -(-length // page)].long()
        if not length or first == end:
            continue
        # Pages before the window may hold anything.
        hidden = 0 if window is None else max(0, length - (end - first) - window + 1)
        pages = pages.clamp(min=0)
        pair = [each[pages].flatten(0, 1)[:length].clone() for each in (key_cache, value_cache)]
        for each, factor in zip(pair, (key_scale, value_scale), strict=True):
            each[:hidden] = 0
            if factor is not None:
                each *= factor.reshape(-1, 1)
        key, value = (each.transpose(0, 1).repeat_interleave(len(rows) // kv_heads, 0) for each in pair)
        scores = rows @ key.mT * scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        seen = torch.ones(end - first, length, dtype=torch.bool, device=query.device).tril(length - (end - first))
        if window is not None:
            seen = seen.triu(length - (end - first) - window + 1)
        shares = scores.masked_fill(~seen, -1e30).softmax(-1) * seen
        out[first:end] = (shares @ value).transpose(0, 1)
    return out


def reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, key_scale=None, value_scale=None):
    """Return the caches with keys and values of tokens in their slots, without a rounding."""
    caches, slots = [], slot_mapping.tolist()
    for own, cache, factor in ((key, key_cache, key_scale), (value, value_cache, value_scale)):
        made = cache.clone()
        for row, slot in zip(own, slots, strict=False):
            if slot >= 0:
                written = row if factor is None else row / factor.reshape(-1, 1)
                made[slot // cache.shape[1], slot % cache.shape[1]] = written
        caches.append(made)
    return tuple(caches)
