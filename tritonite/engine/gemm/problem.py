"""What a product of matrices is to those who choose its tiles: sizes, dtypes, and how its operands lie."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from tritonite.engine.gemm.table import Config

# Products of up to so many rows are bound by memory.
FEW = 16
# Operands of so many bytes, and the result, are taken to be in the L2 cache, where what came before left them, and cost
# what was fitted to products of so many operations. Tensor cores, and no cache, decide how long more of those take.
CACHED, BRIEF = 19 * 2**20, 4e9
# Such products of halves have tiles of their own where K is no longer than this (`Problem.is_short`).
SHORT = 128
# So many rows a product is taken to have whose tiles must not depend on them: more than a decoding step has, so that
# tensor cores are busy, and fewer than a prompt, so that the tiles of a step's few rows are on many multiprocessors.
ANY_ROWS = 256
# Tiles have columns apart where so many of these are alike, and of so long a K at least: where elements are loaded one
# by one otherwise, and where several are.
LEAST_ALIKE, LEAST_LENGTH, LONG = 64, 768, 3000


class Problem(NamedTuple):
    """Batches of (M, K) times (K, N), and whether elements along K are next to each other in both operands.

    `blockwise` where sums over blocks of K are added in float32. Through pointers `a_vector` and `b_vector` bytes are
    loaded at a time, and `out_vector` stored. It is `invariant` where the bits of a sum are to be the same by all tiles
    that may be chosen. `a_pitch` and `b_pitch` are how many elements rows, or columns, of the operands are apart where
    that is known; otherwise they are as far apart as they are long. With `columns_apart` a tile of halves that is
    loaded through pointers has columns so far from each other, all of which begin alike in 16 bytes. `added` where each
    element of a product has one of its own that is loaded and added, or multiplied with it, and `added_by_tma` where
    that is an addend whose tiles can be copied as those of the result are.
    """

    batches: int
    M: int
    N: int
    K: int
    dtype: torch.dtype
    result: torch.dtype
    a_inner: bool
    b_inner: bool
    blockwise: bool = False
    a_vector: int = 16
    b_vector: int = 16
    out_vector: int = 16
    invariant: bool = False
    a_pitch: int = 0
    b_pitch: int = 0
    columns_apart: int = 0
    added: bool = False
    added_by_tma: bool = False

    @classmethod
    def of(cls, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Problem:
        """Of (batches, M, K) and (batches, K, N), and where the product is written."""
        batches, M, N = out.shape
        inner = a.stride(2) == 1, b.stride(1) == 1
        vectors = vector(a, inner[0]), vector(b, not inner[1]), vector(out, out.stride(2) == 1)
        pitches = _pitch(a, inner[0]), _pitch(b, not inner[1])
        return cls(batches, M, N, a.shape[2], a.dtype, out.dtype, *inner, False, *vectors, False, *pitches)

    @property
    def bytes(self) -> int:
        """Of the operands and the result."""
        return self.dtype.itemsize * self.batches * (self.M * self.K + self.K * self.N + self.M * self.N)

    @property
    def is_cached(self) -> bool:
        """Whether its costs are those of operands in the L2 cache."""
        operations = 2 * self.batches * self.M * self.N * self.K
        return self.bytes <= CACHED and operations <= BRIEF

    @property
    def is_short(self) -> bool:
        """Whether it is of halves in the L2 cache, of more than a few rows and few blocks of K."""
        return self.dtype.itemsize == 2 and self.M > FEW and self.K <= SHORT and self.is_cached

    def grid(self, config: Config) -> tuple[int, int]:
        """How many rows and columns of tiles a matrix of results is cut into, or its transpose."""
        M, N = (self.N, self.M) if config.transposed else (self.M, self.N)
        apart = 1 if config.descriptors or config.transposed else max(1, self.columns_apart)
        columns = -(-N // apart)
        return -(-M // config.BLOCK_M), apart * -(-columns // (config.BLOCK_N + config.MORE_N))

    def tiles(self, config: Config) -> int:
        """How many tiles its results are cut into."""
        rows, columns = self.grid(config)
        return self.batches * rows * columns

    def with_columns_apart(self) -> Problem:
        """The same in tiles of columns apart, where 16 bytes of b can only be loaded so and it is worth it.

        That is so of a few rows of halves. 2 rows by 13,824 by 3,067 took 79 us element by element, and take 32 (cuBLAS
        50); 6 such products in memory take 0.51 of their time, and 8 in the cache 0.83. Where loads take 4 or 8 bytes 7
        products in memory take 0.82, and those in the cache or with K of less than LONG mostly longer. Of one row there
        is nothing to gain, and of more than a few the results, which are written apart, take too long (H200).
        """
        size, length = self.dtype.itemsize, self.b_pitch or self.K
        apart = 16 // math.gcd(16, length * size)
        if size != 2 or self.b_vector == 16 or not self.b_inner or not 1 < self.M <= FEW:
            return self
        one_by_one = self.b_vector == size
        least = LEAST_LENGTH if one_by_one else LONG
        worth = least <= self.K and LEAST_ALIKE * apart <= self.N and (one_by_one or not self.is_cached)
        return self._replace(columns_apart=apart, b_vector=16) if worth else self

    def of_any_rows(self) -> Problem:
        """What stands for it where neither the rows, their batches nor how they lie may decide anything."""
        alone = self._replace(batches=1, M=ANY_ROWS, added=False, added_by_tma=False)
        return alone._replace(a_inner=True, a_vector=16, out_vector=16, a_pitch=0)

    @property
    def key(self) -> str:
        """What stored results know it by; n and t stand for rows and columns, as in BLAS."""
        sizes = f"{self.batches}x{self.M}x{self.N}x{self.K}"
        dtypes = f"{self.dtype}-{self.result}".replace("torch.", "")
        layout = f"{'n' if self.a_inner else 't'}{'t' if self.b_inner else 'n'}"
        return f"{sizes} {dtypes} {layout}{' blockwise' if self.blockwise else ''}"


def _pitch(tensor: torch.Tensor, rows: bool) -> int:
    """How many elements the rows of a tensor, or the columns, are apart, or 0 where there is one."""
    across = 1 if rows else 2
    return tensor.stride(across) if tensor.shape[across] > 1 else 0


def vector(tensor: torch.Tensor, rows: bool) -> int:
    """How many bytes of a tensor in rows, or in columns, one load may take: all addresses and lengths are multiples."""
    size, inner = tensor.dtype.itemsize, 2 if rows else 1
    if tensor.stride(inner) != 1:
        return size
    return math.gcd(16, tensor.data_ptr(), size * math.gcd(tensor.shape[inner], divisor(16, tensor, rows)))


def divisor(most: int, tensor: torch.Tensor, rows: bool) -> int:
    """What divides `most` and the strides between batches and rows, or columns, of a tensor."""
    batch = tensor.stride(0) if tensor.shape[0] > 1 else 0
    return math.gcd(most, batch, tensor.stride(1 if rows else 2))
