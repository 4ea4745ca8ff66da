"""Kernels by the shortest way to the driver: explicit launches for engines, and `libentry` for any Triton kernel."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime import driver

from tritonite import devices

_LIMIT = 4096
_lock = threading.RLock()
_compiled: dict[tuple[object, ...], CompiledKernel] = {}


class _Local(threading.local):
    inside_kernel = False


_local = _Local()


def inside_kernel() -> bool:
    """Whether this thread is running a kernel in the interpreter, which itself calls ATen on CPU tensors."""
    return _local.inside_kernel


@contextlib.contextmanager
def _interpreting() -> Iterator[None]:
    """The interpreter keeps its state in module globals, so one kernel runs at a time.

    Overflow checks go off: integer operators wrap around, in the interpreter as on a GPU.
    """
    from triton.runtime.interpreter import InterpreterOptions, interpreter_builder

    from tritonite.language import interpreted

    changes = {
        "options": InterpreterOptions(sanitize_overflow=False),
        "cast_impl": functools.partial(interpreted.cast, interpreter_builder),
    }
    with _lock:
        outer, _local.inside_kernel = _local.inside_kernel, True
        saved = dict(vars(interpreter_builder))
        vars(interpreter_builder).update(changes)
        try:
            with np.errstate(all="ignore"):
                yield
        finally:
            _local.inside_kernel = outer
            vars(interpreter_builder).clear()
            vars(interpreter_builder).update(saved)


@dataclass(frozen=True)
class Specialization:
    """A kernel, what it is compiled for, and the arguments that stay the same from launch to launch.

    `signature` names every parameter's Triton type (nested tuples for tuple parameters, "constexpr" for constants),
    `constants` and `attributes` are keyed by parameter path, `fixed` are the arguments after the run-time ones.
    """

    kernel: Any
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    leading: tuple[Any, ...]
    fixed: tuple[Any, ...]
    grid: int
    options: dict[str, int] = field(default_factory=dict)

    def key(self) -> tuple[object, ...]:
        return (
            self.kernel,
            tuple(self.signature.values()),
            tuple(sorted(self.constants.items(), key=lambda item: item[0])),
            tuple(self.attributes),
            tuple(self.options.items()),
        )

    def compile(self, target: GPUTarget) -> CompiledKernel:
        """The compiled kernel for `target`, from Triton's own disk cache where it has it. Needs no GPU."""
        source = ASTSource(self.kernel, self.signature, self.constants, self.attributes)
        return triton.compile(source, target=target, options=dict(self.options))


class Launch:
    """A specialization made ready for one device: call it with the run-time arguments to launch it."""

    __slots__ = ("device_index", "specialization", "compiled", "_run", "_before", "_leading", "_fixed", "_packed")

    def __init__(self, specialization: Specialization, device: torch.device) -> None:
        self.specialization = specialization
        self.device_index = device.index or 0
        self._leading, self._fixed = specialization.leading, specialization.fixed
        self.compiled = None if devices.current.interpreted else _compile_for(specialization, self.device_index)
        if self.compiled is not None:
            self._run = self.compiled.run
            self._packed = (self.compiled.function, self.compiled.packed_metadata)

    def __call__(self, *arguments: Any) -> None:
        if self.compiled is None:
            with _interpreting():
                grid = (self.specialization.grid,)
                self.specialization.kernel[grid](*self._leading, *arguments, *self._fixed)
            return
        stream = torch._C._cuda_getCurrentRawStream(self.device_index)
        enter, exit_ = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        grid = self.specialization.grid
        arguments = (*self._leading, *arguments, *self._fixed)
        metadata = None if enter is None else self.compiled.launch_metadata((grid, 1, 1), stream, *arguments)
        self._run(grid, 1, 1, stream, *self._packed, metadata, enter, exit_, *arguments)


def _compile_for(specialization: Specialization, device_index: int) -> CompiledKernel:
    key = (device_index, *specialization.key())
    kernel = _compiled.get(key)
    if kernel is None:
        with torch.cuda.device(device_index):
            kernel = specialization.compile(driver.active.get_current_target())
            kernel._init_handles()
        with _lock:
            while len(_compiled) >= _LIMIT:
                _compiled.pop(next(iter(_compiled)))
            _compiled[key] = kernel
    return kernel
