"""Which rows are sorted in which way, and where ATen is faster, by the kind of device."""

from __future__ import annotations

from typing import NamedTuple


class Sorting(NamedTuple):
    """The choices of a kind of device.

    `network`: the longest row that is sorted in registers by a network. Each doubling of a row adds a round of
      comparisons to it, and none to a sort by digits, of which there are as many for rows of any length.
    `held_registers` and `long_registers`: how many registers a thread may have where a program holds a row, and where
      several share one, so that a multiprocessor has several programs, of which others work while one waits.
    `held_slower` and `long_slower`: the bits of the keys in which ATen is faster, in such rows.
    `few`: with fewer elements than these in all, rows that programs share take more launches than ATen's.
    """

    network: int
    held_registers: int
    long_registers: int
    held_slower: frozenset[int] = frozenset()
    long_slower: frozenset[int] = frozenset()
    few: int = 0

    def aten_is_faster(self, route: str, bits: int, elements: int) -> bool:
        """Whether it sorts so many elements faster than a route of ours (`engine.sorting.radix.route`)."""
        if route == "held":
            return bits in self.held_slower
        return route == "long" and (bits in self.long_slower or elements < self.few)


_NVIDIA = Sorting(network=128, held_registers=80, long_registers=128)

SORTING: dict[str, Sorting] = {
    "nvidia": _NVIDIA,
    "none": _NVIDIA,
    "interpreter": _NVIDIA,
    # Exchanging elements by their places is in NVIDIA's assembly.
    "amd": _NVIDIA._replace(network=2048),
}
