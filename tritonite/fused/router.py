"""Routers of mixtures of experts: the choice of experts for each token, and the losses that train a router."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from tritonite.dtypes import FLOATS, opmath
from tritonite.engine.iteration import common_device
from tritonite.engine.moe import balance, routing
from tritonite.engine.moe.routing import Routing
from tritonite.errors import Decline
from tritonite.fused.check import check_device, check_floats, check_shape
from tritonite.registry import library_operator
from tritonite.runtime.contract import empty

# A program holds the scores of a token in registers.
_MOST_EXPERTS = 4096
_SCORINGS = ("softmax", "sigmoid")


def topk_softmax(logits: torch.Tensor, k: int, *, renormalize: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the k experts with the largest softmax probabilities for each token, in one launch.

    The weights are the probabilities, divided by their sum if `renormalize`. They are computed in float32, or float64
    for float64 logits. Gradients pass through the weights; the choice has none.

    Args:
        logits: (..., E) of float16, bfloat16, float32 or float64, of any strides, with E at most 4096.
        k: the number of experts of a token.
        renormalize: whether the weights of a token add up to 1.

    Returns the weights, (..., k) of float32 or float64, and the numbers of the experts, (..., k) of int32, in
    descending order of logits; of equal logits the one with the lower number is first, and nan counts as the largest.

    Raises errors.Unsupported for another number of dimensions, experts or k.

    Source: Shazeer et al. 2017, "Outrageously Large Neural Networks"; Jiang et al. 2024, "Mixtral of Experts".
    """
    return route(logits, k, renormalize=renormalize)


def route(
    logits: torch.Tensor,
    k: int,
    *,
    scoring: str = "softmax",
    bias: torch.Tensor | None = None,
    num_groups: int | None = None,
    topk_groups: int | None = None,
    renormalize: bool = True,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose k experts for each token by scores, biased and by group if asked for, in one launch.

    The scores s are the softmax or the sigmoid of the logits. Experts are chosen by s + bias. With groups, each of
    E / num_groups consecutive experts, only experts of the `topk_groups` groups with the largest scores are chosen; a
    group's score is the sum of its two largest s + bias. The weights are scale * s, without bias, or if `renormalize`
    scale * s / (sum of the chosen s + 1e-20). Gradients by the logits pass through the weights; the choice and the bias
    have none.

    Args:
        logits: (..., E) of float16, bfloat16, float32 or float64, of any strides, with E at most 4096.
        k: the number of experts of a token.
        scoring: "softmax" or "sigmoid".
        bias: (E,) of any floating-point dtype, or None.
        num_groups: a divisor of E, or None for a choice among all experts.
        topk_groups: the number of groups that experts are chosen from; given with num_groups.
        renormalize: whether to divide the weights of a token by their sum.
        scale: a factor of all weights.

    Returns the weights, (..., k) of float32, or float64 for float64 logits, and the numbers of the experts, (..., k) of
    int32, in descending order of s + bias; of equal ones the expert with the lower number is first, and nan counts as
    the largest.

    Raises errors.Unsupported for other shapes, dtypes or options, and for tensors on several devices.

    Source: Jiang et al. 2024, "Mixtral of Experts"; DeepSeek-AI 2024, "DeepSeek-V3 Technical Report".
    """
    options = scoring, bias, num_groups, topk_groups, renormalize, scale
    chosen: tuple[torch.Tensor, torch.Tensor] = torch.ops.tritonite.route(logits, k, *options)
    return chosen


def load_balancing_loss(logits: torch.Tensor, experts: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return the auxiliary loss that balances the load of experts: E * sum over experts of f P.

    f is the number of times that tokens chose the expert, and P the sum of the expert's softmax probabilities, each
    divided by the number of tokens. As in transformers' `load_balancing_loss_func`, f of all experts adds up to k. The
    loss of several layers is that of their logits and experts stacked. Gradients by the logits pass through P.

    Args:
        logits: (..., E) of float16, bfloat16, float32 or float64, of any strides, with E at most 4096.
        experts: (..., k) of int32 or int64, the experts chosen for each token.
        mask: None, or (...) of bool or integers; tokens with a mask of 0 do not count.

    Returns a tensor of no dimensions, of float32, or float64 for float64 logits. It is nan if no token counts.

    Raises errors.Unsupported for other shapes or dtypes, and for tensors on several devices.

    Source: Fedus, Zoph, Shazeer 2021, "Switch Transformers".
    """
    loss: torch.Tensor = torch.ops.tritonite.load_balancing_loss(logits, experts, mask)[0]
    return loss


def router_z_loss(logits: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return the router's z-loss: the mean over tokens of the squared logsumexp of their logits.

    Args:
        logits: (..., E) of float16, bfloat16, float32 or float64, of any strides, with E at most 4096.
        mask: None, or (...) of bool or integers; tokens with a mask of 0 do not count.

    Returns a tensor of no dimensions, of float32, or float64 for float64 logits. It is nan if no token counts.

    Raises errors.Unsupported for other shapes or dtypes, and for tensors on several devices.

    Source: Zoph et al. 2022, "ST-MoE: Designing Stable and Transferable Sparse Expert Models".
    """
    loss: torch.Tensor = torch.ops.tritonite.load_balancing_loss(logits, None, mask)[0]
    return loss


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor (..., N) as a matrix of rows, copied if one stride does not lead from row to row."""
    steps = [(size, step) for size, step in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if size != 1]
    merges = all(outer[1] == inner[0] * inner[1] for outer, inner in itertools.pairwise(steps))
    whole = tensor if merges or not tensor.numel() else tensor.contiguous()
    return whole.view(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def check_ids(name: str, tensor: torch.Tensor, shape: Sequence[int], whose: str) -> None:
    """Decline ids of experts that are not int32 or int64, or whose shape is not `shape` but for the last dimension."""
    if tensor.dtype not in (torch.int32, torch.int64):
        raise Decline(f"{name} is {tensor.dtype}: it may be torch.int32 or torch.int64")
    if tensor.dim() != len(shape) + 1 or tuple(tensor.shape[:-1]) != tuple(shape):
        raise Decline(f"{name} has the shape {tuple(tensor.shape)}: it must be {(*shape, 'k')}, {whose}")


def _check_logits(logits: torch.Tensor) -> None:
    check_floats(logits=logits)
    if not logits.dim() or not 1 <= logits.shape[-1] <= _MOST_EXPERTS:
        raise Decline(f"logits has the shape {tuple(logits.shape)}: it must be (..., experts), 1 to {_MOST_EXPERTS}")


def _check_route(logits, k, scoring, bias, num_groups, topk_groups):
    _check_logits(logits)
    experts = logits.shape[-1]
    if scoring not in _SCORINGS:
        raise Decline(f'scoring is {scoring!r}: it may be "softmax" or "sigmoid"')
    if bias is not None:
        check_floats(bias=bias)
        check_shape("bias", bias, (experts,), "that of logits' last dimension")
        check_device("bias", bias, "logits", logits)
    if (num_groups is None) != (topk_groups is None):
        raise Decline(f"num_groups is {num_groups} and topk_groups {topk_groups}: give both or neither")
    groups, chosen = (1, 1) if num_groups is None else (num_groups, topk_groups)
    if groups < 1 or experts % groups:
        raise Decline(f"num_groups is {groups}: it must divide the {experts} experts")
    if not 1 <= chosen <= groups:
        raise Decline(f"topk_groups is {chosen}: it may be 1 to {groups}, the number of groups")
    if not 1 <= k <= chosen * (experts // groups):
        raise Decline(f"k is {k}: it may be 1 to {chosen * (experts // groups)}, the number of experts to choose from")


def _fake_route(
    logits, k, scoring="softmax", bias=None, num_groups=None, topk_groups=None, renormalize=True, scale=1.0
):
    _check_route(logits, k, scoring, bias, num_groups, topk_groups)
    shape = (*logits.shape[:-1], k)
    return logits.new_empty(shape, dtype=opmath(logits.dtype)), logits.new_empty(shape, dtype=torch.int32)


def _save_route(ctx, inputs, output):
    logits, _, scoring, _, _, _, renormalize, scale = inputs
    ctx.save_for_backward(logits, output[1])
    ctx.options = scoring, renormalize, scale
    ctx.mark_non_differentiable(output[1])


def _route_gradient(ctx, grad, grad_experts):
    by_logits = torch.ops.tritonite.route_backward(grad, *ctx.saved_tensors, *ctx.options)
    return by_logits, *(None,) * 7


@library_operator(
    'route(Tensor logits, int k, str scoring="softmax", Tensor? bias=None, int? num_groups=None,'
    " int? topk_groups=None, bool renormalize=True, float scale=1.0) -> (Tensor, Tensor)",
    fake=_fake_route,
    accepts=FLOATS,
    save=_save_route,
    gradient=_route_gradient,
    leading=("logits",),
    pin=("k", "num_groups", "topk_groups", "renormalize"),
)
def route_host(logits, k, scoring="softmax", bias=None, num_groups=None, topk_groups=None, renormalize=True, scale=1.0):
    """Return the weights and numbers of the experts chosen for each token: DeepSeek-AI 2024, Jiang et al. 2024."""
    _check_route(logits, k, scoring, bias, num_groups, topk_groups)
    common_device((logits,) if bias is None else (logits, bias), ())
    shape = (*logits.shape[:-1], k)
    weights = empty(shape, opmath(logits.dtype), logits.device)
    chosen = empty(shape, torch.int32, logits.device)
    options = Routing(k, scoring == "sigmoid", num_groups or 1, topk_groups or 1, renormalize, scale)
    routing.route(as_rows(logits), bias, options, weights, chosen)
    return weights, chosen


def _check_route_backward(grad, logits, experts, scoring):
    _check_logits(logits)
    check_ids("experts", experts, logits.shape[:-1], "the tokens of logits")
    check_shape("grad", grad, experts.shape, "that of experts")
    check_floats(grad=grad)
    if not experts.shape[-1]:
        raise Decline("experts has no expert for a token: give at least one")
    if scoring not in _SCORINGS:
        raise Decline(f'scoring is {scoring!r}: it may be "softmax" or "sigmoid"')
    for name, each in (("grad", grad), ("experts", experts)):
        check_device(name, each, "logits", logits)


def _fake_route_backward(grad, logits, experts, scoring, renormalize, scale):
    _check_route_backward(grad, logits, experts, scoring)
    return logits.new_empty(logits.shape)


@library_operator(
    "route_backward(Tensor grad, Tensor logits, Tensor experts, str scoring, bool renormalize, float scale) -> Tensor",
    fake=_fake_route_backward,
    accepts=FLOATS,
    leading=("grad", "logits", "experts"),
    pin=("renormalize",),
)
def route_backward_host(grad, logits, experts, scoring, renormalize, scale):
    """Return the gradient of route by the logits, given that by the weights."""
    _check_route_backward(grad, logits, experts, scoring)
    common_device((grad, logits, experts), ())
    by_logits = empty(logits.shape, logits.dtype, logits.device)
    options = Routing(experts.shape[-1], scoring == "sigmoid", renormalize=renormalize, scale=scale)
    routing.route_backward(as_rows(grad), as_rows(logits), experts.contiguous(), options, by_logits)
    return (by_logits,)


def _check_balance(logits, experts, mask):
    _check_logits(logits)
    if experts is not None:
        check_ids("experts", experts, logits.shape[:-1], "the tokens of logits")
        check_device("experts", experts, "logits", logits)
        if not experts.shape[-1]:
            raise Decline("experts has no expert for a token: give at least one")
    if mask is not None:
        check_shape("mask", mask, logits.shape[:-1], "that of logits without its last dimension")
        check_device("mask", mask, "logits", logits)
        if mask.dtype not in (torch.bool, torch.int32, torch.int64):
            raise Decline(f"mask is {mask.dtype}: it may be torch.bool, torch.int32 or torch.int64")


def _fake_balance(logits, experts=None, mask=None):
    _check_balance(logits, experts, mask)
    dtype = opmath(logits.dtype)
    return logits.new_empty((), dtype=dtype), logits.new_empty((logits.shape[-1],), dtype=dtype)


def _save_balance(ctx, inputs, output):
    logits, experts, mask = inputs
    ctx.save_for_backward(output[1], logits, mask)
    ctx.k = 0 if experts is None else experts.shape[-1]
    ctx.mark_non_differentiable(output[1])


def _balance_gradient(ctx, grad, grad_factors):
    return torch.ops.tritonite.load_balancing_loss_backward(grad, *ctx.saved_tensors, ctx.k), None, None


@library_operator(
    "load_balancing_loss(Tensor logits, Tensor? experts=None, Tensor? mask=None) -> (Tensor, Tensor)",
    fake=_fake_balance,
    accepts=FLOATS,
    save=_save_balance,
    gradient=_balance_gradient,
)
def load_balancing_loss_host(logits, experts=None, mask=None):
    """Return the load-balancing loss, or without experts the z-loss, and factors of its gradient: Fedus et al. 2021."""
    _check_balance(logits, experts, mask)
    common_device([each for each in (logits, experts, mask) if each is not None], ())
    loss = empty((), opmath(logits.dtype), logits.device)
    chosen = None if experts is None else as_rows(experts.contiguous())
    return loss, balance.loss_of_load(as_rows(logits), chosen, None if mask is None else mask.contiguous(), loss)


def _fake_balance_backward(grad, factors, logits, mask, k):
    _check_balance(logits, None, mask)
    check_shape("factors", factors, (logits.shape[-1],), "that of logits' last dimension")
    check_shape("grad", grad, (), "that of the loss")
    return logits.new_empty(logits.shape)


@library_operator(
    "load_balancing_loss_backward(Tensor grad, Tensor factors, Tensor logits, Tensor? mask, int k) -> Tensor",
    fake=_fake_balance_backward,
    accepts=FLOATS,
    pin=("k",),
)
def load_balancing_loss_backward_host(grad, factors, logits, mask, k):
    """Return the gradient of load_balancing_loss by the logits."""
    _check_balance(logits, None, mask)
    check_shape("factors", factors, (logits.shape[-1],), "that of logits' last dimension")
    check_shape("grad", grad, (), "that of the loss")
    common_device((grad, factors, logits), ())
    by_logits = empty(logits.shape, logits.dtype, logits.device)
    own = None if mask is None else mask.contiguous()
    balance.loss_of_load_backward(grad, factors.contiguous(), as_rows(logits), own, k, by_logits)
    return (by_logits,)
