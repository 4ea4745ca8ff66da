"""The choice of chunks and programs of the norm kernels, for rows in registers or in a ring in shared memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tritonite import devices
from tritonite.engine.iteration import power_of_2
from tritonite.engine.norm.meta import NormMeta, RingMeta
from tritonite.engine.norm.table import norm_table
from tritonite.runtime.contract import fusion, settings


class NormBlocks(NamedTuple):
    """The grid of a launch, the fields of `NormMeta` that it decides, and the options for the compiler.

    `programs` persistent programs take turns at the rows. With `splits` above 1, rows have that number of slices, and
    a program takes one.
    """

    programs: int
    splits: int
    fields: dict[str, Any]
    options: dict[str, Any]

    def meta(self, **others: Any) -> NormMeta:
        return NormMeta(**self.fields, **others)


class RingBlocks(NamedTuple):
    """The number of programs, the fields of `RingMeta` that shapes decide, and the options for the compiler."""

    programs: int
    fields: dict[str, Any]
    options: dict[str, Any]

    def meta(self, **others: Any) -> RingMeta:
        return RingMeta(**self.fields, **others)


def choose_blocks(total: torch.Tensor, loaded: int, parameters: int, sums: int, least: int = 1) -> NormBlocks:
    """Return blocks for rows like those of `total`, of `loaded` tensors, with `parameters` vectors of columns.

    A program accumulates `sums` vectors of columns over its rows. A chunk of a longer row has `least` columns or more.
    """
    device, size = devices.current, total.dtype.itemsize
    n_rows, n_columns = total.shape
    tile = device.row_elements
    columns = min(power_of_2(n_columns), max(least, tile // 4 if n_columns <= tile // 2 else tile // 2))
    # Registers hold a row's elements, the parameters and the sums; with two sums of float32 half as many elements.
    held = 4 * tile // max(1, size // 4) // (2 if sums > 1 and size == 4 else 1)
    chunks, most = -(-n_columns // columns), max(1, held // columns)
    splits = 1 if chunks <= most else -(-chunks // 4)
    chunks = chunks if splits == 1 else 4
    elements = columns * chunks
    rows = max(1, min(tile // 2 // elements, power_of_2(n_rows)))
    # Programs per multiprocessor, limited by registers, and by shared memory for one or two blocks of rows in flight.
    # Fewer programs also write and read fewer sums.
    crowded = elements > tile if sums else parameters > 1 and elements > 2 * tile
    each = 4 if rows * elements <= tile // 2 else 1 if crowded else 2
    room = (devices.shared_memory(total.device) - 2**12) // (loaded * rows * elements * size)
    # Two blocks in flight are worth more than two programs.
    each = max(1, min(each, room // 2))
    # All programs take the same number of turns: a last turn of a few would leave memory idle.
    turns = -(-n_rows // rows)
    programs = max(1, min(each * devices.multiprocessors(total.device) // splits, turns))
    programs = -(-turns // -(-turns // programs))
    whole = n_columns % (columns if splits == 1 else elements) == 0
    fields = {
        "rows": rows,
        "columns": columns,
        "chunks": chunks,
        "whole": chunks if whole else chunks - 1 if splits == 1 else 0,
        "stages": 1 + max(1, min(2, room // each)),
        "packed": device.ptx and size == 2 and elements > 2 * tile,
        "in_order": settings().invariant,
    }
    options = {"num_warps": 4 if rows * elements <= tile // 2 else 8}
    return NormBlocks(programs, splits, fields, options | device.options | fusion())


def choose_ring(grads: tuple[torch.Tensor, ...], total: torch.Tensor, parameters: int, sums: int) -> RingBlocks | None:
    """Return blocks for rows that stream through a ring in shared memory, or None where no ring serves them.

    A ring needs an NVIDIA GPU and room in shared memory for a row and a few chunks. Rows must start at 16 bytes, and be
    enough for all multiprocessors. The sums may take at most half of the registers.
    """
    device, size, (n_rows, n_columns) = devices.current, total.dtype.itemsize, total.shape
    table = norm_table()
    programs, columns = devices.multiprocessors(total.device), table.ring_warps * 32 * 16 // size
    chunks, late = -(-n_columns // columns), table.late * (len(grads) - 1)
    # Reductions take some shared memory too.
    ring = ((devices.shared_memory(total.device) - 2**11) // (columns * size) - late) // 2
    aligned = all(each.data_ptr() % 16 == 0 and each.stride(0) * size % 16 == 0 for each in (*grads, total))
    if not (device.ptx and size <= 4 and aligned and all(each.stride(1) == 1 for each in grads)):
        return None
    if n_rows < programs or sums * chunks * columns > device.registers // 2 or ring < chunks + table.late // 2:
        return None
    # Two thirds of the registers hold the sums and chunks of the weight.
    held = (2 * device.registers // 3 - sums * chunks * columns) // columns
    fields = {
        "chunks": chunks,
        "whole": n_columns // columns,
        "ring": ring,
        "late": late,
        "held": min(held, chunks) * parameters,
    }
    return RingBlocks(-(-n_rows // -(-n_rows // programs)), fields, {"num_warps": table.ring_warps})
