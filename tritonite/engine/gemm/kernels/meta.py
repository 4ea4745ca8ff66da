"""Compile-time facts of the kernels, one frozen dataclass a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tritonite.engine.pointwise.embedded import ResultProgram


@dataclass(frozen=True, kw_only=True)
class EpilogueMeta:
    """Facts of an epilogue (`epilogue.epilogue`).

    An activation is a parameter of its own. Triton's cache on disk hashes the source of a function that is a parameter,
    but not of one in a dataclass.
    """

    # Whether to multiply by alpha; otherwise alpha is 1.
    scaled: bool
    # Dimensions that each scale, then the addend, then each operand of the program varies along
    # (`epilogue._load_broadcast`).
    kinds: tuple[int, ...]
    # The pointwise program of the result, or None.
    program: ResultProgram | None = None


@dataclass(frozen=True, kw_only=True)
class TileMeta:
    """Facts of a tile: its size, and how its products are added."""

    block_m: int
    block_n: int
    block_k: int
    # Rows of tiles that consecutive programs go down (`epilogue.tile_index`).
    group_m: int
    # The dtypes of sums and of element offsets.
    accumulator: Any
    index: Any
    # Precision of float32 products: "ieee", "tf32", or "bf16x6", six products of bfloat16 terms (Henry, Tang and
    # Heinecke 2019).
    precision: str
    # Elements along K after which tensor cores' float8 sums are added in float32; None for no such limit.
    imprecise: int | None

    @property
    def shown(self) -> dict[str, int]:
        """The facts that `explain` shows: the sizes of a tile."""
        sizes = {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k}
        return {**sizes, "GROUP_M": self.group_m}


@dataclass(frozen=True, kw_only=True)
class GemmMeta(TileMeta, EpilogueMeta):
    """Facts of the kernels that load through pointers: those of `pointers`, and `hopper_fp32.multiply_bf16x6`.

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
    # Whether programs sum slices of K (split-K), each of which has a result of its own.
    split: bool
    # Whether block_k divides K and the ends of all groups.
    even_k: bool = False
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


@dataclass(frozen=True, kw_only=True)
class PersistentMeta(TileMeta, EpilogueMeta):
    """Facts of `persistent.multiply_persistent`."""

    # The dtype of the result, or of the partial products.
    result: Any
    # Whether columns of an operand are contiguous, and rows are not.
    a_transposed: bool
    b_transposed: bool
    # Whether each slice of K has a result of its own (split-K).
    split: bool
    # Whether a tile is stored in two subtiles, through half the shared memory.
    split_store: bool


@dataclass(frozen=True, kw_only=True)
class GroupsMeta(TileMeta):
    """Facts of `persistent.multiply_groups`."""

    a_transposed: bool
    b_transposed: bool
    # Groups, and the power of two that is at least as large.
    groups: int
    lanes: int
    # A divisor of the row that each tile starts at.
    multiple: int


@dataclass(frozen=True, kw_only=True)
class HopperGemmMeta(EpilogueMeta):
    """Facts of `hopper.multiply_warp_specialized`, whose tensor descriptors have the sizes of blocks."""

    # The dtype of element offsets.
    index: Any
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
