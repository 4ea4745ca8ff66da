"""Pairs of linear attention: gated delta rule, short convolution, gated norm, as in Qwen3-Next."""

from __future__ import annotations

from typing import Any

import torch

from tritonite import fused
from tritonite.bench.fused.pair import Make, Pair, Shape

library = torch.ops.tritonite
functional = torch.nn.functional
_CHUNK = 64


def _by_head(heads: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return (batch, tokens, key heads, ...) as (batch, heads, tokens, ...), each key head repeated.

    Results are float32, or float64 for the reference.
    """
    wide = [each.to(torch.promote_types(each.dtype, torch.float32)).transpose(1, 2) for each in tensors]
    return [each.repeat_interleave(heads // each.shape[1], 1, output_size=heads) for each in wide]


def _chunked(query, key, value, g, beta):
    """Compute the gated delta rule in chunks: products, a triangular solve, and a loop over chunks for the state."""
    batch, tokens, heads, size = value.shape
    q, k, v, decay, rate = _by_head(heads, query, key, value, g, beta)
    q = q * query.shape[-1] ** -0.5
    chunk = min(_CHUNK, tokens)
    q, k, v, decay, rate = (each.unflatten(2, (-1, chunk)) for each in (q, k, v, decay, rate))
    total = decay.cumsum(-1)
    past = torch.ones(chunk, chunk, dtype=torch.bool, device=value.device).tril()
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~past, -torch.inf).exp()
    faded, grown, rate = (total[..., -1:] - total).exp()[..., None], total.exp()[..., None], rate[..., None]
    system = rate * (k @ k.mT) * between
    solved = torch.linalg.solve_triangular(
        system, torch.cat((rate * v, rate * grown * k), -1), upper=False, unitriangular=True
    )
    corrections, weights = solved.split((size, k.shape[-1]), -1)
    scores, q, k = (q @ k.mT) * between, q * grown, k * faded
    state, outs = v.new_zeros(batch, heads, k.shape[-1], size), []
    for i in range(tokens // chunk):
        own = corrections[:, :, i] - weights[:, :, i] @ state
        outs.append(q[:, :, i] @ state + scores[:, :, i] @ own)
        state = state * grown[:, :, i, -1:] + k[:, :, i].mT @ own
    return torch.stack(outs, 2).flatten(2, 3).transpose(1, 2).to(value.dtype).contiguous()


def _chunked_backward(grad, *operands):
    with torch.enable_grad():
        given = [each.detach().requires_grad_() for each in operands]
        return [each.contiguous() for each in torch.autograd.grad(_chunked(*given), given, grad)]


def _fused_chunked_backward(grad, *operands):
    return library.gated_delta_rule_backward(grad, None, *operands, None, None, False)[:5]


def _decode(query, key, value, g, beta, state):
    """Compute one token of the gated delta rule, and return the state as a new tensor."""
    q, k, v, decay, rate = (each[:, :, 0] for each in _by_head(value.shape[2], query, key, value, g, beta))
    state = state * decay.exp()[..., None, None]
    correction = rate[..., None] * (v - (state * k[..., None]).sum(-2))
    state = state + k[..., None] * correction[..., None, :]
    out = (state * q[..., None]).sum(-2) * query.shape[-1] ** -0.5
    return out.unsqueeze(1).to(value.dtype), state


def _fused_decode(*operands):
    out, state = fused.recurrent_gated_delta_rule(*operands[:5], initial_state=operands[5], return_final_state=True)
    return out, state


def _delta(make: Make, shape: Shape) -> list[torch.Tensor]:
    """Return query, key, value, g and beta for `shape` = (batch, tokens, key heads, heads, head size)."""
    batch, tokens, key_heads, heads, size = shape
    key = functional.normalize(make(batch, tokens, key_heads, size), dim=-1)
    gates = [make(batch, tokens, heads) for _ in range(2)]
    query, value = make(batch, tokens, key_heads, size), make(batch, tokens, heads, size)
    return [query, key, value, -gates[0].float().abs(), gates[1].sigmoid()]


def _delta_gradients(make: Make, shape: Shape) -> list[torch.Tensor]:
    operands = _delta(make, shape)
    return [make(*operands[2].shape), *operands]


def _decoding(make: Make, shape: Shape) -> list[torch.Tensor]:
    operands, (batch, _, _, heads, size) = _delta(make, shape), shape
    return [*operands, make(batch, heads, size, size).float()]


def _convolution(x, weight):
    width = weight.shape[1]
    out = functional.conv1d(x, weight.unsqueeze(1), padding=width - 1, groups=len(weight))
    return functional.silu(out[..., : x.shape[-1]])


def _convolution_backward(grad, x, weight):
    with torch.enable_grad():
        given = [each.detach().requires_grad_() for each in (x, weight)]
        return torch.autograd.grad(_convolution(*given), given, grad)


def _fused_convolution_backward(grad, x, weight):
    return library.short_convolution_backward(grad, x, weight, None, "silu", None)[:2]


def _filtered(tensors: int) -> Any:
    """Return a function that makes tensors of `shape` = (batch, channels, tokens), and a weight of 4 taps."""
    return lambda make, shape: [*(make(*shape) for _ in range(tensors)), make(shape[1], 4)]


def _norm(x, gate, weight):
    return functional.rms_norm(x, weight.shape, weight, 1e-6) * functional.silu(gate)


def _norm_backward(grad, x, gate, weight):
    with torch.enable_grad():
        given = [each.detach().requires_grad_() for each in (x, gate, weight)]
        return torch.autograd.grad(_norm(*given), given, grad)


def _fused_norm_backward(grad, x, gate, weight):
    _, rstd = library.gated_rms_norm(x, gate, weight)
    return library.gated_rms_norm_backward(grad, x, gate, weight, rstd, True)


def _rows(tensors: int) -> Any:
    return lambda make, shape: [*(make(*shape) for _ in range(tensors)), make(shape[1])]


# (batch, tokens, key heads, heads, head size) of Qwen3-Next-80B-A3B: prefill, training; small for host time and tests.
_PREFILL = ((1, 4096, 16, 32, 128), (4, 2048, 16, 32, 128), (1, 32_768, 16, 32, 128))
_DECODE = ((1, 1, 16, 32, 128), (64, 1, 16, 32, 128), (256, 1, 16, 32, 128))
_SMALL, _TINY = (1, 128, 2, 4, 64), (1, 32, 1, 2, 16)
# (batch, channels, tokens) of its convolution.
_CHANNELS = (((1, 8192, 4096), (4, 8192, 2048)), (1, 64, 64), (1, 8, 16))
# (tokens times heads, head size) of its gated norm.
_HEADS = (((4096 * 32, 128), (32, 128)), (64, 64), (4, 32))

PAIRS: dict[str, Pair] = {
    "chunk_gated_delta_rule": Pair(
        _chunked, lambda *given: fused.chunk_gated_delta_rule(*given)[0], _delta, (_PREFILL, _SMALL, _TINY)
    ),
    "gated_delta_rule_backward": Pair(
        _chunked_backward, _fused_chunked_backward, _delta_gradients, (_PREFILL[:2], _SMALL, _TINY)
    ),
    "recurrent_gated_delta_rule": Pair(
        _decode, _fused_decode, _decoding, (_DECODE, (1, 1, 2, 4, 64), (2, 1, 1, 2, 16))
    ),
    "short_convolution": Pair(
        _convolution, lambda x, weight: fused.short_convolution(x, weight, None, "silu"), _filtered(1), _CHANNELS
    ),
    "short_convolution_backward": Pair(_convolution_backward, _fused_convolution_backward, _filtered(2), _CHANNELS),
    "gated_rms_norm": Pair(_norm, fused.gated_rms_norm, _rows(2), _HEADS),
    "gated_rms_norm_backward": Pair(_norm_backward, _fused_norm_backward, _rows(3), _HEADS),
}
