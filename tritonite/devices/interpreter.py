"""Triton's interpreter on CPU tensors: blocks are large because every block costs milliseconds of Python."""

import torch

from tritonite.devices.record import Device, NativeDriver
from tritonite.devices.runtime import HostRuntime

RECORD = Device(
    kind="interpreter",
    type="cpu",
    dispatch_key="CPU",
    flat_bytes=1 << 18,
    tile_bytes=1 << 16,
    transpose_tile=(128, 128),
    num_warps=4,
    row_elements=1 << 14,
    row_columns=128,
    programs=4,
    runtime=HostRuntime(),
    aten="cpu",
    native=NativeDriver(by_default=False),
    tensor_cores=frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8)),
    tma=True,
    fp8=True,
    interpreted=True,
    host_memory=True,
    # ATen's CPU generator is not Philox, so the same seed gives other numbers.
    unverified=frozenset(("random", "sampling")),
)


def device() -> Device:
    """Return the record: every machine has a CPU."""
    return RECORD
