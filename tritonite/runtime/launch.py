"""Kernels by the shortest way to the driver: explicit launches for engines, and `libentry` for any Triton kernel."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as LaidOutDescriptor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from tritonite import devices
from tritonite.errors import CapturedInPart, Decline
from tritonite.language.order import waits
from tritonite.runtime import cache, contract, progress
from tritonite.runtime.interpreter import interpreting
from tritonite.runtime.symbols import value_of

# What a kernel is compiled with whose assertions stop the program, as those of ATen's do.
ASSERTING = {"debug": True, "sanitize_overflow": False}
# Of a launch that may be prepared while the one before it ends, as CUDA calls it a programmatic dependent one.
DEPENDENT = {"launch_pdl": True}
# Those of Triton's language, and of Gluon, which tell of the layout in shared memory.
DESCRIPTORS = (TensorDescriptor, LaidOutDescriptor)


def watched_compile(kernel: Any) -> contextlib.AbstractContextManager[None]:
    """Tell the user, within it, of compiling that takes long."""
    name = getattr(kernel, "__name__", "a kernel")
    line = f"compiling kernels, {name} at present; Triton keeps them in {knobs.cache.dir} for later processes"
    return progress.timed("compiling", line, watched=True)


def share_with(dispatcher: Any) -> None:
    """Tell the native dispatcher of Triton's launch hooks, and from now on of threads inside the interpreter."""
    contract.native = dispatcher
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    dispatcher.set_launch_hooks([hook.calls for hook in hooks if hasattr(hook, "calls")])


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
        prepare_cache()
        with watched_compile(self.kernel):
            return triton.compile(source, target=target, options=self.options | dependent_options(self.kernel, target))


@functools.lru_cache(maxsize=1)
def prepare_cache() -> None:
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
        enter, exit_ = active_hooks()
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
        with interpreting():
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


def active_hooks() -> tuple[Any, Any]:
    """What Triton is to call before and after a launch; None where nobody asked, which spares it the preparation."""
    enter, exit_ = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return enter if getattr(enter, "calls", enter) else None, exit_ if getattr(exit_, "calls", exit_) else None


def dependent_options(kernel: Any, target: GPUTarget) -> dict[str, Any]:
    """How a kernel of this function is launched: beside the end of what it waits for, where the device can."""
    return DEPENDENT if devices.prepares_launches(target.backend, target.arch) and waits(kernel) else {}


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
            decline_to_compile(specialization.kernel)
        with torch.cuda.device(device_index):
            kernel = specialization.compile(driver.active.get_current_target())
            kernel._init_handles()
        specialization.compiled[device_index] = kernel
    return kernel


def decline_to_compile(kernel: Any) -> None:
    """Leave a call to ATen whose kernel is not compiled yet. Raises CapturedInPart where that would do a part twice."""
    if contract.has_written():
        raise CapturedInPart(kernel=getattr(kernel, "__name__", repr(kernel)))
    raise Decline("a kernel to compile while a CUDA graph is captured", lasting=False)
