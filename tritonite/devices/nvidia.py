"""NVIDIA GPUs, sm_80 and later."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
from typing import Any

import torch

from tritonite.devices.cuda import CudaRuntime
from tritonite.devices.record import Device, NativeDriver

# CUDA 12.3, the first driver that captures dependent launches into CUDA graphs.
_FIRST_DRIVER = 12_030


class NvidiaRuntime(CudaRuntime):
    """The functions of torch.cuda, and properties by compute capability."""

    def has_tma(self, device: torch.device, kind: Device) -> bool:
        return torch.cuda.get_device_capability(device) >= (9, 0)

    def has_wgmma(self, device: torch.device) -> bool:
        return torch.cuda.get_device_capability(device)[0] == 9

    def has_float8(self, device: torch.device, kind: Device) -> bool:
        return torch.cuda.get_device_capability(device) >= (8, 9)

    def architecture(self, device: torch.device) -> str:
        return "sm_{}{}".format(*torch.cuda.get_device_capability(device))

    def shared_memory(self, device: torch.device, kind: Device) -> int:
        return min(kind.shared_memory, torch.cuda.get_device_properties(device).shared_memory_per_block_optin - 1024)

    def has_dependent_launch(self, device: torch.device) -> bool:
        return torch.cuda.get_device_capability(device) >= (9, 0) and sufficient_driver()

    def prepares_launches(self, architecture: Any) -> bool:
        return architecture >= 90 and sufficient_driver()


@functools.lru_cache(maxsize=1)
def sufficient_driver() -> bool:
    """Return whether NVIDIA's driver captures dependent launches; True without a driver, for other machines."""
    return torch.version.hip is not None or not torch.cuda.is_available() or driver_version() >= _FIRST_DRIVER


RECORD = Device(
    kind="nvidia",
    type="cuda",
    dispatch_key="CUDA",
    flat_bytes=4096,
    tile_bytes=4096,
    transpose_tile=(64, 64),
    num_warps=4,
    row_elements=4096,
    row_columns=64,
    programs=1056,
    runtime=NvidiaRuntime(),
    target="cuda",
    native=NativeDriver(by_default=True, driver="cuda"),
    tensor_cores=frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8)),
    tma=True,
    fp8=True,
    most_warps=32,
    small_elements=2**18,
    small_block=128,
    small_transpose_tile=(16, 32),
    captures=True,
    profiled=True,
    forward_progress=True,
    ptx=True,
    aten_measured=True,
    # Slower than ATen's kernels, or not measured; docs/correctness.md lists the reasons.
    unverified=frozenset(
        (
            *("_dirichlet_grad", "_sample_dirichlet", "_standard_gamma", "_standard_gamma_grad"),
            *("binomial", "multinomial", "batch_norm_gather_stats_with_counts", "batch_norm_stats"),
        )
    ),
    # By default libdevice flushes subnormals to 0, which ATen does not.
    options={"enable_reflect_ftz": False},
    flushing={"enable_reflect_ftz": True},
)


def device() -> Device | None:
    """Return the record if PyTorch finds an NVIDIA GPU."""
    return RECORD if torch.cuda.is_available() and not torch.version.hip else None


def driver_version() -> int:
    """Return the newest CUDA version that the driver supports (12030 for 12.3); 0 without a driver."""
    version = ctypes.c_int(0)
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


# Size of a CUtensorMap.
_MAP_BYTES = 128


def descriptor_parameters(descriptor: Any, metadata: dict[str, Any] | None) -> list[Any]:
    """Return the kernel parameters that Triton's launcher makes of a tensor descriptor, in order.

    `metadata` is the compiled kernel's entry for the descriptor. An encoded CUtensorMap is returned as its 128 bytes,
    which stand at the end of Triton's PyCUtensorMap object.
    """
    from triton.backends.nvidia import driver

    # Triton 3.9 has one more parameter, which serves other backends.
    more = len(inspect.signature(driver.make_tensordesc_arg).parameters) - 2
    values = driver.make_tensordesc_arg(descriptor, metadata, *[None] * more)
    return [
        ctypes.string_at(id(value) + type(value).__basicsize__ - _MAP_BYTES, _MAP_BYTES)
        if type(value).__name__ == "PyCUtensorMap"
        else value
        for value in values
    ]
