"""The description of a convolution: how filters move over an input, and the sizes of the product that results."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from tritonite.engine.convolution.meta import Axes, Axis, FilterStrides, ImageStrides

Triple = tuple[int, int, int]


class Geometry(NamedTuple):
    """Steps of a filter over an input, along depth, height and width, and the number of groups of channels."""

    stride: Triple = (1, 1, 1)
    padding: Triple = (0, 0, 0)
    dilation: Triple = (1, 1, 1)
    groups: int = 1

    @property
    def phases(self) -> int:
        """Residue classes of output positions of the transpose, modulo the stride."""
        return math.prod(self.stride)

    @property
    def is_pointwise(self) -> bool:
        """True if a filter of one tap meets every input position once, at the output position with its index."""
        return self.stride == (1, 1, 1) and self.padding == (0, 0, 0) and self.groups == 1

    def axes(self, sizes: Triple, positions: Triple, taps: Triple) -> Axes:
        """Return the axes of a convolution: input `sizes`, output `positions` and filter `taps`."""
        each = zip(sizes, positions, taps, self.stride, self.padding, self.dilation, strict=True)
        return Axes(*[Axis(size, out, count, s, -p, d, 1, 0) for size, out, count, s, p, d in each])

    def transposed_axes(self, sizes: Triple, positions: Triple, taps: Triple) -> Axes:
        """Return the axes of a transposed convolution.

        With a stride of 1 it is a convolution whose taps go backwards. Otherwise the kernel derives a phase's taps from
        the greatest common divisor of stride and dilation, and from the inverse of dilation / divisor modulo
        stride / divisor.
        """
        found = []
        for size, out, count, s, p, d in zip(
            sizes, positions, taps, self.stride, self.padding, self.dilation, strict=True
        ):
            common = math.gcd(s, d)
            inverse = pow(d // common, -1, s // common) if s > common else 0
            phased = self.phases > 1
            found.append(Axis(size, out, count, s, p, d if phased else -d, common, inverse))
        return Axes(*found)


class Problem(NamedTuple):
    """The implicit product that a tile is chosen for: `batches * positions` rows of a phase, and K of taps * channels.

    `columns` and `channels` are those of one group. Groups and phases are products of equal size. A group is
    `merged` groups of the convolution, with block-diagonal filters.
    """

    dtype: torch.dtype
    batches: int
    positions: int
    columns: int
    channels: int
    taps: int
    groups: int
    phases: int
    merged: int = 1

    def merging(self, groups: int) -> Problem:
        """Return the problem with `groups` groups, a divisor of their number, in each product."""
        wide = {"columns": self.columns * groups, "channels": self.channels * groups}
        return self._replace(groups=self.groups // groups, merged=self.merged * groups, **wide)

    @property
    def units(self) -> int:
        """Products of equal size."""
        return self.groups * self.phases

    @property
    def accumulator(self) -> torch.dtype:
        """The dtype in which products are summed."""
        return torch.float64 if self.dtype is torch.float64 else torch.float32

    @property
    def rows(self) -> int:
        return self.batches * self.positions

    @property
    def inner(self) -> int:
        """The length of K."""
        return self.taps * self.channels

    @property
    def operations(self) -> float:
        """Floating-point operations of all products, zeros of block-diagonal filters included."""
        return 2.0 * self.rows * self.columns * self.inner * self.units


def image_strides(tensor: torch.Tensor) -> ImageStrides:
    """Return the strides of an (N, C, D, H, W) tensor, 0 along dimensions of size 1."""
    return ImageStrides(*[0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True)])


def filter_strides(filters: torch.Tensor, groups: int, transposed: bool = False) -> FilterStrides:
    """Return the strides of filters, whose first dimension has the groups one after the other.

    Columns are the first dimension and channels the second, or with `transposed` the other way round. The stride of a
    dimension of size 1 is 0.
    """
    each = filters.shape[0] // groups
    group = 0 if groups == 1 else each * filters.stride(0)
    sizes = (each, *filters.shape[1:])
    first, second, *spatial = [0 if size == 1 else step for size, step in zip(sizes, filters.stride(), strict=True)]
    pair = (second, first) if transposed else (first, second)
    return FilterStrides(group, *pair, *spatial)


def vector_multiple(tensor: torch.Tensor, size: int, strides: ImageStrides | FilterStrides, contiguous: str) -> int:
    """Return the elements, up to 16 bytes of them, that divide a tensor's address, `size` and all strides but one.

    Returns 1 if the stride named `contiguous` is not 1.
    """
    given = strides._asdict()
    if given.pop(contiguous) != 1 or tensor.data_ptr() % 16:
        return 1
    return math.gcd(16 // tensor.dtype.itemsize, size, *given.values())
