"""Causal depthwise convolution with a short kernel, and its update by one token for decoding.

Linear attention mixes neighbouring tokens of a channel with it. The kernels are `engine.short_convolution`'s.
"""

from __future__ import annotations

import math

import torch

from tritonite.dtypes import SINGLE_FLOATS
from tritonite.engine.iteration import common_device
from tritonite.engine.short_convolution.launch import LARGEST_WIDTH, Convolution, convolve, gradients, update
from tritonite.errors import Decline
from tritonite.fused.check import check_device, check_floats, check_shape, share_memory
from tritonite.registry import library_operator
from tritonite.runtime.contract import empty


def short_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    initial_state: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the causal depthwise convolution of x over its last dimension, with an activation.

    out[..., d, t] = f(bias[d] + sum over j of weight[d, j] x[..., d, t - width + 1 + j]), where x before the first
    token is `initial_state`, or 0. 16-bit floats are computed in float32 and rounded once. Neither pass copies x,
    whichever of its last two dimensions is contiguous.

    Args:
        x: (..., channels, tokens) of float16, bfloat16 or float32, of any strides.
        weight: (channels, width) of x's dtype or float32; width is 1 to 16.
        bias: (channels,) of x's dtype or float32, or None.
        activation: None, "silu" or "swish", which is another name for it.
        initial_state: (..., channels, width - 1) of x's dtype, the tokens before the first, or None for zeros.

    Returns a tensor of x's shape and dtype. Its channels are contiguous if x's are, otherwise its tokens.

    Raises errors.Unsupported for other shapes or dtypes, and for tensors on several devices.

    Source: Fu et al. 2023, "Hungry Hungry Hippos: Towards Language Modeling with State Space Models", its shift layer.
    """
    result: torch.Tensor = torch.ops.tritonite.short_convolution(x, weight, bias, activation, initial_state)
    return result


def short_convolution_update(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """Append a token to `state` in place, and return the causal depthwise convolution at this token.

    out[..., d] = f(bias[d] + sum over j of weight[d, j] s[..., d, j]), where s is the last `width` of the tokens of
    `state` and x. The state drops its first token, and keeps x as its last.

    Args:
        x: (..., channels) of float16, bfloat16 or float32, of any strides.
        state: (..., channels, length) of x's dtype, whose elements do not share memory; length is at least width - 1.
        weight: (channels, width) of x's dtype or float32; width is 1 to 16.
        bias: (channels,) of x's dtype or float32, or None.
        activation: None, "silu" or "swish", which is another name for it.

    Returns a contiguous tensor of x's shape and dtype.

    Raises errors.Unsupported for other shapes or dtypes, for tensors on several devices, for a state whose elements
    share memory, and, while gradients are recorded, for arguments that require one.

    Source: Fu et al. 2023, "Hungry Hungry Hippos: Towards Language Modeling with State Space Models", its shift layer.
    """
    result: torch.Tensor = torch.ops.tritonite.short_convolution_update(x, state, weight, bias, activation)
    return result


def _check_filter(
    x: torch.Tensor, channels: int, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> None:
    check_floats(x=x)
    if x.dtype is torch.float64:
        raise Decline("x is torch.float64: it may be float16, bfloat16 or float32")
    if weight.dim() != 2 or not 1 <= weight.shape[1] <= LARGEST_WIDTH:
        raise Decline(
            f"weight has the shape {tuple(weight.shape)}: it must be (channels, width), with a width of 1 to "
            f"{LARGEST_WIDTH}"
        )
    check_shape("weight", weight, (channels, weight.shape[1]), "a row for each channel of x")
    for name, each in (("weight", weight), ("bias", bias)):
        if each is not None:
            if each.dtype not in (x.dtype, torch.float32):
                raise Decline(f"{name} is {each.dtype}: it may be {x.dtype}, as x is, or torch.float32")
            check_device(name, each, "x", x)
    if bias is not None:
        check_shape("bias", bias, (channels,), "an element for each channel of x")
    if activation not in (None, "silu", "swish"):
        raise Decline(f'activation is {activation!r}: it may be None, "silu" or "swish"')


def _check_state(name: str, state: torch.Tensor, x: torch.Tensor, shape: tuple[int, ...]) -> None:
    check_shape(name, state, shape, "that of x with the tokens before it")
    if state.dtype is not x.dtype:
        raise Decline(f"{name} is {state.dtype} and x {x.dtype}: give both one dtype")
    check_device(name, state, "x", x)


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    initial_state: torch.Tensor | None,
) -> None:
    """Decline arguments of `short_convolution` that are not served."""
    if x.dim() < 2:
        raise Decline(f"x has the shape {tuple(x.shape)}: it must be (..., channels, tokens)")
    _check_filter(x, x.shape[-2], weight, bias, activation)
    if initial_state is not None:
        _check_state("initial_state", initial_state, x, (*x.shape[:-1], weight.shape[1] - 1))


def _channels_first(x: torch.Tensor) -> bool:
    """Return whether tokens rather than channels are contiguous in memory, as in a contiguous tensor."""
    return x.stride(-1) == 1 or x.stride(-2) != 1 or x.shape[-2] == 1


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return (..., channels, tokens) with its leading dimensions as one; a copy if no view has this shape."""
    batch = math.prod(tensor.shape[:-2])
    try:
        return tensor.view(batch, *tensor.shape[-2:])
    except RuntimeError:
        return tensor.contiguous().view(batch, *tensor.shape[-2:])


def _convolution(x, weight, bias, activation, initial_state):
    common_device([each for each in (x, weight, bias, initial_state) if each is not None], ())
    state = None if initial_state is None else _flat(initial_state)
    return Convolution(_flat(x), weight, bias, state, activation is not None)


def _like(x, make):
    """Return an empty tensor of x's shape by `make`, with contiguous channels if x has them."""
    if _channels_first(x):
        return make(x.shape)
    return make((*x.shape[:-2], x.shape[-1], x.shape[-2])).transpose(-1, -2)


def _fake(x, weight, bias=None, activation=None, initial_state=None):
    _check(x, weight, bias, activation, initial_state)
    return _like(x, x.new_empty)


def _save(ctx, inputs, output):
    x, weight, bias, activation, state = [*inputs, None, None, None][:5]
    ctx.activation = activation
    ctx.save_for_backward(x, weight, bias, state)


def _gradient(ctx, grad):
    x, weight, bias, state = ctx.saved_tensors
    by_x, by_weight, by_bias, by_state = torch.ops.tritonite.short_convolution_backward(
        grad, x, weight, bias, ctx.activation, state
    )
    return by_x, by_weight, by_bias, None, by_state


@library_operator(
    "short_convolution(Tensor x, Tensor weight, Tensor? bias=None, str? activation=None, Tensor? initial_state=None)"
    " -> Tensor",
    fake=_fake,
    accepts=SINGLE_FLOATS,
    save=_save,
    gradient=_gradient,
    leading=("x", "initial_state"),
)
def short_convolution_host(x, weight, bias=None, activation=None, initial_state=None):
    """Return the causal depthwise convolution of x over its last dimension, with an activation: Fu et al. 2023."""
    _check(x, weight, bias, activation, initial_state)
    out = _like(x, lambda shape: empty(shape, x.dtype, x.device))
    convolve(_convolution(x, weight, bias, activation, initial_state), _flat(out))
    return (out,)


def _check_backward(grad, x, weight, bias, activation, initial_state):
    _check(x, weight, bias, activation, initial_state)
    check_shape("grad", grad, x.shape, "the shape of x")
    if grad.dtype is not x.dtype:
        raise Decline(f"grad is {grad.dtype} and x {x.dtype}: give both one dtype")
    check_device("grad", grad, "x", x)


def _fake_backward(grad, x, weight, bias, activation, initial_state):
    _check_backward(grad, x, weight, bias, activation, initial_state)
    parameters = [None if each is None else each.new_empty(each.shape) for each in (weight, bias, initial_state)]
    return _like(x, x.new_empty), *parameters


@library_operator(
    "short_convolution_backward(Tensor grad, Tensor x, Tensor weight, Tensor? bias, str? activation, "
    "Tensor? initial_state) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_backward,
    accepts=SINGLE_FLOATS,
)
def short_convolution_backward_host(grad, x, weight, bias, activation, initial_state):
    """Return the gradients of short_convolution by x, weight, bias and initial state; None for those not given."""
    _check_backward(grad, x, weight, bias, activation, initial_state)
    by_x = _like(x, lambda shape: empty(shape, x.dtype, x.device))
    by_weight, by_bias, by_state = [
        None if each is None else empty(each.shape, each.dtype, each.device) for each in (weight, bias, initial_state)
    ]
    work = _convolution(x, weight, bias, activation, initial_state)
    gradients(work, _flat(grad), _flat(by_x), by_weight, by_bias, None if by_state is None else _flat(by_state))
    return by_x, by_weight, by_bias, by_state


def _check_update(x, state, weight, bias, activation):
    if not x.dim():
        raise Decline("x has no dimension: it must be (..., channels)")
    _check_filter(x, x.shape[-1], weight, bias, activation)
    length = state.shape[-1] if state.dim() else 0
    _check_state("state", state, x, (*x.shape, length))
    if length < weight.shape[1] - 1:
        raise Decline(f"state has {length} tokens: a width of {weight.shape[1]} needs {weight.shape[1] - 1}")


def _fake_update(x, state, weight, bias=None, activation=None):
    _check_update(x, state, weight, bias, activation)
    return x.new_empty(x.shape)


@library_operator(
    "short_convolution_update(Tensor x, Tensor(a!) state, Tensor weight, Tensor? bias=None, str? activation=None)"
    " -> Tensor",
    fake=_fake_update,
    accepts=SINGLE_FLOATS,
)
def short_convolution_update_host(x, state, weight, bias=None, activation=None):
    """Append a token to the states in place, and return the causal depthwise convolution at it: Fu et al. 2023."""
    _check_update(x, state, weight, bias, activation)
    common_device([each for each in (x, weight, bias) if each is not None], (state,))
    if share_memory(state):
        raise Decline("state has elements that share memory: make it contiguous")
    batch, channels = math.prod(x.shape[:-1]), x.shape[-1]
    try:
        states = state.view(batch, *state.shape[-2:])
    except RuntimeError:
        raise Decline(f"state has the strides {state.stride()}: its leading dimensions must be one by a view") from None
    out = empty(x.shape, x.dtype, x.device)
    work = Convolution(_flat(x.unsqueeze(-1)), weight, bias, states, activation is not None)
    update(work, out.view(batch, channels))
    return (out,)
