"""Groups of dtypes, PyTorch's type promotion, and Triton's names for PyTorch's dtypes."""

from __future__ import annotations

from enum import Enum
from functools import lru_cache

import torch
import triton.language as tl

from tritonite.errors import Decline

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOATS_OF_16_BITS = (torch.float16, torch.bfloat16)
FULL_FLOATS = (torch.float32, torch.float64)
SINGLE_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
BOOL = (torch.bool,)
NUMBERS = FLOATS + INTS
ALL = NUMBERS + BOOL
COMPLEX = (torch.complex64, torch.complex128)
WITH_COMPLEX = ALL + COMPLEX
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
# Dtypes that indexing, and dtypes that copies, handle as bits: all but quantised ones and those narrower than a byte.
BITS = (*WITH_COMPLEX, torch.complex32, *UNSIGNED, *FLOAT8)
MOVED = (*BITS, torch.float8_e8m0fnu)

TRITON_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bool: "i1",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}
TRITON_DTYPES = {dtype: tl.str_to_ty(name, None) for dtype, name in TRITON_NAMES.items()}
# float8 names, for operands of matrix products alone.
FLOAT8_NAMES = {torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5"}


class Promotion(Enum):
    """Rules from an operator's argument dtypes to the dtype it computes in and the dtype of its result.

    Every rule first finds the arguments' common dtype: tensors with dimensions come before 0-d tensors, and 0-d tensors
    before Python numbers. A lower rank decides only if its category (bool < int < float < complex) is higher.

    DEFAULT        computes fp16 and bf16 in float32, returns the common dtype  add: (int32, float16) -> float16
    NO_OPMATH      computes in the common dtype itself                          bitwise_and
    INT_TO_FLOAT   bool and ints become the default dtype first                 exp: int64 -> float32
    ALWAYS_BOOL    computes as DEFAULT, returns bool                            eq: (int32, float16) -> bool
    BOOL_TO_LONG   bool becomes int64 first
    """

    DEFAULT = "default"
    NO_OPMATH = "no_opmath"
    INT_TO_FLOAT = "int_to_float"
    ALWAYS_BOOL = "always_bool"
    BOOL_TO_LONG = "bool_to_long"


_NUMBER_DTYPES = {bool: torch.bool, int: torch.int64}


def opmath(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for arithmetic on `dtype`: float32 for float16 and bfloat16, `dtype` otherwise."""
    return torch.float32 if dtype in FLOATS_OF_16_BITS else dtype


def category(dtype: torch.dtype) -> int:
    """Return 0 for bool, 1 for integers, 2 for floating point, 3 for complex."""
    if dtype is torch.bool:
        return 0
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 1


@lru_cache(maxsize=4096)
def common_dtype(
    tensors: tuple[torch.dtype, ...],
    zero_dim: tuple[torch.dtype, ...],
    numbers: tuple[type, ...],
    default: torch.dtype,
) -> torch.dtype:
    """Return the common dtype of tensors with dimensions, 0-d tensors and Python numbers, by PyTorch's three ranks.

    `default` is the dtype of a Python float. Raises Decline if all three are empty.
    """
    result: torch.dtype | None = None
    kinds = tuple(default if kind is float else _NUMBER_DTYPES[kind] for kind in numbers)
    for rank in (tensors, zero_dim, kinds):
        if not rank:
            continue
        candidate = rank[0]
        for dtype in rank[1:]:
            candidate = torch.promote_types(candidate, dtype)
        if result is None or category(candidate) > category(result):
            result = candidate
    if result is None:
        raise Decline("no tensor or number argument to promote")
    return result


@lru_cache(maxsize=1024)
def promote(kind: Promotion, common: torch.dtype, default: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Return (dtype to compute in, dtype of the result) of a promotion rule for a common dtype."""
    if kind is Promotion.INT_TO_FLOAT and category(common) < 2:
        common = default
    elif kind is Promotion.BOOL_TO_LONG and common is torch.bool:
        common = torch.int64
    compute = common if kind is Promotion.NO_OPMATH else opmath(common)
    return compute, torch.bool if kind is Promotion.ALWAYS_BOOL else common
