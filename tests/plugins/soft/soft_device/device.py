"""The record that Tritonite asks for."""

from __future__ import annotations

import torch
from python_backend.memory import on_host

from tritonite.devices import Device, Runtime


class SoftRuntime(Runtime):
    """The functions of `torch.soft`."""

    def host_view(self, tensor: torch.Tensor) -> torch.Tensor:
        return on_host(tensor)

    def synchronize(self, kind: Device) -> None:
        torch.get_device_module("soft").synchronize()

    def draw(self, generator: torch.Generator, advance: int) -> tuple[int, int] | None:
        # Its generator is one of the CPU, which has no offset.
        return None


def _held_rows(table):
    """Return the table of row reductions with shorter rows held by a program."""
    return table._replace(held_tiles=2)


def device() -> Device:
    """Return the record of the device, which every machine has."""
    return Device(
        kind="soft",
        type="soft",
        dispatch_key="PrivateUse1",
        runtime=SoftRuntime(),
        aten="cpu",
        like="interpreter",
        interpreted=True,
        host_memory=True,
        flat_bytes=1 << 14,
        tile_bytes=1 << 14,
        transpose_tile=(64, 64),
        num_warps=4,
        row_elements=1 << 12,
        row_columns=64,
        programs=8,
        warp_size=16,
        tma=True,
        fp8=True,
        tables={"rows": _held_rows},
        overrides={"gelu": "soft_device.overrides:gelu"},
        unverified=frozenset(("random", "sampling")),
    )
