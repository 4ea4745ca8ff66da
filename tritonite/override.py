"""Putting the catalog's operators in ATen's place, for the process or a scope, and taking them out again."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import itertools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from tritonite import catalog, devices, launch, stats
from tritonite.catalog import Op
from tritonite.errors import Decline, NoDevice, UnknownOperator

Names = str | Iterable[str] | None

_lock = threading.RLock()
_scope_ids = itertools.count(1)
# The selections in force: key 0 is the process-wide one of enable(); each scope adds one. The last one decides.
_layers: dict[int, frozenset[str]] = {}
_installed: dict[str, Any] = {}


def select(include: Names = None, exclude: Names = None) -> frozenset[str]:
    """The overloads that `include` (default: all) names and `exclude` does not. Raises UnknownOperator."""
    chosen = frozenset(catalog.overloads()) if include is None else _match(include)
    return chosen if exclude is None else chosen - _match(exclude)


def _match(patterns: str | Iterable[str]) -> frozenset[str]:
    names = list(catalog.overloads())
    matched: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        found = [name for name in names if _names(pattern, name)]
        if not found:
            packets = {name.partition(".")[0] for name in names}
            close = difflib.get_close_matches(str(pattern), [*packets, *names], n=1)
            raise UnknownOperator(name=pattern, hint=f" (did you mean {close[0]!r}?)" if close else "")
        matched.update(found)
    return frozenset(matched)


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
        _installed.pop(name).reset()
    missing = sorted(wanted - _installed.keys())
    if not missing:
        return
    key = devices.current.dispatch_key
    table = catalog.overloads()
    with warnings.catch_warnings():
        # torch warns once in a process that a kernel is overridden, which is what was asked for.
        warnings.filterwarnings("ignore", message=r"(?s).*verrid", category=UserWarning)
        for name in missing:
            library = torch._C._dispatch_library("IMPL", "aten", key, "tritonite", 0)
            library.impl(name, key, _function_for(table[name], key), False)
            _installed[name] = library


_functions: dict[str, Callable[..., Any]] = {}


def _function_for(op: Op, key: str) -> Callable[..., Any]:
    """The override over the kernel now in place.

    It is remembered, which halves the time a scope takes, unless Python code has registered a kernel, which may go.
    """
    name = op.overload
    if f"aten/{name}/{key}" in torch.library._impls:
        return _override(op, torch._C._dispatch_get_computed_kernel_for_dispatch_key(f"aten::{name}", key))
    if name not in _functions:
        kernel = torch._C._dispatch_get_computed_kernel_for_dispatch_key(f"aten::{name}", key)
        _functions[name] = _override(op, kernel)
    return _functions[name]


def _override(op: Op, kernel: Any) -> Callable[..., Any]:
    keyset = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, devices.current.dispatch_key))
    counts = stats.counts_of(op.overload)
    count_launch, count_decline = counts.count_launch, counts.count_decline
    interpreted = devices.current.interpreted
    tensor_arguments = [i for i, argument in enumerate(op.schema.arguments) if "Tensor" in str(argument.type)]
    inside_kernel = launch.inside_kernel

    def aten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for i in tensor_arguments:
            # The dispatcher hands numbers in tensor arguments to Python as numbers, and wants tensors back.
            if i < len(args) and type(args[i]) in (bool, int, float, complex):
                args = (*args[:i], _number_tensor(args[i], args), *args[i + 1 :])
        return kernel.call_boxed(keyset, *args, **kwargs)

    def override(*args: Any, **kwargs: Any) -> Any:
        if interpreted and inside_kernel():
            return aten(args, kwargs)
        try:
            result = op(*args, **kwargs)
        except Decline as decline:
            count_decline(decline.reason)
            return aten(args, kwargs)
        count_launch()
        return result

    return override


def _number_tensor(number: Any, args: tuple[Any, ...]) -> torch.Tensor:
    """A 0-d tensor that promotes with the other arguments as the bare number does."""
    tensor = torch.tensor(number, dtype=torch.float64 if type(number) is float else None)
    others = [value for value in args if isinstance(value, torch.Tensor)]
    for other in others:
        as_number = torch.result_type(other, number)
        if as_number != torch.result_type(other, tensor):
            tensor = tensor.to(as_number)
    return tensor


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
