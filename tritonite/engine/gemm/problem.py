"""A product as tiles are chosen for it: sizes, dtypes, and the layout of its operands."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from tritonite.engine.gemm.table import Config, limits

# M up to which a product is bound by memory and has kernels of its own ("few rows").
FEW = 16


class Problem(NamedTuple):
    """A product of (batches, M, K) and (batches, K, N), as tiles are chosen for it."""

    batches: int
    M: int
    N: int
    K: int
    dtype: torch.dtype
    result: torch.dtype
    # Whether elements along K are contiguous in a, and in b.
    a_inner: bool
    b_inner: bool
    # Whether sums over blocks of K are added in float32.
    blockwise: bool = False
    # Bytes that a load through pointers, or a store of the result, may have.
    a_vector: int = 16
    b_vector: int = 16
    out_vector: int = 16
    # Whether all tiles that may be chosen must give a sum the same bits.
    invariant: bool = False
    # Leading dimensions in elements, or 0 for contiguous operands.
    a_pitch: int = 0
    b_pitch: int = 0
    # The stride between the columns of a tile, all of which start at the same offset within 16 bytes, or 0 for
    # contiguous columns. For 16-bit floats loaded through pointers.
    column_stride: int = 0
    # Whether each result element has epilogue elements of its own to load, and whether TMA copies them: an addend in
    # the result's layout.
    added: bool = False
    added_by_tma: bool = False

    @classmethod
    def of(cls, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Problem:
        """Return the problem of a (batches, M, K) times b (batches, K, N) into out (batches, M, N)."""
        batches, M, N = out.shape
        inner = a.stride(2) == 1, b.stride(1) == 1
        vectors = vector_bytes(a, inner[0]), vector_bytes(b, not inner[1]), vector_bytes(out, out.stride(2) == 1)
        pitches = _pitch(a, inner[0]), _pitch(b, not inner[1])
        return cls(batches, M, N, a.shape[2], a.dtype, out.dtype, *inner, False, *vectors, False, *pitches)

    @property
    def bytes(self) -> int:
        """Bytes of both operands and of a result of the operands' dtype."""
        return self.dtype.itemsize * self.batches * (self.M * self.K + self.K * self.N + self.M * self.N)

    @property
    def is_cached(self) -> bool:
        """True if the product is costed with operands in the L2 cache."""
        operations = 2 * self.batches * self.M * self.N * self.K
        return self.bytes <= limits().cached_bytes and operations <= limits().cached_operations

    @property
    def is_short(self) -> bool:
        """True for 16-bit floats in the L2 cache, more than few rows, and few blocks of K."""
        return self.dtype.itemsize == 2 and self.M > FEW and limits().short_k >= self.K and self.is_cached

    def grid(self, config: Config) -> tuple[int, int]:
        """Return the rows and columns of tiles that a result matrix has, or its transpose for transposed tiles."""
        M, N = (self.N, self.M) if config.transposed else (self.M, self.N)
        stride = 1 if config.descriptors or config.transposed else max(1, self.column_stride)
        columns = -(-N // stride)
        return -(-M // config.BLOCK_M), stride * -(-columns // (config.BLOCK_N + config.MORE_N))

    def tiles(self, config: Config) -> int:
        """Return the number of tiles of all results."""
        rows, columns = self.grid(config)
        return self.batches * rows * columns

    def with_column_stride(self) -> Problem:
        """Return the problem with strided tiles of columns, if only they allow 16-byte loads of b and they pay.

        They are for few rows of 16-bit floats. A single row gains nothing, and with more rows the strided stores of the
        result take too long. regressions: gemm_column_stride
        """
        size, length = self.dtype.itemsize, self.b_pitch or self.K
        stride = 16 // math.gcd(16, length * size)
        if size != 2 or self.b_vector == 16 or not self.b_inner or not 1 < self.M <= FEW:
            return self
        one_by_one = self.b_vector == size
        least = limits().strided_k if one_by_one else limits().strided_k_vectors
        worth = least <= self.K and limits().alike_columns * stride <= self.N and (one_by_one or not self.is_cached)
        return self._replace(column_stride=stride, b_vector=16) if worth else self

    def of_any_rows(self) -> Problem:
        """Return the problem with M, the batches and a's layout replaced by constants, for invariant mode."""
        alone = self._replace(batches=1, M=limits().any_rows, added=False, added_by_tma=False)
        return alone._replace(a_inner=True, a_vector=16, out_vector=16, a_pitch=0)

    @property
    def key(self) -> str:
        """The key of stored tiles; n and t say which operands are transposed, as in BLAS."""
        sizes = f"{self.batches}x{self.M}x{self.N}x{self.K}"
        dtypes = f"{self.dtype}-{self.result}".replace("torch.", "")
        layout = f"{'n' if self.a_inner else 't'}{'t' if self.b_inner else 'n'}"
        return f"{sizes} {dtypes} {layout}{' blockwise' if self.blockwise else ''}"


def _pitch(tensor: torch.Tensor, rows: bool) -> int:
    """Return the stride between rows (or columns) in elements, or 0 if there is only one."""
    across = 1 if rows else 2
    return tensor.stride(across) if tensor.shape[across] > 1 else 0


def vector_bytes(tensor: torch.Tensor, rows: bool) -> int:
    """Return the bytes that a load along rows (or columns) may have, up to 16, by all addresses and lengths."""
    size, inner = tensor.dtype.itemsize, 2 if rows else 1
    if tensor.stride(inner) != 1:
        return size
    return math.gcd(16, tensor.data_ptr(), size * math.gcd(tensor.shape[inner], common_multiple(16, tensor, rows)))


def common_multiple(most: int, tensor: torch.Tensor, rows: bool) -> int:
    """Return the greatest divisor of `most` that divides the strides between batches and between rows (or columns)."""
    batch = tensor.stride(0) if tensor.shape[0] > 1 else 0
    return math.gcd(most, batch, tensor.stride(1 if rows else 2))
