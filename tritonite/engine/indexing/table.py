"""Blocks of the indexing kernels for each kind of device."""

from __future__ import annotations

from typing import NamedTuple

from tritonite import devices
from tritonite.devices.tables import Tables


class SegmentBlocks(NamedTuple):
    """Blocks of sums at repeated indices, which sort rows by target.

    `sorted`: keys of a program that sorts.
    `runs`: runs that a launch merges into one.
    `merged`: keys of a program that merges.
    `rows`, `columns`: rows, and the most columns, of a chunk that a program adds up.
    `partial_sums`: sums of chunks that are added up at a time.
    """

    sorted: int = 1024
    runs: int = 32
    merged: int = 64
    rows: int = 16
    columns: int = 512
    partial_sums: int = 32


class SharedRows(NamedTuple):
    """Limits of rows that a program copies to shared memory, to look up their columns there.

    `held_bytes`: rows of a program.
    `least_bytes`: the shortest row. A shorter one has few cache lines.
    `most_rows`: rows of a program, which share the loads of the index.
    `columns`: columns that a program looks up at a time, a few for each thread.
    `most_slices`: slices of a row that does not fit.
    `result_bytes`, `result_columns`: the largest row of the result that registers hold while slices arrive.
    """

    held_bytes: int = 32 * 1024
    least_bytes: int = 1024
    most_rows: int = 8
    columns: int = 1024
    most_slices: int = 4
    result_bytes: int = 64 * 1024
    result_columns: int = 2**14


class CompactBlocks(NamedTuple):
    """Blocks of stream compaction.

    `block`: elements of a program that counts and writes.
    `counts`: counts that are scanned at a time.
    `filled`: elements of a program that fills. Each element takes two 64-bit divisions.
    """

    block: int = 4096
    counts: int = 4096
    filled: int = 1024


class IndexingTable(NamedTuple):
    """Blocks of a kind of device.

    `rows_of_one_index`: the fewest rows of a program if all rows have the same indices, which it then loads once.
    `small_target`: elements of a target whose float32 copy costs less than the launches that make it.
    `bag_rows`: rows of a bag whose loads are in flight at a time.
    `repeated`: elements of a program of repeat_interleave.
    """

    rows_of_one_index: int = 4
    small_target: int = 2**16
    bag_rows: int = 8
    repeated: int = 1024
    shared_rows: SharedRows = SharedRows()
    segments: SegmentBlocks = SegmentBlocks()
    compact: CompactBlocks = CompactBlocks()


INDEXING: Tables[IndexingTable] = Tables("indexing", dict.fromkeys(devices.KINDS, IndexingTable()))


def indexing_table() -> IndexingTable:
    """Return the table of the current device."""
    return INDEXING[devices.current.kind]
