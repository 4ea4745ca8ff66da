"""Values of a plan as JSON: booleans, integers, strings and None as they are, others as objects whose key is a kind."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from triton import language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from tritonite import devices
from tritonite.errors import UnsavableGraph
from tritonite.graph.plan import (
    AllocateStep,
    ClearStep,
    DrawStep,
    FreeStep,
    GraphBuffer,
    HoldStep,
    Note,
)
from tritonite.graph.saving.names import name_of, named
from tritonite.runtime.plan import CopyStep, Source, View

# Records of a plan, by the name of their class.
_RECORDS = (Source, View, GraphBuffer, CopyStep, ClearStep, DrawStep, HoldStep, AllocateStep, FreeStep, Note)
_BY_NAME: dict[str, Any] = {each.__name__: each for each in _RECORDS}
_FUNCTIONS = (JITFunction, InterpretedFunction)
# Values of torch and Triton that have a name in a module.
_TORCH = (torch.dtype, torch.layout, torch.memory_format)


class Hole(NamedTuple):
    """The place of a step's parameter among a kernel's arguments, with the fields of a descriptor or None."""

    place: int
    descriptor: dict[str, Any] | None


_BY_NAME["Hole"] = Hole


def encoded(value: Any) -> Any:
    """Return a value as JSON. Raises UnsavableGraph for one of another type."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return {"float": value.hex()}
    if kind is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if kind is list:
        return {"list": [encoded(item) for item in value]}
    if kind in (tuple, torch.Size):
        return {"tuple": [encoded(item) for item in value]}
    if kind is dict:
        return {"dict": [[encoded(key), encoded(item)] for key, item in value.items()]}
    if kind is slice:
        return {"slice": [encoded(item) for item in (value.start, value.stop, value.step)]}
    if kind in (set, frozenset):
        return {"set": [encoded(item) for item in sorted(value)]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if isinstance(value, _TORCH):
        return {"torch": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {"device": value.type}
    if kind is tl.dtype:
        return {"triton": value.name}
    if kind is tl.constexpr:
        return {"constexpr": encoded(value.value)}
    if _BY_NAME.get(kind.__name__) is kind:
        return {"record": [kind.__name__, *map(encoded, value)]}
    if isinstance(value, _FUNCTIONS):
        return {"function": name_of(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"named": [name_of(kind), *map(encoded, value)]}
    if dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return {"fields": [name_of(kind), {name: encoded(getattr(value, name)) for name in fields}]}
    raise UnsavableGraph(name=f"a value of type {kind.__module__}.{kind.__qualname__}", reason=_SAVABLE)


_SAVABLE = "saved are numbers, strings, dtypes, devices, kernels of Tritonite, and tuples, lists and dicts of them"


def decoded(value: Any) -> Any:
    """Return the value of `encoded`. Raises ValueError for JSON that `encoded` does not make."""
    if not isinstance(value, dict):
        if isinstance(value, list):
            raise ValueError("a list without a kind")
        return value
    if len(value) != 1:
        raise ValueError(f"{value!r} has not one kind")
    ((kind, given),) = value.items()
    if kind not in _DECODERS:
        raise ValueError(f"there is no kind {kind!r}")
    return _DECODERS[kind](given)


def device_of(kind: str) -> torch.device:
    """Return the current device of a kind: a file has no index of a device."""
    return devices.indexed(torch.device(kind))


def _items(given: Any) -> list[Any]:
    return [decoded(item) for item in given]


def _torch(name: str) -> Any:
    found = getattr(torch, name, None)
    if not isinstance(found, _TORCH):
        raise ValueError(f"torch.{name} is no dtype, layout or memory format")
    return found


def _triton(name: str) -> Any:
    return tl.dtype(name)


def _record(given: Any) -> Any:
    return _BY_NAME[given[0]](*_items(given[1:]))


def _named_tuple(given: Any) -> Any:
    return named(given[0])(*_items(given[1:]))


def _fields(given: Any) -> Any:
    return named(given[0])(**{name: decoded(item) for name, item in given[1].items()})


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "float": float.fromhex,
    "complex": lambda given: complex(*map(float.fromhex, given)),
    "list": _items,
    "tuple": lambda given: tuple(_items(given)),
    "dict": lambda given: {decoded(key): decoded(item) for key, item in given},
    "slice": lambda given: slice(*_items(given)),
    "set": lambda given: frozenset(_items(given)),
    "bytes": bytes.fromhex,
    "torch": _torch,
    "device": device_of,
    "triton": _triton,
    "constexpr": lambda given: tl.constexpr(decoded(given)),
    "record": _record,
    "function": named,
    "named": _named_tuple,
    "fields": _fields,
}

# Functions of Python and of torch over sizes, by name.
PYTHON: dict[str, Callable[..., Any]] = {
    **{f"operator.{name}": getattr(operator, name) for name in operator.__all__ if callable(getattr(operator, name))},
    **{f"torch.{name}": getattr(torch, name) for name in dir(torch) if name.startswith("sym_")},
}
for _unsafe in ("attrgetter", "methodcaller", "itemgetter", "call"):
    PYTHON.pop(f"operator.{_unsafe}", None)
