"""Kinds of devices: a capability record for each, and properties of the GPUs present."""

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
    """Capabilities and block sizes of a kind of device; nothing in the record belongs to one operator.

    Attributes:
        kind: "nvidia", "amd", "interpreter", or "none" for compilation without a device.
        type: PyTorch's device type.
        dispatch_key: the key that overrides register at.
        flat_bytes: bytes of the widest operand that a program handles in a flat iteration space. A block has 2,048
            elements at most, except in the interpreter.
        tile_bytes: bytes of the widest operand that a program handles in a two-dimensional iteration space.
        transpose_tile: (rows, columns) of a tile where operands are contiguous along different dimensions.
        num_warps: warps of a pointwise program.
        row_elements: elements that a program reduces at a time.
        row_columns: contiguous elements of a tile in a column reduction.
        programs: programs that fill the device.
        most_warps: warps of the largest program.
        shared_memory: bytes of shared memory that a program may use; Triton keeps the rest.
        registers: 32-bit registers of a multiprocessor.
        small_elements: the size up to which a pointwise iteration space counts as small.
        small_block: elements of the smallest block in a flat space; 0 where all spaces have the same block.
        small_transpose_tile: `transpose_tile` of small spaces.
        interpreted: Triton's interpreter runs the kernels.
        forward_progress: a running program keeps running while other programs wait for it.
        ptx: kernels may contain NVIDIA's assembly.
        aten_measured: it is known where ATen's kernels are faster.
        unverified: operators and families whose results or speed nobody has verified on this kind of device. They stay
            ATen's unless a caller names them.
        options: compiler options of every kernel.
        flushing: compiler options of kernels in which subnormals may be 0.
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


# Values of TRITON_INTERPRET that Triton itself takes for true.
_ON = ("1", "true", "yes", "on", "y")


def _decorate_library() -> None:
    """Switch Triton's already imported standard library to the interpreter.

    Libraries such as transformers import Triton before Tritonite can set TRITON_INTERPRET. Raises
    TritonImportedTooEarly if this Triton has other module or class names.
    """
    try:
        from triton.language import core
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction
    except ImportError:
        raise TritonImportedTooEarly from None
    interpreted: dict[int, Any] = {}
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("triton.language")]
    for owner in (*modules, core.tensor):
        for name, value in list(vars(owner).items()):
            if isinstance(value, JITFunction):
                function = interpreted.setdefault(id(value), InterpretedFunction(value.fn))
                # Only a plain function becomes a bound method of the tensor.
                setattr(owner, name, function if owner is not core.tensor else _method(function))


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


# The kinds for which engines have tables.
KINDS = ("nvidia", "amd", "interpreter", "none")
current = _detect()


def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors."""
    return _multiprocessors(device) if device.type == "cuda" else max(1, current.programs // 8)


@functools.lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def resident_threads(device: torch.device) -> int:
    """Return the number of threads resident at a time, which is the most that ATen's grid-stride kernels launch."""
    return _resident_threads(device) if device.type == "cuda" else 2048


@functools.lru_cache(maxsize=64)
def _resident_threads(device: torch.device) -> int:
    properties = torch.cuda.get_device_properties(device)
    # Whole blocks of 256 threads, as ATen counts.
    return int(properties.multi_processor_count * (properties.max_threads_per_multi_processor // 256 * 256))


@functools.lru_cache(maxsize=64)
def has_tma(device: torch.device) -> bool:
    """Return whether the device has TMA, which copies tiles by tensor descriptors: NVIDIA from sm_90 on."""
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.lru_cache(maxsize=64)
def has_wgmma(device: torch.device) -> bool:
    """Return whether the device has WGMMA instructions: sm_90 alone."""
    return device.type == "cuda" and has_tma(device) and torch.cuda.get_device_capability(device)[0] == 9


# CUDA 12.3, the first driver that captures dependent launches into CUDA graphs.
_FIRST_DRIVER = 12_030


def prepares_launches(backend: str, architecture: Any) -> bool:
    """Return whether a Triton target has programmatic dependent launch: `backend` "cuda", `architecture` 90 or more."""
    return backend == "cuda" and architecture >= 90 and _driver_version() >= _FIRST_DRIVER


@functools.lru_cache(maxsize=1)
def _driver_version() -> int:
    """Return the CUDA version of NVIDIA's driver (12030 for 12.3), or the lowest sufficient one without a driver."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        return _FIRST_DRIVER
    from tritonite.devices import nvidia

    return nvidia.driver_version()


def has_dependent_launch(device: torch.device) -> bool:
    """Return whether the device has programmatic dependent launch: NVIDIA from sm_90 on."""
    return device.type == "cuda" and has_tma(device) and _driver_version() >= _FIRST_DRIVER


@functools.lru_cache(maxsize=64)
def has_float8(device: torch.device) -> bool:
    """Return whether Triton converts float8_e4m3fn on the device: NVIDIA from sm_89 on, and the interpreter."""
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


@functools.lru_cache(maxsize=64)
def architecture(device: torch.device) -> str:
    """Return the compute capability, such as "sm_90"; "" for anything but an NVIDIA GPU."""
    if device.type != "cuda" or torch.version.hip is not None:
        return ""
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


@functools.lru_cache(maxsize=64)
def name_of(device: torch.device) -> str:
    """Return the device name under which tuned tiles are stored."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else current.kind


@functools.lru_cache(maxsize=64)
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may use, without Triton's own 1,024."""
    if device.type != "cuda" or torch.version.hip is not None:
        return current.shared_memory
    return min(current.shared_memory, torch.cuda.get_device_properties(device).shared_memory_per_block_optin - 1024)
