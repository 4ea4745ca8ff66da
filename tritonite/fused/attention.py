"""Attention with sliding windows, soft caps and sinks: checks and declarations; the kernels are `engine.attention`'s.

Probabilities are softmax(softcap * tanh(scale * query @ key.mT / softcap) + mask), where a sink adds exp(sink) to the
denominator of each of its head's rows. The gradient by a sink is the sum over rows of -p * delta, with the sink's
probability p and delta, a row's sum of out * grad.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tritonite.dtypes import SINGLE_FLOATS
from tritonite.engine.attention.backward import attention_backward
from tritonite.engine.attention.decode import decode, decodes
from tritonite.engine.attention.forward import attention as attention_forward
from tritonite.engine.attention.problem import Problem
from tritonite.engine.iteration import common_device
from tritonite.engine.rows.declare import Reduction, reduced
from tritonite.engine.rows.formulas import add_states
from tritonite.errors import Decline, Unsupported
from tritonite.fused.check import check_device, check_shape, check_sinks
from tritonite.ops.matmul import precision_of
from tritonite.ops.reduction.sums import added_to_zero, same
from tritonite.registry import library_operator
from tritonite.runtime.contract import empty

_LARGEST_HEAD = 256
_SUM = Reduction((0.0,), same, add_states, added_to_zero)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    is_causal: bool = False,
    window: int | Sequence[int] | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    attn_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend queries to keys and values, with a sliding window, a soft cap and attention sinks: forward and backward.

    Query i of L stands at key p = i + S - L of S, so the last query stands at the last key. For L != S this differs
    from torch's scaled_dot_product_attention, whose is_causal aligns the first query with the first key.

    Scores are scale * query @ key.mT, then softcap * tanh(scores / softcap), then attn_mask is added. Products are in
    query's dtype with float32 sums. Blocks of keys outside the window are skipped. Calls without window, softcap and
    sinks run on the kernels of scaled_dot_product_attention, on Hopper the warp-specialised ones; the other calls run
    on the kernels for all devices. With few queries and many keys, all calls run on the decoding kernels.

    Args:
        query: (..., Hq, L, D) of float16, bfloat16 or float32, of any strides; D is at most 256.
        key: (..., Hkv, S, D) of query's dtype; Hkv divides Hq, and Hq / Hkv successive query heads share a key head.
        value: (..., Hkv, S, Dv) of query's dtype; Dv is at most 256.
        is_causal: queries see the keys up to p.
        window: None for all keys; (left, right) for the keys from p - left to p + right, where -1 is for no limit; or
            an int w for the last w keys up to p, as (w - 1, 0).
        softcap: the positive bound of scores; None or 0 for no bound.
        sinks: (Hq,) of query's dtype or float32: logits that add to the softmax's denominator alone. None for none.
        scale: the factor of scores; None for 1 / sqrt(D).
        attn_mask: None, or a tensor that broadcasts to (..., Hq, L, S): bool, false for hidden keys, or of query's
            dtype or float32, added to scores. It has no gradient.

    Returns (..., Hq, L, Dv) of query's dtype, whose memory is ordered (..., L, Hq, Dv); 0 for queries that see no key.

    Raises errors.Unsupported for other shapes or dtypes, for tensors on several devices, and for an attn_mask that
    requires a gradient.

    Source: Dao 2023, "FlashAttention-2"; Beltagy et al. 2020, "Longformer" (windows); Gemma Team 2024, "Gemma 2" (soft
    caps); Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks", and OpenAI 2025, "gpt-oss-120b
    & gpt-oss-20b Model Card" (sinks).
    """
    left, right = _sides(window)
    result: torch.Tensor
    result, _ = torch.ops.tritonite.attention(
        query, key, value, is_causal, left, right, softcap, sinks, scale, attn_mask
    )
    return result


def _sides(window: int | Sequence[int] | None) -> tuple[int | None, int | None]:
    """Return the keys that a query sees before and behind its own, None for no limit."""
    if window is None:
        return None, None
    sides = (window - 1, 0) if isinstance(window, int) else tuple(window)
    least = 0 if isinstance(window, int) else -1
    if len(sides) != 2 or min(sides) < least:
        reason = f"window is {window}: it may be an int from 1 on, or two from 0 on, -1 for no limit"
        raise Unsupported(name="tritonite::attention", reason=reason)
    left, right = (None if side < 0 else side for side in sides)
    return left, right


# ---- Checks ----------------------------------------------------------------------------------------------------------


def _check_operands(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    if query.dtype not in SINGLE_FLOATS:
        raise Decline(f"query is {query.dtype}: it may be float16, bfloat16 or float32")
    if query.dim() < 3:
        raise Decline(f"query has the shape {tuple(query.shape)}: it must be (..., heads, queries, head size)")
    kv_heads, keys = key.shape[-3:-1] if key.dim() > 2 else (0, 0)
    check_shape("key", key, (*query.shape[:-3], kv_heads, keys, query.shape[-1]), "query's but for heads and rows")
    size = value.shape[-1] if value.dim() else 0
    check_shape("value", value, (*key.shape[:-1], size), "key's but for the head size")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype is not query.dtype:
            raise Decline(f"{name} is {tensor.dtype} and query {query.dtype}: give all one dtype")
        check_device(name, tensor, "query", query)
    if not kv_heads or query.shape[-3] % kv_heads:
        raise Decline(f"key has {kv_heads} heads, which must divide the query's {query.shape[-3]}")
    if not 0 < query.shape[-1] <= _LARGEST_HEAD or not 0 < size <= _LARGEST_HEAD:
        raise Decline(f"heads have {query.shape[-1]} and {size} elements: they may have 1 to {_LARGEST_HEAD}")


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    left: int | None,
    right: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    attn_mask: torch.Tensor | None,
) -> None:
    """Decline arguments that the operators do not serve."""
    _check_operands(query, key, value)
    for side in (left, right):
        if side is not None and side < 0:
            raise Decline(f"left is {left} and right {right}: each may be None, or an int from 0 on")
    if softcap is not None and not 0 <= softcap < math.inf:
        raise Decline(f"softcap is {softcap}: it may be None, or a finite number that is not negative")
    if sinks is not None:
        check_sinks(sinks, query, query.shape[-3])
    if attn_mask is not None:
        shape = _scores_shape(query, key)
        if attn_mask.dtype not in (torch.bool, query.dtype, torch.float32):
            raise Decline(f"attn_mask is {attn_mask.dtype}: it may be bool, {query.dtype}, as query is, or float32")
        if attn_mask.dim() > len(shape) or any(
            own not in (1, wanted) for own, wanted in zip(reversed(attn_mask.shape), reversed(shape), strict=False)
        ):
            raise Decline(f"attn_mask has the shape {tuple(attn_mask.shape)}: it must broadcast to {shape}")
        check_device("attn_mask", attn_mask, "query", query)


def _scores_shape(query: torch.Tensor, key: torch.Tensor) -> tuple[int, ...]:
    return (*query.shape[:-1], key.shape[-2])


def _check_results(
    grad: torch.Tensor, query: torch.Tensor, value: torch.Tensor, out: torch.Tensor, logsumexp: torch.Tensor
) -> None:
    """Decline results of the forward pass, and their gradient, that it would not return."""
    shape = (*query.shape[:-1], value.shape[-1])
    for name, tensor, wanted, dtype in (
        ("grad", grad, shape, query.dtype),
        ("out", out, shape, query.dtype),
        ("logsumexp", logsumexp, shape[:-1], torch.float32),
    ):
        check_shape(name, tensor, wanted, "that of the forward pass")
        if tensor.dtype is not dtype:
            raise Decline(f"{name} is {tensor.dtype}: it must be {dtype}")
        check_device(name, tensor, "query", query)


# ---- Engine's arguments ----------------------------------------------------------------------------------------------


def _batched(x: torch.Tensor) -> torch.Tensor:
    """View or copy (..., heads, rows, elements) as four dimensions whose last is contiguous."""
    x = x if x.dim() == 4 else x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def _batched_rows(x: torch.Tensor) -> torch.Tensor:
    """View or copy (..., heads, rows) as three dimensions."""
    return x if x.dim() == 3 else x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def _problem(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    left: int | None,
    right: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    scale: Any,
    attn_mask: torch.Tensor | None,
) -> Problem:
    """Return the engine's problem; sides that hide no key are left out."""
    _check(query, key, value, left, right, softcap, sinks, attn_mask)
    common_device((query, key, value), ())
    queries, keys = query.shape[-2], key.shape[-2]
    right = 0 if is_causal else right
    right = None if right is None or right >= queries else right
    left = None if left is None or left >= keys else left
    causal = left is not None or right is not None
    behind = queries if right is None else right
    bias = None
    if attn_mask is not None:
        bias = attn_mask.expand(_scores_shape(query, key))
        bias = bias if bias.dim() == 4 else bias.reshape(math.prod(bias.shape[:-3]), *bias.shape[-3:])
    query, key, value = map(_batched, (query, key, value))
    return Problem(
        query,
        key,
        value,
        bias,
        scale,
        causal,
        keys - queries + behind if causal else 0,
        precision_of(query.dtype),
        window=None if left is None else left + behind + 1,
        softcap=softcap or None,
        sinks=None if sinks is None else sinks.contiguous(),
    )


def _rows_before_heads(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Allocate (batch, heads, rows, elements) in the memory order (batch, rows, heads, elements)."""
    batch, heads, rows, size = shape
    return empty((batch, rows, heads, size), like.dtype, like.device).transpose(1, 2)


def _fake_rows_before_heads(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    *lead, heads, rows, size = shape
    return like.new_empty((*lead, rows, heads, size)).transpose(-3, -2)


def _with_leading(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """View the first dimension of x as the dimensions of `like`, (..., heads, rows, elements), in front of heads."""
    lead = like.shape[:-3]
    return x if len(lead) == 1 else x.view(*lead, *x.shape[1:])


# ---- Operators -------------------------------------------------------------------------------------------------------


def _fake(
    query,
    key,
    value,
    is_causal=False,
    left=None,
    right=None,
    softcap=None,
    sinks=None,
    scale=None,
    attn_mask=None,
):
    _check(query, key, value, left, right, softcap, sinks, attn_mask)
    out = _fake_rows_before_heads((*query.shape[:-1], value.shape[-1]), query)
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


def _save(ctx, inputs, output):
    query, key, value, *ctx.statics, sinks, ctx.scale, attn_mask = inputs
    if attn_mask is not None and attn_mask.requires_grad:
        raise Unsupported(name="tritonite::attention", reason="attn_mask has no gradient: detach it")
    out, logsumexp = output
    ctx.save_for_backward(query, key, value, out, logsumexp, sinks, attn_mask)
    ctx.mark_non_differentiable(logsumexp)


def _gradient(ctx, grad, grad_logsumexp):
    *tensors, sinks, attn_mask = ctx.saved_tensors
    by_query, by_key, by_value, by_sinks = torch.ops.tritonite.attention_backward(
        grad, *tensors, *ctx.statics, sinks, ctx.scale, attn_mask
    )
    return by_query, by_key, by_value, None, None, None, None, by_sinks, None, None


@library_operator(
    "attention(Tensor query, Tensor key, Tensor value, bool is_causal=False, int? left=None, int? right=None, "
    "float? softcap=None, Tensor? sinks=None, float? scale=None, Tensor? attn_mask=None) -> (Tensor, Tensor)",
    fake=_fake,
    accepts=SINGLE_FLOATS,
    save=_save,
    gradient=_gradient,
    leading=("query", "key", "value"),
    pin=("is_causal", "left", "right", "softcap"),
)
def attention_host(
    query,
    key,
    value,
    is_causal=False,
    left=None,
    right=None,
    softcap=None,
    sinks=None,
    scale=None,
    attn_mask=None,
):
    """Attention with windows, soft caps and sinks, and its rows' logsumexp: Dao 2023, Beltagy et al. 2020."""
    problem = _problem(query, key, value, is_causal, left, right, softcap, sinks, scale, attn_mask)
    out = _rows_before_heads((*problem.query.shape[:3], value.shape[-1]), query)
    logsumexp = empty(problem.query.shape[:3], torch.float32, query.device)
    if decodes(problem, logsumexp):
        decode(problem, out, logsumexp)
    else:
        attention_forward(problem, out, logsumexp)
    return _with_leading(out, query), _with_leading(logsumexp, query)


def _fake_backward(grad, query, key, value, out, logsumexp, *options):
    _, left, right, softcap, sinks, _, attn_mask = options
    _check(query, key, value, left, right, softcap, sinks, attn_mask)
    _check_results(grad, query, value, out, logsumexp)
    by_operands = [_fake_rows_before_heads(each.shape, each) for each in (query, key, value)]
    return (*by_operands, None if sinks is None else sinks.new_empty(sinks.shape))


@library_operator(
    "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
    "bool is_causal, int? left, int? right, float? softcap, Tensor? sinks, float? scale, Tensor? attn_mask) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_backward,
    accepts=SINGLE_FLOATS,
    pin=("is_causal", "left", "right", "softcap"),
)
def attention_backward_host(
    grad, query, key, value, out, logsumexp, is_causal, left, right, softcap, sinks, scale, attn_mask
):
    """Return attention's gradients by query, key, value and sinks, from logsumexp: Dao 2023. None without sinks."""
    problem = _problem(query, key, value, is_causal, left, right, softcap, sinks, scale, attn_mask)
    _check_results(grad, query, value, out, logsumexp)
    grads = tuple([_rows_before_heads(each.shape, each) for each in problem[:3]])
    partial = by_sinks = None
    if sinks is not None:
        partial = empty((*problem.query.shape[:2], problem.query_blocks), torch.float32, query.device)
    results = _batched(grad), _batched(out), _batched_rows(logsumexp)
    attention_backward(problem, *results, grads, grad_sinks=partial)
    if partial is not None:
        (by_sinks,) = reduced(_SUM, (partial,), (0, 2), False, (sinks.dtype,), (), torch.float32)
    by_operands = [_with_leading(each, own) for each, own in zip(grads, (query, key, value), strict=True)]
    return (*by_operands, by_sinks)
