"""`enable`, `disable` and `use_gems`: override ATen's operators, for the process or a scope.

An overload is registered with torch when it is first selected, and stays registered until `disable()`. A switch decides
whether Tritonite's kernel or ATen's runs, so that entering a scope again is cheap.
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

# A name that `enable()` takes, or a function of torch.
Name = str | Callable[..., Any]
Names = Name | Iterable[Name] | None

_MOST_SELECTIONS = 256
_lock = fork_safe_lock()
_scope_ids = itertools.count(1)


class _Layer(NamedTuple):
    """The selection of `enable()` or a scope: overloads, the same as bits for the native dispatcher, and settings."""

    names: frozenset[str]
    switches: bytes
    settings: Settings | None


class _PythonKernels(NamedTuple):
    """A cache of the kernels that Python code has registered with torch.

    Scanning all registrations costs more than the rest of a scope. Registrations at the import of this module are
    torch's own and stay. The cache is stale if the total has changed or one of the `later` registrations is gone.
    """

    total: int
    later: Set[str]
    overloads: frozenset[str]


_AT_IMPORT = frozenset(torch.library._impls)
_python_kernels = _PythonKernels(-1, frozenset(), frozenset())
_NOTHING = _Layer(frozenset(), b"", None)
# Open layers: key 0 is the process-wide layer of enable(), and each scope adds a key. The largest key is in force.
_layers: dict[int, _Layer] = {}
_in_force = _NOTHING
# A function that unregisters, for each overload that is registered with torch.
_registered: dict[str, Callable[[], None]] = {}
# Selections whose overloads are all registered.
_complete: set[frozenset[str]] = set()
# Overloads over a kernel that a user's Python code has registered and may remove: unregistered when not in force.
_over_users: set[str] = set()
# Whether to unregister everything when the last scope ends.
_disabling = False
# The native dispatcher, once loaded.
_native: ModuleType | None = None
# The arguments of its `set_audit`: a function for sampled calls, their share of 2**64, a seed.
_audit: tuple[Callable[..., Any] | None, int, int] = (None, 0, 0)


class Selection(frozenset[str]):
    """The overloads that `select` has chosen. Given to `select` again, they are chosen as they are, not as names."""


def select(include: Names = None, exclude: Names = None) -> Selection:
    """Return the overloads of `include` (default: all verified) without those of `exclude`. Raises UnknownOperator."""
    if isinstance(include, Selection) and exclude is None:
        return include
    return _selected(_listed(include), _listed(exclude))


def _listed(given: Names) -> tuple[Name, ...] | None:
    if given is None:
        return None
    listed = (given,) if isinstance(given, str) or callable(given) else tuple(given)
    return tuple([names.spelled(name) if isinstance(name, str) else name for name in listed])


@functools.lru_cache(maxsize=_MOST_SELECTIONS)
def _selected(include: tuple[Name, ...] | None, exclude: tuple[Name, ...] | None) -> Selection:
    chosen = frozenset(registry.overloads()) if include is None else _match(include)
    # Without overloads that ATen has on another kind of device only.
    chosen = frozenset(name for name in chosen if registry.overloads()[name].has_place)
    # An overload that is not verified on this kind of device has to be named, or to match a glob.
    named = [pattern for pattern in include or () if isinstance(pattern, str)]
    verified = {name for name in chosen if registry.overloads()[name].verified}
    unverified = tuple(chosen - verified)
    chosen = frozenset(verified.union(*[_named(each, unverified) for each in named]))
    return Selection(chosen if exclude is None else chosen - _match(exclude))


def _match(patterns: Iterable[Name]) -> frozenset[str]:
    return frozenset().union(*map(_match_one, patterns))


def _match_one(pattern: Name) -> frozenset[str]:
    table = registry.overloads()
    function = names.function_named(pattern) if isinstance(pattern, str) else names.known_function(pattern)
    found = _named(pattern, tuple(table)) if isinstance(pattern, str) else set()
    if function is not None and not (found and isinstance(function, torch._ops.OpOverload)):
        found |= names.reached(function)
    if not found:
        raise unknown(pattern, "" if function is None else " (no ATen operator that it calls has a kernel here)")
    return frozenset(found)


def unknown(name: Name, hint: str = "") -> UnknownOperator:
    """Return the error for an unknown name, with `hint` or else the nearest known name."""
    table = registry.overloads()
    text = name if isinstance(name, str) else getattr(name, "__name__", str(name))
    known = [*{overload.partition(".")[0] for overload in table}, *table]
    return UnknownOperator(name=text, hint=hint or did_you_mean(text, known))


def _named(pattern: str, overloads: tuple[str, ...]) -> set[str]:
    """Return the overloads that a name or glob matches.

    A name without an overload matches all, in-place ones too; "add.default" matches the unnamed overload only.
    """
    found = set(_by_spelling(overloads).get(pattern, ()))
    if any(mark in pattern for mark in "*?["):
        found |= {name for name in overloads if any(fnmatch.fnmatchcase(text, pattern) for text in _spellings(name))}
    return found


@functools.lru_cache(maxsize=8)
def _by_spelling(overloads: tuple[str, ...]) -> dict[str, list[str]]:
    """Return the overloads of each of their names."""
    found: dict[str, list[str]] = {}
    for name in overloads:
        for text in _spellings(name):
            found.setdefault(text, []).append(name)
    return found


@functools.cache
def _spellings(overload: str) -> tuple[str, ...]:
    """Return the names of an overload: its own, its operator's with and without "_", and the one with "default"."""
    packet, _, rest = overload.partition(".")
    spelled = overload if rest else f"{packet}.default"
    operator = packet if packet.endswith("__") else packet.removesuffix("_")
    return overload, packet, operator, spelled


def _layer(include: Names, exclude: Names, faster_only: bool, invariant: bool) -> _Layer:
    names = select(include, exclude)
    return _Layer(names, _switches(names), contract.settings_of(faster_only, invariant))


def _apply() -> None:
    """Put the layer entered last in force, or nothing if none is open."""
    layer = _layers[max(_layers)] if _layers else _NOTHING
    if layer is not _in_force:
        _put_in_force(layer)
    if _disabling and not _layers:
        for name in list(_registered):
            _unregister(name)


def _put_in_force(layer: _Layer) -> None:
    global _in_force
    wanted = layer.names
    if _over_users:
        for name in _over_users - wanted:
            _unregister(name)
    if wanted:
        users = _with_users_kernel(wanted)
        if users or wanted not in _complete:
            _register(wanted, users)
    _in_force = layer
    contract.put_in_force(layer.settings)
    python.put_in_force(wanted)
    if _native is not None:
        _select_native(_native)


def _register(wanted: frozenset[str], users: frozenset[str]) -> None:
    """Register all overloads of a selection that are not registered. `users` have a user's kernel."""
    users -= _in_force.names
    for name in users & _registered.keys():
        # A kernel that a user registered later has replaced ours.
        _unregister(name)
    missing = wanted - _registered.keys()
    _over_users.update(users)
    # Separate libraries, so that overloads of `users` can be unregistered without the others.
    _register_with_torch(sorted(missing - users))
    _register_with_torch(sorted(missing & users))
    if len(_complete) >= _MOST_SELECTIONS:
        _complete.clear()
    _complete.add(wanted)


def _register_with_torch(names: list[str]) -> None:
    """Register overloads with torch, with the native dispatcher's kernel or else Python's."""
    if not names:
        return
    table, dispatcher = registry.overloads(), native_dispatcher()
    # The native dispatcher serves the default device alone.
    by_python = devices.present if dispatcher is None else devices.present[1:]
    libraries: list[Any] = []
    if dispatcher is not None:
        for name in names:
            dispatcher.install(name, name in _over_users)
            _registered[name] = functools.partial(dispatcher.uninstall, name)
        if not by_python:
            return
    with warnings.catch_warnings():
        # Silences torch's warning that a kernel is overridden.
        warnings.filterwarnings("ignore", message=r"(?s).*verrid", category=UserWarning)
        remove = functools.partial(_remove_all, libraries, names, dispatcher)
        for device in by_python:
            key = device.dispatch_key
            library = torch._C._dispatch_library("IMPL", "aten", key, "tritonite", 0)
            libraries.append(library)
            for name in names:
                library.impl(name, key, _function_for(table[name], device), False)
                _registered[name] = remove


def _unregister(name: str) -> None:
    """Unregister an overload, and all others of the same torch library."""
    _over_users.discard(name)
    _complete.clear()
    # Another overload of the library may have removed this one.
    if name in _registered:
        _registered.pop(name)()
        _forget_dispatch(name)


def _remove_all(libraries: list[Any], names: list[str], dispatcher: ModuleType | None) -> None:
    for library in libraries:
        library.reset()
    for name in names:
        _registered.pop(name, None)
        if dispatcher is not None:
            dispatcher.uninstall(name)
        _forget_dispatch(name)


def _forget_dispatch(name: str) -> None:
    """Have PyTorch's dispatcher in Python, which compilers use, forget that a kernel is registered.

    The dispatcher would call the kernel that is gone.
    """
    packet, _, overload = name.partition(".")
    found = vars(torch.ops.aten).get(packet)
    known = None if found is None else vars(found).get(overload or "default")
    if known is not None:
        known._dispatch_cache.clear()


def _with_users_kernel(wanted: frozenset[str]) -> frozenset[str]:
    """Return the overloads in `wanted` for which a user's Python code has registered a kernel that it may remove."""
    global _python_kernels
    # Keys such as "aten/add.Tensor/CUDA".
    keys = torch.library._impls
    if len(keys) != _python_kernels.total or not _python_kernels.later <= keys:
        kinds = {device.dispatch_key for device in devices.present}
        overloads = frozenset(
            key.removeprefix("aten/").rpartition("/")[0]
            for key in keys
            if key.startswith("aten/") and key.rpartition("/")[2] in kinds
        )
        _python_kernels = _PythonKernels(len(keys), keys - _AT_IMPORT, overloads)
    return _python_kernels.overloads & wanted


@functools.lru_cache(maxsize=_MOST_SELECTIONS)
def _switches(names: frozenset[str]) -> bytes:
    """Return a selection as bits, one for each overload in the order of `overloads()`, padded to 64-bit words."""
    table = registry.overloads()
    bits = sum(1 << i for i, name in enumerate(table) if name in names)
    return bits.to_bytes(8 * -(-len(table) // 64), "little")


def _select_native(dispatcher: ModuleType) -> None:
    """Pass the selection and the settings in force to the native dispatcher."""
    dispatcher.select(_in_force.switches, (_in_force.settings or contract.settings_of()).bits)


@functools.lru_cache(maxsize=1)
def native_dispatcher() -> ModuleType | None:
    """Return the native dispatcher, with every operator declared, or None if calls go through Python."""
    global _native
    module = native.module()
    if module is not None:
        for op in registry.overloads().values():
            declare_native(module, op)
        launch.share_with(module)
        stats.read_native(module)
        with _lock:
            _select_native(module)
            module.set_audit(*_audit)
    _native = module
    return module


def dispatcher_in_use() -> ModuleType | None:
    """Return the native dispatcher if it is loaded."""
    return _native


def audit_natively(begin: Callable[..., Any] | None, share: int, seed: int) -> None:
    """Have the native dispatcher show a share of calls, as a fraction of 2**64, to `begin`; None ends that."""
    global _audit
    with _lock:
        _audit = begin, share, seed
        if _native is not None:
            _native.set_audit(*_audit)


def declare_native(module: ModuleType, op: Op) -> None:
    """Declare an operator to the native dispatcher."""
    key = devices.default.dispatch_key
    written = [i in op.written for i in range(len(op.schema.arguments))]
    module.declare(op.overload, key, list(op.takes_tensors), written, list(op.slots), python.recording(op))


_functions: dict[tuple[str, str], Callable[..., Any]] = {}


def _function_for(op: Op, device: devices.Device) -> Callable[..., Any]:
    """Return the Python override over the current kernel, cached unless a user's Python code registered that kernel."""
    name, key = op.overload, device.dispatch_key
    if (name, key) in _functions and name not in _over_users:
        return _functions[name, key]
    kernel = torch._C._dispatch_get_computed_kernel_for_dispatch_key(f"aten::{name}", key)
    function = python.override(op, kernel, device)
    if name not in _over_users:
        _functions[name, key] = function
    return function


def _require_device() -> None:
    if not devices.default.dispatch_key:
        raise NoDevice


@opaque
def enable(include: Names = None, exclude: Names = None, *, faster_only: bool = True, invariant: bool = False) -> None:
    """Run ATen's operators as Triton kernels in this process, from every thread, until `disable()`.

    Args:
        include: operators to run as Triton kernels, one or several of:

            - names of torch's functions ("softmax", "linear") or the functions themselves (torch.relu), for every
              overload that their calls reach, in-place forms and backward formulas included
            - overloads ("add.Tensor", torch.ops.aten.add.Tensor)
            - globs over overloads ("bitwise_*")

            A name may have its module or namespace before it ("torch.softmax", "aten::add.Tensor").
            Default: all overloads verified on this kind of device. Others must be named or match a glob, such as "*".
        exclude: operators to leave to ATen, in the same forms.
        faster_only: decline calls for which ATen is known to be faster on this kind of device. `explain`, `stats` and
            `report` give the reason "ATen is faster here".
        invariant: compute the same bits for a row of the batch, however many rows the batch has. Kernels are slower,
            and no call is declined for speed; docs/guides/batch-invariance.md says more.

    A later call replaces an earlier one. Raises UnknownOperator for a name that matches nothing, and NoDevice without a
    device to run on.
    """
    global _disabling
    _require_device()
    layer = _layer(include, exclude, faster_only, invariant)
    with _lock:
        _disabling = False
        _layers[0] = layer
        _apply()


@opaque
def disable() -> None:
    """Undo `enable()`, and unregister all overloads from torch. Open scopes stay in force until they end."""
    global _disabling
    with _lock:
        _disabling = True
        _layers.pop(0, None)
        _apply()


class use_gems(contextlib.ContextDecorator):  # noqa: N801 - called as a function is
    """Apply `enable()` within a with block, or within calls of a decorated function.

    - Arguments are those of `enable()`.
    - Scopes are process-wide, as torch's registrations are.
    - Scopes nest, and the scope entered last decides alone: inside `use_gems(include="add")` only add is overridden.
    - `faster_only` and `invariant` of the scope entered last also hold for `tritonite.ops` and `tritonite.fused`.
    - The state before returns at the end of the block, also after an exception.
    - As a decorator, parentheses are optional. In generators and coroutines a scope is open while they run, not while
      they wait.
    - The first scope of a selection registers its overloads; later scopes only switch them on and off, until
      `disable()` unregisters them.
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
        global _disabling
        scope = next(_scope_ids)
        with _lock:
            _disabling = _disabling and len(_layers) > 0
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
        """Run the steps of a generator or a coroutine, each within the scope."""
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
    """Return the overloads in force."""
    return _in_force.names


def registered() -> frozenset[str]:
    """Return the overloads that are registered with torch, in force or not."""
    with _lock:
        return frozenset(_registered)
