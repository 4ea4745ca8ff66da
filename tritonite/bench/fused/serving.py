"""Pairs of serving: sampling of tokens, and decoding over caches of latents."""

from __future__ import annotations

import torch

from tritonite import fused
from tritonite.bench.fused.pair import Make, Pair, Shape

functional = torch.nn.functional
_TEMPERATURE, _TOP_K, _TOP_P = 0.8, 50, 0.95
# Elements of a latent and of a rotary key, and the scale of heads of 128 + 64 elements: DeepSeek-V2.
_LATENT, _ROTARY, _SCALE = 512, 64, 192**-0.5
_VOCABULARY = 128_256
# (rows, vocabulary).
_ROWS = tuple((rows, _VOCABULARY) for rows in (1, 32, 256))
# (sequences, heads, rows of a sequence, rows of a page).
_LATENTS = ((1, 128, 8192, 64), (32, 128, 4096, 64), (32, 16, 4096, 64), (128, 128, 2048, 64))


def _drawn(logits):
    """Sample by PyTorch's softmax and multinomial."""
    return (logits / _TEMPERATURE).softmax(-1).multinomial(1).squeeze(-1)


def _filtered(logits):
    """Sample after top-k and top-p, as transformers does, in float32."""
    scores = logits.float() / _TEMPERATURE
    scores = scores.masked_fill(scores < scores.topk(_TOP_K).values[..., -1:], -torch.inf)
    ordered, order = scores.sort(-1)
    removed = ordered.softmax(-1).cumsum(-1) <= 1 - _TOP_P
    removed[..., -1:] = False
    scores = scores.masked_fill(removed.scatter(1, order, removed), -torch.inf)
    return scores.softmax(-1).multinomial(1).squeeze(-1)


def _logits(make: Make, shape: Shape) -> list[torch.Tensor]:
    return [make(*shape) * 3]


def _latents(make: Make, shape: Shape) -> list[torch.Tensor]:
    """Return query, pages, page table and lengths. Pages are in order, so that the cache is a plain one as well."""
    sequences, heads, length, page = shape
    size, pages = _LATENT + _ROTARY, length // page
    query, cache = make(sequences, heads, size), make(sequences * pages, page, size)
    table = torch.arange(sequences * pages, dtype=torch.int32, device=query.device).view(sequences, pages)
    return [query, cache, table, torch.full((sequences,), length, dtype=torch.int32, device=query.device)]


def _over_plain_latents(query, cache, table, lengths):
    """Attend to the cache's memory viewed as (sequences, 1, rows, elements), with heads as the queries of one head.

    ATen repeats keys and values for grouped queries whose head size it has no fused kernel for.
    """
    rows = cache.view(len(table), 1, -1, cache.shape[-1])
    given = query.unsqueeze(1), rows, rows[..., :_LATENT]
    return functional.scaled_dot_product_attention(*given, scale=_SCALE).squeeze(1)


def _mla_decode(query, cache, table, lengths):
    return fused.mla_decode(query, cache, lengths=lengths, scale=_SCALE, page_table=table, value_size=_LATENT)


PAIRS: dict[str, Pair] = {
    "sample": Pair(
        _filtered,
        lambda logits: fused.sample(logits, temperature=_TEMPERATURE, top_k=_TOP_K, top_p=_TOP_P),
        _logits,
        (_ROWS, (4, 4096), (2, 300)),
    ),
    "sample_unfiltered": Pair(
        _drawn, lambda logits: fused.sample(logits, temperature=_TEMPERATURE), _logits, (_ROWS, (4, 4096), (2, 300))
    ),
    "mla_decode": Pair(_over_plain_latents, _mla_decode, _latents, (_LATENTS, (1, 16, 64, 64), (2, 4, 64, 64))),
}
