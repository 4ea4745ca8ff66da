"""ATen's fused optimisers: one update of all parameters by Adam, AdamW, SGD or Adagrad.

A formula is the update of one element, as in the documentation of torch.optim. It computes in float32, or in float64
for float64 parameters. Numbers and step counts arrive in float64. What is the same for all elements of a parameter is
computed on one element, so that a thread computes it once for a block.

A formula returns the new parameter, the new state and, with a `grad_scale`, the unscaled gradient. If `found_inf` is 1,
all of these are unchanged. Absent arguments are None.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.dtypes import FLOATS, Promotion
from tritonite.engine.iteration import is_dense, same_strides
from tritonite.engine.lists.elementwise import Elements, apply
from tritonite.engine.lists.pairs import move_each
from tritonite.engine.pointwise.declare import Pointwise
from tritonite.errors import Decline
from tritonite.language import libdevice
from tritonite.language.math import divide
from tritonite.registry import operator
from tritonite.runtime import contract
from tritonite.runtime.contract import empty_strided
from tritonite.runtime.symbols import Limits

_BETAS = Limits(low=0, high=1, largest=1.0, finite=True, least=0.0)
_ZERO = Limits(low=0, high=0, largest=0.0, finite=True)
_POSITIVE = Limits(low=1, high=2**63 - 1, largest=1.7976931348623157e308, finite=True, least=5e-324)


@triton.jit
def unscaled(grad, grad_scale):
    """Return the gradient without the factor of the loss."""
    if grad_scale is not None:
        grad = divide(grad, grad_scale.to(grad.dtype))
    return grad


@triton.jit
def unless_found(found_inf, new, old):
    """Return `new`, or `old` if `found_inf` is 1."""
    if found_inf is not None:
        new = tl.where(found_inf == 1.0, old, new)
    return new


@triton.jit
def with_decay(grad, param, weight_decay):
    """Return grad + weight_decay * param. A weight decay of 0 reads no infinite parameter."""
    return tl.where(weight_decay != 0.0, grad + weight_decay.to(param.dtype) * param, grad)


@triton.jit
def bias_correction(beta, step, dtype: tl.constexpr):
    """Return 1 - beta**step for beta in [0, 1], with the relative accuracy of `dtype` also for a beta near 1."""
    exponent = step.to(dtype) * libdevice.log1p((beta - 1.0).to(dtype))
    return 0.0 - libdevice.expm1(exponent)


@triton.jit
def adam(
    param,
    grad,
    exp_avg,
    exp_avg_sq,
    max_exp_avg_sq,
    step,
    lr,
    beta1,
    beta2,
    weight_decay,
    eps,
    grad_scale,
    found_inf,
    maximize,
    decoupled,
):
    """Adam (Kingma and Ba 2015), AMSGrad (Reddi et al. 2018); with `decoupled` AdamW (Loshchilov and Hutter 2019).

    With `max_exp_avg_sq` the update is AMSGrad's, which divides by the largest second moment so far.
    """
    dtype: tl.constexpr = param.dtype
    unscaled_grad = unscaled(grad, grad_scale)
    g = -unscaled_grad if maximize else unscaled_grad
    decayed = param
    if decoupled:
        decay = (lr * weight_decay).to(dtype)
        decayed = tl.where(weight_decay != 0.0, param - decay * param, param)
    else:
        g = with_decay(g, param, weight_decay)
    mean = beta1.to(dtype) * exp_avg + (1.0 - beta1).to(dtype) * g
    square = beta2.to(dtype) * exp_avg_sq + (1.0 - beta2).to(dtype) * g * g
    step_size = lr.to(dtype) / bias_correction(beta1, step, dtype)
    scale = 1.0 / tl.sqrt(bias_correction(beta2, step, dtype))
    largest = square
    if max_exp_avg_sq is not None:
        # As std::max: a nan in the new moment is ignored.
        largest = tl.where(max_exp_avg_sq < square, square, max_exp_avg_sq)
    denominator = tl.sqrt(largest) * scale + eps.to(dtype)
    new = unless_found(found_inf, decayed - step_size * mean / denominator, param)
    results = (new, unless_found(found_inf, mean, exp_avg), unless_found(found_inf, square, exp_avg_sq))
    if max_exp_avg_sq is not None:
        results = results + (unless_found(found_inf, largest, max_exp_avg_sq),)
    if grad_scale is not None:
        results = results + (unless_found(found_inf, unscaled_grad, grad),)
    return results


@triton.jit
def sgd(
    param,
    grad,
    momentum_buffer,
    lr,
    momentum,
    dampening,
    weight_decay,
    grad_scale,
    found_inf,
    nesterov,
    maximize,
    is_first_step,
):
    """Stochastic gradient descent, with momentum or Nesterov's momentum (Sutskever et al. 2013).

    The buffer of a first step is written without being read.
    """
    dtype: tl.constexpr = param.dtype
    unscaled_grad = unscaled(grad, grad_scale)
    update = with_decay(-unscaled_grad if maximize else unscaled_grad, param, weight_decay)
    buffer = update
    if momentum_buffer is not None:
        if not is_first_step:
            buffer = momentum.to(dtype) * momentum_buffer + (1.0 - dampening).to(dtype) * update
        update = update + momentum.to(dtype) * buffer if nesterov else buffer
    results = unless_found(found_inf, param - lr.to(dtype) * update, param)
    if momentum_buffer is not None:
        results = (results, unless_found(found_inf, buffer, momentum_buffer))
        if grad_scale is not None:
            results = results + (unless_found(found_inf, unscaled_grad, grad),)
    elif grad_scale is not None:
        results = (results, unless_found(found_inf, unscaled_grad, grad))
    return results


@triton.jit
def adagrad(param, grad, state_sum, step, lr, lr_decay, weight_decay, eps, grad_scale, found_inf, maximize):
    """Adagrad (Duchi et al. 2011), with a learning rate that decays with the number of steps."""
    dtype: tl.constexpr = param.dtype
    unscaled_grad = unscaled(grad, grad_scale)
    g = with_decay(-unscaled_grad if maximize else unscaled_grad, param, weight_decay)
    total = state_sum + g * g
    rate = lr.to(dtype) / (1.0 + (step - 1.0).to(dtype) * lr_decay.to(dtype))
    new = param - rate * g / (tl.sqrt(total) + eps.to(dtype))
    results = (unless_found(found_inf, new, param), unless_found(found_inf, total, state_sum))
    if grad_scale is not None:
        results = results + (unless_found(found_inf, unscaled_grad, grad),)
    return results


# The parameters of formulas that have a value for each element, and those that are compile-time constants.
_ELEMENTS = frozenset(
    ("param", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "state_sum"),
)
_STATIC = frozenset(("maximize", "decoupled", "nesterov", "is_first_step"))


@functools.cache
def kernel(formula: Any, results: tuple[str, ...]) -> Pointwise:
    """Return the kernel that stores the first results of a formula, which have the dtypes of these parameters."""
    names = formula.arg_names
    roles = {name: "own" if name in _ELEMENTS else "static" if name in _STATIC else "exact" for name in names}
    return Pointwise(
        formula.fn.__name__,
        formula,
        roles,
        accepts=FLOATS,
        output_dtypes=(None,) * len(results),
        methods=tuple([((names.index(name),), Promotion.DEFAULT) for name in results]),
        cpu_numbers=True,
    )


Lists = Sequence[Sequence[torch.Tensor]]


def _update(
    formula: Any, lists: dict[str, Sequence[torch.Tensor]], others: dict[str, Any], outs: Lists, inplace: bool
) -> Lists:
    """Run a formula over lists of tensors, and return a list for each list of `lists`, or none if outputs are given.

    Args:
        lists: the parameters, the state, and last the gradients, by the formula's parameters. The formula's results
            have this order.
        others: the formula's other parameters. Step counts are `Elements`.
        outs: the outputs of the out= form, which has new parameters alone. In place, the parameters.
        inplace: whether parameters and state are updated, and with a `grad_scale` the gradients.
    """
    _check(lists, others)
    values = [lists[name] if name in lists else others.get(name) for name in formula.arg_names]
    scaled = others["grad_scale"] is not None
    names = tuple(lists) if scaled else tuple(lists)[:-1]
    if inplace:
        outs = [lists[name] for name in names]
    elif outs:
        outs = [*outs, *[list(map(_empty_like, lists[name])) for name in names[1:]]]
    results: list[Any] = apply(kernel(formula, names), values, outs)
    if outs:
        return ()
    return results if scaled else [*results, _copies(lists["grad"])]


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    return empty_strided(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of dense tensors, made by as few launches as their layouts allow."""
    copies = list(map(_empty_like, tensors))
    move_each(tensors, copies)
    return copies


def _check(lists: dict[str, Sequence[torch.Tensor]], others: dict[str, Any]) -> None:
    """Decline tensors that ATen's kernels refuse or read as another dtype, and a parameter with two states in one."""
    first = lists["param"]
    lengths = [len(own) for own in (*lists.values(), others.get("step", first))]
    if len(set(lengths)) != 1 or not first:
        raise Decline(f"lists of {', '.join(map(str, lengths))} tensors")
    dtype, device = first[0].dtype, first[0].device
    for row in zip(*lists.values(), strict=True):
        param = row[0]
        for x in row:
            if x.layout is not torch.strided or x.dtype is not dtype or x.device != device:
                raise Decline(f"a tensor of {x.dtype} on {x.device}, where the first is {dtype} on {device}")
            if x.shape != param.shape or not same_strides(x.shape, x.stride(), param.stride()):
                raise Decline(f"tensors of shapes {tuple(param.shape)} and {tuple(x.shape)}, or of different strides")
        if param.numel() and not is_dense(param.shape, param.stride()):
            raise Decline(f"a parameter of strides {param.stride()}, which is not dense")
        if param.numel() and len({x.data_ptr() for x in row}) < len(row):
            raise Decline("a parameter that shares memory with its gradient or state")
    single = [("step", step) for step in others.get("step", ())]
    single += [(name, others[name]) for name in ("grad_scale", "found_inf") if others[name] is not None]
    for name, x in single:
        if x.dtype is not torch.float32 or x.numel() != 1 or x.device != device:
            raise Decline(f"{name} of {x.numel()} elements of {x.dtype} on {x.device}; one of float32 is served")
    lr = others["lr"]
    if isinstance(lr, torch.Tensor):
        on_host = lr.device.type == "cpu"
        # A tensor on the host counts as a number if it has no dimensions; ATen reads any other one as float32.
        if lr.numel() != 1 or (lr.device != device and (lr.dim() or not on_host)):
            raise Decline(f"lr of {lr.numel()} elements on {lr.device}; one on {device} is served")
        if (lr.dtype not in FLOATS and lr.device == device) or (not on_host and lr.dtype is not torch.float32):
            raise Decline(f"lr of {lr.dtype}; torch.float32 is served")


def _scalar(value: Any) -> Any:
    """Return a tensor of one element on the device in use without dimensions, or another value unchanged."""
    if not isinstance(value, torch.Tensor) or not value.dim() or value.numel() != 1:
        return value
    return value.view(()) if value.device.type == devices.current.type else value


def _steps(state_steps: Sequence[torch.Tensor]) -> Elements:
    return Elements(map(_scalar, state_steps))


def _declare_adam(name: str, decoupled: bool, inplace: bool) -> None:
    """Declare Adam, or `decoupled` AdamW: the in-place overloads, or the functional ones with out=."""

    @operator(name, kernels=(kernel(adam, ("param", "exp_avg", "exp_avg_sq")),))
    def update(
        self: Any,
        grads: Any,
        exp_avgs: Any,
        exp_avg_sqs: Any,
        max_exp_avg_sqs: Any,
        state_steps: Any,
        lr: Any,
        beta1: Any,
        beta2: Any,
        weight_decay: Any,
        eps: Any,
        amsgrad: bool,
        maximize: bool,
        grad_scale: Any,
        found_inf: Any,
        *,
        outs: Any,
    ) -> Any:
        contract.limit(beta1, _BETAS)
        contract.limit(beta2, _BETAS)
        if not amsgrad and max_exp_avg_sqs:
            raise Decline("max_exp_avg_sqs without amsgrad")
        lists = {"param": self, "exp_avg": exp_avgs, "exp_avg_sq": exp_avg_sqs}
        if amsgrad:
            lists["max_exp_avg_sq"] = max_exp_avg_sqs
        lists["grad"] = grads
        others = {"step": _steps(state_steps), "lr": _scalar(lr), "beta1": beta1, "beta2": beta2, "eps": eps}
        others |= {"weight_decay": weight_decay, "maximize": maximize, "decoupled": decoupled}
        others |= {"grad_scale": _scalar(grad_scale), "found_inf": _scalar(found_inf)}
        results = _update(adam, lists, others, outs, inplace)
        if not results:
            return ()
        new, means, squares, *largest, unscaled_grads = results
        return new, unscaled_grads, means, squares, *(largest or [[]])


def _declare_sgd(name: str, inplace: bool) -> None:
    """Declare SGD: the in-place overloads, or the functional ones with out=."""

    @operator(name, kernels=(kernel(sgd, ("param", "momentum_buffer")),))
    def update(
        self: Any,
        grads: Any,
        momentum_buffer_list: Any,
        weight_decay: Any,
        momentum: Any,
        lr: Any,
        dampening: Any,
        nesterov: bool,
        maximize: bool,
        is_first_step: bool,
        grad_scale: Any,
        found_inf: Any,
        *,
        outs: Any,
    ) -> Any:
        contract.limit(momentum, _POSITIVE if momentum_buffer_list else _ZERO)
        lists = {"param": self}
        if momentum_buffer_list:
            lists["momentum_buffer"] = momentum_buffer_list
        lists["grad"] = grads
        others = {"lr": _scalar(lr), "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        others |= {"nesterov": nesterov, "maximize": maximize, "is_first_step": is_first_step}
        others |= {"grad_scale": _scalar(grad_scale), "found_inf": _scalar(found_inf)}
        results = _update(sgd, lists, others, outs, inplace)
        if not results:
            return ()
        new, *buffers, unscaled_grads = results
        return new, unscaled_grads, *(buffers or [[]])


def _declare_adagrad(name: str, inplace: bool) -> None:
    """Declare Adagrad: the in-place overloads, or the functional ones with out=."""

    @operator(name, kernels=(kernel(adagrad, ("param", "state_sum")),))
    def update(
        self: Any,
        grads: Any,
        state_sums: Any,
        state_steps: Any,
        lr: Any,
        lr_decay: Any,
        weight_decay: Any,
        eps: Any,
        maximize: bool,
        grad_scale: Any,
        found_inf: Any,
        *,
        outs: Any,
    ) -> Any:
        lists = {"param": self, "state_sum": state_sums, "grad": grads}
        others = {"step": _steps(state_steps), "lr": _scalar(lr), "lr_decay": lr_decay, "weight_decay": weight_decay}
        others |= {"eps": eps, "maximize": maximize}
        others |= {"grad_scale": _scalar(grad_scale), "found_inf": _scalar(found_inf)}
        results = _update(adagrad, lists, others, outs, inplace)
        if not results:
            return ()
        new, sums, unscaled_grads = results
        # The overload with a number for `lr` has new step counts among its results, the one with a tensor has not.
        steps = [] if isinstance(lr, torch.Tensor) else [_copies(state_steps)]
        return new, unscaled_grads, sums, *steps


# In-place overloads come first: `operator` adds those without a declaration to the functional form.
for _inplace, _suffix in ((True, "_"), (False, "")):
    _declare_adam(f"_fused_adam{_suffix}", False, _inplace)
    _declare_adam(f"_fused_adamw{_suffix}", True, _inplace)
    _declare_sgd(f"_fused_sgd{_suffix}", _inplace)
    _declare_adagrad(f"_fused_adagrad{_suffix}", _inplace)
