"""Draws of operators on sequences: gated delta rule, short convolutions, attention over paged caches."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tritonite import devices
from tritonite.testing.compositions import attention, delta_rule, layers
from tritonite.testing.fuzz.fused.drawing import Drawer, FusedCall, draws

# Factors of the roundoff of products: chunks solve a triangular system.
_OF_PRODUCTS, _OF_CHUNKS = 4.0, 16.0
_INDICES = ("block_table", "lengths", "cu_seqlens", "slot_mapping")


@draws("chunk_gated_delta_rule", "recurrent_gated_delta_rule", "recurrent_gated_delta_rule_")
def _delta(drawer: Drawer, name: str) -> FusedCall:
    in_place = name.endswith("_")
    batch, tokens = drawer.choice(((), (1,), (2,), (1, 2), (0,))), drawer.choice((0, 1, 1, 2, 5, 16, 17, 33, 70))
    key_heads, ratio = drawer.choice((1, 1, 2)), drawer.choice((1, 1, 2, 3))
    key_size, size = (drawer.choice((1, 3, 8, 16, 17, 32, 40)) for _ in range(2))
    heads, dtype, grad = key_heads * ratio, drawer.dtype(), 0.0 if in_place else 0.8
    normalized = torch.nn.functional.normalize(drawer.fractions((*batch, tokens, key_heads, key_size)) - 0.5, dim=-1)
    given: dict[str, Any] = {
        "query": drawer.normal((*batch, tokens, key_heads, key_size), dtype, grad),
        "key": drawer.laid(normalized.to(dtype), grad),
        "value": drawer.normal((*batch, tokens, heads, size), dtype, grad),
        "g": drawer.laid((-drawer.fractions((*batch, tokens, heads))).to(drawer.dtype()), grad),
        "beta": drawer.laid(drawer.fractions((*batch, tokens, heads)).to(drawer.dtype()), grad),
    }
    state = (*batch, heads, key_size, size)
    # A normalised number is 1 or -1, and its gradient roundoff.
    given |= {"scale": drawer.choice((None, None, 0.7)), "normalize_qk": key_size > 1 and drawer.chance(0.4)}
    if in_place:
        given["state"] = drawer.normal(state, drawer.dtype(), layout=False)
        return FusedCall(name, given, _delta_in_place, ("state",), slack=_OF_CHUNKS)
    if drawer.chance(0.5):
        given["initial_state"] = drawer.normal(state, drawer.dtype(), grad)
    given["return_final_state"] = drawer.chance(0.6)
    return FusedCall(name, given, _delta_reference, slack=_OF_CHUNKS)


def _delta_reference(*, return_final_state: bool, **given: Any) -> Any:
    out, state = delta_rule.gated_delta_rule(**given)
    return out, state if return_final_state else None


def _delta_in_place(*, state: torch.Tensor, **given: Any) -> Any:
    return delta_rule.gated_delta_rule(initial_state=state, **given)


@draws("short_convolution", "short_convolution_update")
def _convolution(drawer: Drawer, name: str) -> FusedCall:
    updates = name.endswith("update")
    batch, channels, tokens = drawer.choice(((), (1,), (2,), (2, 3), (0,))), drawer.width(129), drawer.width(129)
    width, dtype, grad = drawer.choice((1, 2, 3, 4, 4, 7, 16)), drawer.dtype(), 0.0 if updates else 0.8
    given: dict[str, Any] = {"activation": drawer.choice((None, "silu", "swish"))}
    given["weight"] = drawer.normal((channels, width), drawer.parameter_dtype(dtype), grad)
    if drawer.chance(0.5):
        given["bias"] = drawer.normal((channels,), drawer.parameter_dtype(dtype), grad)
    if not updates:
        given["x"] = drawer.normal((*batch, channels, tokens), dtype, grad)
        if drawer.chance(0.4):
            given["initial_state"] = drawer.normal((*batch, channels, width - 1), dtype, grad)
        return FusedCall(name, given, layers.short_convolution, contiguous=False, slack=1.0)
    given["x"] = drawer.normal((*batch, channels), dtype)
    # The leading dimensions of a state must be one by a view.
    length = width - 1 + drawer.randrange(3)
    given["state"] = drawer.normal((*batch, channels, length), dtype, layout=len(batch) < 2, overlap=False)
    return FusedCall(name, given, layers.short_convolution_update, ("state",), slack=1.0)


def _scales(drawer: Drawer, heads: int, probability: float) -> dict[str, Any]:
    if not drawer.chance(probability):
        return {}
    size = heads if drawer.chance(0.5) else 1
    return {name: drawer.laid(0.5 + drawer.fractions((size,))) for name in ("key_scale", "value_scale")}


def _cache_dtype(drawer: Drawer, dtype: torch.dtype) -> torch.dtype:
    has_float8 = devices.has_float8(torch.device(drawer.device))
    return torch.float8_e4m3fn if has_float8 and drawer.chance(0.25) else dtype


@draws("paged_attention")
def _paged(drawer: Drawer, name: str) -> FusedCall:
    page, kv_heads, ratio = drawer.choice((1, 3, 16, 24, 64)), drawer.choice((1, 2, 3)), drawer.choice((1, 2, 3, 8))
    size, value_size = (drawer.choice((1, 5, 16, 17, 32, 64)) for _ in range(2))
    dtype, sequences = drawer.dtype(), drawer.choice((0, 1, 2, 3))
    lengths = [drawer.choice((0, 1, 2, 15, 16, 17, 33, 70)) for _ in range(sequences)]
    ragged = drawer.chance(0.5)
    counts = [min(length, drawer.choice((0, 1, 2, 5, 17))) if ragged else 1 for length in lengths]
    pages = [-(-length // page) for length in lengths]
    order = list(range(sum(pages) + 2))
    drawer.shuffle(order)
    table = torch.full((sequences, max(pages, default=0) + drawer.randrange(2)), -1, dtype=torch.int32)
    for i, count in enumerate(pages):
        table[i, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    cache_dtype = _cache_dtype(drawer, dtype)
    filled = functools.partial(_filled, drawer, table, lengths, sum(pages) + 2, page, kv_heads)
    caches = [filled(each).to(dtype).to(cache_dtype) for each in (size, value_size)]
    tokens = sum(counts) + (drawer.randrange(3) if ragged else 0)
    given: dict[str, Any] = {
        "query": drawer.normal((tokens, kv_heads * ratio, size), dtype, layout=False),
        "key_cache": drawer.laid(caches[0], layout=False),
        "value_cache": drawer.laid(caches[1], layout=False),
        "block_table": drawer.laid(table, layout=False),
        "lengths": drawer.laid(torch.tensor(lengths, dtype=torch.int32), layout=False),
    }
    if ragged:
        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        given["cu_seqlens"] = drawer.laid(starts, layout=False)
    given |= _scales(drawer, kv_heads, 0.3)
    given |= {"scale": drawer.choice((None, 0.3)), "softcap": drawer.choice((None, None, 5.0))}
    given["window"] = drawer.choice((None, None, 1, 4, 20))
    if drawer.chance(0.3):
        given["sinks"] = drawer.normal((kv_heads * ratio,), drawer.parameter_dtype(dtype))
    return FusedCall(name, given, attention.paged_attention, slack=_OF_PRODUCTS, indices=_INDICES)


def _filled(
    drawer: Drawer, table: torch.Tensor, lengths: list[int], blocks: int, page: int, heads: int, size: int
) -> torch.Tensor:
    """Return a cache with numbers where sequences have keys, and nan elsewhere."""
    cache = torch.full((blocks, page, heads, size), torch.nan)
    for row, length in zip(table.tolist(), lengths, strict=True):
        values = drawer.fractions((length, heads, size)) * 4 - 2
        for j in range(length):
            cache[row[j // page], j % page] = values[j]
    return cache


@draws("reshape_and_cache")
def _write(drawer: Drawer, name: str) -> FusedCall:
    blocks, page, heads = drawer.choice((1, 2, 5)), drawer.choice((1, 3, 16)), drawer.choice((1, 2, 3))
    size, value_size = (drawer.choice((1, 5, 16, 17, 64)) for _ in range(2))
    dtype = drawer.dtype()
    cache_dtype = _cache_dtype(drawer, dtype)
    slots = list(range(blocks * page))
    drawer.shuffle(slots)
    slots = [slot if drawer.chance(0.8) else -1 for slot in slots[: drawer.randrange(len(slots) + 1)]]
    tokens = len(slots) + drawer.randrange(3)
    given: dict[str, Any] = {
        "key": drawer.normal((tokens, heads, size), dtype),
        "value": drawer.normal((tokens, heads, value_size), dtype),
    }
    for each, last in (("key_cache", size), ("value_cache", value_size)):
        made = drawer.fractions((blocks, page, heads, last)).to(dtype).to(cache_dtype)
        given[each] = drawer.laid(made, overlap=False)
    numbers = torch.tensor(slots, dtype=drawer.choice((torch.int32, torch.int64)))
    # Of two tokens in one slot either may stay.
    given["slot_mapping"] = drawer.laid(numbers, overlap=False)
    given |= _scales(drawer, heads, 0.4)
    written = ("key_cache", "value_cache")
    return FusedCall(name, given, attention.reshape_and_cache, written, indices=_INDICES)
