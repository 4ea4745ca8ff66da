"""Device functions that decode quantised numbers in registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decoded_float8(bits, FORMAT: tl.constexpr):
    """Return the float8 numbers in a block of bytes as float16, which has all of their values.

    FORMAT is "fp8e5" or "fp8e4nv". The first is float16's upper byte. The second has its mantissa moved to float16's,
    and a bias of the exponent that is 8 less (Micikevicius et al. 2022).
    """
    wide = bits.to(tl.uint16)
    if FORMAT == "fp8e5":
        value = (wide << 8).to(tl.float16, bitcast=True)
    else:
        moved = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        value = moved.to(tl.float16, bitcast=True) * 256.0
        value = tl.where((wide & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)
    return value


@triton.jit
def less_constant(x, VALUE: tl.constexpr):
    """Return x - VALUE in x's dtype. Triton's interpreter has no constants of bfloat16."""
    return x - tl.full(x.shape, VALUE, tl.float32).to(x.dtype)


@triton.jit
def _number(nibbles, DTYPE: tl.constexpr):
    """Return integers below 16, in a block of uint16, as 16-bit floats.

    The integer becomes the end of the mantissa of 2**10 (float16) or 2**7 (bfloat16), which is then subtracted.
    Conversion instructions have a quarter of the rate.
    """
    if tl.float16 == DTYPE:
        value = less_constant((nibbles | 0x6400).to(tl.float16, bitcast=True), 1024.0)
    else:
        value = less_constant((nibbles | 0x4300).to(tl.bfloat16, bitcast=True), 128.0)
    return value


@triton.jit
def nibbles_of_int4(packed, DTYPE: tl.constexpr):
    """Return the low and the high nibbles of a block of bytes, as 16-bit floats of 0 to 15."""
    wide = packed.to(tl.uint16)
    return _number(wide & 0xF, DTYPE), _number(wide >> 4, DTYPE)


@triton.jit
def unpacked_int4(packed, DTYPE: tl.constexpr):
    """Return a (rows, columns) block of bytes as (rows, 2 * columns) numbers of 0 to 15; the low nibble comes first."""
    low, high = nibbles_of_int4(packed, DTYPE)
    return tl.interleave(low, high)
