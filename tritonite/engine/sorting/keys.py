"""Integer keys in the order of the elements, and the layout of the rows that kernels sort."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tritonite.dtypes import FLOATS, UNSIGNED
from tritonite.engine.iteration import INT32_LIMIT, collapse, span
from tritonite.errors import Decline

# Dtypes that kernels read as integers of the same width. All others are read as they are.
_INTEGERS = {torch.bool: torch.uint8, torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_INTEGERS |= {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
_INTEGERS[torch.float64] = torch.int64
_INFINITIES = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80, torch.float32: 0x7F800000, torch.float64: 0x7FF << 52}


@dataclass(frozen=True)
class Keys:
    """The order of a dtype's elements, as integer keys of `bits` bits.

    `infinity` is the bit pattern of the dtype's infinity, 0 for integers. `signed` says whether integers have a sign.
    All nan have the same key, the largest, and both zeros have the same key. `descending` inverts keys.
    """

    bits: int
    infinity: int
    signed: bool
    descending: bool

    @classmethod
    def of(cls, dtype: torch.dtype, descending: bool = False) -> Keys:
        """Return the keys of a dtype."""
        return cls(
            bits=8 * dtype.itemsize,
            infinity=_INFINITIES.get(dtype, 0),
            signed=dtype is not torch.bool and dtype is not torch.uint8 and dtype not in UNSIGNED,
            descending=descending,
        )

    @property
    def passes(self) -> int:
        """Number of 8-bit digits of a key, which are the passes of a radix sort."""
        return self.bits // 8


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a view of it as integers of the same width where kernels read bits."""
    integer = _INTEGERS.get(tensor.dtype)
    if tensor.dtype in FLOATS and tensor._is_zerotensor():
        raise Decline("a zero tensor, which has no memory")
    return tensor if integer is None else tensor.view(integer)


@triton.jit
def signed_key(value, KEYS: tl.constexpr):
    """Return the key of an element's bits, between -2^(bits - 1) and 2^(bits - 1) - 1, as int64 or int32."""
    LARGEST: tl.constexpr = 2 ** (KEYS.bits - 1) - 1
    k = value if KEYS.bits == 64 else value.to(tl.int32)
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
def shifted_to_signed(key, KEYS: tl.constexpr):
    """Return the `signed_key`, as int64, of a signed key that was shifted to start at 0."""
    if KEYS.bits == 64:
        result = key ^ (-(2**63))
    else:
        result = key - 2 ** (KEYS.bits - 1)
    return result


@triton.jit
def unsigned_key(value, KEYS: tl.constexpr):
    """Return an unsigned key of an element's bits, in the order of `signed_key` but with other values.

    A float's key is its magnitude's bit pattern with the sign, plus that of infinity, so that keys start at 0. All nan
    get the key after infinity's. The unsigned key costs fewer instructions than the signed one.
    """
    LOWEST: tl.constexpr = -(2 ** (KEYS.bits - 1))
    UNSIGNED: tl.constexpr = tl.uint64 if KEYS.bits == 64 else tl.uint32
    key = value if KEYS.bits == 64 else value.to(tl.int32)
    if KEYS.infinity > 0:
        key = (tl.where(key < 0, LOWEST - key, key) + KEYS.infinity).to(UNSIGNED, bitcast=True)
        key = tl.minimum(key, 2 * KEYS.infinity + 1)
    else:
        key = (key ^ LOWEST if KEYS.signed else key).to(UNSIGNED, bitcast=True)
        if KEYS.bits < 32:
            key = key & (2**KEYS.bits - 1)
    return key ^ (2**KEYS.bits - 1) if KEYS.descending else key


@triton.jit
def digit_of(value, shift, KEYS: tl.constexpr):
    """Return bits `shift` to `shift + 7` of an element's unsigned key, as an int32 from 0 to 255."""
    return ((unsigned_key(value, KEYS) >> shift) & 255).to(tl.int32)


class RowLayout(NamedTuple):
    """Sizes and strides of rows, as kernels take them; `Rows` explains the fields."""

    shape: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    steps: tuple[int, ...]


class Rows:
    """The layout of rows along one dimension of several tensors, whose other sizes are equal.

    The other dimensions are collapsed. `shape` has their sizes without the slowest, fastest first. `strides` has a
    tuple of strides over them for each tensor, and `steps` each tensor's stride along the rows. `index` is the integer
    type of offsets.
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

    @property
    def layout(self) -> RowLayout:
        """The layout of all tensors."""
        return RowLayout(self.shape, self.strides, self.steps)
