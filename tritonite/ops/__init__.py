"""ATen's operators, for direct calls: `tritonite.ops.add(x, y)` runs the kernel without PyTorch's dispatcher.

Arguments are ATen's. A call that no kernel serves goes to ATen. Autograd, transforms, autocast and torch.compile see an
ATen call: it passes through the dispatcher when one of them is active.

A module is a family: formulas and host functions of operators that belong together. `families` lists them, `aten` asks
whether results follow ATen's CPU or GPU kernels.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from tritonite import registry
from tritonite.errors import Decline
from tritonite.install import direct
from tritonite.ops.families import FAMILIES
from tritonite.registry import names, signature

# A family declares its operators when it is imported.
for _family in FAMILIES:
    importlib.import_module(f"tritonite.ops.{_family}")
# An operator goes before a family of the same name.
for _name in [each for each in vars() if f"{__name__}.{each}" in sys.modules and registry.schemas(each)]:
    delattr(sys.modules[__name__], _name)


@functools.cache
def _packets() -> frozenset[str]:
    return frozenset(name.partition(".")[0] for name in registry.overloads())


def __getattr__(name: str) -> Callable[..., Any]:
    own = names.spelled(name)
    if own not in _packets() and not _is_composite(own):
        raise AttributeError(f"tritonite.ops has no operator {name!r}")
    return _function(own)


@functools.cache
def _is_composite(name: str) -> bool:
    """Return whether an operator is composite in ATen, of operators with kernels."""
    return bool(registry.schemas(name)) and bool(names.reached(getattr(torch.ops.aten, name)))


@functools.cache
def _function(name: str) -> Callable[..., Any]:
    """Return the one function of an operator; a second one could not be pickled by name."""
    packet = getattr(torch.ops.aten, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return packet(*args, **kwargs)
        if torch._C._is_any_autocast_enabled() or not direct.may_pass_by(*args, *kwargs.values()):
            with direct.Serving():
                return packet(*args, **kwargs)
        chosen = torch._C._jit_resolve_packet(f"aten::{name}", *args, **kwargs)
        op = registry.overloads().get(name if chosen in ("", "default") else f"{name}.{chosen}")
        if op is None:
            # Composite: ATen calls operators with kernels.
            with direct.Serving():
                return packet(*args, **kwargs)
        try:
            result = op(*args, **kwargs)
        except Decline:
            return packet(*args, **kwargs)
        direct.increment_versions(op, args, kwargs)
        return result

    call.__name__ = call.__qualname__ = name
    call.__signature__, call.__doc__ = signature.described(name)
    return call


def __dir__() -> list[str]:
    return sorted(_packets())
