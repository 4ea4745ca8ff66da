"""Limits between the ways to sort, and the calls that ATen serves faster, for each kind of device."""

from __future__ import annotations

from typing import NamedTuple


class Slower(NamedTuple):
    """Calls that ATen serves faster, measured on one device of a kind and assumed for the others of that kind.

    `one_long_row`: sorting a single row that takes several programs.
    `top_k`: top-k of rows that take several programs, for k above this, unless one program sorts the selected elements.
    `wide_ranks`: selecting an element by rank from rows that one program holds, with 64-bit keys.
    `sets`: unique_consecutive, and unique by sorting, except with inverse or counts of elements below 64 bits.
    """

    one_long_row: bool = False
    top_k: int = 2**31
    wide_ranks: bool = False
    sets: bool = False


class Sorting(NamedTuple):
    """Parameters of a kind of device.

    `network`: the longest row that a sorting network sorts in registers. Each doubling of the row adds a stage to the
      network, while the passes of a radix sort do not depend on the row's length.
    `registers`: registers of a thread of a radix sort, few enough that a multiprocessor has several programs.
    `registers_alone`: registers of a thread that sorts keys of 32 bits at most without indices.
    `dense`: the number of elements from which on unique integers are found with a bitmap of their range.
    """

    network: int
    registers: int
    registers_alone: int
    dense: int = 2**20
    slower: Slower = Slower()


_NVIDIA = Sorting(network=128, registers=128, registers_alone=80)

SORTING: dict[str, Sorting] = {
    "nvidia": _NVIDIA._replace(slower=Slower(top_k=1024, sets=True)),
    "none": _NVIDIA,
    "interpreter": _NVIDIA,
    # One program's radix sort needs NVIDIA's assembly, so the network sorts longer rows, too.
    "amd": _NVIDIA._replace(network=2048),
}


def slower(kind: str) -> Slower:
    """Return the calls that ATen serves faster on a kind of device."""
    return SORTING[kind].slower
