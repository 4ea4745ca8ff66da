"""Calls that need not pass through PyTorch's dispatcher, and those that have to."""

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

_TYPES = (torch.Tensor, torch.nn.Parameter)


@functools.lru_cache(maxsize=1)
def _ordinary() -> int:
    """The dispatch keys that ordinary tensors on the CPU or the device have, as bits."""
    names = ["ADInplaceOrView"]
    for key in {"CPU", devices.current.dispatch_key or "CPU"}:
        names += [key, f"Autograd{key}", f"Autocast{key}"]
    sets = [torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)) for name in names]
    keys: int = functools.reduce(lambda a, b: a | b, sets).raw_repr()
    return keys


def in_memory(values: Iterable[Any]) -> bool:
    """Whether all tensors among a call's arguments are ordinary ones, which a kernel can read as they are.

    Not so are subclasses (fake tensors, DTensor), what functorch wraps, sparse tensors, those on other devices, and
    those that are negated, conjugated or filled with zeros when they are read: their dispatch keys tell.
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
    """Whether nothing of PyTorch's dispatcher concerns a call: no gradient, no transform, no mode that traces it."""
    return not (
        torch._C._len_torch_dispatch_stack()
        or forward_ad._current_level >= 0
        or (torch.is_grad_enabled() and torch._C._any_requires_grad(*args))
    ) and in_memory(args)


class Serving(OpaqueMode):
    """Within it this thread's calls of ATen run the catalog's kernels, below autograd, transforms and other modes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().removeprefix("aten::")
        op = registry.overloads().get(name)
        if op is not None and not torch._C._len_torch_dispatch_stack() and in_memory((*args, *kwargs.values())):
            with contextlib.suppress(Decline):
                return op(*args, **kwargs)
        return func(*args, **kwargs)


def increment_versions(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell autograd that a call has written into arguments, as the dispatcher's own kernel for that would."""
    for i in op.written:
        value = args[i] if i < len(args) else kwargs.get(op.schema.arguments[i].name)
        if value is not None:
            increment_version(value)
