"""Run-time arguments of the kernels of products, whose fields kernels read by name."""

from __future__ import annotations

from typing import Any, NamedTuple


class MatrixStrides(NamedTuple):
    """Strides, in elements, of a batch of matrices: between batches, between rows and between columns."""

    batch: Any
    row: Any
    column: Any


class GemmStrides(NamedTuple):
    """Strides of the operands a and b and of the result, each `MatrixStrides`."""

    a: Any
    b: Any
    out: Any


class EpilogueOperands(NamedTuple):
    """Tensors that an epilogue reads: the addend or None, the scales, `MatrixStrides`, and operands of its program.

    The strides are those of the scales, the addend and the operands. They are 0 for a broadcast dimension.
    """

    addend: Any
    scales: Any
    strides: Any
    more: Any = ()


class EpilogueArguments(NamedTuple):
    """`EpilogueOperands`, and the factors of the product and of the addend in the product's dtype."""

    operands: Any
    alpha: Any
    beta: Any


class GroupScales(NamedTuple):
    """float32 factors of a product of groups: one for each row of a, and one for each column of each group.

    Both are contiguous but for the stride between the columns of two groups.
    """

    rows: Any
    columns: Any
    group_stride: Any


class ResultTile(NamedTuple):
    """A tile of the result: its batch, indices of its rows and columns, and masks of those that exist."""

    batch: Any
    rows: Any
    columns: Any
    row_mask: Any
    column_mask: Any
