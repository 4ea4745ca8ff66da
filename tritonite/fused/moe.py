"""Mixtures of experts: tokens in the order of their experts, rows to experts and back, and the whole layer."""

from __future__ import annotations

import math
from typing import Any

import torch

from tritonite.dtypes import FLOATS
from tritonite.engine.iteration import INT32_LIMIT, common_device
from tritonite.engine.moe.exchange import from_experts, from_experts_backward, to_experts
from tritonite.engine.moe.grouping import aligned_ids, positions_by_expert
from tritonite.errors import Decline, Unsupported
from tritonite.fused.check import check_device, check_floats, check_shape
from tritonite.fused.gated import gelu_and_mul, silu_and_mul
from tritonite.fused.grouped import grouped_linear
from tritonite.fused.router import route
from tritonite.registry import library_operator
from tritonite.runtime.contract import empty

_MOST_EXPERTS = 4096


def moe_align(
    experts: torch.Tensor, num_experts: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort tokens by expert, with each expert's tokens padded to whole blocks, as kernels of serving engines take them.

    Slot i of the flattened `experts` is slot i % k of token i // k. The slots of an expert keep their order. Slots
    whose expert is outside 0..num_experts-1 are left out. The host does not wait for the numbers of tokens.

    Args:
        experts: (T, k) of int32 or int64.
        num_experts: the number E of experts, at most 4096.
        block_size: the number of slots in a block.

    Returns
        sorted_token_ids: int32, the slots in the order of their experts; T * k stands for padding. There is room for
            T * k + E * (block_size - 1) slots, or if T * k < E for T * k blocks, rounded up to whole blocks.
        expert_ids: int32, the expert of each block; -1 for blocks after the last expert's.
        num_tokens_post_padded: (1,) of int32, the number of slots with padding up to the last expert's last block.

    Raises errors.Unsupported for other shapes or dtypes.

    Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention" (vLLM).
    """
    aligned: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.tritonite.moe_align(
        experts, num_experts, block_size
    )
    return aligned


def permute(
    x: torch.Tensor, experts: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copy the row of each token to all its experts, in the order of experts and, for one expert, of tokens.

    Slots whose expert is outside 0..num_experts-1 follow all others; their rows are 0, and pass no gradient. The host
    does not wait for the numbers of tokens. The gradient by x is the sum over a token's slots.

    Args:
        x: (T, H) of float16, bfloat16, float32 or float64, of any strides.
        experts: (T, k) of int32 or int64, the experts of each token.
        num_experts: the number E of experts, at most 4096.

    Returns
        permuted: (T * k, H), contiguous and of x's dtype.
        offsets: (E,) of int32, the row where each expert's rows end, as `grouped_linear` takes it.
        inverse: (T, k) of int32, the row of each slot, as `unpermute` takes it; -1 - row for a slot without an expert.

    Raises errors.Unsupported for other shapes or dtypes, and for tensors on several devices.

    Source: Gale et al. 2022, "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts".
    """
    permuted: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.tritonite.permute(x, experts, num_experts)
    return permuted


def unpermute(y: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Add up the rows of each token's slots, times their weights: out[t] = sum over j of w[t, j] y[inverse[t, j]].

    Sums and products are computed in float32, or float64 for float64, and rounded once. Slots with a negative `inverse`
    have no row, and pass no gradient.

    Args:
        y: (T * k, H) of float16, bfloat16, float32 or float64, of any strides.
        inverse: (T, k) of int32, as `permute` returns it.
        weights: (T, k) of y's dtype, float32 or float64, or None for weights of 1.

    Returns a contiguous tensor (T, H) of y's dtype.

    Raises errors.Unsupported for other shapes or dtypes, and for tensors on several devices.

    Source: Gale et al. 2022, "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts".
    """
    result: torch.Tensor = torch.ops.tritonite.unpermute(y, inverse, weights)
    return result


def moe(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up_weight: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    down_weight: torch.Tensor,
    k: int,
    *,
    activation: str = "silu",
    **routing: Any,
) -> torch.Tensor:
    """Return the layer of a mixture of experts: the weighted sum of the k best experts' gated layers of each token.

    An expert computes down_weight[e] @ (activation(gate) * up), with gate and up the halves of gate_up_weight[e] @ x.
    The layer is `route`, then `moe_experts`. The host does not wait for the device.

    Args:
        x: (..., H) of float16, bfloat16 or float32, of any strides.
        router_logits: (..., E) of any floating-point dtype.
        gate_up_weight: (E, 2 I, H) of x's dtype, the gates' I rows first; or the pair (E, I, H) of gates and ups.
        down_weight: (E, H, I) of x's dtype.
        k: the number of experts of a token.
        activation: "silu", "gelu" or "gelu_tanh".
        routing: options of `route`: scoring, bias, num_groups, topk_groups, renormalize, scale.

    Returns a contiguous tensor of x's shape and dtype.

    Raises errors.Unsupported for other shapes, dtypes or options, and for tensors on several devices.

    Source: Shazeer et al. 2017, "Outrageously Large Neural Networks"; Jiang et al. 2024, "Mixtral of Experts".
    """
    weights, experts = route(router_logits, k, **routing)
    return moe_experts(x, weights, experts, gate_up_weight, down_weight, activation=activation)


def moe_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up_weight: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    down_weight: torch.Tensor,
    *,
    activation: str = "silu",
) -> torch.Tensor:
    """Return the weighted sum of the chosen experts' gated layers of each token.

    Rows are copied to their experts, multiplied by group, and added up; see `moe` for an expert's formula.

    Args:
        x: (..., H) of float16, bfloat16 or float32, of any strides.
        weights: (..., k) of x's dtype, float32 or float64, as `route` returns them.
        experts: (..., k) of int32 or int64; experts outside 0..E-1 add nothing.
        gate_up_weight: (E, 2 I, H) of x's dtype, the gates' I rows first; or the pair (E, I, H) of gates and ups.
        down_weight: (E, H, I) of x's dtype.
        activation: "silu", "gelu" or "gelu_tanh".

    Returns a contiguous tensor of x's shape and dtype.

    Raises errors.Unsupported for other shapes, dtypes or options, and for tensors on several devices.

    Source: Gale et al. 2022, "MegaBlocks"; Tan et al. 2024, "Scattered Mixture-of-Experts Implementation".
    """
    if not x.dim() or tuple(experts.shape[:-1]) != tuple(x.shape[:-1]) or not experts.dim():
        reason = f"x has the shape {tuple(x.shape)} and experts {tuple(experts.shape)}: they must have the same tokens"
        raise Unsupported(name="tritonite::moe_experts", reason=reason)
    if weights.shape != experts.shape:
        reason = f"weights has the shape {tuple(weights.shape)}: it must be that of experts, {tuple(experts.shape)}"
        raise Unsupported(name="tritonite::moe_experts", reason=reason)
    if down_weight.dim() != 3:
        reason = f"down_weight has the shape {tuple(down_weight.shape)}: it must be (experts, hidden, inner)"
        raise Unsupported(name="tritonite::moe_experts", reason=reason)
    tokens = math.prod(x.shape[:-1])
    rows, slots = x.reshape(tokens, x.shape[-1]), experts.reshape(tokens, experts.shape[-1])
    permuted, offsets, inverse = permute(rows, slots, down_weight.shape[0])
    if isinstance(gate_up_weight, tuple):
        hidden = _gated(activation, *(grouped_linear(permuted, each, offsets) for each in gate_up_weight))
    else:
        hidden = _gated(activation, grouped_linear(permuted, gate_up_weight, offsets))
    result = unpermute(grouped_linear(hidden, down_weight, offsets), inverse, weights.reshape(slots.shape))
    return result.reshape(*x.shape[:-1], result.shape[-1])


def _gated(activation: str, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
    """Return the activation of the gates times the ups, of two tensors or of the halves of one."""
    if activation == "silu":
        return silu_and_mul(x, y)
    if activation not in ("gelu", "gelu_tanh"):
        reason = f'activation is {activation!r}: it may be "silu", "gelu" or "gelu_tanh"'
        raise Unsupported(name="tritonite::moe_experts", reason=reason)
    return gelu_and_mul(x, y, "tanh" if activation == "gelu_tanh" else "none")


def _check_experts(experts: torch.Tensor, num_experts: int) -> None:
    if experts.dtype not in (torch.int32, torch.int64):
        raise Decline(f"experts is {experts.dtype}: it may be torch.int32 or torch.int64")
    if experts.dim() != 2 or not experts.shape[1] or experts.numel() >= INT32_LIMIT:
        raise Decline(
            f"experts has the shape {tuple(experts.shape)}: it must be (tokens, k) with a k of 1 at least, and below "
            f"{INT32_LIMIT} elements"
        )
    if not 1 <= num_experts <= _MOST_EXPERTS:
        raise Decline(f"num_experts is {num_experts}: it may be 1 to {_MOST_EXPERTS}")


def _aligned_sizes(experts: torch.Tensor, num_experts: int, block_size: int) -> tuple[int, int]:
    """Return the most slots, and the most blocks, that a call may need."""
    _check_experts(experts, num_experts)
    slots = experts.shape[0] * experts.shape[1]
    if block_size < 1:
        raise Decline(f"block_size is {block_size}: it must be 1 at least")
    room = slots * block_size if slots < num_experts else slots + num_experts * (block_size - 1)
    blocks = -(-room // block_size)
    if blocks * block_size >= INT32_LIMIT:
        raise Decline(f"block_size is {block_size}: {blocks} blocks must have below {INT32_LIMIT} slots")
    return blocks * block_size, blocks


def _fake_align(experts, num_experts, block_size):
    sizes = (*_aligned_sizes(experts, num_experts, block_size), 1)
    return tuple([experts.new_empty((size,), dtype=torch.int32) for size in sizes])


@library_operator(
    "moe_align(Tensor experts, int num_experts, int block_size) -> (Tensor, Tensor, Tensor)",
    fake=_fake_align,
    accepts=(torch.int32, torch.int64),
    pin=("num_experts", "block_size"),
)
def moe_align_host(experts, num_experts, block_size):
    """Return slots sorted by expert and padded to blocks, the blocks' experts, and the number of slots: vLLM."""
    room, blocks = _aligned_sizes(experts, num_experts, block_size)
    common_device((experts,), ())
    indices, expert_ids, used = [empty((size,), torch.int32, experts.device) for size in (room, blocks, 1)]
    aligned_ids(experts.contiguous(), indices, expert_ids, used, num_experts, block_size)
    return indices, expert_ids, used


def _check_permute(x: torch.Tensor, experts: torch.Tensor, num_experts: int) -> None:
    _check_experts(experts, num_experts)
    check_floats(x=x)
    if x.dim() != 2 or x.shape[0] != experts.shape[0]:
        tokens = experts.shape[0]
        raise Decline(f"x has the shape {tuple(x.shape)}: it must be ({tokens}, columns), a row for each token")
    check_device("experts", experts, "x", x)


def _fake_permute(x, experts, num_experts):
    _check_permute(x, experts, num_experts)
    permuted = x.new_empty((experts.shape[0] * experts.shape[1], x.shape[1]))
    offsets = x.new_empty((num_experts,), dtype=torch.int32)
    return permuted, offsets, x.new_empty(experts.shape, dtype=torch.int32)


def _save_permute(ctx, inputs, output):
    ctx.save_for_backward(output[2])
    ctx.mark_non_differentiable(output[1], output[2])


def _permute_gradient(ctx, grad, grad_offsets, grad_inverse):
    return torch.ops.tritonite.unpermute(grad, *ctx.saved_tensors), None, None


@library_operator(
    "permute(Tensor x, Tensor experts, int num_experts) -> (Tensor, Tensor, Tensor)",
    fake=_fake_permute,
    accepts=FLOATS,
    save=_save_permute,
    gradient=_permute_gradient,
    pin=("num_experts",),
)
def permute_host(x, experts, num_experts):
    """Return tokens' rows in the order of their experts, the ends of experts, and each slot's row: Gale et al. 2022."""
    _check_permute(x, experts, num_experts)
    common_device((x, experts), ())
    inverse = empty(experts.shape, torch.int32, x.device)
    offsets = empty((num_experts,), torch.int32, x.device)
    permuted = empty((experts.numel(), x.shape[1]), x.dtype, x.device)
    positions_by_expert(experts.contiguous(), inverse, offsets)
    to_experts(x, inverse, permuted)
    return permuted, offsets, inverse


def _check_unpermute(y: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor | None) -> None:
    check_floats(y=y)
    if inverse.dtype is not torch.int32 or inverse.dim() != 2 or not inverse.shape[1]:
        raise Decline(
            f"inverse is {inverse.dtype} of shape {tuple(inverse.shape)}: it must be int32 of shape (tokens, k)"
        )
    slots = inverse.shape[0] * inverse.shape[1]
    if y.dim() != 2 or y.shape[0] != slots:
        raise Decline(f"y has the shape {tuple(y.shape)}: it must be ({slots}, columns), a row for each slot")
    check_device("inverse", inverse, "y", y)
    if weights is not None:
        check_shape("weights", weights, inverse.shape, "that of inverse")
        if weights.dtype not in (y.dtype, torch.float32, torch.float64):
            raise Decline(f"weights is {weights.dtype}: it may be {y.dtype}, as y is, torch.float32 or torch.float64")
        check_device("weights", weights, "y", y)


def _fake_unpermute(y, inverse, weights=None):
    _check_unpermute(y, inverse, weights)
    return y.new_empty((inverse.shape[0], y.shape[1]))


def _save_unpermute(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _unpermute_gradient(ctx, grad):
    y, inverse, weights = ctx.saved_tensors
    wanted = weights is not None and ctx.needs_input_grad[2]
    by_y, by_weights = torch.ops.tritonite.unpermute_backward(grad, y, inverse, weights, wanted)
    return by_y, None, by_weights


@library_operator(
    "unpermute(Tensor y, Tensor inverse, Tensor? weights=None) -> Tensor",
    fake=_fake_unpermute,
    accepts=FLOATS,
    save=_save_unpermute,
    gradient=_unpermute_gradient,
)
def unpermute_host(y, inverse, weights=None):
    """Return the sum of each token's rows of its experts, times their weights: Gale et al. 2022."""
    _check_unpermute(y, inverse, weights)
    common_device((y, inverse) if weights is None else (y, inverse, weights), ())
    out = empty((inverse.shape[0], y.shape[1]), y.dtype, y.device)
    from_experts(y, inverse.contiguous(), weights, out)
    return (out,)


def _check_unpermute_backward(grad, y, inverse, weights, weights_wanted):
    _check_unpermute(y, inverse, weights)
    check_shape("grad", grad, (inverse.shape[0], y.shape[1]), "a row for each token")
    if grad.dtype is not y.dtype:
        raise Decline(f"grad is {grad.dtype} and y {y.dtype}: give both one dtype")
    check_device("grad", grad, "y", y)
    if weights_wanted and weights is None:
        raise Decline("weights is None and weights_wanted is set: there is no gradient by weights without weights")


def _fake_unpermute_backward(grad, y, inverse, weights, weights_wanted):
    _check_unpermute_backward(grad, y, inverse, weights, weights_wanted)
    return y.new_empty(y.shape), weights.new_empty(weights.shape) if weights_wanted else None


@library_operator(
    "unpermute_backward(Tensor grad, Tensor y, Tensor inverse, Tensor? weights, bool weights_wanted)"
    " -> (Tensor, Tensor)",
    fake=_fake_unpermute_backward,
    accepts=FLOATS,
    pin=("weights_wanted",),
)
def unpermute_backward_host(grad, y, inverse, weights, weights_wanted):
    """Return the gradients of unpermute by y and by weights; None if that is not wanted."""
    _check_unpermute_backward(grad, y, inverse, weights, weights_wanted)
    common_device((grad, y, inverse) if weights is None else (grad, y, inverse, weights), ())
    by_y = empty(y.shape, y.dtype, y.device)
    if weights is None:
        to_experts(grad, inverse.contiguous(), by_y)
        return by_y, None
    by_weights = empty(weights.shape, weights.dtype, weights.device) if weights_wanted else None
    from_experts_backward(grad, y, inverse.contiguous(), weights, by_y, by_weights)
    return by_y, by_weights
