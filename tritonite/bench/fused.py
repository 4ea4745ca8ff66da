"""Fused operators, and what ATen needs several kernels for: the same functions of the same tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tritonite import fused
from tritonite.bench import attention
from tritonite.ops.normalization import statistics_dtype

Make = Callable[..., torch.Tensor]
Shape = tuple[int, ...]
aten, library = torch.ops.aten, torch.ops.tritonite
functional = torch.nn.functional
# Elements of a head, and heads of query for one of key.
_HEAD, _GROUP = 128, 4


@dataclass(frozen=True)
class Pair:
    """A fused operator and ATen's composition, of tensors made of a function of shapes and a shape of rows.

    `shapes` are those it has of its own, and the ones to measure the host and in the interpreter.
    """

    composition: Callable[..., Any]
    fused: Callable[..., Any]
    operands: Callable[[Make, Shape], Sequence[torch.Tensor]]
    shapes: tuple[tuple[Shape, ...], Shape, Shape] | None = None


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
    return library.skip_layer_norm_backward(grad, grad_total, total, *statistics, weight, bias, True, True)


def _rms_norm(x, residual, weight):
    total = x + residual
    return functional.rms_norm(total, weight.shape, weight, 1e-6), total


def _rms_norm_backward(grad, grad_total, total, rstd, weight):
    own, by_weight = aten._fused_rms_norm_backward(grad, total, weight.shape, rstd, weight, [True, True])
    return own + grad_total, by_weight


def _fused_rms_norm_backward(grad, grad_total, total, rstd, weight):
    return library.skip_rms_norm_backward(grad, grad_total, total, rstd.squeeze(-1), weight, True)


def _gated(activation, x):
    a, b = x.chunk(2, -1)
    return activation(a) * b


def _gated_backward(activation, gradient, grad, x):
    a, b = x.chunk(2, -1)
    return torch.cat((gradient(grad * b, a), grad * activation(a)), -1)


def _fused_gated_backward(backward, grad, x):
    return backward(grad, x)[0]


def _rotary(query, key, cos, sin):
    """As models on Hugging Face write it."""
    cos, sin = (torch.cat((each, each), -1).unsqueeze(-2) for each in (cos, sin))
    turned = []
    for x in (query, key):
        a, b = x.chunk(2, -1)
        turned.append(x * cos + torch.cat((-b, a), -1) * sin)
    return tuple(turned)


def _heads(make: Make, shape: Shape) -> list[torch.Tensor]:
    """Query and key of rows of such a width, and cos and sin of a sequence of them."""
    rows, width = shape
    size = min(_HEAD, width)
    heads = max(1, width // size)
    angles = make(rows, size // 2)
    return [make(rows, heads, size), make(rows, max(1, heads // _GROUP), size), angles.cos(), angles.sin()]


def _statistics(make: Make, rows: int, count: int) -> list[torch.Tensor]:
    """Of rows, as ATen's forward operators leave them."""
    found = [make(rows, 1).abs_().add_(0.5) for _ in range(count)]
    return [each.to(statistics_dtype(each, each.dtype)) for each in found]


def _norm_gradients(parameters: int, make: Make, shape: Shape) -> list[torch.Tensor]:
    rows = [make(*shape) for _ in range(3)]
    return [*rows, *_statistics(make, shape[0], parameters), *(make(shape[1]) for _ in range(parameters))]


# Of decoding: sequences, heads, heads of key and value, keys of each, elements of a head, tokens in a block.
_PAGED = tuple(
    (heads.batch, heads.heads, heads.shared, heads.length, heads.size, page)
    for heads in attention.DECODING
    if heads.queries == 1
    for page in (16, 256)
)


def _paged(make: Make, shape: Shape) -> list[torch.Tensor]:
    """One token of each sequence, whose blocks lie one after the other, so that they are a plain cache as well."""
    sequences, heads, shared, length, size, page = shape
    blocks = length // page
    query, caches = make(sequences, heads, size), [make(sequences * blocks, page, shared, size) for _ in range(2)]
    table = torch.arange(sequences * blocks, dtype=torch.int32, device=query.device).view(sequences, blocks)
    return [query, *caches, table, torch.full((sequences,), length, dtype=torch.int32, device=query.device)]


def _over_plain_caches(query, key_cache, value_cache, table, lengths):
    """Decoding over the same memory, as (sequences, heads, keys, elements)."""
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
