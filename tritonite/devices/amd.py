"""AMD GPUs under ROCm; PyTorch calls the device type "cuda" there too."""

from __future__ import annotations

import functools

import torch

from tritonite.devices.cuda import CudaRuntime
from tritonite.devices.record import Device, NativeDriver


class AmdRuntime(CudaRuntime):
    """The functions of torch.cuda under ROCm, and properties of GPUs with 64 (CDNA) or 32 threads a warp (RDNA)."""

    def warp_size(self, kind: Device) -> int:
        return _warp_size(torch.cuda.current_device(), kind.warp_size)

    def shared_memory(self, device: torch.device, kind: Device) -> int:
        return int(torch.cuda.get_device_properties(device).shared_memory_per_block)


@functools.lru_cache(maxsize=64)
def _warp_size(index: int, usual: int) -> int:
    return int(getattr(torch.cuda.get_device_properties(index), "warp_size", usual))


RECORD = Device(
    kind="amd",
    type="cuda",
    dispatch_key="CUDA",
    flat_bytes=4096,
    tile_bytes=4096,
    transpose_tile=(64, 64),
    num_warps=4,
    row_elements=4096,
    row_columns=64,
    programs=1216,
    runtime=AmdRuntime(),
    target="hip",
    # Has never run on a GPU.
    native=NativeDriver(by_default=False, driver="hip"),
    pointer_ranges=True,
    captures=True,
    profiled=True,
    warp_size=64,
    shared_memory=64 * 1024,
    tensor_cores=frozenset((torch.float16, torch.bfloat16, torch.float64, torch.int8)),
    small_elements=2**18,
    small_block=512,
    small_transpose_tile=(16, 32),
    # ATen's order of draws on AMD GPUs differs from its order on NVIDIA GPUs.
    unverified=frozenset(("random", "sampling")),
)


def device() -> Device | None:
    """Return the record if PyTorch is built for ROCm and finds a GPU."""
    return RECORD if torch.cuda.is_available() and torch.version.hip else None
