"""Compile-time facts of the kernels, one frozen dataclass a kernel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GemmMeta:
    """Layout of the operands of `portable.multiply` and `hopper_fp32.multiply_bf16x6`, which load through pointers.

    A `multiple` is a number of elements, up to 16 bytes of them, that divides a size or the strides other than 1.
    Triton itself detects multiples of 16 alone, and with any other it would load elements one by one.
    """

    m_multiple: int
    n_multiple: int
    k_multiple: int
    a_multiple: int
    b_multiple: int
    out_multiple: int
    # Whether elements along K are contiguous in a and b, and those along N in the result.
    a_inner: bool
    b_inner: bool
    out_inner: bool
    # Whether neither dimension of a is contiguous.
    a_strided: bool
    # Elements up to a multiple of which contiguous rows or columns are padded with zeros: 16 bytes of them, or 1 for no
    # padding.
    a_padding: int = 1
    b_padding: int = 1
    # Whether a block is loaded to registers while the one before is multiplied.
    prefetch_a: bool = False
    prefetch_b: bool = False
    # Stride, in columns, between the columns of a tile, which begin at the same offset within 16 bytes; 0 for
    # contiguous columns.
    column_stride: int = 0


@dataclass(frozen=True)
class HopperGemmMeta:
    """Facts that `hopper.multiply_warp_specialized` is compiled for; blocks are those of its tensor descriptors."""

    a_transposed: bool
    b_transposed: bool
    out_transposed: bool
    group_m: int
    # Warp groups that multiply and store.
    consumers: int
    # Whether consumers take turns with whole tiles (ping-pong) instead of sharing the rows of each (cooperative).
    pingpong: bool
    # Whether each block's product is added in float32 outside the tensor cores.
    blockwise: bool
    # Columns of a tile in addition to those of b's block, since the sizes of blocks are powers of two.
    more_n: int
    # Whether TMA copies the addend's tile to the staging buffer, and whether each batch has an addend of its own.
    addend_by_tma: bool
    addend_batched: bool
    # Operand blocks in flight, and staging buffers a consumer writes results through.
    stages: int
    buffers: int

    @property
    def row_sharers(self) -> int:
        """Consumers among which the rows of a tile are divided."""
        return 1 if self.pingpong else self.consumers

    @property
    def turns(self) -> int:
        """Consumers that take turns with whole tiles."""
        return self.consumers if self.pingpong else 1
