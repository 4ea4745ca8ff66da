"""Kinds of devices: a record for each, from plug-ins, and properties of the devices present.

- record.py: `Device`, the record, and `Override`, a vendor's own host function
- runtime.py: `Runtime`, what the host asks of devices of one type; cuda.py: of torch.cuda's
- plugins.py: how records are found, ours and those of other packages
- tables.py: an engine's tables by kind of device
- nvidia.py, amd.py, interpreter.py, compile_only.py: our own plug-ins

`current` is the record of the device whose call this thread serves, and outside calls the default device's.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from tritonite.devices.record import KINDS, Device, NativeDriver, Override
from tritonite.devices.runtime import HostRuntime, Runtime
from tritonite.errors import TritonImportedTooEarly

__all__ = ["KINDS", "Device", "HostRuntime", "NativeDriver", "Override", "Runtime", "current", "default", "present"]

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


def _detect() -> tuple[Device, ...]:
    """Return the devices that this process serves, the default first: all interpreted, or none of them."""
    from tritonite.devices import compile_only, plugins

    setting = os.environ.get("TRITON_INTERPRET")
    every = plugins.found()
    interpreted = [device for device in every if device.interpreted]
    compiled = [device for device in every if not device.interpreted]
    if setting is not None and setting.lower() in _ON:
        return _default_first(interpreted)
    if compiled:
        return _default_first(compiled)
    if setting is not None:
        return (replace(compile_only.RECORD, plugin="tritonite"),)
    os.environ["TRITON_INTERPRET"] = "1"
    if "triton" in sys.modules:
        _decorate_library()
    return _default_first(interpreted)


def _default_first(found: list[Device]) -> tuple[Device, ...]:
    """Return the devices, that of PyTorch's current accelerator first."""
    if len(found) > 1:
        accelerator = torch.accelerator.current_accelerator()
        found.sort(key=lambda device: accelerator is None or device.type != accelerator.type)
    from tritonite.devices import plugins

    # What results follow is part of formulas, which a process has once.
    for device in found[1:]:
        if device.aten != found[0].aten:
            plugins.leave_out(device.kind, device.plugin, f"results follow ATen's {found[0].aten} kernels here")
    return tuple([device for device in found if device.aten == found[0].aten])


class _Serving(threading.local):
    """The device whose call a thread serves, where several are present."""

    device: Device


# The kind under which results of the interpreter are stored.
INTERPRETER = "interpreter"
# The devices that this process serves. The first is the default one.
present = _detect()
default = present[0]
current: Device
_Serving.device = default
_serving = _Serving()
if len(present) == 1:
    current = default
else:

    def __getattr__(name: str) -> Any:
        """Return the device that this thread serves as `current`, which a process with one device has as a constant."""
        if name == "current":
            return _serving.device
        raise AttributeError(name)


_this: Any = sys.modules[__name__]


def in_force() -> Device:
    """Return `current`, within this module too."""
    return _this.current  # type: ignore[no-any-return]


@contextlib.contextmanager
def serving(device: Device) -> Iterator[None]:
    """Make a device `current` for this thread within the with block, where several are present."""
    outer, _serving.device = _serving.device, device
    try:
        yield
    finally:
        _serving.device = outer


def of(device: torch.device) -> Device:
    """Return the record of a device. CPU tensors without a device that serves them have the current one's limits."""
    own = in_force()
    if device.type == own.type:
        return own
    if device.type == "cpu" and len(present) == 1:
        return replace(own, type="cpu", runtime=HostRuntime(), host_memory=True, tma=True, fp8=True)
    return next((each for each in present if each.type == device.type), own)


def current_device() -> torch.device:
    """Return the device, with its index, on which a call without tensors allocates."""
    kind = in_force()
    index = kind.runtime.current_index(kind)
    return torch.device(kind.type) if index is None else torch.device(kind.type, index)


def indexed(device: torch.device) -> torch.device:
    """Return a device without an index as PyTorch takes it, with this thread's current index if its type has one."""
    kind = next((each for each in (in_force(), *present) if each.type == device.type), None)
    index = None if kind is None else kind.runtime.current_index(kind)
    return device if index is None else torch.device(device.type, index)


def elsewhere(device: torch.device) -> str:
    """Return why a call declines a tensor that is not on the current kind of device."""
    several = any(device.type == each.type for each in present)
    return "a tensor on another device" if several else f"device {device}"


def named(kind: str) -> Device:
    """Return the record of a kind that is present. Raises KeyError for any other."""
    for device in (in_force(), *present):
        if device.kind == kind:
            return device
    raise KeyError(kind)


def all_have_fp64() -> bool:
    """Return whether all devices present compute in float64."""
    return all(device.fp64 for device in present)


def overridden() -> frozenset[str]:
    """Return the overloads for which a device present has a vendor's host function."""
    return frozenset().union(*[device.overrides for device in present])


def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors."""
    kind = of(device)
    return kind.runtime.multiprocessors(device, kind)


def warp_size() -> int:
    """Return the threads of a warp of this thread's device."""
    kind = in_force()
    return kind.runtime.warp_size(kind)


def warps(threads: int) -> int:
    """Return the number of warps, at least one, that have no more than this many threads."""
    return max(1, threads // warp_size())


def resident_threads(device: torch.device) -> int:
    """Return the number of threads resident at a time, which is the most that ATen's grid-stride kernels launch."""
    return of(device).runtime.resident_threads(device)


@functools.lru_cache(maxsize=64)
def has_tma(device: torch.device) -> bool:
    """Return whether the device has TMA, which copies tiles by tensor descriptors: NVIDIA from sm_90 on."""
    kind = of(device)
    return kind.runtime.has_tma(device, kind)


@functools.lru_cache(maxsize=64)
def has_wgmma(device: torch.device) -> bool:
    """Return whether the device has WGMMA instructions: sm_90 alone."""
    return of(device).runtime.has_wgmma(device)


def prepares_launches(backend: str, architecture: Any) -> bool:
    """Return whether a Triton target has programmatic dependent launch: `backend` "cuda", `architecture` 90 or more."""
    from tritonite.devices import nvidia

    records = (nvidia.RECORD, *present)
    return any(each.target == backend and each.runtime.prepares_launches(architecture) for each in records)


def takes_ptx(backend: str) -> bool:
    """Return whether kernels compiled for one of Triton's backends may contain NVIDIA's assembly."""
    from tritonite.devices import nvidia

    return any(each.ptx and each.target == backend for each in (nvidia.RECORD, *present))


@functools.lru_cache(maxsize=64)
def has_dependent_launch(device: torch.device) -> bool:
    """Return whether the device has programmatic dependent launch: NVIDIA from sm_90 on."""
    return of(device).runtime.has_dependent_launch(device)


@functools.lru_cache(maxsize=64)
def has_float8(device: torch.device) -> bool:
    """Return whether Triton converts float8_e4m3fn on the device: NVIDIA from sm_89 on, and the interpreter."""
    kind = of(device)
    return kind.runtime.has_float8(device, kind)


@functools.lru_cache(maxsize=64)
def architecture(device: torch.device) -> str:
    """Return the compute capability, such as "sm_90"; "" for anything but an NVIDIA GPU."""
    return of(device).runtime.architecture(device)


@functools.lru_cache(maxsize=64)
def name_of(device: torch.device) -> str:
    """Return the device name under which tuned tiles are stored."""
    kind = of(device)
    return kind.runtime.device_name(device, kind)


@functools.lru_cache(maxsize=64)
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may use, without Triton's own 1,024."""
    kind = of(device)
    return kind.runtime.shared_memory(device, kind)
