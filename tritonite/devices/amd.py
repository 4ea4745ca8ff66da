"""AMD GPUs under ROCm; PyTorch calls the device type "cuda" there too."""

from __future__ import annotations

import torch

from tritonite.devices.cuda import CudaRuntime
from tritonite.devices.record import Device, NativeDriver

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
    runtime=CudaRuntime(),
    target="hip",
    # Has never run on a GPU.
    native=NativeDriver(by_default=False, driver="hip"),
    pointer_ranges=True,
    captures=True,
    profiled=True,
    warp_size=64,
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
