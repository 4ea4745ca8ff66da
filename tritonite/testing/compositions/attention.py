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
    sinks=None,
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
        hidden_score = -1e30
        scores = scores.masked_fill(~seen, hidden_score)
        sink = scores.new_full((1, 1, 1), hidden_score) if sinks is None else sinks.to(scores.dtype)[:, None, None]
        every = torch.cat((scores, sink.expand(*scores.shape[:-1], 1)), -1)
        shares = every.softmax(-1)[..., :-1] * seen
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


def mla_decode(query, cache, *, lengths, scale, page_table=None, cu_seqlens=None, value_size=512):
    """Return the attention of the last tokens of sequences to a cache of latents, and the logsumexp of scores."""
    if page_table is None:
        page_table = torch.arange(len(cache), device=cache.device).view(-1, 1)
    starts = list(range(len(lengths) + 1)) if cu_seqlens is None else cu_seqlens.tolist()
    out, logsumexp = query.new_zeros(*query.shape[:2], value_size), query.new_full(query.shape[:2], -torch.inf)
    for i, length in enumerate(lengths.tolist()):
        first, end = starts[i : i + 2]
        pages = page_table[i, : -(-length // cache.shape[1])].long()
        rows = cache[pages].flatten(0, 1)[:length]
        # Tokens before the sequence's first key see nothing.
        for j in range(first, end):
            seen = rows[: max(0, length - (end - 1 - j))]
            if len(seen):
                scores = query[j] @ seen.mT * scale
                out[j], logsumexp[j] = scores.softmax(-1) @ seen[:, :value_size], scores.logsumexp(-1)
    return out, logsumexp


def attention(query, key, value, *, is_causal=False, window=None, softcap=None, sinks=None, scale=None, attn_mask=None):
    """Return attention whose last query stands at the last key, 0 for queries that see no key."""
    heads, (rows, keys) = query.shape[-3], (query.shape[-2], key.shape[-2])
    key, value = (each.repeat_interleave(heads // each.shape[-3], -3) for each in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    seen = _seen(rows, keys, is_causal, window, query.device).expand(scores.shape)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        seen = seen & attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask
        seen = seen & (scores > -torch.inf)
    scores = torch.where(seen, scores, -torch.inf)
    every = scores
    if sinks is not None:
        every = torch.cat((scores, sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1).to(scores.dtype)), -1)
    # A row that sees nothing has a sum of 0, and its gradient is 0.
    bounds = torch.finfo(scores.dtype)
    largest = every.detach().amax(-1, keepdim=True).clamp(min=bounds.min) if every.shape[-1] else 0.0
    weights = torch.where(every > -torch.inf, torch.exp(every - largest), 0.0)
    shares = weights[..., :keys] / weights.sum(-1, keepdim=True).clamp(min=bounds.tiny)
    return shares @ value


def _seen(rows, keys, is_causal, window, device):
    """Return (rows, keys), true for keys within a window around a query's own key."""
    distance = torch.arange(keys, device=device) - (torch.arange(rows, device=device)[:, None] + keys - rows)
    left, right = (window - 1, 0) if isinstance(window, int) else (-1, -1) if window is None else window
    seen = distance <= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
    seen = seen & (distance >= -left) if left >= 0 else seen
    return seen & (distance <= right) if right >= 0 else seen
