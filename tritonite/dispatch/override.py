"""Putting the catalog's operators in ATen's place, for the process or a scope, and taking them out again."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import torch

from tritonite import catalog, devices, launch, stats
from tritonite.catalog import Op
from tritonite.dispatch import native, python
from tritonite.errors import NoDevice, UnknownOperator

Names = str | Iterable[str] | None

_lock = threading.RLock()
_scope_ids = itertools.count(1)
# The selections in force: key 0 is the process-wide one of enable(); each scope adds one. The last one decides.
_layers: dict[int, frozenset[str]] = {}
# How to take out each overload that is installed.
_installed: dict[str, Callable[[], None]] = {}


def select(include: Names = None, exclude: Names = None) -> frozenset[str]:
    """The overloads that `include` (default: all) names and `exclude` does not. Raises UnknownOperator."""
    chosen = frozenset(catalog.overloads()) if include is None else _match(include)
    return chosen if exclude is None else chosen - _match(exclude)


def _match(patterns: str | Iterable[str]) -> frozenset[str]:
    return frozenset().union(*map(_match_one, [patterns] if isinstance(patterns, str) else patterns))


# Scopes may be entered often, and a look at every name takes milliseconds.
@functools.lru_cache(maxsize=256)
def _match_one(pattern: str) -> frozenset[str]:
    names = list(catalog.overloads())
    found = [name for name in names if _names(pattern, name)]
    if not found:
        packets = {name.partition(".")[0] for name in names}
        close = difflib.get_close_matches(str(pattern), [*packets, *names], n=1)
        raise UnknownOperator(name=pattern, hint=f" (did you mean {close[0]!r}?)" if close else "")
    return frozenset(found)


def _names(pattern: str, overload: str) -> bool:
    """A name without overload stands for all of them, in-place ones too; "add.default" for the unnamed overload."""
    packet, _, rest = overload.partition(".")
    spelled = overload if rest else f"{packet}.default"
    operator = packet if packet.endswith("__") else packet.removesuffix("_")
    return any(fnmatch.fnmatchcase(text, pattern) for text in (overload, packet, operator, spelled))


def _apply() -> None:
    """Make what is installed equal to the last layer's selection."""
    wanted = _layers[max(_layers)] if _layers else frozenset()
    for name in _installed.keys() - wanted:
        # One may have gone with others of its library.
        if name in _installed:
            _installed.pop(name)()
    missing = sorted(wanted - _installed.keys())
    if not missing:
        return
    key = devices.current.dispatch_key
    table = catalog.overloads()
    dispatcher = native_dispatcher()
    if dispatcher is not None:
        for name in missing:
            dispatcher.install(name, _may_go(name, key))
            _installed[name] = functools.partial(dispatcher.uninstall, name)
        return
    with warnings.catch_warnings():
        # torch warns once in a process that a kernel is overridden, which is what was asked for.
        warnings.filterwarnings("ignore", message=r"(?s).*verrid", category=UserWarning)
        library = torch._C._dispatch_library("IMPL", "aten", key, "tritonite", 0)
        remove = functools.partial(_remove_all, library, missing)
        for name in missing:
            library.impl(name, key, _function_for(table[name], key), False)
            _installed[name] = remove


def _remove_all(library: Any, names: list[str]) -> None:
    """Take out what a library holds; those that are still wanted are missing then."""
    library.reset()
    for name in names:
        _installed.pop(name, None)


@functools.lru_cache(maxsize=1)
def native_dispatcher() -> ModuleType | None:
    """The native dispatcher, told of every operator there is; None where calls go through Python."""
    module = native.module()
    if module is not None:
        for op in catalog.overloads().values():
            declare_native(module, op)
        launch.share_with(module)
        stats.read_native(module)
    return module


def declare_native(module: ModuleType, op: Op) -> None:
    """Tell the native dispatcher of an operator."""
    written = [a.alias_info is not None and a.alias_info.is_write for a in op.schema.arguments]
    key = devices.current.dispatch_key
    module.declare(op.overload, key, list(op.takes_tensors), written, list(op.slots), python.recording(op))


_functions: dict[str, Callable[..., Any]] = {}


def _may_go(name: str, key: str) -> bool:
    """Whether the kernel now in place is of Python code, which may take it back."""
    return f"aten/{name}/{key}" in torch.library._impls


def _function_for(op: Op, key: str) -> Callable[..., Any]:
    """The override over the kernel now in place.

    It is remembered, which halves the time a scope takes, unless Python code has registered a kernel, which may go.
    """
    name = op.overload
    if _may_go(name, key):
        return python.override(op, torch._C._dispatch_get_computed_kernel_for_dispatch_key(f"aten::{name}", key))
    if name not in _functions:
        kernel = torch._C._dispatch_get_computed_kernel_for_dispatch_key(f"aten::{name}", key)
        _functions[name] = python.override(op, kernel)
    return _functions[name]


def _require_device() -> None:
    if not devices.current.dispatch_key:
        raise NoDevice


def enable(include: Names = None, exclude: Names = None) -> None:
    """Run ATen's operators as Triton kernels in this process, from every thread, until `disable()`.

    Args:
        include: which ones: operator names ("softmax", in-place forms included), overloads ("add.Tensor") or globs
            ("bitwise_*"), one or several. Default: all.
        exclude: which of those to leave to ATen.

    A later call replaces an earlier one. Raises UnknownOperator for a name that matches nothing, NoDevice where
    nothing can run.
    """
    _require_device()
    selection = select(include, exclude)
    with _lock:
        _layers[0] = selection
        _apply()


def disable() -> None:
    """Undo `enable()`. Scopes that are open stay in force until they end."""
    with _lock:
        _layers.pop(0, None)
        _apply()


@contextlib.contextmanager
def use_gems(include: Names = None, exclude: Names = None) -> Iterator[None]:
    """`enable()` for the length of a with block; what was in force outside returns at its end, exceptions or not.

    Scopes nest, and the one entered last decides alone: inside `use_gems(include="add")` only add is overridden. They
    are process-wide, as torch's registrations are.
    """
    _require_device()
    selection = select(include, exclude)
    scope = next(_scope_ids)
    with _lock:
        _layers[scope] = selection
        _apply()
    try:
        yield
    finally:
        with _lock:
            del _layers[scope]
            _apply()


def installed() -> frozenset[str]:
    """The overloads in force at this moment."""
    with _lock:
        return frozenset(_installed)
