"""Device functions of quantisation to float8_e4m3fn and int8 by a scale.

A value x becomes x / scale, clamped to the range of the dtype and rounded to nearest even. A dynamic scale is the
largest absolute value over the largest value of the dtype. x is multiplied by 1 / scale in float32.
"""

import triton
import triton.language as tl

from tritonite.language import libdevice
from tritonite.language.math import true_divide

# The elements of a row that share a scale with the granularity "block".
BLOCK = tl.constexpr(128)
_SMALLEST_NORMAL = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def scale_of(maximum, MOST: tl.constexpr):
    """Return the scale with which a largest absolute value becomes MOST."""
    return true_divide(maximum, tl.full(maximum.shape, MOST, tl.float32))


@triton.jit
def inverse_scale(scale):
    """Return 1 / scale; 0 for scales that are 0 or subnormal, whose inverse may overflow."""
    one = tl.full(scale.shape, 1.0, tl.float32)
    return tl.where(tl.abs(scale) < _SMALLEST_NORMAL, 0.0, true_divide(one, tl.where(scale == 0.0, 1.0, scale)))


@triton.jit
def quantized(value, MOST: tl.constexpr, DTYPE: tl.constexpr):
    """Return values over their scale in DTYPE, clamped to its range; nan stays nan in float8 and is 0 in int8."""
    LEAST: tl.constexpr = -MOST - 1.0 if tl.int8 == DTYPE else -MOST
    value = tl.where(value > MOST, MOST, tl.where(value < LEAST, LEAST, value))
    if tl.int8 == DTYPE:
        value = libdevice.nearbyint(tl.where(value == value, value, 0.0))
    return value.to(DTYPE)


@triton.jit
def block_maxima(value, BLOCKS: tl.constexpr):
    """Return the largest absolute values of BLOCKS blocks of each row, as (rows, BLOCKS)."""
    blocks = tl.reshape(tl.abs(value), (value.shape[0], BLOCKS, value.shape[1] // BLOCKS))
    return tl.max(blocks, 2)
