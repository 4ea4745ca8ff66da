"""Pairs of mixtures of experts: routers, exchanges of rows, grouped linear layers, whole layers."""

from __future__ import annotations

import torch

from tritonite import fused
from tritonite.bench.fused.pair import Make, Pair, Shape

library, functional = torch.ops.tritonite, torch.nn.functional
# Experts of a token in pairs of routers.
_CHOSEN = 8
# (tokens, experts): prefill of Qwen3-MoE and DeepSeek-V3, and decoding.
_LOGITS = ((4096, 128), (32_768, 256), (64, 128))
# (tokens, hidden size, size within an expert, experts, experts of a token): Mixtral with a quarter of each expert,
# Qwen3-MoE, and its decoding.
_LAYERS = ((4096, 4096, 3584, 8, 2), (4096, 2048, 768, 128, 8), (64, 2048, 768, 128, 8))


def _router(make: Make, shape: Shape) -> list[torch.Tensor]:
    return [make(*shape)]


def _softmax(logits):
    return functional.softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _topk_softmax(logits):
    """Return the weights alone: torch.topk chooses any of equal experts."""
    weights = _softmax(logits).topk(_CHOSEN, -1).values
    return weights / weights.sum(-1, keepdim=True)


def _chosen(make: Make, shape: Shape) -> list[torch.Tensor]:
    """Return logits and the experts chosen by them."""
    logits = make(*shape)
    return [logits, logits.topk(_CHOSEN, -1).indices.int()]


def _balance(logits, experts):
    count = logits.shape[-1]
    frequency = functional.one_hot(experts.long(), count).float().mean(0)
    return count * (frequency * _softmax(logits).mean(0)).sum()


def _experts(device: torch.device, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's experts, in equal numbers, and the slots of each expert."""
    tokens, _, _, count, k = shape
    # A token's experts are consecutive, so that they differ.
    experts = torch.arange(tokens * k, device=device) % count
    return experts.view(tokens, k).int(), experts.argsort(stable=True).view(count, -1)


def _rows(make: Make, shape: Shape) -> list[torch.Tensor]:
    x = make(*shape[:2])
    return [x, *_experts(x.device, shape)]


def _permute(x, experts, slots):
    order = experts.flatten().argsort(stable=True)
    return x[order // experts.shape[1]]


def _permuted_rows(make: Make, shape: Shape) -> list[torch.Tensor]:
    tokens, columns, _, _, k = shape
    y = make(tokens * k, columns)
    inverse = _experts(y.device, shape)[1].flatten().argsort().view(tokens, k).int()
    return [y, inverse, make(tokens, k).float()]


def _unpermute(y, inverse, weights):
    return (y[inverse.long()] * weights.unsqueeze(-1)).sum(1).to(y.dtype)


def _grouped_rows(make: Make, shape: Shape) -> list[torch.Tensor]:
    tokens, columns, inner, count, k = shape
    grad, rows = make(tokens * k, 2 * inner), make(tokens * k, columns)
    every = tokens * k // count
    return [grad, rows, torch.arange(every, tokens * k + 1, every, device=rows.device).int()]


def _weight_gradients(grad, rows, offsets):
    count = len(offsets)
    return torch.bmm(grad.view(count, -1, grad.shape[1]).mT, rows.view(count, -1, rows.shape[1]))


def _layer(make: Make, shape: Shape) -> list[torch.Tensor]:
    tokens, columns, inner, count, k = shape
    x, gate_up, down = make(tokens, columns), make(count, 2 * inner, columns), make(count, columns, inner)
    # Results are near 1, which fp16 can represent.
    gate_up, down = gate_up * columns**-0.5, down * inner**-0.5
    return [x, functional.softmax(make(tokens, k).float(), -1), *_experts(x.device, shape), gate_up, down]


def _loop(x, weights, experts, slots, gate_up, down):
    """Add up the experts' results one after the other, for slots that are known on the host, so that nothing waits."""
    result, k = torch.zeros_like(x), experts.shape[1]
    for i in range(len(down)):
        tokens = slots[i] // k
        gate, up = functional.linear(x[tokens], gate_up[i]).chunk(2, -1)
        own = functional.linear(functional.silu(gate) * up, down[i])
        result.index_add_(0, tokens, (own * weights.flatten()[slots[i], None]).to(x.dtype))
    return result


_LAYER_SHAPES = (_LAYERS, (16, 64, 32, 8, 2), (4, 16, 8, 4, 2))
_ROUTER_SHAPES = (_LOGITS, (64, 128), (4, 16))
PAIRS: dict[str, Pair] = {
    "topk_softmax": Pair(_topk_softmax, lambda logits: fused.topk_softmax(logits, _CHOSEN)[0], _router, _ROUTER_SHAPES),
    "load_balancing_loss": Pair(_balance, fused.load_balancing_loss, _chosen, _ROUTER_SHAPES),
    "permute": Pair(
        _permute,
        lambda x, experts, slots: fused.permute(x, experts, len(slots))[0],
        _rows,
        _LAYER_SHAPES,
    ),
    "unpermute": Pair(_unpermute, fused.unpermute, _permuted_rows, _LAYER_SHAPES),
    "grouped_linear_backward_weight": Pair(
        _weight_gradients, library.grouped_linear_backward_weight, _grouped_rows, _LAYER_SHAPES
    ),
    "moe": Pair(
        _loop,
        lambda x, weights, experts, slots, gate_up, down: fused.moe_experts(x, weights, experts, gate_up, down),
        _layer,
        _LAYER_SHAPES,
    ),
}
