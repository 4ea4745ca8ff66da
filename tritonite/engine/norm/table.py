"""Parameters of the ring in shared memory of the norm kernels, for each kind of device."""

from __future__ import annotations

from typing import NamedTuple

from tritonite import devices
from tritonite.devices.tables import Tables


class NormTable(NamedTuple):
    """Parameters of a kind of device.

    `ring_warps`: warps of a program that streams rows through a ring, and has a multiprocessor to itself.
    `late`: chunks of the ring of the gradient of the sum.
    """

    ring_warps: int = 16
    late: int = 4


NORM: Tables[NormTable] = Tables("norm", dict.fromkeys(devices.KINDS, NormTable()))


def norm_table() -> NormTable:
    """Return the table of the current device."""
    return NORM[devices.current.kind]
