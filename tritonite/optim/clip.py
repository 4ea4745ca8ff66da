"""Clipping of gradients by their norm or by their values, with the signatures of torch.nn.utils."""

from __future__ import annotations

import contextlib
import functools
import math
import types
import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch

from tritonite import devices, registry
from tritonite.dtypes import FLOATS, opmath
from tritonite.engine.lists.elementwise import apply
from tritonite.engine.lists.reduce import Task, clip_by_total
from tritonite.errors import Decline, Unsupported
from tritonite.install import library, override
from tritonite.ops.conditional import clamp
from tritonite.ops.reduction.norms import norm_of
from tritonite.registry import library_operator
from tritonite.runtime.contract import Settings, settings

Tensors: TypeAlias = torch.Tensor | Iterable[torch.Tensor]
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Operators that torch.nn.utils calls, for gradients that the operators of this module do not serve.
_BY_TORCH = (
    "_foreach_norm",
    "_foreach_mul_",
    "_foreach_clamp_min_",
    "_foreach_clamp_max_",
    "linalg_vector_norm",
    "stack",
    "add",
    "reciprocal",
    "mul",
    "mul_",
    "clamp",
    "clamp_",
)


def clip_grad_norm_(
    parameters: Tensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients in place so that the norm of all of them together is at most `max_norm`.

    Gradients are read once for the norm and once to be scaled, in one launch a dtype. The host does not wait for the
    norm, so that the call can be captured in a CUDA graph. The factor min(max_norm / (norm + 1e-6), 1) is computed in
    float32, or in float64 if a gradient is float64.

    Gradients that are DTensors, have gaps between their elements, or are on several devices are clipped by
    torch.nn.utils.clip_grad_norm_, with Tritonite's kernels for the tensors in memory.

    Args:
        parameters: a tensor, or tensors, whose `grad` is clipped. Parameters without one are skipped.
        max_norm: the largest norm.
        norm_type: the order of the norm, which may be infinite.
        error_if_nonfinite: raise a RuntimeError if the norm is inf or nan. The host waits for the norm.
        foreach: as in torch.nn.utils.clip_grad_norm_, where that clips.

    Returns the norm before clipping, a 0-d tensor of the dtype to which the gradients' dtypes promote.
    """
    parameters = _listed(parameters, warn=True)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    # torch's norm of order 0 counts the tensors that are not 0.
    if not error_if_nonfinite and float(norm_type) and _in_memory(gradients):
        with contextlib.suppress(Unsupported), torch.no_grad():
            total: torch.Tensor = torch.ops.tritonite.clip_grad_norm_(gradients, float(max_norm), float(norm_type))
            return total
    clip = torch.nn.utils.clip_grad_norm_
    return _by_torch(gradients, lambda: clip(parameters, max_norm, norm_type, error_if_nonfinite, foreach))


def clip_grad_value_(parameters: Tensors, clip_value: float, foreach: bool | None = None) -> None:
    """Clamp gradients in place to the range from -clip_value to clip_value, in one launch a dtype.

    Args:
        parameters: a tensor, or tensors, whose `grad` is clipped. Parameters without one are skipped.
        clip_value: the largest absolute value.
        foreach: as in torch.nn.utils.clip_grad_value_, which clips gradients that are DTensors or on several devices.
    """
    parameters = _listed(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    limit = float(clip_value)
    if _in_memory(gradients):
        with contextlib.suppress(Unsupported), torch.no_grad():
            torch.ops.tritonite.clip_grad_value_(gradients, -limit, limit)
            return
    _by_torch(gradients, lambda: torch.nn.utils.clip_grad_value_(parameters, clip_value, foreach))


def _listed(parameters: Tensors, warn: bool = False) -> list[torch.Tensor]:
    """Return parameters as a list. With `warn`, warn of an empty generator as torch does."""
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    found = list(parameters)
    if warn and isinstance(parameters, types.GeneratorType) and not found:
        message = "`parameters` is an empty generator, no gradient clipping will occur."
        warnings.warn(message, stacklevel=3)
    return found


def _in_memory(gradients: list[torch.Tensor]) -> bool:
    """Return whether there are gradients, and all are strided tensors on the device, without a subclass."""
    kind = devices.current.type if devices.current.dispatch_key else None
    return bool(gradients) and all(
        [type(x) in _PLAIN and x.layout is torch.strided and x.device.type == kind for x in gradients]
    )


@functools.lru_cache(maxsize=4)
def _scope(settings: Settings) -> Any:
    """Return the scope of the operators in `_BY_TORCH`, with these settings."""
    included = [name for name in registry.overloads() if name.partition(".")[0] in _BY_TORCH]
    return override.use_gems(include=included, **settings._asdict())


def _by_torch(gradients: list[torch.Tensor], clip: Callable[[], Any]) -> Any:
    """Clip by a function of torch.nn.utils, which runs kernels if a gradient is on the device."""
    if not devices.current.dispatch_key or not any([x.device.type == devices.current.type for x in gradients]):
        return clip()
    with _scope(settings()):
        return clip()


def _norm_dtype(gradients: list[torch.Tensor]) -> torch.dtype:
    """Return the dtype to which floating-point gradients promote. Declines gradients of other dtypes."""
    for x in gradients:
        if x.dtype not in FLOATS:
            raise Decline(f"a gradient of {x.dtype}; floating-point gradients are served")
    return functools.reduce(torch.promote_types, [x.dtype for x in gradients])


def _fake_norm(gradients: list[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
    return gradients[0].new_empty((), dtype=_norm_dtype(gradients))


@library_operator(
    "clip_grad_norm_(Tensor(a!)[] gradients, float max_norm, float norm_type) -> Tensor",
    fake=_fake_norm,
    accepts=FLOATS,
    pin=("norm_type",),
)
def _clip_norm_host(gradients, max_norm, norm_type):
    """Scale gradients in place by the norm of all of them."""
    dtype = _norm_dtype(gradients)
    if not 0 < norm_type < math.inf and not all([x.numel() for x in gradients]):
        raise Decline(f"the norm of order {norm_type} of an empty tensor")
    reduction, numbers = norm_of(gradients[0], norm_type, dtype, False)
    task = Task(reduction, opmath(dtype), dtype, *numbers)
    return (clip_by_total(gradients, task, max_norm),)


@library_operator(
    "clip_grad_value_(Tensor(a!)[] gradients, float low, float high) -> ()",
    fake=lambda gradients, low, high: _norm_dtype(gradients) and None,
    accepts=FLOATS,
)
def _clip_value_host(gradients, low, high):
    """Clamp gradients in place to a range."""
    _norm_dtype(gradients)
    apply(clamp, [gradients, low, high], [gradients])
    return ()


library.register(registry.declarations)
