"""Pairs of norms as models call them, angles of three planes, and quantisation of activations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tritonite import fused
from tritonite.bench.fused.pair import Make, Pair, Shape

functional = torch.nn.functional
_HEAD, _GROUP = 128, 4
# Pairs that turn by time, height and width, of 64.
_SECTIONS = (16, 24, 24)


def _llama(x, weight):
    """Normalise as transformers' LlamaRMSNorm does."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def _gemma(x, weight):
    """Normalise as transformers' GemmaRMSNorm does."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (wide * (1.0 + weight.float())).type_as(x)


def _added(x, residual, weight):
    residual.add_(x)
    return x.copy_(_llama(residual, weight))


def _fused_added(x, residual, weight):
    fused.add_rms_norm_(x, residual, weight)
    return x


def _rows(make: Make, shape: Shape) -> list[torch.Tensor]:
    return [make(*shape)]


def _rows_and_weight(make: Make, shape: Shape) -> list[torch.Tensor]:
    return [make(*shape), make(shape[1])]


def _two_and_weight(make: Make, shape: Shape) -> list[torch.Tensor]:
    return [make(*shape), make(*shape), make(shape[1])]


def _quantized(x):
    """Quantise rows to float8 by their largest absolute values."""
    scale = x.abs().amax(-1, keepdim=True).float() / 448.0
    return (x.float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale


def _scales(function: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """Return the function without its quantised values, because those near a boundary may round to either side.

    The tests compare the values.
    """

    def scales(*operands: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = function(*operands)[1]
        return result

    return scales


def _gated(x):
    a, b = x.chunk(2, -1)
    return functional.silu(a) * b


def _sections(pairs: int) -> list[int]:
    """Return sections in the proportions of _SECTIONS for heads of any size."""
    height, width = (each * pairs // sum(_SECTIONS) for each in _SECTIONS[1:])
    return [pairs - height - width, height, width]


def _multimodal(query, key, cos, sin):
    """Gather angles and rotate query and key as Qwen2-VL on Hugging Face does."""
    sections = _sections(cos.shape[-1])
    cos, sin = (torch.cat([part[i] for i, part in enumerate(each.split(sections, -1))], -1) for each in (cos, sin))
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
    angles = make(3, rows, size // 2)
    return [make(rows, heads, size), make(rows, max(1, heads // _GROUP), size), angles.cos(), angles.sin()]


PAIRS: dict[str, Pair] = {
    "rms_norm": Pair(_llama, fused.rms_norm, _rows_and_weight),
    "rms_norm_with_offset": Pair(
        _gemma, functools.partial(fused.rms_norm, offset=1.0, casting="gemma"), _rows_and_weight
    ),
    "layer_norm": Pair(
        lambda x, weight: functional.layer_norm(x, weight.shape, weight), fused.layer_norm, _rows_and_weight
    ),
    "add_rms_norm_": Pair(_added, _fused_added, _two_and_weight),
    "multimodal_rotary_embedding": Pair(
        _multimodal,
        lambda query, key, cos, sin: fused.multimodal_rotary_embedding(query, key, cos, sin, _sections(cos.shape[-1])),
        _heads,
    ),
    "quantize": Pair(_scales(_quantized), _scales(fused.quantize), _rows),
    "swiglu_quantize": Pair(
        _scales(lambda x: _quantized(_gated(x))),
        _scales(fused.swiglu_quantize),
        lambda make, shape: [make(shape[0], 2 * shape[1])],
    ),
    "rms_norm_quantize": Pair(
        _scales(lambda x, weight: _quantized(_llama(x, weight))), _scales(fused.rms_norm_quantize), _rows_and_weight
    ),
}
