"""Operands of the linear algebra kernels: batches of matrices, vectors and numbers of any strides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl

from tritonite.engine.iteration import collapse, offset_type
from tritonite.engine.linalg.table import Tile


class Operand(NamedTuple):
    """A tensor, its element strides over the collapsed batch, and those of a matrix's rows and columns.

    A vector has no stride of columns (0), and a number none of rows. An operand that a call lacks has no data.
    """

    data: Any
    batch: tuple[int, ...]
    row: int
    column: int
    # Triton 3.6 loses constants of a nested tuple, such as a batch stride of 1, in loops unless a constant follows.
    end: None = None

    @property
    def transposed(self) -> Operand:
        """This operand with rows and columns exchanged."""
        return self._replace(row=self.column, column=self.row)


class Batch(NamedTuple):
    """Matrices of a call: their number, and the sizes of the collapsed batch without the slowest dimension."""

    n_matrices: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class TileMeta:
    """Compile-time facts that all kernels share: the tile, and the type of offsets."""

    matrices: int
    rows: int
    columns: int
    index: Any

    @classmethod
    def of(cls, tile: Tile, operands: Sequence[torch.Tensor | None]) -> TileMeta:
        """Return the facts of a tile for operands that decide the type of offsets."""
        index = offset_type(*[x for x in operands if x is not None])
        return cls(tile.matrices, tile.rows, tile.columns, index if operands else tl.int32)


ABSENT = Operand(None, (0,), 0, 0)


def over_batch(shape: Sequence[int], *operands: tuple[torch.Tensor | None, int]) -> tuple[Batch, list[Operand]]:
    """Return a call's batch and its operands, given as (tensor, dimensions of each matrix: 2, of a vector: 1, or 0).

    Every tensor has the batch's `shape` in front.
    """
    present = [(tensor, rank) for tensor, rank in operands if tensor is not None]
    sizes, merged = collapse(shape, [tensor.stride()[: len(shape)] for tensor, _ in present])
    made = iter(
        Operand(tensor, tuple(batch), *tensor.stride()[len(shape) :], *(0,) * (2 - rank))
        for (tensor, rank), batch in zip(present, merged, strict=True)
    )
    batch = Batch(math.prod(shape), tuple(sizes[:-1]))
    return batch, [ABSENT if tensor is None else next(made) for tensor, _ in operands]
