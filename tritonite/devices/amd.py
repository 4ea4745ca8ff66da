"""AMD GPUs under ROCm; PyTorch calls the device type "cuda" there too."""

from tritonite.devices import Device

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
    small_elements=2**18,
    small_block=512,
    small_transpose_tile=(16, 32),
    # ATen's order of draws on AMD GPUs differs from its order on NVIDIA GPUs.
    unverified=frozenset(("random", "sampling")),
)
