"""Pairs of attention with a window, a soft cap and sinks, forward and trained."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tritonite import fused
from tritonite.bench.fused.pair import Make, Pair, Shape

_CAP = 50.0
# (batch, query heads, key heads, queries and keys, head_dim). Operands and results are contiguous
# (batch, rows, heads, head_dim), as a model's projections are.
_SHAPES = (
    ((1, 32, 8, 4096, 128), (1, 64, 8, 4096, 64), (1, 16, 8, 8192, 256)),
    (1, 4, 2, 64, 64),
    (1, 2, 1, 40, 16),
)


def _window(query: torch.Tensor) -> int:
    """Return the keys that a query of these cases sees: an eighth of all."""
    return max(1, query.shape[1] // 8)


def _operands(sinks: bool, make: Make, shape: Shape) -> list[torch.Tensor]:
    """Return query, key, value, the mask of a causal window, and sinks if asked for."""
    batch, heads, kv_heads, length, size = shape
    query, key, value = (make(batch, length, each, size) for each in (heads, kv_heads, kv_heads))
    every = torch.ones(length, length, dtype=torch.bool, device=query.device)
    return [query, key, value, every.tril() & ~every.tril(-_window(query)), *([make(heads)] if sinks else [])]


def _masked(query, key, value, mask):
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    return out.transpose(1, 2).contiguous()


def _by_definition(query, key, value, mask, sinks=None, softcap=None):
    """Attend as models on Hugging Face do without a kernel."""
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
    scores = query @ key.mT * query.shape[3] ** -0.5
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:3], 1)), -1)
    p = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return (p[..., : key.shape[2]] @ value).transpose(1, 2).contiguous()


def _fused(query, key, value, mask, sinks=None, softcap=None):
    heads_first = [each.transpose(1, 2) for each in (query, key, value)]
    out = fused.attention(*heads_first, window=_window(query), sinks=sinks, softcap=softcap)
    return out.transpose(1, 2)


def _trained(function: Callable[..., torch.Tensor], query, key, value, mask, *sinks):
    """Return the gradients by query, key, value and sinks, with the query as the result's gradient."""
    given = [each.detach().requires_grad_() for each in (query, key, value, *sinks)]
    with torch.enable_grad():
        result = function(*given[:3], mask, *given[3:])
    return [each.contiguous() for each in torch.autograd.grad(result, given, query)]


_FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any], bool]] = {
    "window": (_masked, _fused, False),
    "softcap": (functools.partial(_by_definition, softcap=_CAP), functools.partial(_fused, softcap=_CAP), False),
    "sinks": (_by_definition, _fused, True),
}
PAIRS: dict[str, Pair] = {}
for _name, (_composition, _ours, _sinks) in _FUNCTIONS.items():
    _make = functools.partial(_operands, _sinks)
    PAIRS[f"attention_{_name}"] = Pair(_composition, _ours, _make, _SHAPES)
    PAIRS[f"attention_{_name}_trained"] = Pair(
        functools.partial(_trained, _composition), functools.partial(_trained, _ours), _make, _SHAPES
    )
