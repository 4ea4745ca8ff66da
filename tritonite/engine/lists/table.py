"""The table of a list of tensors in device memory: addresses, sizes, programs and numbers of each tensor.

A kernel cannot choose among its arguments by an index. `write_table` therefore stores its arguments to memory, from
which a later kernel reads those of one tensor. Arguments are captured in a CUDA graph with its launch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.engine.iteration import power_of_2
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import empty, filling
from tritonite.runtime.launch import Launch, Specialization, flatten

# The numbers of a launch of `write_table`. The largest fill the 4 KiB of arguments that every CUDA device takes.
_CAPACITIES = (32, 128, 480)
# The row of the tensors' sizes.
SIZES = tl.constexpr(1)
# Programs of a launch, in units of the programs that fill the device, up to which a program handles one block.
_WAVES = 4


def choose_blocks(largest: int, sizes: Sequence[int], most_steps: int) -> tuple[int, int]:
    """Return (elements of a block, blocks of a program) for tensors of these sizes.

    A block has up to `largest` elements, and a program up to `most_steps` blocks.
    """
    block = min(largest, max(32, power_of_2(max(sizes))))
    steps = sum(sizes) // (block * devices.current.programs * _WAVES)
    return block, min(max(power_of_2(steps + 1) // 2, 1), most_steps)


@triton.jit
def write_table(numbers, tables, first, count, FLOATING: tl.constexpr):
    """Store the first `count` of `numbers`, from index `first` of the table on.

    `tables` has the table alone. Numbers are float64 if FLOATING, else addresses or int64.
    """
    wait_for_previous_launch()
    for i in tl.static_range(len(numbers)):
        if FLOATING:
            bits = tl.cast(tl.full((), numbers[i], tl.float64), tl.int64, bitcast=True)
        else:
            bits = numbers[i].to(tl.int64)
        tl.store(tables[0] + first + i, bits, mask=i < count)


@functools.lru_cache(maxsize=16)
def _writer(capacity: int, kind: str) -> Specialization:
    """Return the kernel that writes up to `capacity` numbers of Triton type `kind`."""
    signature = {
        "numbers": (kind,) * capacity,
        "tables": ("*i64",),
        "first": "i32",
        "count": "i32",
        "FLOATING": "constexpr",
    }
    floating = kind == "fp64"
    return Specialization(
        kernel=write_table,
        signature=signature,
        constants={(4,): floating},
        attributes={},
        leading=(),
        trailing=(floating,),
        options={"num_warps": 1, **devices.current.options},
        types=tuple(flatten(tuple(signature.values()), tuple(signature.values()))),
    )


class Table:
    """A table of `count` tensors: int64 rows of `count` elements each, one row a fact.

    Row 0 has the program where those of each tensor end, row SIZES the elements of each tensor. Next come rows of
    addresses, then rows of numbers: int64, or the bits of float64.

    Args:
        sizes: the elements of each tensor.
        elements: the elements that a program handles.
    """

    def __init__(self, sizes: Sequence[int], elements: int) -> None:
        self.count = len(sizes)
        ends = list(itertools.accumulate(-(-size // elements) for size in sizes))
        self.programs = ends[-1]
        self._rows: list[tuple[str, Sequence[Any]]] = [("i64", ends), ("i64", list(sizes))]
        self.search_steps = (self.count - 1).bit_length()

    def add_tensors(self, tensors: Sequence[torch.Tensor]) -> int:
        """Add a row of the tensors' addresses, and return the row's number."""
        self._rows.append(("i64", tensors))
        return len(self._rows) - 1

    def add_numbers(self, numbers: Sequence[Any], floating: bool) -> int:
        """Add a row of numbers or symbols, float64 or int64, and return the row's number."""
        plain = [int(number) if type(number) is bool else number for number in numbers]
        self._rows.append(("fp64" if floating else "i64", plain))
        return len(self._rows) - 1

    def write(self, device: torch.device) -> torch.Tensor:
        """Return the table in the memory of a device, written by as few launches as its rows allow.

        A replay of the call's plan keeps the table, and uses it again while addresses and numbers are the same.
        """
        table = empty((len(self._rows) * self.count,), torch.int64, device)
        first = 0
        with filling(table):
            for kind, rows in itertools.groupby(self._rows, key=lambda row: row[0]):
                numbers = [number for _, row in rows for number in row]
                for i in range(0, len(numbers), _CAPACITIES[-1]):
                    _write(numbers[i : i + _CAPACITIES[-1]], kind, table, first + i)
                first += len(numbers)
        return table


def _write(numbers: list[Any], kind: str, table: torch.Tensor, first: int) -> None:
    capacity = next(capacity for capacity in _CAPACITIES if capacity >= len(numbers))
    # The numbers in addition are not stored.
    padding = [0.0 if kind == "fp64" else 0] * (capacity - len(numbers))
    Launch(_writer(capacity, kind).over((first, len(numbers)), 1), table.device)([*numbers, *padding], (table,))
