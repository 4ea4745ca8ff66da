"""Putting the catalog's operators in ATen's place, for the process or a scope, and taking them out again.

An overload is registered with torch when it is first selected and stays so until `disable()`: whether its kernel or
ATen's runs is a switch, so that a scope costs microseconds once its selection has been in force.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import inspect
import itertools
import types
import warnings
from collections.abc import Callable, Iterable, Set
from types import ModuleType
from typing import Any, NamedTuple

import torch

from tritonite import devices, registry
from tritonite.errors import NoDevice, UnknownOperator, did_you_mean
from tritonite.install import python
from tritonite.registry import Op, names
from tritonite.runtime import contract, launch, native, stats
from tritonite.runtime.contract import Settings
from tritonite.runtime.locks import fork_safe_lock
from tritonite.runtime.opaque import opaque

# Names that `enable()` takes, or functions of torch's.
Name = str | Callable[..., Any]
Names = Name | Iterable[Name] | None

_MOST_SELECTIONS = 256
_lock = fork_safe_lock()
_scope_ids = itertools.count(1)


class _Layer(NamedTuple):
    """What `enable()` or a scope selects, also as the native dispatcher takes it, and what it asks of kernels."""

    names: frozenset[str]
    switches: bytes
    settings: Settings | None


class _PythonKernels(NamedTuple):
    """What Python code had registered with torch when it was last looked through.

    Looking through all of it takes longer than all else that a scope does. What is there when this module is imported
    is taken for torch's own, which stays: so if anything has changed, the total has, or something later is gone.
    """

    total: int
    later: Set[str]
    overloads: frozenset[str]


_AT_IMPORT = frozenset(torch.library._impls)
_python_kernels = _PythonKernels(-1, frozenset(), frozenset())
_NOTHING = _Layer(frozenset(), b"", None)
# Those in force: key 0 is the process-wide one of enable(); each scope adds one. The last one decides.
_layers: dict[int, _Layer] = {}
_in_force = _NOTHING
# How to take out each overload that is registered with torch.
_registered: dict[str, Callable[[], None]] = {}
# Selections that are registered as a whole.
_complete: set[frozenset[str]] = set()
# Those over a kernel that Python code has registered and may take back: they are taken out when they are not in force.
_over_users: set[str] = set()
# Whether nothing is to stay registered once the last scope has ended.
_leaving = False
# The native dispatcher, once it has been asked for and is there.
_native: ModuleType | None = None


def select(include: Names = None, exclude: Names = None) -> frozenset[str]:
    """The overloads that `include` (default: the verified) names and `exclude` does not. Raises UnknownOperator."""
    return _selected(_listed(include), _listed(exclude))


def _listed(given: Names) -> tuple[Name, ...] | None:
    if given is None:
        return None
    every = (given,) if isinstance(given, str) or callable(given) else tuple(given)
    return tuple([names.spelled(name) if isinstance(name, str) else name for name in every])


@functools.lru_cache(maxsize=_MOST_SELECTIONS)
def _selected(include: tuple[Name, ...] | None, exclude: tuple[Name, ...] | None) -> frozenset[str]:
    chosen = frozenset(registry.overloads()) if include is None else _match(include)
    # What ATen has on another kind of device alone has no place here.
    chosen = frozenset(name for name in chosen if registry.overloads()[name].has_place)
    # What is not verified on this kind of device is asked for by its own name, or by a pattern that has it.
    named = [pattern for pattern in include or () if isinstance(pattern, str)]
    verified = {name for name in chosen if registry.overloads()[name].verified}
    chosen = frozenset(name for name in chosen if name in verified or any(_names(each, name) for each in named))
    return chosen if exclude is None else chosen - _match(exclude)


def _match(patterns: Iterable[Name]) -> frozenset[str]:
    return frozenset().union(*map(_match_one, patterns))


def _match_one(pattern: Name) -> frozenset[str]:
    every = list(registry.overloads())
    function = names.function_named(pattern) if isinstance(pattern, str) else names.known_function(pattern)
    found = {name for name in every if isinstance(pattern, str) and _names(pattern, name)}
    if function is not None and not (found and isinstance(function, torch._ops.OpOverload)):
        found |= names.reached(function)
    if not found:
        raise unknown(pattern, "" if function is None else " (what it calls of ATen has no kernel here)")
    return frozenset(found)


def unknown(name: Name, hint: str = "") -> UnknownOperator:
    """The error for a name that nothing has, with the nearest of those that there are, if there is no other `hint`."""
    every = registry.overloads()
    text = name if isinstance(name, str) else getattr(name, "__name__", str(name))
    known = [*{overload.partition(".")[0] for overload in every}, *every]
    return UnknownOperator(name=text, hint=hint or did_you_mean(text, known))


def _names(pattern: str, overload: str) -> bool:
    """A name without overload stands for all of them, in-place ones too; "add.default" for the unnamed overload."""
    packet, _, rest = overload.partition(".")
    spelled = overload if rest else f"{packet}.default"
    operator = packet if packet.endswith("__") else packet.removesuffix("_")
    return any(fnmatch.fnmatchcase(text, pattern) for text in (overload, packet, operator, spelled))


def _layer(include: Names, exclude: Names, faster_only: bool, invariant: bool) -> _Layer:
    names = select(include, exclude)
    return _Layer(names, _switches(names), contract.settings_of(faster_only, invariant))


def _apply() -> None:
    """Put the last layer in force."""
    layer = _layers[max(_layers)] if _layers else _NOTHING
    if layer is not _in_force:
        _put_in_force(layer)
    if _leaving and not _layers:
        for name in list(_registered):
            _take_out(name)


def _put_in_force(layer: _Layer) -> None:
    global _in_force
    wanted = layer.names
    if _over_users:
        for name in _over_users - wanted:
            _take_out(name)
    if wanted:
        users = _of_users(wanted)
        if users or wanted not in _complete:
            _register(wanted, users)
    _in_force = layer
    contract.put_in_force(layer.settings)
    python.put_in_force(wanted)
    if _native is not None:
        _tell(_native)


def _register(wanted: frozenset[str], users: frozenset[str]) -> None:
    """Have all overloads of a selection registered, over the kernels of `users` too."""
    users -= _in_force.names
    for name in users & _registered.keys():
        # A kernel that came after ours is in its place.
        _take_out(name)
    missing = wanted - _registered.keys()
    _over_users.update(users)
    # Apart, so that they can be taken out without the others.
    _put_in(sorted(missing - users))
    _put_in(sorted(missing & users))
    if len(_complete) >= _MOST_SELECTIONS:
        _complete.clear()
    _complete.add(wanted)


def _put_in(names: list[str]) -> None:
    """Register overloads with torch."""
    if not names:
        return
    key, table = devices.current.dispatch_key, registry.overloads()
    dispatcher = native_dispatcher()
    if dispatcher is not None:
        for name in names:
            dispatcher.install(name, name in _over_users)
            _registered[name] = functools.partial(dispatcher.uninstall, name)
        return
    with warnings.catch_warnings():
        # torch warns once in a process that a kernel is overridden, which is what was asked for.
        warnings.filterwarnings("ignore", message=r"(?s).*verrid", category=UserWarning)
        library = torch._C._dispatch_library("IMPL", "aten", key, "tritonite", 0)
        remove = functools.partial(_remove_all, library, names)
        for name in names:
            library.impl(name, key, _function_for(table[name], key), False)
            _registered[name] = remove


def _take_out(name: str) -> None:
    """Take an overload, and what shares its library with torch, out of it."""
    _over_users.discard(name)
    _complete.clear()
    # It may have gone with others of its library.
    if name in _registered:
        _registered.pop(name)()


def _remove_all(library: Any, names: list[str]) -> None:
    library.reset()
    for name in names:
        _registered.pop(name, None)


def _of_users(wanted: frozenset[str]) -> frozenset[str]:
    """The overloads among them that Python code has registered a kernel of its own for, which it may take back."""
    global _python_kernels
    places = torch.library._impls
    if len(places) != _python_kernels.total or not _python_kernels.later <= places:
        begin, end = "aten/", f"/{devices.current.dispatch_key}"
        ours = [place for place in places if place.startswith(begin) and place.endswith(end)]
        overloads = frozenset(place[len(begin) : -len(end)] for place in ours)
        _python_kernels = _PythonKernels(len(places), places - _AT_IMPORT, overloads)
    return _python_kernels.overloads & wanted


@functools.lru_cache(maxsize=_MOST_SELECTIONS)
def _switches(names: frozenset[str]) -> bytes:
    """A selection as the native dispatcher takes it: a bit for each overload in the catalog's order, in whole words."""
    table = registry.overloads()
    bits = sum(1 << i for i, name in enumerate(table) if name in names)
    return bits.to_bytes(8 * -(-len(table) // 64), "little")


def _tell(dispatcher: ModuleType) -> None:
    """Tell the native dispatcher what is in force."""
    dispatcher.select(_in_force.switches, (_in_force.settings or contract.settings_of()).bits)


@functools.lru_cache(maxsize=1)
def native_dispatcher() -> ModuleType | None:
    """The native dispatcher, told of every operator there is; None where calls go through Python."""
    global _native
    module = native.module()
    if module is not None:
        for op in registry.overloads().values():
            declare_native(module, op)
        launch.share_with(module)
        stats.read_native(module)
        with _lock:
            _tell(module)
    _native = module
    return module


def declare_native(module: ModuleType, op: Op) -> None:
    """Tell the native dispatcher of an operator."""
    key = devices.current.dispatch_key
    written = [i in op.written for i in range(len(op.schema.arguments))]
    module.declare(op.overload, key, list(op.takes_tensors), written, list(op.slots), python.recording(op))


_functions: dict[str, Callable[..., Any]] = {}


def _function_for(op: Op, key: str) -> Callable[..., Any]:
    """The override over the kernel now in place; remembered, unless Python code has registered that kernel."""
    name = op.overload
    if name in _functions and name not in _over_users:
        return _functions[name]
    function = python.override(op, torch._C._dispatch_get_computed_kernel_for_dispatch_key(f"aten::{name}", key))
    if name not in _over_users:
        _functions[name] = function
    return function


def _require_device() -> None:
    if not devices.current.dispatch_key:
        raise NoDevice


@opaque
def enable(include: Names = None, exclude: Names = None, *, faster_only: bool = True, invariant: bool = False) -> None:
    """Run ATen's operators as Triton kernels in this process, from every thread, until `disable()`.

    Args:
        include: which ones, one or several: the names of torch's functions ("softmax", "linear") or the functions
            themselves (torch.relu), which stand for all that their calls reach, in place and in their backward
            formulas too; overloads ("add.Tensor", torch.ops.aten.add.Tensor); or globs over overloads ("bitwise_*").
            A name may have its module or namespace before it ("torch.softmax", "aten::add.Tensor").
            Default: all that are verified on this kind of device. What is not takes a name of its own, or "*".
        exclude: which of those to leave to ATen, likewise.
        faster_only: leave calls to ATen for which it is known to be faster on this kind of device. `explain`, `stats`
            and `report` give "ATen is faster here" for the reason.
        invariant: have kernels compute an element in the same way, to the bit, however many rows are beside it. It
            costs speed, and leaves nothing to ATen for its; docs/guides/batch-invariance.md says more.

    A later call replaces an earlier one. Raises UnknownOperator for a name that matches nothing, NoDevice where
    nothing can run.
    """
    global _leaving
    _require_device()
    layer = _layer(include, exclude, faster_only, invariant)
    with _lock:
        _leaving = False
        _layers[0] = layer
        _apply()


@opaque
def disable() -> None:
    """Undo `enable()`, and take all of ours out of torch. Scopes that are open stay in force until they end."""
    global _leaving
    with _lock:
        _leaving = True
        _layers.pop(0, None)
        _apply()


class use_gems(contextlib.ContextDecorator):  # noqa: N801 - called as a function is
    """`enable()` for the length of a with block; what was in force outside returns at its end, exceptions or not.

    It decorates functions, with parentheses or without: generators and coroutines have it in force while they run, and
    not while they wait. One object may be entered several times. Scopes nest, and the one entered last decides alone:
    inside `use_gems(include="add")` only add is overridden. They are process-wide, as torch's registrations are. A
    selection's first scope registers it, in milliseconds; later ones switch it on and off, in microseconds, until
    `disable()` takes it out of torch. So it is with `faster_only` and `invariant`, which are `enable()`'s: those of the
    scope entered last count, for calls of `tritonite.ops` and `tritonite.fused` too.
    """

    @opaque
    def __new__(  # type: ignore[misc]
        cls, include: Any = None, exclude: Names = None, *, faster_only: bool = True, invariant: bool = False
    ) -> Any:
        if isinstance(include, types.FunctionType) and not include.__module__.startswith("torch"):
            return cls(faster_only=faster_only, invariant=invariant)(include)
        return super().__new__(cls)

    @opaque
    def __init__(
        self, include: Names = None, exclude: Names = None, *, faster_only: bool = True, invariant: bool = False
    ) -> None:
        _require_device()
        self._layer = _layer(include, exclude, faster_only, invariant)
        self._scopes: list[int] = []

    @opaque
    def __enter__(self) -> None:
        global _leaving
        scope = next(_scope_ids)
        with _lock:
            _leaving = _leaving and len(_layers) > 0
            _layers[scope] = self._layer
            _apply()
        self._scopes.append(scope)

    @opaque
    def __exit__(self, *_: object) -> None:
        with _lock:
            del _layers[self._scopes.pop()]
            _apply()

    @opaque
    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:  # type: ignore[override]
        if inspect.isgeneratorfunction(function):

            def run(*args: Any, **kwargs: Any) -> Any:
                return (yield from self._each_step(function(*args, **kwargs)))

        elif inspect.iscoroutinefunction(function):

            async def run(*args: Any, **kwargs: Any) -> Any:  # type: ignore[misc]
                return await types.coroutine(self._each_step)(function(*args, **kwargs).__await__())

        else:
            return super().__call__(function)
        return functools.wraps(function)(run)

    def _each_step(self, steps: Any) -> Any:
        """A generator's steps, or a coroutine's, each within the scope."""
        step = functools.partial(next, steps)
        while True:
            try:
                with self:
                    item = step()
            except StopIteration as stop:
                return stop.value
            try:
                step = functools.partial(steps.send, (yield item))
            except GeneratorExit:
                with self:
                    steps.close()
                raise
            except BaseException as error:  # noqa: BLE001 - it is the generator's to catch
                step = functools.partial(steps.throw, error)


def installed() -> frozenset[str]:
    """The overloads in force at this moment."""
    return _in_force.names


def registered() -> frozenset[str]:
    """The overloads that are registered with torch, in force or not."""
    with _lock:
        return frozenset(_registered)
