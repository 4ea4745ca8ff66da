"""Block sizes of divergences for each kind of device."""

from __future__ import annotations

from typing import NamedTuple

from tritonite import devices
from tritonite.devices.tables import Tables


class DivergenceTable(NamedTuple):
    """Block sizes of a kind of device, in units of `row_elements`, a field of the device's record.

    `held`: longest row that a program holds in registers and reads once.
    `looped`: elements of a block of a longer row, which a program reads twice.
    `gradient`: elements of a block of the backward pass.
    `warps`: warps for each unit of a program's block.
    """

    held: int = 2
    looped: int = 1
    gradient: int = 1
    warps: int = 8


DIVERGENCE: Tables[DivergenceTable] = Tables("divergence", dict.fromkeys(devices.KINDS, DivergenceTable()))


def divergence_table() -> DivergenceTable:
    """Return the table of the current device."""
    return DIVERGENCE[devices.current.kind]
