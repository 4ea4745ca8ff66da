"""NVIDIA GPUs, sm_80 and later."""

from tritonite.devices import Device

RECORD = Device(
    kind="nvidia",
    type="cuda",
    dispatch_key="CUDA",
    flat_bytes=4096,
    tile_elements=1024,
    transpose_tile=(64, 64),
    num_warps=4,
    # Subnormals count: libdevice would flush them.
    options={"enable_reflect_ftz": False},
)
