"""Elements as integers in the order in which they are sorted, and rows of them in any layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tritonite.dtypes import FLOATS, UNSIGNED
from tritonite.engine.iteration import INT32_LIMIT, collapse, span
from tritonite.errors import Decline

# Whose bits are moved as integers.
_WORDS = {torch.bool: torch.uint8, torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_WORDS |= {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
_WORDS[torch.float64] = torch.int64
_INFINITIES = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80, torch.float32: 0x7F800000, torch.float64: 0x7FF << 52}


@dataclass(frozen=True)
class Keys:
    """How elements of a dtype are ordered: by integers of as many `bits`, from a half below 0 to a half above.

    Floats have the bits of `infinity`, integers 0. All nan are one key, the largest, and both zeros are one.
    """

    bits: int
    infinity: int
    signed: bool
    descending: bool

    @classmethod
    def of(cls, dtype: torch.dtype, descending: bool = False) -> Keys:
        """Those of a dtype."""
        return cls(
            bits=8 * dtype.itemsize,
            infinity=_INFINITIES.get(dtype, 0),
            signed=dtype is not torch.bool and dtype is not torch.uint8 and dtype not in UNSIGNED,
            descending=descending,
        )

    @property
    def passes(self) -> int:
        """How many digits of 8 bits a key has."""
        return self.bits // 8


def words(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as integers that kernels take: its own, or its bits."""
    word = _WORDS.get(tensor.dtype)
    if tensor.dtype in FLOATS and tensor._is_zerotensor():
        raise Decline("zeros without memory")
    return tensor if word is None else tensor.view(word)


@triton.jit
def ordered(word, KEYS: tl.constexpr):
    """The key of a word, of int64 where it has 64 bits and else of int32."""
    LARGEST: tl.constexpr = 2 ** (KEYS.bits - 1) - 1
    k = word if KEYS.bits == 64 else word.to(tl.int32)
    if KEYS.infinity > 0:
        key = tl.where(k < 0, k ^ LARGEST, k)
        key = tl.where(k == -LARGEST - 1, 0, key)
        key = tl.where((k & LARGEST) > KEYS.infinity, LARGEST, key)
    elif KEYS.signed:
        key = k
    elif KEYS.bits >= 32:
        key = k ^ (-LARGEST - 1)
    else:
        key = (k & (2 * LARGEST + 1)) - (LARGEST + 1)
    return ~key if KEYS.descending else key


@triton.jit
def with_sign(digits, KEYS: tl.constexpr):
    """A key, as an int64, of what it is where keys count from 0."""
    if KEYS.bits == 64:
        result = digits ^ (-(2**63))
    else:
        result = digits - 2 ** (KEYS.bits - 1)
    return result


@triton.jit
def unsigned_key(word, KEYS: tl.constexpr):
    """Another key than `ordered` gives, in the same order and of fewer instructions: an unsigned integer of its bits.

    Floats are those of their size with a sign, moved up to count from 0, and all nan are at the end of what unsigned
    integers have.
    """
    LOWEST: tl.constexpr = -(2 ** (KEYS.bits - 1))
    UNSIGNED: tl.constexpr = tl.uint64 if KEYS.bits == 64 else tl.uint32
    key = word if KEYS.bits == 64 else word.to(tl.int32)
    if KEYS.infinity > 0:
        key = (tl.where(key < 0, LOWEST - key, key) + KEYS.infinity).to(UNSIGNED, bitcast=True)
        key = tl.minimum(key, 2 * KEYS.infinity + 1)
    else:
        key = (key ^ LOWEST if KEYS.signed else key).to(UNSIGNED, bitcast=True)
        if KEYS.bits < 32:
            key = key & (2**KEYS.bits - 1)
    return key ^ (2**KEYS.bits - 1) if KEYS.descending else key


@triton.jit
def digit_of(word, shift, KEYS: tl.constexpr):
    """The 8 bits from bit `shift` on of a word's unsigned key, as an int32 from 0 to 255."""
    return ((unsigned_key(word, KEYS) >> shift) & 255).to(tl.int32)


class Rows:
    """Rows along a dimension of several tensors, which have the same other sizes.

    `shape` are the sizes of the kept dimensions but the slowest, fastest first, `strides` the tensors' over them, and
    `steps` along the rows. `index` is the integer type of offsets.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], dim: int) -> None:
        kept = [d for d in range(tensors[0].dim()) if d != dim]
        sizes, merged = collapse(
            [tensors[0].shape[d] for d in kept], [[tensor.stride(d) for d in kept] for tensor in tensors]
        )
        self.n_rows = math.prod(tensors[0].shape[d] for d in kept)
        self.shape = tuple(sizes[:-1])
        self.strides = tuple(map(tuple, merged))
        self.steps = tuple(tensor.stride(dim) for tensor in tensors)
        reach = max([span(tensor.shape, tensor.stride()) for tensor in tensors], default=0)
        self.index: Any = tl.int64 if reach >= INT32_LIMIT else tl.int32
