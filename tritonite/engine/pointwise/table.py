"""Limits of the pointwise engine's tiles for each kind of device. Sizes of tiles are fields of the device's record."""

from __future__ import annotations

from typing import NamedTuple

from tritonite import devices
from tritonite.devices.tables import Tables


class PointwiseTable(NamedTuple):
    """Limits of a kind of device.

    `least_elements`: the fewest elements of a program, unless there are at most half of those that fill the device.
    `matrix_in_cache`: elements of the largest matrix that is read flat because L1 holds it.
    `least_tile`: the fewest elements of a tile that are worth a tiled read.
    `linear_below`: a tile that dimension 1 leaves fewer than 1 / `linear_below` of its rows has linear rows instead.
    """

    least_elements: int = 1024
    matrix_in_cache: int = 4096
    least_tile: int = 512
    linear_below: int = 4


POINTWISE: Tables[PointwiseTable] = Tables("pointwise", dict.fromkeys(devices.KINDS, PointwiseTable()))


def pointwise_table() -> PointwiseTable:
    """Return the table of the current device."""
    return POINTWISE[devices.current.kind]
