"""`libentry`: a cache of compiled kernels around any Triton kernel, whose launches a recorder notes."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from torch.utils._python_dispatch import _disable_current_modes
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as LaidOutDescriptor
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, KernelInterface, create_function_from_signature

from tritonite import devices, dtypes
from tritonite.errors import InvalidDeclaration
from tritonite.language.order import waits
from tritonite.runtime import compilation, contract, launch
from tritonite.runtime.hollow import decline_guarded
from tritonite.runtime.interpreted import InterpretedCall
from tritonite.runtime.interpreter import interpreting, on_host
from tritonite.runtime.launch import DESCRIPTORS, LaunchDescription, Specialization
from tritonite.runtime.locks import brief, fork_safe_lock
from tritonite.runtime.nested import flatten, retyped
from tritonite.runtime.symbols import Symbol, value_of

# Compiled kernels, and tuned configs, that a LibEntry keeps at most.
_MOST_KEPT = 4096
_TYPE_NAMES = dtypes.TRITON_NAMES | dtypes.FLOAT8_NAMES
_SEVERAL = not devices.default.interpreted and devices.default.runtime.count(devices.default) > 1
_TYPE = devices.default.type
_TYPES = frozenset(device.type for device in devices.present) - {"cpu"}


class _Local(threading.local):
    target: GPUTarget | None = None


_local = _Local()


@contextlib.contextmanager
def compiling(target: GPUTarget) -> Iterator[None]:
    """Have this thread's `libentry` launches compile for `target`, into Triton's disk cache, and run nothing."""
    outer, _local.target = _local.target, target
    try:
        yield
    finally:
        _local.target = outer


def libentry(fn: Any = None) -> Any:
    """Cache the compiled kernels of a Triton kernel: a decorator, with or without parentheses.

    It goes over `triton.jit`, `triton.autotune` and `triton.heuristics` in any nesting. The first call of a kind goes
    through these decorators, tuning included. Later calls only evaluate the heuristics, look up the compiled kernel by
    what Triton specialises on, and launch it. Raises InvalidDeclaration for any other function.

        @libentry()
        @triton.autotune(configs=[...], key=["n"])
        @triton.jit
        def kernel(x, n, BLOCK: tl.constexpr): ...
    """
    return LibEntry if fn is None else LibEntry(fn)


class LibEntry(KernelInterface):
    """A kernel behind `libentry`. Launch it as any Triton kernel, `kernel[grid](...)`."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self._decorators: list[Any] = []
        while not isinstance(fn, (JITFunction, InterpretedFunction)):
            if not isinstance(fn, (Autotuner, Heuristics)):
                raise InvalidDeclaration(
                    name=getattr(fn, "__name__", repr(fn)), reason="libentry wraps triton.jit, autotune or heuristics"
                )
            self._decorators.append(fn)
            fn = fn.fn
        self.jit = fn
        self.arg_names: list[str] = fn.arg_names
        functools.update_wrapper(self, fn.fn)
        self._parameters = list(inspect.signature(fn.fn).parameters.values())
        # Names of the parameters annotated as constexpr, in the interpreter, too.
        self._annotated = [each.name for each in self._parameters if "constexpr" in str(each.annotation)]
        self._waits = waits(fn)
        self._constexprs = frozenset(self.arg_names[i] for i in fn.constexprs) if self._compiles else frozenset()
        self._configs: dict[tuple[Any, ...], Any] = {}
        self._kernels: dict[tuple[Any, ...], CompiledKernel] = {}
        self._tuning = fork_safe_lock()

    @property
    def _compiles(self) -> bool:
        return isinstance(self.jit, JITFunction)

    def run(self, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        """Launch the kernel, from the cache if a call of this kind has been compiled."""
        if _local.target is not None:
            return self._compile_for(_local.target, args, kwargs | launch.dependent_options(self.jit, _local.target))
        if _SEVERAL and (index := _device_index(args, kwargs)) not in (None, devices.current.runtime.launch_index()):
            with devices.current.runtime.on(torch.device(devices.current.type, index)):
                return self.run(*args, grid=grid, warmup=warmup, **kwargs)
        decline_guarded(args, kwargs)
        symbols = {name: value for name, value in self._named(args, kwargs).items() if _has_symbol(value)}
        if symbols:
            args = tuple([value_of(value) for value in args])
            kwargs = {name: value_of(value) for name, value in kwargs.items()}
        recorder = contract.recorder()
        if recorder is not None and recorder.dry:
            bound, options, _ = self._bind(args, kwargs)
            self._record(recorder, bound | symbols, grid, None)
            recorder.described(self._description(bound, options, grid))
            if self._compiles and (collector := compilation.collector()) is not None:
                self._note_needed(collector, args, kwargs)
            return None
        if not self._compiles:
            bound, _, hooks = self._bind(args, kwargs)
            for hook in hooks:
                hook({**bound})
            given = {name: value for name, value in bound.items() if value is not inspect.Parameter.empty}
            if recorder is not None:
                self._record(recorder, given | symbols, grid, None)
            with interpreting():
                return self.jit.run(grid=_extents(grid, given), warmup=warmup, **on_host(given))
        if self._waits and devices.has_dependent_launch(torch.device(_TYPE, driver.active.get_current_device())):
            kwargs = kwargs | launch.DEPENDENT
        found = None if warmup else self._resolve(args, kwargs)
        kernel = None if found is None else self._kernels.get(found[0])
        if found is None or kernel is None:
            return self._launch_new(args, grid, warmup, kwargs, symbols)
        key, bound, hooks = found
        for hook in hooks:
            hook({**bound})
        for hook in self.jit.pre_run_hooks:
            hook(**bound)
        if recorder is not None:
            self._record(recorder, bound | symbols, grid, kernel)
        size = _extents(grid, bound)
        stream = driver.active.get_current_stream(key[0])
        enter, exit_ = launch.active_hooks()
        values = bound.values()
        metadata = None if enter is None else kernel.launch_metadata(size, stream, *values)
        contract.note_launch()
        kernel.run(*size, stream, kernel.function, kernel.packed_metadata, metadata, enter, exit_, *values)
        return kernel

    def _compile_for(self, target: GPUTarget, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CompiledKernel:
        """Compile what Triton would for a launch with these arguments. The launch finds it in the disk cache."""
        source, options = self._source_for(target, args, kwargs)
        return compilation.compile_kernel(source, target, options)

    def _note_needed(self, collector: compilation.Collector, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note what a launch with these arguments compiles. Nothing is noted of a launch that has yet to be tuned."""
        kwargs = kwargs | launch.dependent_options(self.jit, collector.target)
        with contextlib.suppress(KeyError):
            collector.add(*self._source_for(collector.target, args, kwargs), lambda: self._load(args, kwargs))

    def _load(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compile for the current device, into Triton's memory. Tuned kernels stay in the disk cache."""
        if not self._decorators:
            launch.prepare_cache()
            compilation.watch(self.jit, driver.active.get_current_device())
            self.jit.run(*args, grid=None, warmup=True, **kwargs)._init_handles()

    def _source_for(
        self, target: GPUTarget, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[ASTSource, dict[str, Any]]:
        """Return (source, compile options) of what Triton compiles for a launch with these arguments."""
        bound, options, _ = self._bind(args, kwargs)
        backend = make_backend(target)
        binder = create_function_from_signature(self.jit.signature, self.jit.params, backend)
        values, kinds, given = binder(**bound, **options)
        packed, signature, constants, attributes = self.jit._pack_args(backend, options, values, kinds, given)
        kind = GluonASTSource if self.jit.is_gluon() else ASTSource
        return kind(self.jit, signature, constants, attributes), dict(packed.__dict__)

    def specialization(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Specialization:
        """Return what a launch with these arguments compiles, specialised as Triton does. Needs no GPU."""
        bound, options, _ = self._bind(args, kwargs)
        signature: dict[str, Any] = {}
        constants: dict[tuple[int, ...], Any] = {}
        attributes: dict[tuple[int, ...], Any] = {}

        def kind(value: Any, path: tuple[int, ...], parameter: Any) -> Any:
            if isinstance(value, tuple):
                return retyped(value, [kind(item, (*path, i), parameter) for i, item in enumerate(value)])
            if isinstance(value, torch.Tensor):
                attributes[path] = [["tt.divisibility", 16]]
                return "*" + _TYPE_NAMES[value.dtype]
            if isinstance(value, DESCRIPTORS):
                layout = f",{value.layout!r}" if isinstance(value, LaidOutDescriptor) else ""
                return f"tensordesc<{_TYPE_NAMES[value.base.dtype]}{list(value.block_shape)}{layout}>"
            if value is None:
                constants[path] = None
                return "constexpr"
            if parameter.annotation_type:
                return parameter.annotation_type
            if isinstance(value, float):
                return "fp32"
            # Triton ignores do_not_specialize for the elements of a tuple.
            specialized = len(path) > 1 or not parameter.do_not_specialize
            if value == 1 and specialized:
                constants[path] = 1
                return "constexpr"
            if value % 16 == 0 and specialized:
                attributes[path] = [["tt.divisibility", 16]]
            return "i32" if -(2**31) <= value < 2**31 else "i64"

        for i, (parameter, (name, value)) in enumerate(zip(self.jit.params, bound.items(), strict=True)):
            if name in self._constexprs:
                signature[name], constants[(i,)] = "constexpr", value
            else:
                signature[name] = kind(value, (i,), parameter)
        return Specialization(self.jit, signature, constants, attributes, (), (), options=options)

    def _launch_new(
        self, args: tuple[Any, ...], grid: Any, warmup: bool, kwargs: dict[str, Any], symbols: dict[str, Any]
    ) -> Any:
        """Launch through the decorators, which tune and compile, and keep the chosen config and the kernel."""
        recorder = contract.recorder()
        # A user's own launch has no ATen to fall back to, and compiles during a capture, as with Triton alone.
        if contract.in_host_function() and contract.is_capturing():
            launch.decline_to_compile(self.jit)
        launch.prepare_cache()
        if self._compiles:
            compilation.watch(self.jit, driver.active.get_current_device())
        failures = launch.declining_failures(self.jit)
        with self._tuning, _disable_current_modes(), launch.watched_compile(self), failures:
            contract.note_launch()
            kernel = self.fn.run(*args, grid=grid if callable(grid) else value_of(grid), warmup=warmup, **kwargs)
            if warmup or not isinstance(kernel, CompiledKernel):
                return kernel
            for decorator in self._decorators:
                if isinstance(decorator, Autotuner) and len(decorator.configs) > 1:
                    _remember(self._configs, self._tuning_key(decorator, args, kwargs), decorator.best_config)
            found = self._resolve(args, kwargs)
            if found is not None:
                _remember(self._kernels, found[0], kernel)
        if recorder is not None:
            self._record(recorder, self._bind(args, kwargs)[0] | symbols, grid, kernel)
        return kernel

    def _record(self, recorder: Any, bound: dict[str, Any], grid: Any, kernel: CompiledKernel | None) -> None:
        """Note a launch in the recorder. `kernel` is None in the interpreter and in a dry recording."""
        size = (*(grid(bound) if callable(grid) else grid), 1, 1)[:3]
        names = list(bound) if kernel is None else list(kernel.src.signature)
        values = tuple([bound[name] for name in names])
        kinds = tuple(map(_kind, values)) if kernel is None else tuple(kernel.src.signature.values())

        for parameter in self.jit.params if kernel is not None else ():
            given = bound.get(parameter.name)
            if _has_symbol(given) and (isinstance(given, tuple) or not _takes_any(parameter)):
                recorder.unrecordable(f"the kernel is specialised for parameter {parameter.name}, a number of the call")
        types = tuple(flatten(kinds, kinds))
        host = InterpretedCall(self.jit, tuple(names), kinds, values)
        recorder.add(types, list(flatten(kinds, values)), size, kernel, host)

    def _description(self, bound: dict[str, Any], options: dict[str, Any], grid: Any) -> LaunchDescription:
        """Describe a launch for `explain`. `options` are compile options, such as num_warps."""
        # Constants worth showing: numbers, such as block sizes, and strings.
        constants = {name: bound[name] for name in self._annotated if isinstance(bound[name], (int, str))}
        for value in bound.values():
            # Those that a record of compile-time facts wants shown.
            constants |= getattr(value, "shown", {})
        name = getattr(self.jit, "__name__", repr(self.jit))
        return LaunchDescription(name, "", _extents(grid, bound), constants | {"num_warps": 4} | options)

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**dict(zip(self.arg_names, args, strict=False)), **kwargs}

    def _tuning_key(self, autotuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        named = self._named(args, kwargs)
        chosen = [named[name] for name in autotuner.keys if name in named]
        return (id(autotuner), *chosen, *(value.dtype for value in named.values() if hasattr(value, "dtype")))

    def _bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any], list[Callable[[dict[str, Any]], None]]]:
        """Return (value by parameter, compile options, pre-hooks of configs).

        Raises KeyError if a tuner has yet to choose a config. The interpreter cannot time configs and takes the first.
        """
        named = self._named(args, kwargs)
        hooks = []
        for decorator in self._decorators:
            if isinstance(decorator, Heuristics):
                for name, heuristic in decorator.values.items():
                    named[name] = heuristic(named)
                continue
            config = decorator.configs[0]
            if len(decorator.configs) > 1 and self._compiles:
                config = self._configs[self._tuning_key(decorator, args, kwargs)]
            named.update(config.all_kwargs())
            if config.pre_hook is not None:
                hooks.append(config.pre_hook)
        bound = {p.name: named.pop(p.name) if p.name in named else p.default for p in self._parameters}
        return bound, named, hooks

    def _resolve(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[Callable[[dict[str, Any]], None]]] | None:
        """Return (cache key, value by parameter, pre-hooks), or None if the call must go through the decorators."""
        try:
            bound, named, hooks = self._bind(args, kwargs)
        except KeyError:
            return None
        key: list[Any] = [driver.active.get_current_device(), knobs.runtime.debug, tuple(sorted(named.items()))]
        for parameter, (name, value) in zip(self.jit.params, bound.items(), strict=True):
            if name in self._constexprs:
                key.append(value)
                continue
            kind = _specialization(value, not parameter.do_not_specialize, not parameter.do_not_specialize_on_alignment)
            if kind is None:
                return None
            key.append(kind)
        return tuple(key), bound, hooks


def _device_index(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Return the device index of the first tensor that is not on a CPU, also within tuples, or None."""
    for value in (*args, *kwargs.values()):
        value = value.base if isinstance(value, DESCRIPTORS) else value
        if isinstance(value, torch.Tensor) and value.device.type in _TYPES:
            return value.device.index
        if isinstance(value, tuple) and (index := _device_index(value, {})) is not None:
            return index
    return None


def _specialization(value: Any, specialize: bool, on_alignment: bool) -> object:
    """Return what Triton specialises on in an argument, or None if unknown. An int has width, ==1 and %16 == 0."""
    if isinstance(value, torch.Tensor):
        # AMD's backend also specialises on buffers below 2 GiB.
        small = devices.current.pointer_ranges and value.untyped_storage().nbytes() <= 2**31 - 1
        return value.dtype, specialize and on_alignment and value.data_ptr() % 16 == 0, small
    if value is None or isinstance(value, (bool, float)):
        return type(value)
    if isinstance(value, int):
        width = 32 if -(2**31) <= value < 2**31 else 64 if value < 2**63 else -64
        return width, specialize and value == 1, specialize and on_alignment and value % 16 == 0
    if isinstance(value, tuple):
        # Triton ignores do_not_specialize for the elements of a tuple.
        items = tuple(_specialization(item, True, True) for item in value)
        # A NamedTuple equals a tuple with its items, but a kernel reads its fields by name.
        return None if None in items else (type(value), *items) if hasattr(value, "_fields") else items
    if isinstance(value, DESCRIPTORS):
        layout = getattr(value, "layout", None)
        return "descriptor", value.base.dtype, tuple(value.block_shape), value.padding, layout
    return value if isinstance(value, (str, triton.language.dtype, JITFunction)) else None


def _kind(value: Any) -> Any:
    """Return a stand-in for a Triton type, which the interpreter lacks: "*" for what a plan takes from the call."""
    if isinstance(value, tuple):
        return retyped(value, [_kind(item) for item in value])
    return "*" if isinstance(value, (torch.Tensor, *DESCRIPTORS, Symbol)) else "constexpr"


def _has_symbol(value: Any) -> bool:
    return isinstance(value, Symbol) or (isinstance(value, tuple) and any(map(_has_symbol, value)))


def _takes_any(parameter: Any) -> bool:
    """Return whether Triton compiles one kernel for all values of a parameter.

    True for `do_not_specialize` and for floats of a declared type. Elements of a tuple are specialised in any case.
    """
    return parameter.do_not_specialize or str(parameter.annotation_type).startswith("fp")


def _extents(grid: Any, bound: dict[str, Any]) -> tuple[int, int, int]:
    """Return the grid in three dimensions, with this call's numbers for symbols."""
    size = (*value_of(tuple(grid(bound) if callable(grid) else grid)), 1, 1)
    return size[0], size[1], size[2]


def _remember(cache: dict[tuple[Any, ...], Any], key: tuple[Any, ...], value: Any) -> None:
    with brief:
        while len(cache) >= _MOST_KEPT:
            cache.pop(next(iter(cache)))
        cache[key] = value
