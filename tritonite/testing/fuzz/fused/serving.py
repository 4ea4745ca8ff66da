"""Draws of attention, of decoding over latents, and of the sampling of tokens."""

from __future__ import annotations

from typing import Any

import torch

from tritonite import fused
from tritonite.testing.compositions import attention
from tritonite.testing.fuzz.fused.drawing import Drawer, FusedCall, draws

_OF_PRODUCTS = 8.0
_INDICES = ("lengths", "page_table", "cu_seqlens", "tokens", "seeds")
# How far a probability may be from a filter's bound for its token to count as kept by float32 and dropped by float64.
_NEAR = 1e-4


@draws("attention")
def _attention(drawer: Drawer, name: str) -> FusedCall:
    batch = drawer.choice(((), (1,), (2,), (2, 1), (0,)))
    kv_heads, ratio = drawer.choice((1, 2)), drawer.choice((1, 1, 2, 3))
    rows, keys = drawer.choice((0, 1, 1, 3, 16, 17, 40)), drawer.choice((0, 1, 5, 16, 33, 70, 300))
    size, value_size = drawer.choice((1, 7, 16, 32, 40)), drawer.choice((1, 7, 16, 32, 40))
    dtype, heads = drawer.dtype(), kv_heads * ratio
    given: dict[str, Any] = {
        "query": drawer.normal((*batch, heads, rows, size), dtype, 0.8),
        "key": drawer.normal((*batch, kv_heads, keys, size), dtype, 0.8),
        "value": drawer.normal((*batch, kv_heads, keys, value_size), dtype, 0.8),
        "is_causal": drawer.chance(0.4),
        "window": drawer.choice((None, None, 1, 4, 20, (3, 2), (-1, 4), (5, -1))),
        "softcap": drawer.choice((None, None, 5.0)),
        "scale": drawer.choice((None, None, 0.3)),
    }
    if drawer.chance(0.35):
        given["sinks"] = drawer.normal((heads,), drawer.parameter_dtype(dtype), 0.8)
    if drawer.chance(0.3):
        shape = drawer.choice(((rows, keys), (*batch, heads, rows, keys), (1, 1, keys)))
        if drawer.chance(0.5):
            given["attn_mask"] = drawer.laid(drawer.fractions(shape) < 0.7)
        else:
            given["attn_mask"] = drawer.normal(shape, drawer.parameter_dtype(dtype))
    # Gradients by scores are differences from the rounded output's, which nearly cancel where few keys have weight. If
    # one key has nearly all of it, the whole gradient of a query may be the roundoff of such a difference.
    few = keys < 16 or given["window"] is not None or "sinks" in given or "attn_mask" in given
    slack, least = (8 * _OF_PRODUCTS, 0.02) if few else (2 * _OF_PRODUCTS, 1e-3)
    return FusedCall(name, given, attention.attention, contiguous=False, slack=slack, size=least)


@draws("mla_decode")
def _latents(drawer: Drawer, name: str) -> FusedCall:
    value_size, rope = drawer.choice((1, 16, 17, 64)), drawer.choice((0, 1, 8, 16))
    size, dtype, heads = value_size + rope, drawer.dtype(), drawer.choice((1, 3, 16))
    lengths = [drawer.choice((0, 1, 2, 15, 17, 40)) for _ in range(drawer.choice((0, 1, 2, 3)))]
    ragged, paged = drawer.chance(0.5), drawer.chance(0.5)
    counts = [min(length, drawer.choice((0, 1, 2, 5))) if ragged else 1 for length in lengths]
    page = drawer.choice((1, 3, 16, 32)) if paged else max([*lengths, 1]) + drawer.randrange(3)
    pages = [-(-length // page) if paged else 1 for length in lengths]
    order = list(range(sum(pages) + 2 * paged))
    if paged:
        drawer.shuffle(order)
    table = torch.full((len(lengths), max(pages, default=0) + drawer.randrange(2)), -1, dtype=torch.int32)
    cache = torch.full((len(order), page, size), torch.nan)
    for i, (length, count) in enumerate(zip(lengths, pages, strict=True)):
        own = [order.pop(0) for _ in range(count)]
        table[i, :count] = torch.tensor(own, dtype=torch.int32)
        for j in range(length):
            cache[own[j // page], j % page] = 2 * drawer.fractions((size,)) - 1
    tokens = sum(counts) + (drawer.randrange(3) if ragged else 0)
    given: dict[str, Any] = {
        "query": drawer.normal((tokens, heads, size), dtype, layout=False),
        "cache": drawer.laid(cache.to(dtype), layout=False),
        "lengths": drawer.laid(torch.tensor(lengths, dtype=torch.int32), layout=False),
        "scale": drawer.choice((0.1, 0.3)),
        "value_size": value_size,
        "return_logsumexp": True,
    }
    if paged:
        given["page_table"] = drawer.laid(table, layout=False)
    if ragged:
        given["cu_seqlens"] = drawer.laid(torch.tensor([0, *counts]).cumsum(0).to(torch.int32), layout=False)
    return FusedCall(name, given, _latents_reference, slack=_OF_PRODUCTS, indices=_INDICES)


def _latents_reference(*operands: Any, return_logsumexp: bool, **given: Any) -> Any:
    return attention.mla_decode(*operands, **given)


@draws("sample")
def _sample(drawer: Drawer, name: str) -> FusedCall:
    """Draw a call that draws tokens, all of which the filters have to keep."""
    rows, classes = drawer.choice((0, 1, 3, 5)), max(1, drawer.width())
    choices: dict[str, tuple[Any, ...]] = {
        "temperature": (0.7, 1.0, 1.5),
        "top_k": (0, 1, 4, 50),
        "top_p": (0.3, 0.9, 1.0),
        "min_p": (0.0, 0.1, 0.5),
    }
    given: dict[str, Any] = {"logits": drawer.normal((rows, classes), drawer.dtype())}
    for each, values in choices.items():
        if drawer.chance(0.4):
            value = drawer.choice(values)
            if drawer.chance(0.4):
                dtype = torch.int32 if each == "top_k" else torch.float32
                value = drawer.laid(torch.tensor([drawer.choice(values) for _ in range(rows)]).to(dtype))
            given[each] = value
    given["seeds"] = drawer.laid(drawer.integers(2**40, (rows,)))
    given["positions"] = drawer.randrange(5)
    return FusedCall(name, given, _all_kept, function=_is_kept, indices=_INDICES)


def _all_kept(logits: torch.Tensor, **_: Any) -> torch.Tensor:
    return torch.ones(len(logits), dtype=torch.bool, device=logits.device)


def _is_kept(logits: torch.Tensor, **given: Any) -> torch.Tensor:
    """Return whether the filters keep each drawn token, by float64 and with a margin."""
    token: Any = fused.sample(logits, **given)
    rows = []
    for i, row in enumerate(logits.double()):
        own = {name: value[i].item() if isinstance(value, torch.Tensor) else value for name, value in given.items()}
        shares = (row / own.get("temperature", 1.0)).softmax(-1)
        order = shares.sort(descending=True).values
        k = own.get("top_k", 0)
        least = order[k - 1] if 0 < k < len(order) else shares.new_zeros(())
        kept = torch.where(shares >= least * (1 - _NEAR), shares, 0.0)
        kept = kept / kept.sum()
        largest = kept.sort(descending=True).values
        before = largest.cumsum(0) - largest
        if own.get("top_p", 1.0) < 1:
            bound = largest[before < own["top_p"] + _NEAR].min()
            kept = torch.where(kept >= bound * (1 - _NEAR), kept, 0.0)
        kept = torch.where(kept >= own.get("min_p", 0.0) * kept.max() * (1 - _NEAR), kept, 0.0)
        rows.append(kept[token[i]] > 0)
    return torch.stack(rows) if rows else token.bool()
