"""Pairs of the layers of a transformer: norms, gated activations, rotary embeddings, paged attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tritonite import fused
from tritonite.bench import attention
from tritonite.bench.fused.pair import Make, Pair, Shape
from tritonite.ops.normalization import statistics_dtype

aten, library = torch.ops.aten, torch.ops.tritonite
functional = torch.nn.functional
# Head size, and query heads for each key head.
_HEAD, _GROUP = 128, 4


def _layer_norm(x, residual, weight, bias):
    total = x + residual
    return functional.layer_norm(total, weight.shape, weight, bias), total


def _layer_norm_backward(grad, grad_total, total, mean, rstd, weight, bias):
    every = [True, True, True]
    own, by_weight, by_bias = aten.native_layer_norm_backward(
        grad, total, weight.shape, mean, rstd, weight, bias, every
    )
    return own + grad_total, by_weight, by_bias


def _fused_layer_norm_backward(grad, grad_total, total, mean, rstd, weight, bias):
    statistics = mean.squeeze(-1), rstd.squeeze(-1)
    return library.layer_norm_backward(grad, grad_total, total, *statistics, weight, bias, True, True)


def _rms_norm(x, residual, weight):
    total = x + residual
    return functional.rms_norm(total, weight.shape, weight, 1e-6), total


def _rms_norm_backward(grad, grad_total, total, rstd, weight):
    own, by_weight = aten._fused_rms_norm_backward(grad, total, weight.shape, rstd, weight, [True, True])
    return own + grad_total, by_weight


def _fused_rms_norm_backward(grad, grad_total, total, rstd, weight):
    return library.rms_norm_backward(grad, grad_total, total, rstd.squeeze(-1), weight, True)


def _gated(activation, x):
    a, b = x.chunk(2, -1)
    return activation(a) * b


def _gated_backward(activation, gradient, grad, x):
    a, b = x.chunk(2, -1)
    return torch.cat((gradient(grad * b, a), grad * activation(a)), -1)


def _fused_gated_backward(backward, grad, x):
    return backward(grad, x)[0]


def _rotary(query, key, cos, sin):
    """Rotate query and key as models on Hugging Face do."""
    cos, sin = (torch.cat((each, each), -1).unsqueeze(-2) for each in (cos, sin))
    turned = []
    for x in (query, key):
        a, b = x.chunk(2, -1)
        turned.append(x * cos + torch.cat((-b, a), -1) * sin)
    return tuple(turned)


def _heads(make: Make, shape: Shape) -> list[torch.Tensor]:
    """Return query, key, cos and sin for `shape` = (rows, width)."""
    rows, width = shape
    size = min(_HEAD, width)
    heads = max(1, width // size)
    angles = make(rows, size // 2)
    return [make(rows, heads, size), make(rows, max(1, heads // _GROUP), size), angles.cos(), angles.sin()]


def _statistics(make: Make, rows: int, count: int) -> list[torch.Tensor]:
    """Return `count` tensors (rows, 1) in the dtype in which ATen's forward norms return statistics."""
    statistics = [make(rows, 1).abs_().add_(0.5) for _ in range(count)]
    return [each.to(statistics_dtype(each, each.dtype)) for each in statistics]


def _norm_gradients(parameters: int, make: Make, shape: Shape) -> list[torch.Tensor]:
    rows = [make(*shape) for _ in range(3)]
    return [*rows, *_statistics(make, shape[0], parameters), *(make(shape[1]) for _ in range(parameters))]


# (sequences, heads, kv_heads, keys a sequence, head_dim, tokens a page) of decoding.
_PAGED = tuple(
    (heads.batch, heads.heads, heads.kv_heads, heads.length, heads.head_dim, page)
    for heads in attention.DECODING
    if heads.queries == 1
    for page in (16, 256)
)


def _paged(make: Make, shape: Shape) -> list[torch.Tensor]:
    """Return query, caches, page table and lengths. Pages are in order, so that the caches are plain ones as well."""
    sequences, heads, kv_heads, length, size, page = shape
    blocks = length // page
    query, caches = make(sequences, heads, size), [make(sequences * blocks, page, kv_heads, size) for _ in range(2)]
    table = torch.arange(sequences * blocks, dtype=torch.int32, device=query.device).view(sequences, blocks)
    return [query, *caches, table, torch.full((sequences,), length, dtype=torch.int32, device=query.device)]


def _over_plain_caches(query, key_cache, value_cache, table, lengths):
    """Attend to the caches' memory viewed as (sequences, heads, keys, head_dim)."""
    plain = [each.view(len(table), -1, *each.shape[2:]).transpose(1, 2) for each in (key_cache, value_cache)]
    return functional.scaled_dot_product_attention(query.unsqueeze(2), *plain, enable_gqa=True).squeeze(2)


PAIRS: dict[str, Pair] = {
    "paged_attention": Pair(
        _over_plain_caches, fused.paged_attention, _paged, (_PAGED, (1, 4, 2, 64, 64, 16), (2, 4, 2, 32, 16, 16))
    ),
    "skip_layer_norm": Pair(
        _layer_norm,
        fused.skip_layer_norm,
        lambda make, shape: [make(*shape), make(*shape), make(shape[1]), make(shape[1])],
    ),
    "skip_layer_norm_backward": Pair(
        _layer_norm_backward, _fused_layer_norm_backward, functools.partial(_norm_gradients, 2)
    ),
    "skip_rms_norm": Pair(
        _rms_norm, fused.skip_rms_norm, lambda make, shape: [make(*shape), make(*shape), make(shape[1])]
    ),
    "skip_rms_norm_backward": Pair(_rms_norm_backward, _fused_rms_norm_backward, functools.partial(_norm_gradients, 1)),
    "rotary_embedding": Pair(_rotary, fused.rotary_embedding, _heads),
    "rotary_embedding_backward": Pair(
        lambda query, key, cos, sin: _rotary(query, key, cos, -sin),
        lambda query, key, cos, sin: library.rotary_embedding(query, key, cos, sin, False, True),
        _heads,
    ),
}
_ACTIVATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "silu": (functional.silu, aten.silu_backward),
    "gelu": (functional.gelu, aten.gelu_backward),
    "relu": (functional.relu, lambda grad, x: aten.threshold_backward(grad, x, 0)),
}
for _name, (_activation, _gradient) in _ACTIVATIONS.items():
    PAIRS[f"{_name}_and_mul"] = Pair(
        functools.partial(_gated, _activation),
        getattr(fused, f"{_name}_and_mul"),
        lambda make, shape: [make(shape[0], 2 * shape[1])],
    )
    PAIRS[f"{_name}_and_mul_backward"] = Pair(
        functools.partial(_gated_backward, _activation, _gradient),
        functools.partial(_fused_gated_backward, getattr(library, f"{_name}_and_mul_backward")),
        lambda make, shape: [make(*shape), make(shape[0], 2 * shape[1])],
    )
