"""Which rows are sorted in which way, and where ATen is faster, by the kind of device."""

from __future__ import annotations

from typing import NamedTuple


class Slower(NamedTuple):
    """What ATen is faster in, as it was measured on one device of a kind and is assumed of the others; else nothing.

    `one_long_row`: sorting one row that several programs share. `taken`: more of the largest elements of such rows than
    this, where no program puts them in order by itself. `wide_ranks`: an element by its rank, of keys of 64 bits in
    rows that a program holds. `sets`: runs of equals and unique elements that are sorted, unless their places or counts
    are asked for, of keys of 32 bits.
    """

    one_long_row: bool = False
    taken: int = 2**31
    wide_ranks: bool = False
    sets: bool = False


class Sorting(NamedTuple):
    """The choices of a kind of device.

    `network`: the longest row that is sorted in registers by a network. Each doubling of a row adds a round of
      comparisons to it, and none to a sort by digits, of which there are as many for rows of any length.
    `registers`: how many a thread may have, so that a multiprocessor has several programs, of which others work while
      one waits, and threads keep what they rank.
    `registers_alone`: the same where it has keys of 32 bits at most, without places.
    `dense`: from how many on integers are told by the bits of their range, if that is narrow enough.
    """

    network: int
    registers: int
    registers_alone: int
    dense: int = 2**20
    slower: Slower = Slower()


_NVIDIA = Sorting(network=128, registers=128, registers_alone=80)

SORTING: dict[str, Sorting] = {
    # On an H200: 0.60 to 1.14 of ATen's speed for unique elements of 2^24, 0.76 to 1.06 for runs.
    # Medians of int64 in rows of 4,096 have 1.6.
    "nvidia": _NVIDIA._replace(slower=Slower(taken=1024, sets=True)),
    "none": _NVIDIA,
    "interpreter": _NVIDIA,
    # Exchanging elements by their places is in NVIDIA's assembly.
    "amd": _NVIDIA._replace(network=2048),
}


def slower(kind: str) -> Slower:
    """What ATen is faster in on a kind of device."""
    return SORTING[kind].slower
