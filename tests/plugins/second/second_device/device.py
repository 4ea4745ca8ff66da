"""The record: warps of 64, no tensor descriptors, small blocks."""

from __future__ import annotations

import torch
from python_backend.memory import on_host

from tritonite.devices import Device, Runtime


class SecondRuntime(Runtime):
    """The functions of `torch.second`."""

    def host_view(self, tensor: torch.Tensor) -> torch.Tensor:
        return on_host(tensor)

    def draw(self, generator: torch.Generator, advance: int) -> tuple[int, int] | None:
        # The generator is one of the CPU, which has no offset.
        return None

    def multiprocessors(self, device: torch.device, kind: Device) -> int:
        return 3


def _held(table):
    """Return the table of row reductions with rows of one tile held by a program."""
    return table._replace(held_tiles=1)


def device() -> Device:
    """Return the record of the device, which every machine has."""
    return Device(
        kind="second",
        type="second",
        dispatch_key="PrivateUse1",
        runtime=SecondRuntime(),
        aten="cpu",
        like="amd",
        interpreted=True,
        host_memory=True,
        flat_bytes=1 << 15,
        tile_bytes=1 << 14,
        transpose_tile=(64, 64),
        num_warps=4,
        warp_size=64,
        shared_memory=64 * 1024,
        row_elements=1 << 12,
        row_columns=64,
        programs=6,
        tables={"rows": _held},
        overrides={"gelu": "second_device.overrides:gelu"},
        unverified=frozenset(("random", "sampling")),
    )
