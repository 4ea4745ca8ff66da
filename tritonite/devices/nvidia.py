"""NVIDIA GPUs, sm_80 and later."""

from __future__ import annotations

import contextlib
import ctypes
import inspect
from typing import Any

from tritonite.devices import Device

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
    most_warps=32,
    small_elements=2**18,
    small_block=128,
    small_transpose_tile=(16, 32),
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
