"""Kernel specialisations, and launches whose arguments an engine lays out itself.

A `Launch` skips the argument inspection of Triton and of `libentry`, which cost host time in every call.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompilationError, CompiledKernel
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as LaidOutDescriptor
from triton.runtime import driver
from triton.runtime.errors import OutOfResources, PTXASError
from triton.tools.tensor_descriptor import TensorDescriptor

from tritonite import devices
from tritonite.errors import CapturedInPart, Decline
from tritonite.language.order import waits
from tritonite.runtime import cache, compilation, contract, progress
from tritonite.runtime.hollow import decline_guarded
from tritonite.runtime.interpreted import InterpretedCall
from tritonite.runtime.interpreter import interpreting, on_host
from tritonite.runtime.nested import flatten
from tritonite.runtime.symbols import value_of

# Compile options of kernels with assertions, which stop the program as ATen's assertions do.
ASSERTING = {"debug": True, "sanitize_overflow": False}
# Compile options of programmatic dependent launches, which the GPU prepares while the launch before is ending.
DEPENDENT = {"launch_pdl": True}
# Errors of compilers. Triton's passes raise a RuntimeError with the text.
_COMPILERS = (CompilationError, OutOfResources, PTXASError)
_PASSES_FAILED = "PassManager::run failed"
# Tensor descriptors: Triton's, and Gluon's, which also has the layout in shared memory.
DESCRIPTORS = (TensorDescriptor, LaidOutDescriptor)


def watched_compile(kernel: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the user is told that a kernel is being compiled, if that takes long."""
    name = getattr(kernel, "__name__", "a kernel")
    line = f"compiling kernels, {name} at present; Triton keeps them in {knobs.cache.dir} for later processes"
    return progress.timed("compiling", line, watched=True)


def share_with(dispatcher: Any) -> None:
    """Give the native dispatcher Triton's lists of launch hooks, and have `contract` use the dispatcher."""
    contract.native = dispatcher
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    dispatcher.set_launch_hooks([hook.calls for hook in hooks if hasattr(hook, "calls")])


@dataclass(eq=False, slots=True)
class Specialization:
    """A kernel, what it is compiled for, and the arguments that are the same in every launch.

    Args:
        signature: the Triton type of every parameter: nested tuples for tuple parameters, "constexpr" for constants.
            The types of a NamedTuple's fields are a NamedTuple of the same class.
        constants, attributes: Triton's, by path: the parameter's index, then indices in nested tuples.
        leading: the first arguments. Next come the tuple of operands, the tuple of outputs, and `fixed`.
        trailing: the last arguments of `fixed`.
        fixed: sizes and strides, then `trailing`.
        grid: the number of programs.
        compiled: compiled kernels by device index, shared by all iteration spaces.
        types: the Triton types of all arguments but constexprs, flattened.
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
        """Return a specialisation that shares this kernel and its compiled code, with other sizes and another grid."""
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
        """Compile for `target`, or take the kernel from Triton's disk cache. Needs no GPU."""
        prepare_cache()
        with watched_compile(self.kernel):
            return compilation.compile_kernel(self.source(), target, self.options_for(target))

    def source(self) -> ASTSource:
        """Return what Triton compiles."""
        kind = GluonASTSource if self.kernel.is_gluon() else ASTSource
        return kind(self.kernel, self.signature, self.constants, self.attributes)

    def options_for(self, target: GPUTarget) -> dict[str, Any]:
        """Return the compile options for `target`."""
        return self.options | dependent_options(self.kernel, target)


def prepare_cache() -> None:
    """Give Triton a temporary cache folder, with a warning, if it cannot write to its own."""
    _prepare(knobs.cache.dir)


@functools.lru_cache(maxsize=16)
def _prepare(cache_folder: str) -> None:
    try:
        os.makedirs(cache_folder, exist_ok=True)
        tempfile.TemporaryFile(dir=cache_folder).close()
    except OSError as error:
        cache.warn_once(f"kernels are compiled anew in every process, Triton's cache cannot be written: {error}")
        folder = tempfile.TemporaryDirectory(prefix="tritonite-")
        # Held until exit, when the folder is removed.
        _temporary.append(folder)
        knobs.cache.dir = folder.name


_temporary: list[tempfile.TemporaryDirectory[str]] = []


class Launch:
    """A specialisation compiled for one device. Call it with operands and outputs to launch the kernel."""

    __slots__ = (
        "_before",
        "_fixed",
        "_leading",
        "_packed",
        "_run",
        "_runtime",
        "compiled",
        "device_index",
        "specialization",
    )

    def __init__(self, specialization: Specialization, device: torch.device) -> None:
        self.specialization = specialization
        self.device_index = device.index or 0
        self._leading, self._fixed = specialization.leading, specialization.fixed
        self.compiled: CompiledKernel | None = None
        self._load_unless_dry()

    def _load_unless_dry(self) -> None:
        """Compile for the device, or take the kernel from memory or the disk cache. A dry recording needs none."""
        recorder = contract.recorder()
        if devices.current.interpreted or (recorder is not None and recorder.dry):
            return
        self._runtime = devices.current.runtime
        self.compiled = _compile_for(self.specialization, self.device_index)
        self._run = self.compiled.run
        self._packed = (self.compiled.function, self.compiled.packed_metadata)

    def _note_needed(self, collector: compilation.Collector) -> None:
        """Note the kernel as needed by a dry recording, unless it is in memory."""
        specialization, index = self.specialization, self.device_index
        if index not in specialization.compiled:
            load = functools.partial(_compile_for, specialization, index)
            collector.add(specialization.source(), specialization.options_for(collector.target), load)

    def __call__(self, operands: Sequence[Any], outs: Sequence[torch.Tensor]) -> None:
        """Launch on the current stream, and add the launch to the recorder if there is one."""
        if self.compiled is None:
            # A dry recording has made this object, which may be kept for later calls.
            self._load_unless_dry()
        if self.compiled is not None and self._runtime.launch_index() != self.device_index:
            with self._runtime.on(torch.device(devices.current.type, self.device_index)):
                return self(operands, outs)
        decline_guarded(operands, outs)
        if (recorder := contract.recorder()) is not None:
            specialization = self.specialization
            kinds = tuple(specialization.signature.values())[len(self._leading) + 2 :]
            values = [*operands, *outs, *flatten(kinds, self._fixed)]
            size = (specialization.grid, 1, 1)
            recorder.add(specialization.types, values, size, self.compiled, self._host())
            if recorder.dry:
                recorder.described(_described(specialization))
                if (collector := compilation.collector()) is not None and not devices.current.interpreted:
                    self._note_needed(collector)
                return
            operands = [int(value) if type(value) is bool else value for value in map(value_of, operands)]
        if self.compiled is None:
            self._interpret((*self._leading, tuple(operands), tuple(outs), *self._fixed))
            return
        stream = self._runtime.launch_stream(self.device_index)
        enter, exit_ = active_hooks()
        grid = self.specialization.grid
        pointers = tuple([value.data_ptr() if isinstance(value, torch.Tensor) else value for value in operands])
        arguments = (*self._leading, pointers, tuple([out.data_ptr() for out in outs]), *self._fixed)
        metadata = None if enter is None else self.compiled.launch_metadata((grid, 1, 1), stream, *arguments)
        contract.note_launch()
        self._run(grid, 1, 1, stream, *self._packed, metadata, enter, exit_, *arguments)

    def _host(self) -> InterpretedCall:
        signature = self.specialization.signature
        values = (*self._leading, None, None, *self._fixed)
        return InterpretedCall(self.specialization.kernel, tuple(signature), tuple(signature.values()), values)

    def _interpret(self, values: tuple[Any, ...]) -> None:
        with interpreting():
            self.specialization.kernel[(self.specialization.grid,)](*on_host(values))


class LaunchDescription(NamedTuple):
    """A launch as `explain` shows it: the names of kernel and formula, the grid, and the kernel's constants."""

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


def active_hooks() -> tuple[Any, Any]:
    """Return Triton's launch hooks (enter, exit); None for a hook without listeners, which saves its arguments."""
    enter, exit_ = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return enter if getattr(enter, "calls", enter) else None, exit_ if getattr(exit_, "calls", exit_) else None


def dependent_options(kernel: Any, target: GPUTarget) -> dict[str, Any]:
    """Return `DEPENDENT` if the kernel waits for the launch before and the target has dependent launches, else {}."""
    return DEPENDENT if devices.prepares_launches(target.backend, target.arch) and waits(kernel) else {}


def _compile_for(specialization: Specialization, device_index: int) -> CompiledKernel:
    kernel = specialization.compiled.get(device_index)
    if kernel is None:
        if contract.is_capturing():
            decline_to_compile(specialization.kernel)
        runtime = devices.current.runtime
        with declining_failures(specialization.kernel), runtime.on(torch.device(devices.current.type, device_index)):
            kernel = specialization.compile(driver.active.get_current_target())
            kernel._init_handles()
        specialization.compiled[device_index] = kernel
    return kernel


@contextlib.contextmanager
def declining_failures(kernel: Any) -> Iterator[None]:
    """Decline, with a warning, a call whose kernel a compiler fails on within the with block.

    The compiler's error passes through outside host functions, and where the call may have written into its arguments.
    With `contract.set_strict(True)` it always does.
    """
    may_decline = contract.in_host_function() and not contract.has_written() and not contract.is_strict()
    try:
        yield
    except (*_COMPILERS, RuntimeError) as error:
        if not may_decline or not (isinstance(error, _COMPILERS) or _PASSES_FAILED in str(error)):
            raise
        reason = f"its kernel {getattr(kernel, '__name__', repr(kernel))} does not compile: {error}"
        cache.warn_once(f"{contract.running_overload()}: {reason}")
        raise Decline(reason) from error


def decline_to_compile(kernel: Any) -> None:
    """Raise Decline for a kernel that is not compiled while a CUDA graph is captured.

    Raises CapturedInPart if the call may have written into its arguments, because ATen would repeat that work.
    """
    if contract.has_written():
        raise CapturedInPart(kernel=getattr(kernel, "__name__", repr(kernel)))
    raise Decline("a kernel to compile while a CUDA graph is captured", lasting=False)
