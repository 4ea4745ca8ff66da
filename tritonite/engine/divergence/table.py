"""Block sizes of divergences for each kind of device."""

from __future__ import annotations

from typing import NamedTuple

from tritonite import devices


class DivergenceTable(NamedTuple):
    """Block sizes of a kind of device, in units of `row_elements`, a field of the device's record.

    `held`: longest row that a program holds in registers and reads once.
    `looped`: elements of a block of a longer row, which a program reads twice.
    `gradient`: elements of a block of the backward pass.
    `warps`: warps for each unit of a program's block.
    `chunk_elements`: logits of a chunk of rows, where logits are the products of a linear layer.
    """

    held: int = 2
    looped: int = 1
    gradient: int = 1
    warps: int = 8
    chunk_elements: int = 2**28


DIVERGENCE: dict[str, DivergenceTable] = dict.fromkeys(devices.KINDS, DivergenceTable())


def divergence_table() -> DivergenceTable:
    """Return the table of the current device."""
    return DIVERGENCE[devices.current.kind]


def chunk_rows(tokens: int, vocabulary: int) -> int:
    """Return the rows of a chunk of `tokens` rows of logits, a multiple of 128 unless that takes too much memory."""
    rows = max(1, divergence_table().chunk_elements // max(1, vocabulary))
    return max(1, min(tokens, rows // 128 * 128 or rows))
