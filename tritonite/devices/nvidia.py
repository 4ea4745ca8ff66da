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
    # Slower than ATen's, or not measured: docs/correctness.md.
    unverified=frozenset(
        (
            *("_dirichlet_grad", "_sample_dirichlet", "_standard_gamma", "_standard_gamma_grad"),
            *("binomial", "multinomial", "batch_norm_gather_stats_with_counts", "batch_norm_stats"),
        )
    ),
    # Subnormals count: libdevice would flush them.
    options={"enable_reflect_ftz": False},
    flushing={"enable_reflect_ftz": True},
)


def driver_version() -> int:
    """The newest CUDA that the driver knows, as 12030 for 12.3; 0 where it does not tell."""
    version = ctypes.c_int(0)
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


_MAP_BYTES = 128


def descriptor_parameters(descriptor: Any, metadata: dict[str, Any] | None) -> list[Any]:
    """The kernel parameters that Triton's launcher makes of a tensor descriptor, in order.

    `metadata` is the compiled kernel's of it. An encoded CUtensorMap comes as its bytes, which stand at the end of the
    object that Triton keeps it in.
    """
    from triton.backends.nvidia import driver

    # Triton 3.9 hands on one argument more, for what its other backends need.
    more = len(inspect.signature(driver.make_tensordesc_arg).parameters) - 2
    parts = driver.make_tensordesc_arg(descriptor, metadata, *[None] * more)
    return [
        ctypes.string_at(id(part) + type(part).__basicsize__ - _MAP_BYTES, _MAP_BYTES)
        if type(part).__name__ == "PyCUtensorMap"
        else part
        for part in parts
    ]
