"""Compile-time facts of the kernels, one frozen dataclass a kernel, and run-time arguments with named fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Axis(NamedTuple):
    """One spatial dimension of a convolution.

    Output position p and tap t meet the input at p * stride + origin + t * dilation. In a transposed convolution with
    phases `origin` is the padding, `common` the greatest common divisor of stride and dilation, and `inverse` that of
    dilation / common modulo stride / common.
    """

    size: Any
    positions: Any
    taps: Any
    stride: Any
    origin: Any
    dilation: Any
    common: Any
    inverse: Any


class Axes(NamedTuple):
    """The three spatial dimensions."""

    depth: Axis
    height: Axis
    width: Axis


class ImageStrides(NamedTuple):
    """Strides of an (N, C, D, H, W) tensor, in elements."""

    batch: Any
    channel: Any
    depth: Any
    height: Any
    width: Any


class FilterStrides(NamedTuple):
    """Strides of filters, in elements: between groups, columns of a group, channels of a group, and taps."""

    group: Any
    column: Any
    channel: Any
    depth: Any
    height: Any
    width: Any


class Strides(NamedTuple):
    """Strides of the operands of a convolution and of its result."""

    input: ImageStrides
    filters: FilterStrides
    out: ImageStrides


class Walk(NamedTuple):
    """The taps of a phase along one axis.

    Output position q * period + first, for q from 0, and tap first_tap + j * tap_step, for j below `taps`, meet the
    input at q * stride + origin + j * step.
    """

    period: Any
    first: Any
    stride: Any
    origin: Any
    step: Any
    taps: Any
    first_tap: Any
    tap_step: Any


class Walks(NamedTuple):
    """The taps of a phase along the three spatial dimensions."""

    depth: Any
    height: Any
    width: Any


class TileRows(NamedTuple):
    """Rows of a tile, which are output positions: where they meet the input with the first tap.

    `start` are element offsets, `depth`, `height` and `width` indices of the input; `valid` masks rows that exist.
    """

    start: Any
    depth: Any
    height: Any
    width: Any
    valid: Any


class TileColumns(NamedTuple):
    """Columns of a tile, which are output channels: pointers to their filters, and a mask of columns that exist."""

    filters: Any
    valid: Any


@dataclass(frozen=True, kw_only=True)
class TileMeta:
    """Facts of a tile of an implicit product."""

    block_m: int
    block_n: int
    block_k: int
    # Rows of tiles that consecutive programs go down.
    group_m: int
    # The dtypes of sums and of element offsets.
    accumulator: Any
    index: Any
    # Precision of float32 products: "ieee", "tf32" or "bf16x6".
    precision: str
    # Spatial dimensions of the call; axes before them have one position and one tap.
    dims: int
    # Whether a tap may meet no element of the input.
    bounded: bool
    # Whether taps and channels are one dimension of the product, for few channels.
    folded: bool
    # Whether channels are contiguous in the input, and in the result (of the filters' gradient: in the output's
    # gradient).
    input_inner: bool
    out_inner: bool

    @property
    def shown(self) -> dict[str, int]:
        """The facts that `explain` shows: the sizes of a tile."""
        return {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k}

    # Elements, up to 16 bytes of them, that divide the input's channels in a group, and its strides but the channel's,
    # which is 1; or 1.
    input_multiple: int


@dataclass(frozen=True, kw_only=True)
class ForwardMeta(TileMeta):
    """Facts of `forward.convolve_tile`."""

    # Whether output positions are divided into phases.
    phased: bool
    # Whether programs sum slices of K, each with a result of its own.
    split: bool
    # Groups of the convolution in a group of this product, whose filters are block-diagonal then.
    merged: int
    # Whether channels are contiguous in the filters; `filters_multiple` divides the channels then, otherwise the
    # columns, and all strides but the contiguous one.
    filters_inner: bool
    filters_multiple: int
    # The pointwise program of the result, or None, and which of its operands have an element for each channel.
    program: Any = None
    program_channels: tuple[bool, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FilterMeta(TileMeta):
    """Facts of `filters.filter_gradient_tile`."""

    # Whether programs sum slices of the positions, each with a result of its own.
    split: bool
    # What `input_multiple` is for the input, for the gradient of the output.
    grad_multiple: int
