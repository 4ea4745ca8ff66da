"""Host side of gather and scatter: index tensors, and the collapsed space of the elements that are copied.

The space has one element for each that is copied. The direct operand (the output of a gather, the values of a scatter)
has strides over the space. The indexed operand (the input of a gather, the target of a scatter) has strides over it,
too; each index tensor adds an offset: its value times the stride of the dimension that it indexes.

The fastest dimension of the space makes columns, the others rows. An index that does not depend on the column is loaded
once for a row of contiguous elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl

from tritonite import devices
from tritonite.engine.indexing.table import indexing_table
from tritonite.engine.iteration import INT32_LIMIT, collapse, power_of_2, span

INDEX_DTYPES = (torch.int32, torch.int64)
# Messages of ATen's assertions.
IN_RANGE = "idx_dim >= 0 && idx_dim < index_size && index out of bounds"
IN_RANGE_OF_BOTH_SIGNS = "-sizes[i] <= index && index < sizes[i] && index out of bounds"


class Index(NamedTuple):
    """An index tensor: its strides over the space, and what its values index.

    Values are below `size`. `steps` has the strides of the indexed dimensions, fastest first: one, or several if a
    value is a linear index of several dimensions. `inner` has the sizes of these without the slowest.
    """

    tensor: torch.Tensor
    strides: tuple[int, ...]
    size: int
    steps: tuple[int, ...]
    inner: tuple[int, ...] = ()

    def reach(self) -> int:
        """Return the largest offset of a value."""
        slowest = self.size // max(1, math.prod(self.inner))
        return span((*self.inner, max(1, slowest)), self.steps) - 1


def index_along(tensor: torch.Tensor, strides: Sequence[int], indexed: torch.Tensor, dim: int) -> Index:
    """Return an index into a dimension of `indexed`, which may have no dimensions."""
    if not indexed.dim():
        return Index(tensor, tuple(strides), 1, (1,))
    return Index(tensor, tuple(strides), indexed.shape[dim], (indexed.stride(dim),))


def row_major(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Collapse a space in row-major order; return (sizes, strides of each operand), the last dimension first."""
    sizes: list[int] = []
    merged: list[list[int]] = [[] for _ in strides]
    for d in range(len(shape) - 1, -1, -1):
        if shape[d] == 1:
            continue
        if sizes and all([own[d] == kept[-1] * sizes[-1] for own, kept in zip(strides, merged, strict=True)]):
            sizes[-1] *= shape[d]
            continue
        sizes.append(shape[d])
        for own, kept in zip(strides, merged, strict=True):
            kept.append(own[d])
    return (sizes, merged) if sizes else ([1], [[0] for _ in strides])


def in_row_major(x: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], Any]:
    """Return (sizes without the slowest, strides, integer type of offsets) of a tensor in row-major order."""
    sizes, (steps,) = row_major(x.shape, [x.stride()])
    wide = max(x.numel(), span(x.shape, x.stride())) >= INT32_LIMIT
    return tuple(sizes[:-1]), tuple(steps), tl.int64 if wide else tl.int32


def linear_index(tensor: torch.Tensor, strides: Sequence[int], indexed: torch.Tensor) -> Index:
    """Return an index into all elements of `indexed`, numbered in row-major order."""
    sizes, (steps,) = row_major(indexed.shape, [indexed.stride()])
    return Index(tensor, tuple(strides), indexed.numel(), tuple(steps), tuple(sizes[:-1]))


@dataclass(frozen=True)
class IndexedMeta:
    """Compile-time facts of kernels over indexed elements.

    `block` is (rows, columns) of a program. `by_column` says that an index depends on the column. `by_column_only` says
    that indices depend on nothing else; a program loads them once for all of its rows. `aligned` divides the number
    of columns and the offsets of rows, in elements, except offsets by indices of columns. `index` is the integer type
    of offsets. `wraps` says that negative indices count from the end, and `message` is the text of the range assertion.
    `held` is the number of integers of an indexed row that a program has in shared memory, 0 for none.
    """

    block: tuple[int, int]
    by_column: bool
    aligned: int
    index: Any
    wraps: bool
    message: str
    by_column_only: bool = False
    held: int = 0


class IndexedSpace(NamedTuple):
    """The collapsed space of the elements that are copied, fastest dimension first.

    `direct` and `indexed` are the strides of the two operands over `shape`. `integer` is the type of offsets.
    """

    n_rows: int
    n_columns: int
    shape: tuple[int, ...]
    direct: tuple[int, ...]
    indexed: tuple[int, ...]
    indices: tuple[Index, ...]
    integer: Any

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        direct: Sequence[int],
        indexed: Sequence[int],
        indices: Sequence[Index],
        itemsize: int,
    ) -> IndexedSpace:
        """Collapse the space of a call. An element of 16 bytes becomes two of 8, in a dimension of its own."""
        shape, direct, indexed = tuple(shape), tuple(direct), tuple(indexed)
        if itemsize == 16:
            shape = (*shape, 2)
            direct, indexed = (tuple([*(2 * stride for stride in own), 1]) for own in (direct, indexed))
            indices = [
                i._replace(strides=(*i.strides, 0), steps=tuple([2 * step for step in i.steps])) for i in indices
            ]
        sizes, merged = collapse(shape, [direct, indexed, *(i.strides for i in indices)])
        indices = tuple([i._replace(strides=tuple(own)) for i, own in zip(indices, merged[2:], strict=True)])
        reach = [span(sizes, merged[0]), span(sizes, merged[1]) + sum([i.reach() for i in indices])]
        reach += [span(sizes, i.strides) for i in indices]
        integer = tl.int64 if max(*reach, math.prod(sizes)) >= INT32_LIMIT else tl.int32
        return cls(math.prod(sizes[1:]), sizes[0], tuple(sizes), tuple(merged[0]), tuple(merged[1]), indices, integer)

    def meta(self, itemsize: int, wraps: bool, message: str) -> IndexedMeta:
        """Choose the block of a program; return the kernels' compile-time facts."""
        device, by_column = devices.current, any([i.strides[0] for i in self.indices])
        itemsize = min(itemsize, 8)
        elements = 2 * device.tile_bytes // max(itemsize, 8 if by_column else 1)
        # Smaller blocks for a small space, so that programs fill the device.
        while elements > 512 and self.n_rows * self.n_columns < elements * device.programs:
            elements //= 2
        if device.interpreted:
            elements = max(elements, 2048)
        columns = min(elements, power_of_2(self.n_columns))
        # Halve the columns while lanes behind the row's end are an eighth of a row or more.
        while columns > 128 and -self.n_columns % columns * 8 >= self.n_columns:
            columns //= 2
        rows = min(max(1, elements // columns), power_of_2(self.n_rows))
        by_column_only = by_column and not any([any(i.strides[1:]) for i in self.indices])
        shared = indexing_table().rows_of_one_index
        if by_column_only and self.n_rows * self.n_columns >= shared * rows * columns * device.programs:
            # Columns stay as many, so that what they read of a row stays in the L1 cache.
            rows = min(max(rows, shared), power_of_2(self.n_rows))
        aligned = self._aligned(itemsize, by_column)
        return IndexedMeta((rows, columns), by_column, aligned, self.integer, wraps, message, by_column_only)

    def _aligned(self, itemsize: int, by_column: bool) -> int:
        """Return the elements, 16 bytes at most, that divide the offsets of all rows and the number of columns."""
        indexed = [] if by_column else [*self.indexed[1:], *(step for i in self.indices for step in i.steps)]
        return math.gcd(16 // itemsize, *self.direct[1:], *indexed, self.n_columns)

    def programs(self, meta: IndexedMeta) -> int:
        """Return the number of blocks of the space."""
        return -(-self.n_rows // meta.block[0]) * -(-self.n_columns // meta.block[1])

    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments of kernels: indices, shape, strides, column_strides, ranges, n_rows, n_columns.

        `shape` has the row dimensions' sizes without the slowest. `strides` (over rows) and `column_strides` are tuples
        for the direct operand, the indexed operand and the index tensors. `ranges` has (size, inner, steps) by index.
        """
        operands = (self.direct, self.indexed)
        return (
            tuple([i.tensor for i in self.indices]),
            self.shape[1:-1],
            (*(own[1:] or (0,) for own in operands), tuple([i.strides[1:] or (0,) for i in self.indices])),
            (*(own[0] for own in operands), tuple([i.strides[0] for i in self.indices])),
            tuple([(i.size, i.inner, i.steps) for i in self.indices]),
            self.n_rows,
            self.n_columns,
        )
