"""Forward functions of single modules: set on the instance, and taken away again.

A bound method in the module's `__dict__` comes before the class's method. The class, the parameters, the hooks and the
state dict stay as they are; `copy.deepcopy` binds the method to the copy; a pickle of the module has the class's
forward. accelerate's hooks keep the forward that they wrap in `_old_forward`, so the method goes there if they are on.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from tritonite.patching.report import KeepError

# Attribute of a function that `replace_forward` has set: the kind of the module.
_MARK = "tritonite_kind"
# Entries of a module's `__dict__` that may hold the forward: its own, and those that accelerate puts aside.
_SLOTS = ("forward", "_old_forward", "_original_forward")


def kind_of(module: torch.nn.Module) -> str | None:
    """Return the kind of a module whose forward is replaced, or None."""
    for slot in _SLOTS:
        function = getattr(vars(module).get(slot), "__func__", None)
        if hasattr(function, _MARK):
            kind: str = getattr(function, _MARK)
            return kind
    return None


def _slot(module: torch.nn.Module) -> str:
    """Return the entry to replace; raise KeepError if something unknown stands there."""
    slot = "_old_forward" if {"_old_forward", "_hf_hook"} <= vars(module).keys() else "forward"
    now = vars(module).get(slot)
    if now is not None and getattr(now, "__func__", None) is not type(module).forward:
        raise KeepError("its forward was replaced on the instance before: patch the model first")
    return slot


def check_free(module: torch.nn.Module) -> None:
    """Raise KeepError for a module whose forward cannot be replaced."""
    if kind_of(module) is not None:
        raise KeepError("it is replaced already")
    _slot(module)


def replace_forward(module: torch.nn.Module, kind: str, function: Callable[..., Any]) -> None:
    """Make `function(self, ...)` the forward of one module.

    The function must not hold the module or parts of it, because a copy of the module shares the function.
    """
    slot = _slot(module)
    functools.update_wrapper(function, type(module).forward)
    setattr(function, _MARK, kind)
    vars(module)[slot] = types.MethodType(function, module)


def restore_forward(module: torch.nn.Module) -> bool:
    """Give a module its class's forward back, and return whether it had another."""
    found = False
    for slot in _SLOTS:
        if not hasattr(getattr(vars(module).get(slot), "__func__", None), _MARK):
            continue
        found = True
        if slot == "forward":
            del vars(module)[slot]
        else:
            vars(module)[slot] = types.MethodType(type(module).forward, module)
    return found


def only_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the tensor of a call that has one argument, or None."""
    if len(args) + len(kwargs) != 1:
        return None
    (value,) = args or kwargs.values()
    return value if isinstance(value, torch.Tensor) else None
