"""Launches in Triton's interpreter whose facts of a kernel are found once, with the same results.

Triton inspects a kernel's signature, patches its language attribute by attribute and copies the arguments' storages in
every launch, which takes longer than a program of a small kernel. `runtime/interpreter.py` installs these functions.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import GridExecutor, TensorHandle
from triton.runtime.jit import mangle_type
from triton.tools.tensor_descriptor import TensorDescriptor

# Triton's own functions, which serve what these do not.
EXECUTE = GridExecutor.__call__
_initialise = GridExecutor.__init__
_MISSING = object()
_NUMBERS = frozenset((int, float, bool, str, type(None)))


class _Signature(NamedTuple):
    """The parameters of a kernel by position, and the defaults by name."""

    names: tuple[str, ...]
    defaults: dict[str, Any]


class _Change(NamedTuple):
    """An attribute of Triton's language in the interpreter, and outside it; `_MISSING` if it is absent there."""

    owner: Any
    name: str
    inside: Any
    outside: Any


@functools.cache
def _signature(function: Callable[..., Any]) -> _Signature | None:
    """Return the signature of a rewritten kernel, or None if it has other parameters than positional ones."""
    parameters = inspect.signature(function).parameters
    if any(each.kind is not each.POSITIONAL_OR_KEYWORD for each in parameters.values()):
        return None
    defaults = {name: each.default for name, each in parameters.items() if each.default is not each.empty}
    return _Signature(tuple(parameters), defaults)


@functools.cache
def _constexprs(function: Callable[..., Any], names: tuple[str, ...]) -> list[str]:
    executor = object.__new__(GridExecutor)
    _initialise(executor, function, list(names), None)
    return executor.constexprs


def initialise(self: GridExecutor, fn: Any, arg_names: list[str], grid: Any, pre_run_hooks: Any = ()) -> None:
    """Initialise as `GridExecutor.__init__` does, with the constexpr parameters that were found before."""
    self.fn, self.arg_names, self.grid, self.pre_run_hooks = fn, arg_names, grid, pre_run_hooks
    self.constexprs = _constexprs(fn, tuple(arg_names))


def execute(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
    """Run all programs of a launch as `GridExecutor.__call__` does, without copies of arguments that are on the CPU."""
    signature = _signature(self.fn)
    if signature is None or self.pre_run_hooks or not _on_cpu((*args, *kwargs.values())):
        return EXECUTE(self, *args, **kwargs)
    names = signature.names
    given = signature.defaults | {name: kwargs[name] for name in names if name in kwargs}
    given.update(zip(names, args, strict=False))
    twice = any([name in kwargs for name in names[: len(args)]])
    if twice or len(given) < len(names) or len(args) > len(names):
        # Triton's own call raises.
        return EXECUTE(self, *args, **kwargs)
    changes = _changes(self.fn)
    for owner, name, inside, _ in changes:
        setattr(owner, name, inside)
    try:
        convert = interpreter._implicit_cvt
        given = {name: value if name in self.constexprs else convert(value) for name, value in given.items()}
        grid = self.grid(given) if callable(self.grid) else self.grid
        assert len(grid) <= 3, "grid must have at most 3 dimensions"
        x, y, z = grid + (1,) * (3 - len(grid))
        builder, program = interpreter.interpreter_builder, self.fn
        builder.set_grid_dim(x, y, z)
        failure = None
        try:
            for index in itertools.product(range(x), range(y), range(z)):
                builder.grid_idx = index
                program(**given)
        except Exception as error:  # noqa: BLE001 - Triton raises any error of a kernel as its own
            failure = error
        if failure is not None and knobs.compilation.front_end_debugging:
            raise failure
        if failure is not None:
            raise InterpreterError(repr(failure)) from failure
    finally:
        for owner, name, _, outside in reversed(changes):
            if outside is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, outside)


def _on_cpu(value: Any) -> bool:
    """Return whether all tensors in nested arguments are on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.device.type == "cpu"
    if isinstance(value, (tuple, list)):
        return all([_on_cpu(item) for item in value])
    if isinstance(value, TensorDescriptor):
        return _on_cpu(value.base)
    return type(value) in _NUMBERS or not hasattr(value, "data_ptr")


def _changes(function: Callable[..., Any]) -> tuple[_Change, ...]:
    """Return what the interpreter changes in Triton's language for a kernel whose globals name its modules."""
    return _changes_of(tuple([module for module in (tl, tl.core) if _names(function, module)]), function)


@functools.cache
def _names(function: Callable[..., Any], module: Any) -> bool:
    return any(value is module for value in function.__globals__.values())


_known_changes: dict[Any, tuple[_Change, ...]] = {}


def _changes_of(modules: tuple[Any, ...], function: Callable[..., Any]) -> tuple[_Change, ...]:
    found = _known_changes.get(modules)
    if found is None:
        scope = interpreter._patch_lang(function)
        first: dict[tuple[int, str], tuple[Any, Any]] = {}
        for owner, name, outside in scope._changes:
            first.setdefault((id(owner), name), (owner, outside))
        absent = interpreter._MISSING
        found = tuple(
            _Change(owner, name, vars(owner)[name], _MISSING if outside is absent else outside)
            for (_, name), (owner, outside) in first.items()
        )
        scope.restore()
        _known_changes[modules] = found
    return found


# Types of pointers to tensors of a dtype. Made once, so that block types of pointers are found among those made before.
_pointers: dict[torch.dtype, tl.dtype] = {}


def argument(own: Callable[[Any], Any], value: Any) -> Any:
    """Convert a kernel's argument as the interpreter's `own` does, but give int64 from 2**31 on the data of uint32.

    The types of integers and pointers are not parsed from their names each time.
    """
    if type(value) is int and -(2**31) <= value < 2**31:
        return tl.tensor(TensorHandle(np.array([value], np.int32), tl.int32), tl.int32)
    if isinstance(value, torch.Tensor):
        type_ = _pointers.get(value.dtype)
        if type_ is None:
            type_ = _pointers[value.dtype] = tl.str_to_ty(mangle_type(value), None)
        return tl.tensor(TensorHandle(np.array([value.data_ptr()], np.uint64), type_), type_)
    converted = own(value)
    if isinstance(value, int) and 2**31 <= value < 2**32:
        converted.handle.data = converted.handle.data.astype(np.int64)
    return converted
