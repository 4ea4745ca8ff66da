"""Blocks of searches and membership tests for each kind of device."""

from __future__ import annotations

from typing import NamedTuple

from tritonite import devices
from tritonite.devices.tables import Tables


class SearchingTable(NamedTuple):
    """Blocks of a kind of device.

    `block`: elements of a program if there are enough of them to fill the device.
    `small_block`: elements of a program if there are fewer.
    `shared_programs`: programs of a multiprocessor that search from shared memory.
    `shared_queries`: elements of a block of such a program.
    `shared_levels`: rounds of a search whose bounds fit in shared memory, by the bytes of an element.
    `slots`: spare slots behind a hash table, one for each lane of the largest program.
    """

    block: int = 1024
    small_block: int = 256
    shared_programs: int = 2
    shared_queries: int = 2048
    shared_levels: dict[int, int] = {4: 13, 8: 12}
    slots: int = 1024


SEARCHING: Tables[SearchingTable] = Tables("searching", dict.fromkeys(devices.KINDS, SearchingTable()))
# Blocks in the interpreter are large because every block costs milliseconds of Python.
SEARCHING["interpreter"] = SearchingTable(small_block=1024)


def searching_table() -> SearchingTable:
    """Return the table of the current device."""
    return SEARCHING[devices.current.kind]
