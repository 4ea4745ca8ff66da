"""The one place that compiles kernels: `on_compile`, the log of compiled kernels, and collectors of dry recordings."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel, make_backend
from triton.runtime.cache import get_cache_key, get_cache_manager

from tritonite.errors import InvalidAction, KernelNotCompiled
from tritonite.runtime import contract
from tritonite.runtime.locks import brief, fork_safe_lock

# Entries of the log, and cache entries for artifacts, that a process keeps at most.
_MOST_LOGGED, _MOST_KEPT = 4096, 65_536
# Characters of a signature that a record shows.
_LONGEST = 400


@dataclasses.dataclass(frozen=True)
class Compilation:
    """A kernel that this process compiled, or loaded from Triton's disk cache.

    Attributes:
        kernel: the name of the kernel's function.
        overload: the overload whose call needed the kernel, such as "add.Tensor"; "" for a launch outside one.
        signature: the Triton types of the parameters, with the values of constants.
        seconds: duration.
        from_cache: whether Triton's disk cache had the kernel.
    """

    kernel: str
    overload: str
    signature: str
    seconds: float
    from_cache: bool

    def __str__(self) -> str:
        how = "loaded" if self.from_cache else "compiled"
        served = f" for {self.overload}" if self.overload else ""
        return f"{self.kernel}({self.signature}){served} {how} in {self.seconds:.2f} s"


class CompilationWarning(UserWarning):
    """The warning of `on_compile("warn")`."""


Action = str | Callable[[Compilation], object] | None
_ACTIONS = ("raise", "warn", None)
# Key 0 is the action of the process, and each open scope adds a key. The largest key is in force.
_actions: dict[int, Action] = {0: None}
_scopes = itertools.count(1)
_log: collections.deque[Compilation] = collections.deque(maxlen=_MOST_LOGGED)
# Lists of open scopes, which grow with the log.
_listening: list[list[Compilation]] = []
# The files of each compiled kernel by Triton's hash, for artifacts.
_files: dict[str, dict[str, str]] = {}
# Held while a kernel's source is parsed: in some versions of Python, such as 3.11.7, `ast.parse` raises SystemError if
# another thread runs it meanwhile (https://github.com/python/cpython/issues/106905).
_parsing = fork_safe_lock()


class on_compile:  # noqa: N801 - called as a function is
    """Choose what happens when a kernel is compiled: for the process, or within a with block.

        tritonite.on_compile("raise")               # from now on, in every thread
        with tritonite.on_compile("warn") as kernels:
            model(x)                                # `kernels` lists what was compiled or loaded

    Args:
        action: one of

            - "raise": raise KernelNotCompiled before a kernel is compiled. Kernels in Triton's disk cache are loaded.
            - "warn": issue a CompilationWarning when a kernel was compiled.
            - a function: call it with a Compilation when a kernel was compiled or loaded from the disk cache.
            - None: nothing, the default.

    A scope holds for every thread, because autograd runs backward passes in threads of its own. The scope entered last
    decides. Calls whose kernels are in memory are not concerned, and cost nothing more. Raises InvalidAction.
    """

    def __init__(self, action: Action) -> None:
        if action not in _ACTIONS and not callable(action):
            raise InvalidAction(action=action)
        self._action = action
        self._open: list[tuple[int, contextlib.AbstractContextManager[list[Compilation]]]] = []
        self._entered = False
        with brief:
            self._before, _actions[0] = _actions[0], action

    def __enter__(self) -> list[Compilation]:
        listener = listening()
        with brief:
            if not self._entered:
                _actions[0], self._entered = self._before, True
            scope = next(_scopes)
            _actions[scope] = self._action
            self._open.append((scope, listener))
        return listener.__enter__()

    def __exit__(self, *error: Any) -> None:
        with brief:
            scope, listener = self._open.pop()
            del _actions[scope]
        listener.__exit__(*error)


@contextlib.contextmanager
def listening() -> Iterator[list[Compilation]]:
    """Yield a list that grows with each kernel that any thread compiles or loads within the with block."""
    found: list[Compilation] = []
    with brief:
        _listening.append(found)
    try:
        yield found
    finally:
        with brief:
            # By identity, because lists of equal contents are equal.
            _listening[:] = [each for each in _listening if each is not found]


def action_in_force() -> Action:
    """Return the action of the scope entered last, or of the process."""
    with brief:
        return _actions[max(_actions)]


def ignore_actions() -> None:
    """Forget all actions, in a process that compiles for another."""
    with brief:
        _actions.clear()
        _actions[0] = None


def compilations() -> list[Compilation]:
    """Return the kernels that this process compiled or loaded, oldest first, since it began or `forget()`."""
    with brief:
        return list(_log)


def forget() -> None:
    """Empty the list of compiled kernels. Artifacts still contain them."""
    with brief:
        _log.clear()


def kernel_files() -> dict[str, dict[str, str]]:
    """Return the paths of each kernel's files in Triton's disk cache by name, for each hash of a kernel."""
    with brief:
        return {key: dict(files) for key, files in _files.items()}


def compile_kernel(
    source: Any, target: GPUTarget | None = None, options: Mapping[str, Any] | None = None, **others: Any
) -> CompiledKernel:
    """Compile as `triton.compile`, log the kernel, and do what `on_compile` asks for.

    Raises KernelNotCompiled, before anything is compiled, under the action "raise".
    """
    target = target or triton.runtime.driver.active.get_current_target()
    served, text = contract.running_overload(), described(source)
    cached, action = in_disk_cache(source, target, options or {}), action_in_force()
    if action == "raise" and not cached:
        raise KernelNotCompiled(kernel=source.name, served=f" for {served}" if served else "", signature=text)
    beside = contextlib.nullcontext() if cached else _beside(source, options or {})
    source.make_ir = _alone(source.make_ir)
    begin = time.perf_counter()
    with beside:
        kernel = triton.compile(source, target=target, options=options, **others)
    done = Compilation(source.name, served, text, time.perf_counter() - begin, cached)
    with brief:
        _log.append(done)
        for found in _listening:
            found.append(done)
        while len(_files) >= _MOST_KEPT:
            _files.pop(next(iter(_files)))
        _files[kernel.hash] = dict(kernel.metadata_group)
    if callable(action):
        action(done)
    elif action == "warn" and not cached:
        warnings.warn(str(done), CompilationWarning, stacklevel=3)
    return kernel


def _alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that parses kernels while no other thread does."""
    if getattr(function, "__wrapped__", None):
        # The source has been compiled before.
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _parsing:
            return function(*args, **kwargs)

    return call


def watch(jit: Any, device: int) -> None:
    """Have a Triton kernel's own launches compile by `compile_kernel`, on a device."""
    # Triton sets `compile` when it first meets a device.
    _ = jit.device_caches[device]
    jit.compile = compile_kernel


def in_disk_cache(source: Any, target: GPUTarget, options: Mapping[str, Any]) -> bool:
    """Return whether Triton's disk cache has a kernel, by the key that `triton.compile` makes."""
    if knobs.compilation.always_compile:
        return False
    backend = make_backend(target)
    parsed = backend.parse_options(dict(options, **source.parse_options()))
    with _parsing:
        key = get_cache_key(source, backend, parsed, env_vars=get_cache_invalidating_env_vars())
    manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    # Triton cuts long names, too.
    name = f"{source.name[:150]}.json"
    return name in (manager.get_group(name) or {})


def summary(kernels: Sequence[Compilation]) -> str:
    """Return "3 kernels compiled in 4.2 s, 2 loaded from Triton's disk cache", or "" for no kernels."""
    anew = [each for each in kernels if not each.from_cache]
    parts = []
    if anew:
        seconds = sum(each.seconds for each in anew)
        parts.append(f"{len(anew)} kernel{'s' * (len(anew) > 1)} compiled in {seconds:.1f} s")
    if loaded := len(kernels) - len(anew):
        parts.append(
            f"{loaded} {'' if anew else 'kernels ' if loaded > 1 else 'kernel '}loaded from Triton's disk cache"
        )
    return ", ".join(parts)


def described(source: Any) -> str:
    """Return a kernel's parameters as text: "x: *fp32, n: i32, BLOCK=1024"."""
    parts = []
    for i, (name, kind) in enumerate(source.signature.items()):
        if kind == "constexpr":
            parts.append(f"{name}={_constant_text(source.constants.get((i,)))}")
        else:
            parts.append(f"{name}: {_type_text(kind)}")
    text = ", ".join(parts)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _constant_text(value: Any) -> str:
    """Return a number or a string as text, the name of a function, and of a record its class."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return str(value)
    return getattr(value, "__name__", type(value).__name__)


def _type_text(kind: Any) -> str:
    return f"({', '.join(map(_type_text, kind))})" if isinstance(kind, tuple) else str(kind)


class Needed(NamedTuple):
    """A kernel that a call needs: its source, compile options, the overload served, and how the process loads it."""

    source: Any
    options: dict[str, Any]
    overload: str
    load: Callable[[], object]


class Collector:
    """The kernels that calls recorded dry need on a target, each once.

    Attributes:
        target: the target that the kernels are compiled for.
        needed: the kernels by `key_of`.
        recorded: signatures of recorded calls. A further call with one of them needs no other kernels.
    """

    def __init__(self, target: GPUTarget) -> None:
        self.target = target
        self.needed: dict[str, Needed] = {}
        self.recorded: set[Hashable] = set()

    def add(self, source: Any, options: dict[str, Any], load: Callable[[], object]) -> None:
        """Note a kernel, unless it is noted already."""
        self.needed.setdefault(key_of(source, options), Needed(source, options, contract.running_overload(), load))


def key_of(source: Any, options: Mapping[str, Any]) -> str:
    """Return the key of a kernel in a collector."""
    with _parsing:
        own = source.hash()
    return str((own, tuple(sorted(options.items(), key=lambda item: item[0]))))


# Takes the key of the kernel that is being compiled. Returns a context in which others are compiled, too.
Beside = Callable[[str], contextlib.AbstractContextManager[None]]


class _Local(threading.local):
    collector: Collector | None = None
    ahead: Beside | None = None


_local = _Local()


def collector() -> Collector | None:
    """Return the collector of this thread's dry recordings, or None."""
    return _local.collector


@contextlib.contextmanager
def collecting(into: Collector) -> Iterator[None]:
    """Have this thread's dry recordings note the kernels that they need within the with block."""
    outer, _local.collector = _local.collector, into
    try:
        yield
    finally:
        _local.collector = outer


@contextlib.contextmanager
def ahead_of(beside: Beside | None) -> Iterator[None]:
    """Have this thread's first compilation within the with block run beside others, in the context `beside` returns."""
    outer, _local.ahead = _local.ahead, beside
    try:
        yield
    finally:
        _local.ahead = outer


def _beside(source: Any, options: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Return the context of this thread's first compilation, and an empty one of each later one."""
    beside, _local.ahead = _local.ahead, None
    return contextlib.nullcontext() if beside is None else beside(key_of(source, options))
