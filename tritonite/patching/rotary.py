"""Rotation of query and key in attention modules that call a function `apply_rotary...` of their source module.

The function is a global that all models of a family share. So one attention module gets a copy of its forward function
whose globals name another rotation. No global changes, and other models and other threads notice nothing. The copy
sees the globals as they were when the model was patched.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tritonite import devices, fused
from tritonite.patching.report import KeepError
from tritonite.patching.samples import RESOLUTION, check_alike
from tritonite.runtime.sharding import is_sharded

_PREFIX = "apply_rotary"
_LEADING = ["q", "k", "cos", "sin"]


class Rotation(NamedTuple):
    """A way to rotate pairs: `interleaved` as in `fused.rotary_embedding`.

    cos and sin hold each angle twice: in two halves, or if `repeated`, twice in a row.
    """

    interleaved: bool
    repeated: bool

    @property
    def operator(self) -> str:
        """Return the call as a report shows it."""
        return f"fused.rotary_embedding, interleaved={self.interleaved}"


_ROTATIONS = (Rotation(False, False), Rotation(True, False), Rotation(True, True))


def rotation_name(module: torch.nn.Module) -> str | None:
    """Return the global name by which a module's forward calls a rotation, or None."""
    function = inspect.unwrap(type(module).forward)
    if not isinstance(function, types.FunctionType):
        return None
    for name in function.__code__.co_names:
        if name.startswith(_PREFIX) and name in function.__globals__:
            return name
    return None


def _function_of(module: torch.nn.Module) -> types.FunctionType:
    function = type(module).forward
    if not isinstance(function, types.FunctionType) or hasattr(function, "__wrapped__"):
        raise KeepError("its forward is wrapped by a decorator, so the function inside cannot be replaced alone")
    return function


def with_rotation(module: torch.nn.Module, name: str, rotation: Callable[..., Any]) -> types.FunctionType:
    """Return a copy of the forward function of a module's class, for which a global name is another function.

    `__name__` is left out of the globals: torch.compile would look names up in the module of that name.
    """
    function = _function_of(module)
    names = {key: value for key, value in function.__globals__.items() if key != "__name__"}
    copy = types.FunctionType(
        function.__code__, {**names, name: rotation}, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def original_rotation(module: torch.nn.Module, name: str) -> Callable[..., Any]:
    """Return the function that a module calls; raise KeepError unless it takes query, key, cos and sin."""
    function: Callable[..., Any] = _function_of(module).__globals__[name]
    parameters = list(inspect.signature(function).parameters)
    if parameters[:4] != _LEADING:
        raise KeepError(f"{name} takes {', '.join(parameters[:4])}: the operator takes {', '.join(_LEADING)}")
    return function


def recording(function: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    """Return a function that notes the arguments of each call of another."""

    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return function(*args, **kwargs)

    return recorded


def rotating(original: Callable[..., Any], rotation: Rotation) -> Callable[..., Any]:
    """Return a function with the arguments of `original` that calls the operator where the operator serves."""
    axis = inspect.signature(original).parameters.get("unsqueeze_dim")
    default = 1 if axis is None else axis.default

    @functools.wraps(original)
    def rotate(q: Any, k: Any, cos: Any, sin: Any, *args: Any, unsqueeze_dim: int = default, **kwargs: Any) -> Any:
        if args or kwargs or unsqueeze_dim not in (1, 2) or not _serves(q, k, cos):
            if unsqueeze_dim != default:
                kwargs["unsqueeze_dim"] = unsqueeze_dim
            return original(q, k, cos, sin, *args, **kwargs)
        half = cos.shape[-1] // 2
        cos, sin = (each[..., ::2] if rotation.repeated else each[..., :half] for each in (cos, sin))
        if unsqueeze_dim == 2:
            return fused.rotary_embedding(q, k, cos, sin, rotation.interleaved)
        q, k = fused.rotary_embedding(q.transpose(1, 2), k.transpose(1, 2), cos, sin, rotation.interleaved)
        return q.transpose(1, 2), k.transpose(1, 2)

    return rotate


def _serves(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor) -> bool:
    """Return whether the operator serves a call. Under autocast attention casts q and k to one dtype afterwards."""
    if is_sharded(q) or is_sharded(k) or is_sharded(cos):
        return False
    if q.device.type != devices.current.type or q.dtype not in RESOLUTION or q.dtype is not k.dtype:
        return False
    fits = q.dim() == k.dim() == 4 and cos.dim() == 3 and not cos.requires_grad
    return fits and (cos.dtype is q.dtype or torch.is_autocast_enabled(q.device.type))


def recognise_rotation(original: Callable[..., Any], calls: list[Any], with_gradients: bool) -> Rotation:
    """Return how a function rotates; raise KeepError unless the operator has its results for all recorded calls."""
    if not calls:
        raise KeepError("it was not called when the model ran on sample inputs")
    reason = ""
    for rotation in _ROTATIONS:
        try:
            for args, kwargs in calls:
                _check_call(original, rotation, args, kwargs, with_gradients)
        except KeepError as error:
            reason = reason or str(error)
        else:
            return rotation
    raise KeepError(reason)


def _check_call(original: Callable[..., Any], rotation: Rotation, args: Any, kwargs: Any, with_gradients: bool) -> None:
    bound = inspect.signature(original).bind(*args, **kwargs).arguments
    q, k, cos, sin = (bound.pop(name).detach() for name in _LEADING)
    if bound.keys() - {"unsqueeze_dim"} or not _serves(q, k, cos):
        raise KeepError(f"the operator does not serve q of {q.dtype} {tuple(q.shape)} with cos of {cos.dtype}")
    q, k = q.requires_grad_(), k.requires_grad_()
    ours, theirs = (
        lambda function=function: torch.cat([each.flatten() for each in function(q, k, cos, sin, **bound)])
        for function in (rotating(original, rotation), original)
    )
    check_alike(ours, theirs, [q, k], with_gradients)
