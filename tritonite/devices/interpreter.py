"""Triton's interpreter on CPU tensors: blocks are large because every block costs milliseconds of Python."""

from tritonite.devices import Device

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
    interpreted=True,
    # ATen's CPU generator is not Philox, so the same seed gives other numbers.
    unverified=frozenset(("random", "sampling")),
)
