"""Gated delta rule, linear attention whose state decays and is corrected: checks and declarations.

The kernels are `engine.delta_rule`'s. Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks: Improving Mamba2 with Delta
Rule".
"""

from __future__ import annotations

import math
from typing import Any

import torch

from tritonite.dtypes import SINGLE_FLOATS
from tritonite.engine.attention.problem import dot_precision
from tritonite.engine.delta_rule.backward import backward
from tritonite.engine.delta_rule.forward import chunked
from tritonite.engine.delta_rule.problem import LARGEST_KEY, Inputs, Problem
from tritonite.engine.delta_rule.recurrent import recurrent
from tritonite.engine.iteration import common_device
from tritonite.errors import Decline
from tritonite.fused.check import check_device, check_shape
from tritonite.ops.matmul import precision_of
from tritonite.registry import library_operator
from tritonite.runtime.contract import empty, zeros


def chunk_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    return_final_state: bool = False,
    normalize_qk: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gated delta rule's outputs and last state, computed in chunks of tokens for training and prefill.

    A head's state S, (key size, value size), starts as `initial_state` or zeros. Each token does

        S = exp(g) S;   S = S + k (beta (v - S^T k))^T;   out = scale S^T q

    Products of chunks are in query's dtype with float32 sums, and states are summed in float32. The backward pass
    recomputes the states; only the operands are saved for it. A value head i has the query and the key of head
    i // (heads / key heads).

    Args:
        query: (..., tokens, key heads, key size) of float16, bfloat16 or float32, of any strides; key size is 1 to 256.
        key: the same shape and dtype.
        value: (..., tokens, heads, value size) of query's dtype, where key heads divide heads.
        g: (..., tokens, heads) of float16, bfloat16 or float32, the finite logarithm of the decay, 0 or less.
        beta: the same shape as g, of float16, bfloat16 or float32: the rate of correction, usually 0 to 1.
        scale: factor of the outputs; None for 1 / sqrt(key size).
        initial_state: (..., heads, key size, value size) of float16, bfloat16 or float32, or None for zeros.
        return_final_state: whether to return the state behind the last token.
        normalize_qk: whether to divide each query and key by the square root of its sum of squares + 1e-6.

    Returns the outputs, contiguous, of value's shape and dtype, and the last state in float32, or None.

    Raises errors.Unsupported for other shapes or dtypes, and for tensors on several devices.

    Source: Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule".
    """
    results: tuple[torch.Tensor, torch.Tensor | None] = torch.ops.tritonite.chunk_gated_delta_rule(
        query, key, value, g, beta, initial_state, scale, return_final_state, normalize_qk
    )
    return results


def recurrent_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    return_final_state: bool = False,
    normalize_qk: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gated delta rule's outputs and last state, computed token by token in float32.

    The function, arguments, results and errors are those of `chunk_gated_delta_rule`, which is faster from a few dozen
    tokens on. Without gradients, g may be -inf here, a decay of 0. The gradient is computed in chunks.

    Source: Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule".
    """
    results: tuple[torch.Tensor, torch.Tensor | None] = torch.ops.tritonite.recurrent_gated_delta_rule(
        query, key, value, g, beta, initial_state, scale, return_final_state, normalize_qk
    )
    return results


def recurrent_gated_delta_rule_(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    *,
    scale: float | None = None,
    normalize_qk: bool = False,
) -> torch.Tensor:
    """Return the gated delta rule's outputs and update `state` in place, as decoding does with one token a call.

    The function and the arguments are those of `recurrent_gated_delta_rule`.

    Args:
        state: (..., heads, key size, value size) of float16, bfloat16 or float32, contiguous: the state before the
            first token, which the state behind the last token replaces.

    Returns the outputs, contiguous, of value's shape and dtype.

    Raises errors.Unsupported as `chunk_gated_delta_rule` does, for a state that is not contiguous, and, while gradients
    are recorded, for arguments that require one.

    Source: Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule".
    """
    result: torch.Tensor = torch.ops.tritonite.recurrent_gated_delta_rule_(
        query, key, value, g, beta, state, scale, normalize_qk
    )
    return result


# ---- Checks ----------------------------------------------------------------------------------------------------------


def _check_operand(name: str, tensor: torch.Tensor, query: torch.Tensor) -> None:
    if tensor.dtype not in SINGLE_FLOATS:
        raise Decline(f"{name} is {tensor.dtype}: it may be float16, bfloat16 or float32")
    check_device(name, tensor, "query", query)


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
    state_name: str = "initial_state",
) -> None:
    """Decline operands that the operators do not serve."""
    _check_operand("query", query, query)
    if query.dim() < 3 or not 0 < query.shape[-1] <= LARGEST_KEY:
        raise Decline(
            f"query has the shape {tuple(query.shape)}: it must be (..., tokens, key heads, key size) with a key size "
            f"of 1 to {LARGEST_KEY}"
        )
    check_shape("key", key, query.shape, "the shape of query")
    if value.dim() < 2 or (value.shape[-2] % query.shape[-2] if query.shape[-2] else value.shape[-2]):
        raise Decline(
            f"value has the shape {tuple(value.shape)}: it must be (..., tokens, heads, value size), where the "
            f"{query.shape[-2]} heads of query divide heads"
        )
    leading, heads, size = tuple(query.shape[:-2]), value.shape[-2], value.shape[-1]
    check_shape("value", value, (*leading, heads, size), "that of query except heads and size")
    for name, each in (("key", key), ("value", value)):
        if each.dtype is not query.dtype:
            raise Decline(f"{name} is {each.dtype} and query {query.dtype}: give both one dtype")
        check_device(name, each, "query", query)
    for name, each in (("g", g), ("beta", beta)):
        check_shape(name, each, (*leading, heads), "a number for each token and head")
        _check_operand(name, each, query)
    if state is not None:
        shape = (*leading[:-1], heads, query.shape[-1], size)
        check_shape(state_name, state, shape, "a key size x value size state for each head")
        _check_operand(state_name, state, query)


def _check_gradients(
    grad: torch.Tensor | None,
    grad_state: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
) -> None:
    _check(query, key, value, g, beta, state)
    if grad is not None:
        check_shape("grad", grad, value.shape, "the shape of value")
        if grad.dtype is not query.dtype:
            raise Decline(f"grad is {grad.dtype} and query {query.dtype}: give both one dtype")
        check_device("grad", grad, "query", query)
    if grad_state is not None:
        check_shape("grad_state", grad_state, _state_shape(query, value), "that of the last state")
        _check_operand("grad_state", grad_state, query)


def _state_shape(query: torch.Tensor, value: torch.Tensor) -> tuple[int, ...]:
    return (*value.shape[:-3], value.shape[-2], query.shape[-1], value.shape[-1])


# ---- Host functions --------------------------------------------------------------------------------------------------


def _flat(tensor: torch.Tensor, dims: int, dense: bool) -> torch.Tensor:
    """Return a tensor with its leading dimensions as one, before the last `dims`; a copy if no view has this shape.

    If `dense`, the last dimension is contiguous.
    """
    if dense and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        tensor = tensor.contiguous()
    own = tuple(tensor.shape[tensor.dim() - dims :])
    batch = math.prod(tensor.shape[: tensor.dim() - dims])
    try:
        return tensor.view(batch, *own)
    except RuntimeError:
        return tensor.contiguous().view(batch, *own)


def _problem(query, key, value, g, beta, state, scale, normalize_qk):
    common_device([each for each in (query, key, value, g, beta, state) if each is not None], ())
    inputs = Inputs(
        *(_flat(query, 3, True), _flat(key, 3, True), _flat(value, 3, True), _flat(g, 2, False), _flat(beta, 2, False)),
        None if state is None else _flat(state.contiguous(), 3, True),
    )
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return Problem(inputs, scale, normalize_qk, dot_precision(precision_of(query.dtype), query))


def _run(method, query, key, value, g, beta, state, scale, return_final_state, normalize_qk):
    """Return outputs and last states by `method`, `chunked` or `recurrent`."""
    problem = _problem(query, key, value, g, beta, state, scale, normalize_qk)
    out = empty(value.shape, value.dtype, value.device)
    shape = _state_shape(query, value)
    final = empty(shape, torch.float32, value.device) if return_final_state else None
    method(problem, _flat(out, 3, True), None if final is None else _flat(final, 3, True))
    return out, final


def _fake(
    query,
    key,
    value,
    g,
    beta,
    initial_state=None,
    scale=None,
    return_final_state=False,
    normalize_qk=False,
):
    _check(query, key, value, g, beta, initial_state)
    final = value.new_empty(_state_shape(query, value), dtype=torch.float32) if return_final_state else None
    return value.new_empty(value.shape), final


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:6])
    ctx.scale, _, ctx.normalize_qk = inputs[6:]
    ctx.set_materialize_grads(False)


def _gradient(ctx, grad, grad_state):
    if grad is None and grad_state is None:
        return (None,) * 9
    found = torch.ops.tritonite.gated_delta_rule_backward(
        grad, grad_state, *ctx.saved_tensors, ctx.scale, ctx.normalize_qk
    )
    return (*found, None, None, None)


_ARGUMENTS = (
    "(Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, Tensor? initial_state=None, float? scale=None, "
    "bool return_final_state=False, bool normalize_qk=False) -> (Tensor, Tensor)"
)
_OPERANDS = ("query", "key", "value", "g", "beta", "initial_state")


def _declare(name: str, method: Any, order: str) -> None:
    """Declare an operator that computes the gated delta rule by `method`, in an order named in its description."""

    def host(query, key, value, g, beta, initial_state=None, scale=None, return_final_state=False, normalize_qk=False):
        _check(query, key, value, g, beta, initial_state)
        return _run(method, query, key, value, g, beta, initial_state, scale, return_final_state, normalize_qk)

    host.__doc__ = f"Return the gated delta rule's outputs and last states, {order}: Yang et al. 2024."
    library_operator(
        f"{name}{_ARGUMENTS}",
        fake=_fake,
        accepts=SINGLE_FLOATS,
        save=_save,
        gradient=_gradient,
        leading=_OPERANDS,
        pin=("return_final_state", "normalize_qk"),
    )(host)


_declare("chunk_gated_delta_rule", chunked, "in chunks of tokens")
_declare("recurrent_gated_delta_rule", recurrent, "token by token")


def _check_in_place(query, key, value, g, beta, state):
    _check(query, key, value, g, beta, state, "state")
    if not state.is_contiguous():
        raise Decline("state is not contiguous: it is updated in place, so make it contiguous")


def _fake_in_place(query, key, value, g, beta, state, scale=None, normalize_qk=False):
    _check_in_place(query, key, value, g, beta, state)
    return value.new_empty(value.shape)


@library_operator(
    "recurrent_gated_delta_rule_(Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, Tensor(a!) state, "
    "float? scale=None, bool normalize_qk=False) -> Tensor",
    fake=_fake_in_place,
    accepts=SINGLE_FLOATS,
    pin=("normalize_qk",),
)
def recurrent_gated_delta_rule_in_place_host(query, key, value, g, beta, state, scale=None, normalize_qk=False):
    """Return the gated delta rule's outputs and update the states in place: Yang et al. 2024."""
    _check_in_place(query, key, value, g, beta, state)
    problem = _problem(query, key, value, g, beta, state, scale, normalize_qk)
    out = empty(value.shape, value.dtype, value.device)
    recurrent(problem, _flat(out, 3, True), problem.inputs.initial)
    return (out,)


def _fake_backward(grad, grad_state, query, key, value, g, beta, initial_state, scale, normalize_qk):
    _check_gradients(grad, grad_state, query, key, value, g, beta, initial_state)
    operands = (query, key, value, g, beta, initial_state)
    return tuple([None if each is None else each.new_empty(each.shape) for each in operands])


@library_operator(
    "gated_delta_rule_backward(Tensor? grad, Tensor? grad_state, Tensor query, Tensor key, Tensor value, Tensor g, "
    "Tensor beta, Tensor? initial_state, float? scale, bool normalize_qk)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_backward,
    accepts=SINGLE_FLOATS,
    leading=("grad", "grad_state", *_OPERANDS),
    pin=("normalize_qk",),
)
def gated_delta_rule_backward_host(grad, grad_state, query, key, value, g, beta, initial_state, scale, normalize_qk):
    """Return the gradients of the gated delta rule by its operands, None by no initial state: Yang et al. 2024."""
    _check_gradients(grad, grad_state, query, key, value, g, beta, initial_state)
    problem = _problem(query, key, value, g, beta, initial_state, scale, normalize_qk)
    # Zeros, where the last state alone has a gradient.
    grad = zeros(value.shape, value.dtype, value.device) if grad is None else grad
    by_final = None if grad_state is None else _flat(grad_state.contiguous(), 3, True)
    found = backward(problem, _flat(grad, 3, True), by_final)
    operands = (query, key, value, g, beta, initial_state)
    return [None if own is None else own.view(each.shape) for own, each in zip(found, operands, strict=True)]
