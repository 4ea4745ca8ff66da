"""Where index tensors tell elements to be: the host side of reading and writing at such places.

A call's space has an element for every one that is moved. One operand has its element at each place of the space; the
other has it at the place by its own strides plus, for every `Index`, the steps to what that index tensor's number
counts. The dimension that moves fastest makes columns. Where no index depends on it, an index is loaded once for a row
of elements that lie next to each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl

from tritonite import devices
from tritonite.engine.iteration import INT32_LIMIT, collapse, power_of_2, span

# The rows of a program, at least, that share indices of their columns. The columns stay as many, so that what they
# read of a row comes from the nearest cache.
_ROWS_ACROSS = 4
INDEX_DTYPES = (torch.int32, torch.int64)
# ATen's assertions, in its words.
IN_RANGE = "idx_dim >= 0 && idx_dim < index_size && index out of bounds"
IN_RANGE_OF_BOTH_SIGNS = "-sizes[i] <= index && index < sizes[i] && index out of bounds"


class Index(NamedTuple):
    """An index tensor: its strides over the space, how many places it may count, and the steps to each.

    `steps` has several strides, fastest first, where one number counts the elements of several dimensions, of which
    `inner` are the sizes but the slowest's.
    """

    tensor: torch.Tensor
    strides: tuple[int, ...]
    size: int
    steps: tuple[int, ...]
    inner: tuple[int, ...] = ()

    def reach(self) -> int:
        """The largest offset that its numbers tell of."""
        slowest = self.size // max(1, math.prod(self.inner))
        return span((*self.inner, max(1, slowest)), self.steps) - 1


def index_along(tensor: torch.Tensor, strides: Sequence[int], counted: torch.Tensor, dim: int) -> Index:
    """An index tensor whose numbers count along a dimension of `counted`, if that has any."""
    if not counted.dim():
        return Index(tensor, tuple(strides), 1, (1,))
    return Index(tensor, tuple(strides), counted.shape[dim], (counted.stride(dim),))


def row_major(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Sizes and operands' strides of a space in row-major order, the last dimension first, merged where one serves."""
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
    """(sizes but the slowest, strides, integer type of offsets) of a tensor's elements in row-major order."""
    sizes, (steps,) = row_major(x.shape, [x.stride()])
    wide = max(x.numel(), span(x.shape, x.stride())) >= INT32_LIMIT
    return tuple(sizes[:-1]), tuple(steps), tl.int64 if wide else tl.int32


def linear_index(tensor: torch.Tensor, strides: Sequence[int], counted: torch.Tensor) -> Index:
    """An index tensor whose numbers count all elements of `counted`, in row-major order."""
    sizes, (steps,) = row_major(counted.shape, [counted.stride()])
    return Index(tensor, tuple(strides), counted.numel(), tuple(steps), tuple(sizes[:-1]))


@dataclass(frozen=True)
class Facts:
    """What kernels over places are compiled for.

    `block` are the rows and columns of a program. Where indices are `deep`, they depend on the column, too, and where
    they go `across`, on nothing else, so that a program reads them once for all of its rows. Offsets of
    rows and the number of columns are multiples of `aligned`, in elements, but for offsets that deep indices tell.
    Negative numbers count from the end where an index `wraps`; `message` is what is asserted of it. A program has room
    for rows of `held` words of the other operand in shared memory.
    """

    block: tuple[int, int]
    deep: bool
    aligned: int
    index: Any
    wraps: bool
    message: str
    across: bool = False
    held: int = 0


class Space(NamedTuple):
    """The elements that are moved, collapsed, fastest dimension first.

    `near` are the strides of the operand that has them side by side, `far` of the one that indices tell of.
    """

    n_rows: int
    n_columns: int
    shape: tuple[int, ...]
    near: tuple[int, ...]
    far: tuple[int, ...]
    indices: tuple[Index, ...]
    integer: Any

    @classmethod
    def of(
        cls, shape: Sequence[int], near: Sequence[int], far: Sequence[int], indices: Sequence[Index], itemsize: int
    ) -> Space:
        """The space of a call that moves elements of `itemsize` bytes, which are words of 8 where they are wider."""
        shape, near, far = tuple(shape), tuple(near), tuple(far)
        if itemsize == 16:
            shape = (*shape, 2)
            near, far = (tuple([*(2 * stride for stride in own), 1]) for own in (near, far))
            indices = [
                i._replace(strides=(*i.strides, 0), steps=tuple([2 * step for step in i.steps])) for i in indices
            ]
        sizes, merged = collapse(shape, [near, far, *(i.strides for i in indices)])
        indices = tuple([i._replace(strides=tuple(own)) for i, own in zip(indices, merged[2:], strict=True)])
        reach = [span(sizes, merged[0]), span(sizes, merged[1]) + sum([i.reach() for i in indices])]
        reach += [span(sizes, i.strides) for i in indices]
        integer = tl.int64 if max(*reach, math.prod(sizes)) >= INT32_LIMIT else tl.int32
        return cls(math.prod(sizes[1:]), sizes[0], tuple(sizes), tuple(merged[0]), tuple(merged[1]), indices, integer)

    def facts(self, itemsize: int, wraps: bool, message: str) -> Facts:
        """How to cut the space into blocks for programs."""
        device, deep = devices.current, any([i.strides[0] for i in self.indices])
        itemsize = min(itemsize, 8)
        elements = 2 * device.tile_bytes // max(itemsize, 8 if deep else 1)
        # Of few elements each program takes fewer, so that all of the device works.
        while elements > 512 and self.n_rows * self.n_columns < elements * device.programs:
            elements //= 2
        if device.interpreted:
            elements = max(elements, 2048)
        columns = min(elements, power_of_2(self.n_columns))
        # A block that does not divide the row leaves lanes idle; halve it while that wastes an eighth or more.
        while columns > 128 and -self.n_columns % columns * 8 >= self.n_columns:
            columns //= 2
        rows = min(max(1, elements // columns), power_of_2(self.n_rows))
        across = deep and not any([any(i.strides[1:]) for i in self.indices])
        if across and self.n_rows * self.n_columns >= _ROWS_ACROSS * rows * columns * device.programs:
            rows = min(max(rows, _ROWS_ACROSS), power_of_2(self.n_rows))
        return Facts((rows, columns), deep, self._aligned(itemsize, deep), self.integer, wraps, message, across)

    def _aligned(self, itemsize: int, deep: bool) -> int:
        """The largest number of elements, of 16 bytes at most, that all rows start at a multiple of."""
        far = [] if deep else [*self.far[1:], *(step for i in self.indices for step in i.steps)]
        return math.gcd(16 // itemsize, *self.near[1:], *far, self.n_columns)

    def programs(self, facts: Facts) -> int:
        """How many programs take all blocks."""
        return -(-self.n_rows // facts.block[0]) * -(-self.n_columns // facts.block[1])

    def arguments(self) -> tuple[Any, ...]:
        """What kernels take of it: index tensors, and numbers in tuples."""
        operands = (self.near, self.far)
        return (
            tuple([i.tensor for i in self.indices]),
            self.shape[1:-1],
            (*(own[1:] or (0,) for own in operands), tuple([i.strides[1:] or (0,) for i in self.indices])),
            (*(own[0] for own in operands), tuple([i.strides[0] for i in self.indices])),
            tuple([(i.size, i.inner, i.steps) for i in self.indices]),
            self.n_rows,
            self.n_columns,
        )
