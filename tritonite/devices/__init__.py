"""What the kernels run on: one capability record for each kind of device."""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass, field
from typing import Any

import torch

from tritonite.errors import TritonImportedTooEarly


@dataclass(frozen=True)
class Device:
    """What an engine needs to know of a device; nothing in it is particular to an operator.

    `flat_bytes` is how much of its widest operand a program takes of a flat iteration space (2,048 elements at most but
    in the interpreter), `tile_bytes` how much it takes of a two-dimensional one, and `small_block` how many elements of
    the smallest, 0 for the same of all. `transpose_tile` are the (rows, columns) of a tile that reads one operand
    across the other's grain, `small_transpose_tile` those of a space of `small_elements` or fewer, `row_elements` the
    elements a program takes of rows that are reduced at a time, in `row_columns` where the rows stand upright,
    `programs` how many fill the device, `most_warps` the largest program's, `shared_memory` the bytes of it that a
    program may have (Triton keeps the rest), `registers` how many of 32 bits a multiprocessor has, `options` what its
    compiler is told besides, and `flushing` what else where subnormals may be 0. With `forward_progress` a program that
    runs keeps running while others wait for it; one that runs `ptx` takes NVIDIA's assembly. Where `aten_measured` it
    is known in what ATen's kernels are faster. The operators that are `unverified` on this kind of device, in what they
    give or in their speed, stay ATen's unless they are named; so do those of families that are.
    """

    kind: str
    type: str
    dispatch_key: str
    flat_bytes: int
    tile_bytes: int
    transpose_tile: tuple[int, int]
    num_warps: int
    row_elements: int
    row_columns: int
    programs: int
    most_warps: int = 16
    shared_memory: int = 226 * 1024
    registers: int = 2**16
    small_elements: int = 0
    small_block: int = 0
    small_transpose_tile: tuple[int, int] = (0, 0)
    interpreted: bool = False
    forward_progress: bool = False
    ptx: bool = False
    aten_measured: bool = False
    unverified: frozenset[str] = frozenset()
    options: dict[str, Any] = field(default_factory=dict)
    flushing: dict[str, Any] = field(default_factory=dict)


# What turns Triton's interpreter on, as Triton reads it.
_ON = ("1", "true", "yes", "on", "y")


def _decorate_library() -> None:
    """Have Triton's standard library run in the interpreter, as it does where Triton is imported with that set.

    Libraries such as transformers import Triton by themselves. Raises TritonImportedTooEarly for a Triton whose
    functions are not found.
    """
    try:
        from triton.language import core
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction
    except ImportError:
        raise TritonImportedTooEarly from None
    interpreted: dict[int, Any] = {}
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("triton.language")]
    for place in (*modules, core.tensor):
        for name, value in list(vars(place).items()):
            if isinstance(value, JITFunction):
                function = interpreted.setdefault(id(value), InterpretedFunction(value.fn))
                # A method gets the tensor itself.
                setattr(place, name, function if place is not core.tensor else _method(function))


def _method(function: Any) -> Any:
    return lambda *args, **kwargs: function(*args, **kwargs)


def _detect() -> Device:
    from tritonite.devices import amd, compile_only, interpreter, nvidia

    setting = os.environ.get("TRITON_INTERPRET")
    if setting is not None and setting.lower() in _ON:
        return interpreter.RECORD
    if torch.cuda.is_available():
        return amd.RECORD if torch.version.hip else nvidia.RECORD
    if setting is not None:
        return compile_only.RECORD
    os.environ["TRITON_INTERPRET"] = "1"
    if "triton" in sys.modules:
        _decorate_library()
    return interpreter.RECORD


current = _detect()


def multiprocessors(device: torch.device) -> int:
    """How many programs of the largest kind run at a time."""
    return _multiprocessors(device) if device.type == "cuda" else max(1, current.programs // 8)


@functools.lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def resident_threads(device: torch.device) -> int:
    """How many threads run at a time: the most that ATen launches where its kernels stride over their grid."""
    return _resident_threads(device) if device.type == "cuda" else 2048


@functools.lru_cache(maxsize=64)
def _resident_threads(device: torch.device) -> int:
    properties = torch.cuda.get_device_properties(device)
    # In multiples of ATen's blocks.
    return int(properties.multi_processor_count * (properties.max_threads_per_multi_processor // 256 * 256))


@functools.lru_cache(maxsize=64)
def has_tma(device: torch.device) -> bool:
    """Whether the device copies tiles that a tensor descriptor tells of by itself: NVIDIA's from sm_90 on."""
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.lru_cache(maxsize=64)
def has_wgmma(device: torch.device) -> bool:
    """Whether tensor cores read both operands from shared memory, for groups of four warps: sm_90 alone."""
    return device.type == "cuda" and has_tma(device) and torch.cuda.get_device_capability(device)[0] == 9


# Of CUDA 12.3, which takes such launches into CUDA graphs.
_FIRST_DRIVER = 12_030


def prepares_launches(backend: str, architecture: Any) -> bool:
    """Whether such devices place a launch's programs while the launch before it ends: "cuda" from sm_90, 90, on."""
    return backend == "cuda" and architecture >= 90 and _driver_version() >= _FIRST_DRIVER


@functools.lru_cache(maxsize=1)
def _driver_version() -> int:
    """That of NVIDIA's driver, as 12030 for CUDA 12.3; the first that will do where there is none."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        return _FIRST_DRIVER
    from tritonite.devices import nvidia

    return nvidia.driver_version()


def has_dependent_launch(device: torch.device) -> bool:
    """Whether a launch may begin before the one ends that it waits for: NVIDIA's from sm_90 on."""
    return device.type == "cuda" and has_tma(device) and _driver_version() >= _FIRST_DRIVER


@functools.lru_cache(maxsize=64)
def has_float8(device: torch.device) -> bool:
    """Whether Triton converts float8_e4m3fn there: NVIDIA's from sm_89 on, and in the interpreter."""
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


@functools.lru_cache(maxsize=64)
def architecture(device: torch.device) -> str:
    """The kind of its multiprocessors, such as sm_90; "" of what is no NVIDIA GPU."""
    if device.type != "cuda" or torch.version.hip is not None:
        return ""
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


@functools.lru_cache(maxsize=64)
def name_of(device: torch.device) -> str:
    """The name that stored tiles know a device by."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else current.kind


@functools.lru_cache(maxsize=64)
def shared_memory(device: torch.device) -> int:
    """The bytes of it that a program may have, but for what Triton keeps of it."""
    if device.type != "cuda" or torch.version.hip is not None:
        return current.shared_memory
    return min(current.shared_memory, torch.cuda.get_device_properties(device).shared_memory_per_block_optin - 1024)
