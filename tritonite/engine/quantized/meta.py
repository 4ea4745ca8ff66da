"""Compile-time facts of the kernels of quantised products, and the strides that they read by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from tritonite.engine.gemm.kernels.meta import EpilogueMeta


class Float8Strides(NamedTuple):
    """`MatrixStrides` of operands, of their scales and of the result."""

    a: Any
    b: Any
    a_scale: Any
    b_scale: Any
    out: Any


class WordStrides(NamedTuple):
    """`MatrixStrides` of the other operand and the result."""

    x: Any
    out: Any


class Int8Strides(NamedTuple):
    """`MatrixStrides` of the weight, the other operand and the result."""

    weight: Any
    x: Any
    out: Any


class Int4Strides(NamedTuple):
    """`MatrixStrides` of the packed weight, its scales and zeros, the other operand and the result."""

    weight: Any
    scales: Any
    zeros: Any
    x: Any
    out: Any


@dataclass(frozen=True, kw_only=True)
class QuantizedMeta(EpilogueMeta):
    """Facts of a tile."""

    block_m: int
    block_n: int
    block_k: int
    # Rows of tiles that consecutive programs go down.
    group_m: int
    # The dtype of element offsets.
    index: Any
    # Whether each slice of K has a result of its own (split-K).
    split: bool
    # Elements along K that share a scale. Kernels but `multiply_words` need block_k to divide them.
    group_k: int
    # Whether block_k divides K.
    even_k: bool

    @property
    def shown(self) -> dict[str, int]:
        """The facts that `explain` shows: the sizes of a tile."""
        sizes = {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k}
        return {**sizes, "GROUP_M": self.group_m}


@dataclass(frozen=True, kw_only=True)
class Float8Meta(QuantizedMeta):
    """Facts of `kernels.multiply_float8`."""

    # Rows of a, and of b, that share a scale; 0 without scales along K.
    a_rows: int
    b_rows: int
    # Formats of operands that arrive as bytes and are decoded to float16, "" for operands in float8.
    a_format: str
    b_format: str


@dataclass(frozen=True, kw_only=True)
class Int4Meta(QuantizedMeta):
    """Facts of `kernels.multiply_int4`, whose a is the weight."""


@dataclass(frozen=True, kw_only=True)
class WordMeta(QuantizedMeta):
    """Facts of `tensor_core_words.multiply_words`, whose a is the weight."""

    # Neighbouring words of a lane: half as many as tiles of 16 along K.
    words: int

    @property
    def groups(self) -> int:
        """The groups of a block of K, at least 1."""
        return max(1, self.block_k // self.group_k)
