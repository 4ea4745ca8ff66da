"""Calls that bypass PyTorch's dispatcher, and the test of whether a call may."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from tritonite import devices, registry
from tritonite.errors import Decline
from tritonite.registry import Op
from tritonite.runtime.opaque import OpaqueMode

# With several kinds of devices PyTorch's dispatcher finds the one that serves a call.
_SEVERAL = len(devices.present) > 1
_TYPES = (torch.Tensor, torch.nn.Parameter)


@functools.lru_cache(maxsize=1)
def _ordinary() -> int:
    """Return the dispatch keys of ordinary tensors on the CPU and the device, as bits."""
    names = ["ADInplaceOrView"]
    for key in {"CPU", *[device.dispatch_key or "CPU" for device in devices.present]}:
        names += [key, f"Autograd{key}", f"Autocast{key}"]
    sets = [torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)) for name in names]
    keys: int = functools.reduce(lambda a, b: a | b, sets).raw_repr()
    return keys


def in_memory(values: Iterable[Any]) -> bool:
    """Return whether a kernel can read all tensors among a call's arguments directly.

    False for tensor subclasses (fake tensors, DTensor) and for tensors with further dispatch keys: functorch wrappers,
    sparse tensors, other devices, lazy negation or conjugation, and zero tensors.
    """
    ordinary = ~_ordinary()
    for value in values:
        if isinstance(value, torch.Tensor):
            if type(value) not in _TYPES or torch._C._dispatch_keys(value).raw_repr() & ordinary:
                return False
        elif isinstance(value, (list, tuple)) and not in_memory(value):
            return False
    return True


def may_pass_by(*args: Any) -> bool:
    """Return whether a call may bypass PyTorch's dispatcher: no gradient, no transform and no dispatch mode applies."""
    return not (
        _SEVERAL
        or torch._C._len_torch_dispatch_stack()
        or forward_ad._current_level >= 0
        or (torch.is_grad_enabled() and torch._C._any_requires_grad(*args))
    ) and in_memory(args)


def _device_of(values: Iterable[Any]) -> devices.Device:
    """Return the kind of device that serves a call: its tensors', or the default one."""
    for value in values:
        if isinstance(value, torch.Tensor) and (value.dim() or value.device.type != "cpu"):
            return devices.of(value.device)
        if isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value):
            return _device_of(value)
        if isinstance(value, torch.device):
            return devices.of(value)
    return devices.default


class Serving(OpaqueMode):
    """A mode in which calls of ATen run Tritonite's kernels, below autograd, transforms and other modes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().removeprefix("aten::")
        op = registry.overloads().get(name)
        if op is not None and not torch._C._len_torch_dispatch_stack() and in_memory((*args, *kwargs.values())):
            with contextlib.suppress(Decline):
                with devices.serving(_device_of((*args, *kwargs.values()))):
                    result = op(*args, **kwargs)
                increment_versions_of_lists(op, args, kwargs)
                return result
        return func(*args, **kwargs)


def increment_versions(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Increment autograd's version counters of the arguments that a call has written, as the dispatcher would."""
    _increment(op, op.written, args, kwargs)


def increment_versions_of_lists(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Increment the version counters that ATen's kernel would, for a call that has passed through the dispatcher."""
    _increment(op, op.versioned, args, kwargs)


def _increment(op: Op, written: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for i in written:
        value = args[i] if i < len(args) else kwargs.get(op.schema.arguments[i].name)
        if value is not None:
            increment_version(value)
