"""Blocks and limits of the ways to sort, and the calls that ATen serves faster, for each kind of device."""

from __future__ import annotations

from typing import NamedTuple

from tritonite import devices
from tritonite.devices.tables import Tables
from tritonite.language.shared import SHARED_BYTES


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


class RadixBlocks(NamedTuple):
    """Blocks of radix sorts.

    `held_bytes`: the longest row that one program sorts. Its permutation buffer has to fit in 48 KiB of shared memory.
    `block`: elements of a block with a thread for each digit. Its threads have `each` elements.
    `each`: elements of a thread where one program holds a row.
    `each_with_indices`, `each_64bit`, `each_alone`: elements of a thread where several programs sort a row, as many as
      registers allow: keys with indices, 64-bit keys, and narrower keys without indices.
    `counted`: blocks that a program of `_count_digits` counts.
    `copies`: copies of each counter of such a program.
    `registers`: registers of a thread, few enough that a multiprocessor has several programs.
    `registers_alone`: registers of a thread that sorts keys of 32 bits at most without indices.
    """

    held_bytes: int = 32 * 1024
    block: int = 4096
    each: int = 16
    each_with_indices: int = 24
    each_64bit: int = 20
    each_alone: int = 16
    counted: int = 8
    copies: int = 8
    registers: int = 128
    registers_alone: int = 80


class SelectBlocks(NamedTuple):
    """Blocks of the selection by rank from long rows.

    `block`: elements of a block.
    `warps`: warps of a program. It has at most as many threads as elements: threads with the same element would add to
      shared memory twice.
    `programs`: resident programs of a multiprocessor.
    `most_counted`: the most blocks of a program.
    `shared_bits`: the most bits of a digit that is counted in shared memory.
    `few_each`: elements of a thread of `_select_few`, whose programs have one warp.
    `few_programs`: resident programs of a multiprocessor of `_select_few`.
    """

    block: int = 2048
    warps: int = 8
    programs: int = 4
    most_counted: int = 16
    shared_bits: int = 11
    few_each: int = 16
    few_programs: int = 32


class TopKBlocks(NamedTuple):
    """Blocks of top-k.

    `held_bytes`: keys of the longest row that a program holds in registers.
    `thread_registers`: 32-bit registers of a thread for keys.
    `most_sorted`: the most elements that a program sorts, by the bits of a key.
    `sorted_at_once`: the longest row that is sorted, which takes less time than two launches.
    `block`: elements of a block.
    `least_groups`, `most_groups`: groups of a long row.
    `own_groups`: the fewest groups of a program.
    `programs`: programs of a multiprocessor for long rows.
    `most_slices`: the most slices into which the stripes of a row are split.
    """

    held_bytes: int = 32 * 1024
    thread_registers: int = 16
    most_sorted: dict[int, int] = {8: 4096, 16: 4096, 32: 4096, 64: 1024}
    sorted_at_once: int = 128
    block: int = 2048
    least_groups: int = 1024
    most_groups: int = 4096
    own_groups: int = 128
    programs: int = 4
    most_slices: int = 16


class BitmapBlocks(NamedTuple):
    """Blocks of unique integers by a bitmap of their range.

    `least`: elements from which on a bitmap is used.
    `block`: elements of a program that finds extrema.
    `threads`: threads of all programs.
    `each`: elements of a thread that accesses the bitmap.
    `words`: 32-bit words of the bitmap whose integers a program writes.
    `sparsest`: the most integers of a range for each element.
    `programs`: programs of a multiprocessor that set bits. Each has a bitmap, or counts, of its own in shared memory.
    `shared_bytes`: shared memory of such a program.
    """

    least: int = 2**20
    block: int = 4096
    threads: int = 256
    each: int = 8
    words: int = 512
    sparsest: int = 4
    programs: int = 4
    shared_bytes: int = SHARED_BYTES


class MergeBlocks(NamedTuple):
    """Blocks of the merge sort of row numbers: runs that a launch merges into one, and rows of a program."""

    runs: int = 16
    rows: int = 16


class RunBlocks(NamedTuple):
    """Blocks of runs of equal neighbours.

    `measured`: runs of a program that computes lengths.
    `longest`: elements of a row that a program searches for the longest run at a time.
    `written`: elements of a program that writes runs, which has `threads` threads.
    """

    measured: int = 1024
    longest: int = 2048
    written: int = 4096
    threads: int = 256


class SortingTable(NamedTuple):
    """Blocks and limits of a kind of device.

    `network`: the longest row that a sorting network sorts in registers, at most 2,048. Each doubling of the row adds a
      stage to the network, while the passes of a radix sort do not depend on the row's length.
    `network_elements`: elements of all rows of a program that sorts by a network.
    """

    network: int = 128
    network_elements: int = 1024
    radix: RadixBlocks = RadixBlocks()
    select: SelectBlocks = SelectBlocks()
    topk: TopKBlocks = TopKBlocks()
    bitmap: BitmapBlocks = BitmapBlocks()
    merge: MergeBlocks = MergeBlocks()
    runs: RunBlocks = RunBlocks()
    slower: Slower = Slower()


_NVIDIA = SortingTable()

SORTING: Tables[SortingTable] = Tables(
    "sorting",
    {
        "nvidia": _NVIDIA._replace(slower=Slower(top_k=1024, sets=True)),
        "none": _NVIDIA,
        # Threads cost nothing there, and every element of a thread costs milliseconds of Python.
        "interpreter": _NVIDIA._replace(
            radix=RadixBlocks(each=4, each_with_indices=4, each_64bit=4, each_alone=4, copies=2),
            select=SelectBlocks(few_each=4),
            merge=MergeBlocks(rows=256),
        ),
        # One program's radix sort needs NVIDIA's assembly, so the network sorts longer rows, too.
        "amd": _NVIDIA._replace(network=2048),
    },
)


def sorting_table() -> SortingTable:
    """Return the table of the current device."""
    return SORTING[devices.current.kind]


def slower(kind: str) -> Slower:
    """Return the calls that ATen serves faster on a kind of device."""
    return SORTING[kind].slower
