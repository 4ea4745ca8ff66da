"""Lists of parameters, gradients and optimiser states.

The number of parameters decides the options: AMSGrad and Nesterov's momentum for an odd number, no momentum for one, a
scaled loss for five and seven, an overflow for seven, a first step for three, and maximization for three and four.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tritonite import devices, dtypes
from tritonite.engine.iteration import is_dense
from tritonite.registry import Op, overloads
from tritonite.testing.samples import facts

ADAM = ("_fused_adam", "_fused_adamw")
PACKETS = (*ADAM, "_fused_sgd", "_fused_adagrad")
_LARGEST = 1e18
_LARGEST_FACTOR = 1e3
_LARGEST_RATE = 1.0
# The least size of a gradient with its decay, relative to the gradient without.
_CANCELLED = 1 / 4
# A moment is fma(beta1, exp_avg, fma(-beta1, grad, grad)) on CUDA, which makes +0.0 of -0.0 gradients at beta1 = 0, and
# another sum on a CPU. A decayed -0.0 is a product on a CPU, and a difference on CUDA.
facts.ZERO_SIGN_OF_ROUNDOFF |= set(ADAM)
facts.TENSORS["lr"] = lambda x: torch.full((), 0.01, device=x.device)


@facts.layouts(*PACKETS)
def _lists(op: Op, make: facts.Make) -> Iterator[tuple[str, facts.Tensors]]:
    """Yield lists of several lengths, with tensors of several shapes and alignments, empty ones among them."""
    yield "one", [make(33)]
    yield "three", [make(5), make(0, 2), make(7, 3)]
    yield "five", [make(9)[1:], make(), make(4, 3).t(), make(8), make(2, 3, 1, 2)]
    yield "seven", [make(n) for n in (6, 1, 3, 20, 5, 4, 2)]


@facts.arguments(*PACKETS)
def _states(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return gradients and states of each parameter, with its strides; None for parameters that are not dense."""
    if not all(x.is_floating_point() and is_dense(x.shape, x.stride()) for x in tensors):
        return None
    device, count = tensors[0].device, len(tensors)
    if tensors[0].itemsize == 2 and devices.current.aten == "cpu":
        # ATen's SGD on a CPU reads 16-bit momentum as float32 in whole vectors, and leaves their parameters unchanged.
        tensors = [x.flatten()[:7].contiguous() for x in tensors]
    # The order of ATen's sums on each kind of device decides whether arguments that are infinite, or whose squares are,
    # give infinity or nan.
    largest = min(_LARGEST, torch.finfo(tensors[0].dtype).max)
    tensors = [_like(x, x.nan_to_num(0.5, 2.0, -2.0).clamp(-largest, largest)) for x in tensors]
    odd = count % 2 == 1
    squares, means = [_like(x, x.abs()) for x in tensors], [_like(x, 1 - x) for x in tensors]
    given: dict[str, Any] = {"self": tensors, "grads": [_like(x, x.flip(tuple(range(x.dim())))) for x in tensors]}
    given |= {"exp_avgs": means, "exp_avg_sqs": squares, "state_sums": squares}
    given |= {"amsgrad": odd, "max_exp_avg_sqs": [_like(x, 2 - x) for x in squares] if odd else []}
    given |= {"nesterov": odd, "momentum_buffer_list": means if count > 1 else []}
    given |= {"momentum": 0.75 if count > 1 else 0.0, "eps": 1e-3}
    given |= {"is_first_step": count == 3, "maximize": count in (3, 4)}
    given["state_steps"] = [torch.full((), float(i + 1), device=device) for i in range(count)]
    given["grad_scale"] = torch.full((), 4.0, device=device) if count > 4 else None
    given["found_inf"] = torch.full((), float(count == 7), device=device) if count > 4 else None
    return given


def _like(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return a copy of values with the strides of a dense tensor."""
    return torch.empty_like(x).copy_(values)


@facts.drawn(*PACKETS)
def _like_parameters(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return gradients and states of the parameters' shapes: ATen reads those of a CPU by the parameters' sizes."""
    drawn = [x for x in arguments["self"] if x.layout is torch.strided and x.dtype in dtypes.FLOATS]
    tensors = [x for x in drawn if x.dtype is drawn[0].dtype and is_dense(x.shape, x.stride())]
    given = _states(tensors or [torch.ones(3, device=devices.current.type)]) or {}
    found = arguments | {name: given[name] for name in arguments if name in given}
    if isinstance(found["lr"], torch.Tensor):
        rate = found["lr"] if found["lr"].numel() == 1 else facts.TENSORS["lr"](found["lr"])
        found["lr"] = rate.clamp(-_LARGEST_RATE, _LARGEST_RATE) if rate.dtype in dtypes.FLOATS else rate
    # A step that overflows is infinite, nan or finite by the order of ATen's factors, which differs between devices.
    for name in ("lr", "lr_decay", "weight_decay", "eps"):
        if isinstance(found.get(name), float):
            found[name] = max(-_LARGEST_FACTOR, min(found[name], _LARGEST_FACTOR))
    # The judge allows the roundoff of terms of order 1, which a rate multiplies after they have cancelled.
    if isinstance(found["lr"], float):
        found["lr"] = max(-_LARGEST_RATE, min(found["lr"], _LARGEST_RATE))
    # Kernels serve the factors that torch.optim accepts. One of -0.0 gives a zero mean a sign by the form of the sum.
    betas = [name for name in ("beta1", "beta2") if isinstance(found.get(name), float)]
    found |= {name: abs(found[name]) if 0 <= found[name] <= 1 else 0.9 for name in betas}
    found |= {"grads": [_beside_decay(found, i) for i in range(len(found["grads"]))]}
    if "beta1" in found:
        found |= {"exp_avgs": [_beside_gradient(found, i) for i in range(len(found["exp_avgs"]))]}
    return found


def _beside_decay(arguments: dict[str, Any], index: int) -> torch.Tensor:
    """Return the gradient of a parameter, 0 where the weight decay cancels it.

    Adam and Adagrad divide by the size of gradients, or by `eps`: a step may be the roundoff of the cancelled sum.
    """
    grad, (own, decay) = arguments["grads"][index], _terms_of_gradient(arguments, index)
    cancelled = (own + decay).abs() < _CANCELLED * own.abs()
    return _like(grad, grad.masked_fill(cancelled, 0.0))


def _beside_gradient(arguments: dict[str, Any], index: int) -> torch.Tensor:
    """Return the mean of gradients, 0 where the gradient cancels it, with weight decay (Adam) or without (AdamW)."""
    mean, beta = arguments["exp_avgs"][index], arguments["beta1"]
    own, decay = _terms_of_gradient(arguments, index)
    kept, sign = beta * mean.double(), -1 if arguments["maximize"] else 1
    sums = [kept + (1 - beta) * sign * gradient for gradient in (own, own + decay)]
    cancelled = torch.stack([(each.abs() < _CANCELLED * kept.abs()) for each in sums]).any(0)
    return _like(mean, mean.masked_fill(cancelled, 0.0))


def _terms_of_gradient(arguments: dict[str, Any], index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a gradient without its scale, and what the weight decay adds to it, in float64."""
    param, grad = arguments["self"][index], arguments["grads"][index]
    scale = arguments.get("grad_scale")
    own = grad.double() if scale is None else grad.double() / scale.double()
    return own, arguments["weight_decay"] * param.double() * (-1 if arguments["maximize"] else 1)


@facts.terms(*PACKETS)
def _terms(sums: facts.Sums) -> float:
    """Return the terms of an update, in which the decayed parameter, means and quotients of order 1 cancel."""
    return 16.0


def _in_float64(name: str, *args: Any, **kwargs: Any) -> Any:
    """Return the results of an overload by ATen's CPU kernel, or the written arguments and the outputs by name.

    A `grad_scale` and `found_inf` stay float32.
    """
    host_args, host = pytree.tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, (args, kwargs))
    for single in ("grad_scale", "found_inf"):
        if host.get(single) is not None:
            host[single] = host[single].float()
    outs = {"out": list(map(torch.empty_like, host_args[0]))} if name.endswith("out") else {}
    packet, _, overload = name.partition(".")
    results = getattr(getattr(torch.ops.aten, packet), overload or "default")(*host_args, **host, **outs)
    for own, computed in zip(pytree.tree_leaves(args), pytree.tree_leaves(host_args), strict=True):
        if isinstance(own, torch.Tensor) and own is not computed:
            own.copy_(computed)
    return (args, outs) if results is None else results


# An overload's own reference, because the overloads of a packet return and write different lists.
_OVERLOADS = [name for name, op in overloads().items() if op.packet in PACKETS]
facts.REFERENCES |= {name: functools.partial(_in_float64, name) for name in _OVERLOADS}
facts.FLAGS |= dict.fromkeys(_OVERLOADS, (False,))
