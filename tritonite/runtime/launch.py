"""Kernels by the shortest way to the driver: explicit launches for engines, and `libentry` for any Triton kernel."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
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
from triton.tools.tensor_descriptor import TensorDescriptor

from tritonite import devices, dtypes
from tritonite.errors import CapturedInPart, Decline, InvalidDeclaration
from tritonite.language.order import waits
from tritonite.runtime import cache, contract, progress
from tritonite.runtime.contract import Symbol, value_of
from tritonite.runtime.locks import brief, fork_safe_lock

_LIMIT = 4096
_INTERPRETED = (
    "kernels run in Triton's interpreter on the CPU, thousands of times slower than on a GPU: no GPU is used here, or "
    "TRITON_INTERPRET is set"
)
# What a kernel is compiled with whose assertions stop the program, as those of ATen's do.
ASSERTING = {"debug": True, "sanitize_overflow": False}
# Of a launch that may be prepared while the one before it ends, as CUDA calls it a programmatic dependent one.
_DEPENDENT = {"launch_pdl": True}
# Those of Triton's language, and of Gluon, which tell of the layout in shared memory.
DESCRIPTORS = (TensorDescriptor, LaidOutDescriptor)
_TYPE_NAMES = dtypes.TRITON_NAMES | dtypes.FLOAT8_NAMES
_SEVERAL = torch.cuda.device_count() > 1
_lock = fork_safe_lock()


class _Local(threading.local):
    target: GPUTarget | None = None


_local = _Local()


def inside_kernel() -> bool:
    """Whether this thread is running a kernel in the interpreter, which itself calls ATen on CPU tensors."""
    return contract.inside_kernel()


@contextlib.contextmanager
def looking() -> Iterator[None]:
    """Within it a host function looks at data on the CPU, by ATen's operators, and no plan repeats its call.

    A dry recorder watches, so that nothing is written and no memory is read that holds nothing.
    """
    outer = contract.swap_inside_kernel(True)
    recorder = contract.recorder()
    if recorder is not None:
        recorder.unrecordable("data that the host looks at")
    watching = recorder.watch() if recorder is not None and recorder.dry else contextlib.nullcontext()
    try:
        with _disable_current_modes(), watching:
            yield
    finally:
        contract.swap_inside_kernel(outer)


@contextlib.contextmanager
def compiling(target: GPUTarget) -> Iterator[None]:
    """Within it this thread's launches through `libentry` compile for `target`, to Triton's cache, and run nothing."""
    outer, _local.target = _local.target, target
    try:
        yield
    finally:
        _local.target = outer


def _compiling(kernel: Any) -> contextlib.AbstractContextManager[None]:
    """Tell the user, within it, of compiling that takes long."""
    name = getattr(kernel, "__name__", "a kernel")
    line = f"compiling kernels, {name} at present; Triton keeps them in {knobs.cache.dir} for later processes"
    return progress.timed("compiling", line, watched=True)


def share_with(dispatcher: Any) -> None:
    """Tell the native dispatcher of Triton's launch hooks, and from now on of threads inside the interpreter."""
    contract.native = dispatcher
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    dispatcher.set_launch_hooks([hook.calls for hook in hooks if hasattr(hook, "calls")])


@functools.lru_cache(maxsize=1)
def _prepare_core() -> None:
    """Prepare what Triton's own functions call of its language, for the process, as the first call of one would."""
    from triton.runtime import interpreter

    from tritonite.language import interpreted

    interpreter._patch_lang(triton.language.cdiv.fn)
    interpreter._get_np_dtype = interpreted.by_name(interpreter._get_np_dtype)


@contextlib.contextmanager
def _interpreting() -> Iterator[None]:
    """The interpreter keeps its state in module globals, so one kernel runs at a time.

    It calls ATen, which is neither overridden nor recorded then. Overflow checks go off: integer operators wrap around,
    in the interpreter as on a GPU. Where an assertion fails, which stops a GPU, ATen is left to raise its error. Raises
    InvalidDeclaration for a kernel that branches on a block.
    """
    from triton.runtime import interpreter
    from triton.runtime.errors import InterpreterError
    from triton.runtime.interpreter import InterpreterOptions, interpreter_builder

    from tritonite.language import interpreted

    dot = interpreted.dot_in_order if contract.settings().invariant else interpreted.dot
    changes = {
        "options": InterpreterOptions(debug=True, sanitize_overflow=False),
        "binary_op": functools.partial(interpreted.arithmetic, interpreter_builder, "binary_op"),
        "unary_op": functools.partial(interpreted.arithmetic, interpreter_builder, "unary_op"),
        "create_assert": interpreted.refuse_unless,
        "cast_impl": functools.partial(interpreted.cast, interpreter_builder),
        "create_fp_to_fp": functools.partial(interpreted.to_float8, interpreter_builder),
        "create_dot": functools.partial(dot, interpreter_builder),
        "create_splat": functools.partial(interpreted.splat, interpreter_builder),
    }
    contract.note_launch()
    with _lock:
        _prepare_core()
        outer = contract.swap_inside_kernel(True)
        semantic = interpreter.interpreter_semantic
        saved, caller = dict(vars(interpreter_builder)), InterpretedFunction.__call__
        constant = semantic.scalar_constant
        patch_tensor, reduce = interpreter._patch_lang_tensor, interpreter.ReduceOps.generic_reduce
        vars(interpreter_builder).update(changes)
        semantic.scalar_constant = functools.partial(interpreted.scalar_constant, semantic, constant)
        interpreter._patch_lang_tensor = functools.partial(interpreted.patch_tensor, patch_tensor)
        interpreter.ReduceOps.generic_reduce = lambda *given: interpreted.reduce_pairwise(reduce, *given)
        # Triton's own prepares all of its language anew for every function that a kernel calls, in milliseconds.
        InterpretedFunction.__call__ = lambda function, *args, **kwargs: function.rewrite()(*args, **kwargs)
        try:
            with progress.timed("interpreting", _INTERPRETED), np.errstate(all="ignore"), _disable_current_modes():
                yield
        except InterpreterError as error:
            if isinstance(error.__cause__, (Decline, InvalidDeclaration)):
                raise error.__cause__ from None
            raise
        finally:
            contract.swap_inside_kernel(outer)
            vars(interpreter_builder).clear()
            vars(interpreter_builder).update(saved)
            InterpretedFunction.__call__ = caller
            semantic.scalar_constant = constant
            interpreter._patch_lang_tensor = patch_tensor
            interpreter.ReduceOps.generic_reduce = reduce


@dataclass(eq=False, slots=True)
class Specialization:
    """A kernel, what it is compiled for, and the arguments that stay the same from launch to launch.

    `signature` names every parameter's Triton type (nested tuples for tuple parameters, "constexpr" for constants),
    `constants` and `attributes` are keyed by parameter path. A launch passes the `leading` arguments, operands,
    outputs, and `fixed`, which ends with the `trailing` ones. `types` are those of its arguments but constexprs, flat.
    """

    kernel: Any
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    leading: tuple[Any, ...]
    trailing: tuple[Any, ...]
    fixed: tuple[Any, ...] = ()
    grid: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    compiled: dict[int, CompiledKernel] = field(default_factory=dict)
    types: tuple[str, ...] = ()

    def over(self, sized: tuple[Any, ...], grid: int) -> Specialization:
        """The same kernel, and what has been compiled of it, over an iteration space of its own."""
        return Specialization(
            self.kernel,
            self.signature,
            self.constants,
            self.attributes,
            self.leading,
            self.trailing,
            (*sized, *self.trailing),
            grid,
            self.options,
            self.compiled,
            self.types,
        )

    def compile(self, target: GPUTarget) -> CompiledKernel:
        """The compiled kernel for `target`, from Triton's own disk cache where it has it. Needs no GPU."""
        kind = GluonASTSource if self.kernel.is_gluon() else ASTSource
        source = kind(self.kernel, self.signature, self.constants, self.attributes)
        _prepare_cache()
        with _compiling(self.kernel):
            return triton.compile(source, target=target, options=self.options | _launched(self.kernel, target))


@functools.lru_cache(maxsize=1)
def _prepare_cache() -> None:
    """Give Triton a folder for the length of the process, with a warning, where it cannot write to its own."""
    try:
        os.makedirs(knobs.cache.dir, exist_ok=True)
        tempfile.TemporaryFile(dir=knobs.cache.dir).close()
    except OSError as error:
        cache.warn_once(f"kernels are compiled anew in every process, Triton's cache cannot be written: {error}")
        folder = tempfile.TemporaryDirectory(prefix="tritonite-")
        # Removed with what holds it, at exit.
        _temporary.append(folder)
        knobs.cache.dir = folder.name


_temporary: list[tempfile.TemporaryDirectory[str]] = []


class Launch:
    """A specialization made ready for one device: call it with the run-time arguments to launch it."""

    __slots__ = ("_before", "_fixed", "_leading", "_packed", "_run", "compiled", "device_index", "specialization")

    def __init__(self, specialization: Specialization, device: torch.device) -> None:
        self.specialization = specialization
        self.device_index = device.index or 0
        self._leading, self._fixed = specialization.leading, specialization.fixed
        self.compiled = None if devices.current.interpreted else _compile_for(specialization, self.device_index)
        if self.compiled is not None:
            self._run = self.compiled.run
            self._packed = (self.compiled.function, self.compiled.packed_metadata)

    def __call__(self, operands: Sequence[Any], outs: Sequence[torch.Tensor]) -> None:
        """Launch on the current stream."""
        if self.compiled is not None and torch._C._cuda_getDevice() != self.device_index:
            with torch.cuda.device(self.device_index):
                return self(operands, outs)
        if (recorder := contract.recorder()) is not None:
            specialization = self.specialization
            values = [*operands, *outs]
            for sized in self._fixed[: len(self._fixed) - len(specialization.trailing)]:
                _flatten_into(sized, values)
            size = (specialization.grid, 1, 1)
            recorder.add(specialization.types, values, size, self.compiled, self._replay)
            if recorder.dry:
                recorder.described(_described(specialization))
                return
            operands = [int(value) if type(value) is bool else value for value in map(value_of, operands)]
        if self.compiled is None:
            self._interpret((*self._leading, tuple(operands), tuple(outs), *self._fixed))
            return
        stream = torch._C._cuda_getCurrentRawStream(self.device_index)
        enter, exit_ = _hooks()
        grid = self.specialization.grid
        pointers = tuple([value.data_ptr() if isinstance(value, torch.Tensor) else value for value in operands])
        arguments = (*self._leading, pointers, tuple([out.data_ptr() for out in outs]), *self._fixed)
        metadata = None if enter is None else self.compiled.launch_metadata((grid, 1, 1), stream, *arguments)
        contract.note_launch()
        self._run(grid, 1, 1, stream, *self._packed, metadata, enter, exit_, *arguments)

    def _replay(self, values: list[Any], grid: tuple[int, ...]) -> None:
        kinds, trailing = tuple(self.specialization.signature.values()), self.specialization.trailing
        between = [None] * (len(kinds) - len(self._leading) - len(trailing))
        self._interpret(nest(kinds, (*self._leading, *between, *trailing), iter(values)))

    def _interpret(self, values: tuple[Any, ...]) -> None:
        with _interpreting():
            self.specialization.kernel[(self.specialization.grid,)](*values)


class LaunchDescription(NamedTuple):
    """What a launch is, for people: the kernel's name, a formula's, the grid, and the kernel's constants."""

    kernel: str
    formula: str
    grid: tuple[int, ...]
    constants: dict[str, Any]


def _described(specialization: Specialization) -> LaunchDescription:
    names = list(specialization.signature)
    constants = {
        names[path[0]]: value
        for path, value in specialization.constants.items()
        if len(path) == 1 and isinstance(value, int)
    }
    formula = getattr(specialization.leading[0], "__name__", "") if specialization.leading else ""
    constants["num_warps"] = specialization.options.get("num_warps", 4)
    return LaunchDescription(specialization.kernel.__name__, formula, (specialization.grid,), constants)


def _hooks() -> tuple[Any, Any]:
    """What Triton is to call before and after a launch; None where nobody asked, which spares it the preparation."""
    enter, exit_ = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return enter if getattr(enter, "calls", enter) else None, exit_ if getattr(exit_, "calls", exit_) else None


def _launched(kernel: Any, target: GPUTarget) -> dict[str, Any]:
    """How a kernel of this function is launched: beside the end of what it waits for, where the device can."""
    return _DEPENDENT if devices.prepares_launches(target.backend, target.arch) and waits(kernel) else {}


def _flatten_into(value: Any, flat: list[Any]) -> None:
    if type(value) is tuple:
        for item in value:
            _flatten_into(item, flat)
    else:
        flat.append(value)


def flatten(kinds: tuple[Any, ...], values: tuple[Any, ...]) -> Iterator[Any]:
    """The leaves of a launch's arguments that are not constexpr by their kinds, Triton's types in nested tuples."""
    for kind, value in zip(kinds, values, strict=True):
        if type(kind) is tuple:
            yield from flatten(kind, value)
        elif kind != "constexpr":
            yield value


def nest(kinds: Any, constants: Any, leaves: Iterator[Any]) -> Any:
    """The reverse of `flatten`; `constants` has the constexprs in their places."""
    if type(kinds) is not tuple:
        return constants if kinds == "constexpr" else next(leaves)
    return tuple([nest(kind, constants and constants[i], leaves) for i, kind in enumerate(kinds)])


def _compile_for(specialization: Specialization, device_index: int) -> CompiledKernel:
    kernel = specialization.compiled.get(device_index)
    if kernel is None:
        if torch.cuda.is_current_stream_capturing():
            _decline_to_compile(specialization.kernel)
        with torch.cuda.device(device_index):
            kernel = specialization.compile(driver.active.get_current_target())
            kernel._init_handles()
        specialization.compiled[device_index] = kernel
    return kernel


def _decline_to_compile(kernel: Any) -> None:
    """Leave a call to ATen whose kernel is not compiled yet. Raises CapturedInPart where that would do a part twice."""
    if contract.has_written():
        raise CapturedInPart(kernel=getattr(kernel, "__name__", repr(kernel)))
    raise Decline("a kernel to compile while a CUDA graph is captured", lasting=False)


def libentry(fn: Any = None) -> Any:
    """Decorator over `triton.jit`, `triton.autotune` and `triton.heuristics`, in any nesting: a cache of kernels.

    With parentheses or without. The first call of a kind goes through the decorators, tuning included. Later calls
    evaluate the heuristics, look the compiled kernel up by what Triton specialises on, and launch it, without walking
    the decorators again. Raises InvalidDeclaration for anything but such a kernel.

        @libentry()
        @triton.autotune(configs=[...], key=["n"])
        @triton.jit
        def kernel(x, n, BLOCK: tl.constexpr): ...
    """
    return LibEntry if fn is None else LibEntry(fn)


class LibEntry(KernelInterface):
    """A kernel behind `libentry`: launch it as any Triton kernel, `kernel[grid](...)`."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self._chain: list[Any] = []
        while not isinstance(fn, (JITFunction, InterpretedFunction)):
            if not isinstance(fn, (Autotuner, Heuristics)):
                raise InvalidDeclaration(
                    name=getattr(fn, "__name__", repr(fn)), reason="libentry wraps triton.jit, autotune or heuristics"
                )
            self._chain.append(fn)
            fn = fn.fn
        self.jit = fn
        self.arg_names: list[str] = fn.arg_names
        functools.update_wrapper(self, fn.fn)
        self._parameters = list(inspect.signature(fn.fn).parameters.values())
        self._waits = waits(fn)
        self._constexprs = frozenset(self.arg_names[i] for i in fn.constexprs) if self._compiles else frozenset()
        self._configs: dict[tuple[Any, ...], Any] = {}
        self._kernels: dict[tuple[Any, ...], CompiledKernel] = {}
        self._tuning = fork_safe_lock()

    @property
    def _compiles(self) -> bool:
        return isinstance(self.jit, JITFunction)

    def run(self, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        """Launch, from the cache where a call like this one has been compiled."""
        if _local.target is not None:
            return self._compile_for(_local.target, args, kwargs | _launched(self.jit, _local.target))
        if _SEVERAL and (index := _device_index(args, kwargs)) not in (None, torch._C._cuda_getDevice()):
            with torch.cuda.device(index):
                return self.run(*args, grid=grid, warmup=warmup, **kwargs)
        symbols = {name: value for name, value in self._named(args, kwargs).items() if _has_symbol(value)}
        if symbols:
            args = tuple([value_of(value) for value in args])
            kwargs = {name: value_of(value) for name, value in kwargs.items()}
        recorder = contract.recorder()
        if recorder is not None and recorder.dry:
            bound, options, _ = self._bind(args, kwargs)
            self._tell_recorder(recorder, bound | symbols, grid, None)
            recorder.described(self._description(bound, options, grid))
            return None
        if not self._compiles:
            bound, _, hooks = self._bind(args, kwargs)
            for hook in hooks:
                hook({**bound})
            given = {name: value for name, value in bound.items() if value is not inspect.Parameter.empty}
            if recorder is not None:
                self._tell_recorder(recorder, given | symbols, grid, None)
            with _interpreting():
                return self.jit.run(grid=_extents(grid, given), warmup=warmup, **given)
        if self._waits and devices.has_dependent_launch(torch.device("cuda", driver.active.get_current_device())):
            kwargs = kwargs | _DEPENDENT
        found = None if warmup else self._resolve(args, kwargs)
        kernel = None if found is None else self._kernels.get(found[0])
        if found is None or kernel is None:
            return self._first(args, grid, warmup, kwargs, symbols)
        key, bound, hooks = found
        for hook in hooks:
            hook({**bound})
        for hook in self.jit.pre_run_hooks:
            hook(**bound)
        if recorder is not None:
            self._tell_recorder(recorder, bound | symbols, grid, kernel)
        size = _extents(grid, bound)
        stream = driver.active.get_current_stream(key[0])
        enter, exit_ = _hooks()
        values = bound.values()
        metadata = None if enter is None else kernel.launch_metadata(size, stream, *values)
        contract.note_launch()
        kernel.run(*size, stream, kernel.function, kernel.packed_metadata, metadata, enter, exit_, *values)
        return kernel

    def _compile_for(self, target: GPUTarget, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CompiledKernel:
        """Compile what Triton would for a launch with these arguments, so that a launch finds it in the cache."""
        bound, options, _ = self._bind(args, kwargs)
        backend = make_backend(target)
        binder = create_function_from_signature(self.jit.signature, self.jit.params, backend)
        values, kinds, given = binder(**bound, **options)
        packed, signature, constants, attributes = self.jit._pack_args(backend, options, values, kinds, given)
        kind = GluonASTSource if self.jit.is_gluon() else ASTSource
        source = kind(self.jit, signature, constants, attributes)
        return triton.compile(source, target=target, options=packed.__dict__)

    def specialization(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Specialization:
        """What a launch with these arguments compiles, as Triton would specialise it. Needs no GPU."""
        bound, options, _ = self._bind(args, kwargs)
        signature: dict[str, Any] = {}
        constants: dict[tuple[int, ...], Any] = {}
        attributes: dict[tuple[int, ...], Any] = {}

        def kind(value: Any, path: tuple[int, ...], parameter: Any) -> Any:
            if isinstance(value, tuple):
                return tuple([kind(item, (*path, i), parameter) for i, item in enumerate(value)])
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
            # For the elements of a tuple that is done whatever the parameter says.
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

    def _first(
        self, args: tuple[Any, ...], grid: Any, warmup: bool, kwargs: dict[str, Any], symbols: dict[str, Any]
    ) -> Any:
        recorder = contract.recorder()
        # Who launches a kernel of their own has nothing to leave the call to: it compiles, as Triton would.
        if contract.in_host_function() and torch.cuda.is_current_stream_capturing():
            _decline_to_compile(self.jit)
        contract.note_launch()
        _prepare_cache()
        with self._tuning, _disable_current_modes(), _compiling(self):
            kernel = self.fn.run(*args, grid=grid if callable(grid) else value_of(grid), warmup=warmup, **kwargs)
            if warmup or not isinstance(kernel, CompiledKernel):
                return kernel
            for decorator in self._chain:
                if isinstance(decorator, Autotuner) and len(decorator.configs) > 1:
                    _remember(self._configs, self._tuning_key(decorator, args, kwargs), decorator.best_config)
            found = self._resolve(args, kwargs)
            if found is not None:
                _remember(self._kernels, found[0], kernel)
        if recorder is not None:
            self._tell_recorder(recorder, self._bind(args, kwargs)[0] | symbols, grid, kernel)
        return kernel

    def _tell_recorder(self, recorder: Any, bound: dict[str, Any], grid: Any, kernel: CompiledKernel | None) -> None:
        size = (*(grid(bound) if callable(grid) else grid), 1, 1)[:3]
        names = list(bound) if kernel is None else list(kernel.src.signature)
        values = tuple([bound[name] for name in names])
        kinds = tuple(map(_kind, values)) if kernel is None else tuple(kernel.src.signature.values())

        def interpret(leaves: list[Any], size: tuple[int, ...]) -> None:
            given = nest(kinds, values, iter(leaves))
            with _interpreting():
                self.jit.run(grid=size, warmup=False, **dict(zip(names, given, strict=True)))

        for parameter in self.jit.params if kernel is not None else ():
            if isinstance(bound.get(parameter.name), Symbol) and not _takes_any(parameter):
                recorder.unrecordable(f"a number of the call whose kernel is specialised for it: {parameter.name}")
        types = tuple(flatten(kinds, kinds))
        recorder.add(types, list(flatten(kinds, values)), size, kernel, interpret)

    def _description(self, bound: dict[str, Any], options: dict[str, Any], grid: Any) -> LaunchDescription:
        """`options` are what is no parameter: num_warps and the like."""
        constants = {name: bound[name] for name in self.arg_names if _is_constant(self.jit, name, bound[name])}
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
        """(every parameter's value, compile options, configs' hooks). Raises KeyError where a tuner has yet to decide.

        The interpreter has nothing to tune by and takes the first config.
        """
        named = self._named(args, kwargs)
        hooks = []
        for decorator in self._chain:
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
        """(cache key, every parameter's value, configs' hooks), or None where the decorators have to be walked."""
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
    """Where the first tensor is that is on a GPU, in tuples and descriptors too."""
    for value in (*args, *kwargs.values()):
        value = value.base if isinstance(value, DESCRIPTORS) else value
        if isinstance(value, torch.Tensor) and value.device.type == "cuda":
            return value.device.index
        if isinstance(value, tuple) and (index := _device_index(value, {})) is not None:
            return index
    return None


def _specialization(value: Any, specialize: bool, on_alignment: bool) -> object:
    """What Triton compiles anew for in an argument: never the value of an int beyond 1, multiples of 16 and width."""
    if isinstance(value, torch.Tensor):
        # AMD's backend also tells buffers below 2 GiB from larger ones.
        small = torch.version.hip is not None and value.untyped_storage().nbytes() <= 2**31 - 1
        return value.dtype, specialize and on_alignment and value.data_ptr() % 16 == 0, small
    if value is None or isinstance(value, (bool, float)):
        return type(value)
    if isinstance(value, int):
        width = 32 if -(2**31) <= value < 2**31 else 64 if value < 2**63 else -64
        return width, specialize and value == 1, specialize and on_alignment and value % 16 == 0
    if isinstance(value, tuple):
        # Triton specialises for the elements of a tuple, whatever the parameter says.
        parts = tuple(_specialization(item, True, True) for item in value)
        return None if None in parts else parts
    if isinstance(value, DESCRIPTORS):
        layout = getattr(value, "layout", None)
        return "descriptor", value.base.dtype, tuple(value.block_shape), value.padding, layout
    return value if isinstance(value, (str, triton.language.dtype, JITFunction)) else None


def _kind(value: Any) -> Any:
    """A stand-in for a Triton type in the interpreter, which has none: whether a plan takes it from the call."""
    if isinstance(value, tuple):
        return tuple(map(_kind, value))
    return "*" if isinstance(value, (torch.Tensor, *DESCRIPTORS, Symbol)) else "constexpr"


def _has_symbol(value: Any) -> bool:
    return isinstance(value, Symbol) or (type(value) is tuple and any(map(_has_symbol, value)))


def _takes_any(parameter: Any) -> bool:
    """Whether Triton compiles one kernel for all values of a parameter: floats of a declared type, and what is told.

    Not of a tuple's elements, for which it compiles in any case.
    """
    return parameter.do_not_specialize or str(parameter.annotation_type).startswith("fp")


def _extents(grid: Any, bound: dict[str, Any]) -> tuple[int, int, int]:
    """A launch's grid in three dimensions, in this very call."""
    size = (*value_of(tuple(grid(bound) if callable(grid) else grid)), 1, 1)
    return size[0], size[1], size[2]


def _is_constant(jit: Any, name: str, value: Any) -> bool:
    """Whether a parameter is a constant that tells people something: a block's size, a flag."""
    annotation = inspect.signature(jit.fn).parameters[name].annotation
    return "constexpr" in str(annotation) and isinstance(value, (int, str))


def _remember(cache: dict[tuple[Any, ...], Any], key: tuple[Any, ...], value: Any) -> None:
    with brief:
        while len(cache) >= _LIMIT:
            cache.pop(next(iter(cache)))
        cache[key] = value
