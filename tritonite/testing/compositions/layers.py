"""Compositions of norms, gated activations, rotary embeddings, quantisation and short convolutions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

functional = torch.nn.functional
# The largest values of quantised dtypes.
_LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
_BLOCK = 128


def rms_norm(x, weight=None, eps=1e-6, *, residual=None, offset=0.0, casting="none"):
    """Return the root mean square norm of x or of x + residual, and the sum; without intermediate roundings."""
    total = x if residual is None else x + residual
    scale = None if weight is None else offset + weight
    normalized = functional.rms_norm(total, total.shape[-1:], scale, eps)
    return normalized if residual is None else (normalized, total)


def layer_norm(x, weight=None, bias=None, eps=1e-5, *, residual=None):
    """Return the layer norm of x or of x + residual, and the sum."""
    total = x if residual is None else x + residual
    normalized = functional.layer_norm(total, total.shape[-1:], weight, bias, eps)
    return normalized if residual is None else (normalized, total)


def gated_rms_norm(x, gate, weight=None, eps=1e-6):
    """Return the root mean square norm of x times weight and silu(gate)."""
    return functional.rms_norm(x, x.shape[-1:], weight, eps) * functional.silu(gate)


def gated(activation, x, y=None):
    """Return activation(x) * y; without y of the two halves of x's last dimension."""
    x, y = x.chunk(2, -1) if y is None else (x, y)
    return activation(x) * y


def gelu_and_mul(x, y=None, approximate="none"):
    """Return gelu(x) * y."""
    return gated(functools.partial(functional.gelu, approximate=approximate), x, y)


relu_and_mul = functools.partial(gated, functional.relu)
silu_and_mul = functools.partial(gated, functional.silu)


def rotary_embedding(query, key, cos, sin, interleaved=False):
    """Return query and key with their pairs rotated."""
    return tuple([None if each is None else _rotated(each, cos, sin, interleaved) for each in (query, key)])


def _rotated(x, cos, sin, interleaved):
    pairs = cos.shape[-1]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    a, b = (x[..., : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]) if interleaved else x[..., : 2 * pairs].chunk(2, -1)
    turned = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((turned, x[..., 2 * pairs :]), -1)


def gathered(angles, sections, interleaved_sections):
    """Return (..., sequence, pairs) angles from the three planes, as transformers' Qwen2-VL and Qwen3-VL do."""
    if interleaved_sections:
        chosen = angles[0].clone()
        for plane in (1, 2):
            index = slice(plane, 3 * sections[plane], 3)
            chosen[..., index] = angles[plane, ..., index]
        return chosen
    return torch.cat([part[i] for i, part in enumerate(angles.split(sections, -1))], -1)


def multimodal_rotary_embedding(query, key, cos, sin, sections, interleaved=False, interleaved_sections=False):
    """Return query and key with their pairs rotated by angles of time, height and width."""
    cos, sin = (gathered(each, sections, interleaved_sections) for each in (cos, sin))
    return rotary_embedding(query, key, cos, sin, interleaved)


def quantize(x, dtype=torch.float8_e4m3fn, granularity="token", scale=None):
    """Return x over its scales, clamped to the range of `dtype` but not rounded, and the scales."""
    most = _LARGEST[dtype]
    if granularity == "token":
        scale = _absmax(x) / most
        each = scale
    elif granularity == "block":
        blocks = functional.pad(x, (0, -x.shape[-1] % _BLOCK)).unflatten(-1, (-(-x.shape[-1] // _BLOCK), _BLOCK))
        scale = _absmax(blocks).squeeze(-1) / most
        each = scale.repeat_interleave(_BLOCK, -1)[..., : x.shape[-1]]
    else:
        scale = each = scale.reshape(1)
    value = x * torch.where(each == 0, 0.0, 1.0 / each)
    return value.clamp(-128.0 if dtype is torch.int8 else -most, most), scale


def _absmax(x):
    """Return the largest absolute value of each row, 0 of rows without elements."""
    return x.abs().amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros((*x.shape[:-1], 1))


def swiglu_quantize(x, y=None, **wanted):
    """Return silu(x) * y quantised, without a rounding, and the scales."""
    return quantize(silu_and_mul(x, y), **wanted)


def rms_norm_quantize(x, weight=None, eps=1e-6, *, residual=None, offset=0.0, casting="none", **wanted):
    """Return the root mean square norm quantised, without a rounding, the scales, and with a residual the sum."""
    if residual is None:
        return quantize(rms_norm(x, weight, eps, offset=offset), **wanted)
    normalized, total = rms_norm(x, weight, eps, residual=residual, offset=offset)
    return (*quantize(normalized, **wanted), total)


def short_convolution(x, weight, bias=None, activation=None, initial_state=None):
    """Return the causal depthwise convolution of x over its last dimension, with an activation."""
    before = weight.shape[1] - 1
    if not x.numel():
        return x * 1
    padded = functional.pad(x, (before, 0)) if initial_state is None else torch.cat((initial_state, x), -1)
    rows = padded.reshape(-1, *padded.shape[-2:])
    out = functional.conv1d(rows, weight.unsqueeze(1), bias, groups=len(weight)).view(x.shape)
    return out if activation is None else functional.silu(out)


def short_convolution_update(x, state, weight, bias=None, activation=None):
    """Return the convolution at x, and the state with x as its last token."""
    tokens = torch.cat((state, x.unsqueeze(-1)), -1)
    out = (tokens[..., tokens.shape[-1] - weight.shape[1] :] * weight).sum(-1)
    out = out if bias is None else out + bias
    return out if activation is None else functional.silu(out), tokens[..., 1:]


_ACTIVATIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    None: lambda x: x,
    **{name: getattr(functional, name) for name in ("relu", "relu6", "sigmoid", "tanh", "silu", "gelu")},
    # ATen multiplies by the float32 value of 1/6 on a GPU.
    "hardswish": lambda x: x * functional.relu6(x + 3) / 6,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
}


def conv_bias_act(
    input,
    weight,
    bias=None,
    activation=None,
    stride=1,
    padding=0,
    dilation=1,
    groups=1,
    *,
    transposed=False,
    output_padding=0,
    residual=None,
):
    """Return activation(convolution + bias + residual)."""
    dims = weight.dim() - 2
    images = input.reshape(math.prod(input.shape[: -dims - 1]), *input.shape[-dims - 1 :])
    if transposed:
        function = getattr(functional, f"conv_transpose{dims}d")
        out = function(images, weight, bias, stride, padding, output_padding, groups, dilation)
    else:
        out = getattr(functional, f"conv{dims}d")(images, weight, bias, stride, padding, dilation, groups)
    out = out.reshape(*input.shape[: -dims - 1], *out.shape[1:])
    return _ACTIVATIONS[activation](out if residual is None else out + residual)
