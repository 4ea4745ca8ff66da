"""Distributions: ATen's transforms of uniform numbers, normal numbers and words.

They are computed in the samples' dtype, as ATen's are. `Distribution` in `engine/random.py` has their parameters.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tritonite.engine.random import Distribution
from tritonite.language import approximate, libdevice
from tritonite.language import random as sample
from tritonite.language.math import multiply_add, true_divide


@triton.jit
def _number(number, like, DTYPE: tl.constexpr):
    """Return a number of the call as a block, rounded to the result's dtype first, as ATen does."""
    number = number.to(like.dtype)
    return tl.broadcast_to(number.to(DTYPE).to(like.dtype), like.shape)


@triton.jit
def _uniform(value, inputs, first, second, low, span, DTYPE: tl.constexpr):
    """Map a uniform number of (0, 1] to [first, second); a result equal to `second` becomes `first`."""
    begin, end = _number(first, value, DTYPE), _number(second, value, DTYPE)
    width = (end - begin).to(DTYPE).to(value.dtype)
    drawn = multiply_add(value, width, begin).to(DTYPE).to(value.dtype)
    return (tl.where(drawn == end, begin, drawn),)


@triton.jit
def _normal(value, inputs, first, second, low, span, DTYPE: tl.constexpr):
    mean, deviation = _number(first, value, value.dtype), _number(second, value, value.dtype)
    return (multiply_add(value, deviation, mean),)


@triton.jit
def _normal_part(value, inputs, first, second, low, span, DTYPE: tl.constexpr):
    """Return one part of a complex normal number, whose variance is the sum of both parts' variances."""
    return _normal(value, inputs, first, second / 1.4142135623730951, low, span, DTYPE)


@triton.jit
def _log_normal(value, inputs, first, second, low, span, DTYPE: tl.constexpr):
    exponent = _normal(value, inputs, first, second, low, span, DTYPE)[0]
    if value.dtype == tl.float64:
        drawn = libdevice.exp(exponent)
    else:
        drawn = approximate.exp(exponent)
    return (drawn,)


@triton.jit
def _logarithm(x):
    """Return the logarithm of uniform numbers with ATen's precision."""
    if x.dtype == tl.float64:
        logarithm = libdevice.log(x)
    else:
        logarithm = approximate.log(x)
    return logarithm


@triton.jit
def exponential_of(value, inputs, first, second, low, span, DTYPE: tl.constexpr):
    """Return an exponential number of rate `first`, from a logarithm that is at most -epsilon / 2."""
    HALF: tl.constexpr = 2.0**-53 if value.dtype == tl.float64 else 2.0**-24
    logarithm = tl.where(value >= 1 - HALF, -HALF, _logarithm(value))
    rate = _number(first, value, value.dtype)
    return (true_divide(tl.full(value.shape, -1.0, value.dtype), rate) * logarithm,)


@triton.jit
def _cauchy(value, inputs, first, second, low, span, DTYPE: tl.constexpr):
    """Return a Cauchy number, from a tangent that is kept away from its poles."""
    median, scale = _number(first, value, value.dtype), _number(second, value, value.dtype)
    if value.dtype == tl.float64:
        tangent = libdevice.tan((value - 0.5) * 3.141592653589793)
    else:
        value = tl.minimum(tl.maximum(value, 2.0**-23), 1 - 2.0**-23)
        tangent = approximate.tan((value - 0.5) * 3.1415927410125732)
    return (multiply_add(scale, tangent, median),)


@triton.jit
def _truncated(value, DTYPE: tl.constexpr):
    """Convert a number for the result's dtype; integers are truncated to int64 first, as in ATen."""
    if DTYPE.is_int() and tl.int1 != DTYPE:
        value = value.to(tl.int64)
    return value


@triton.jit
def _geometric(value, inputs, first, second, low, span, DTYPE: tl.constexpr):
    p = _number(first, value, value.dtype)
    if value.dtype == tl.float64:
        failure = libdevice.log1p(-p)
    else:
        failure = approximate.log(1.0 - p)
    return (_truncated(libdevice.ceil(true_divide(_logarithm(value), failure)), DTYPE),)


@triton.jit
def _bernoulli(value, inputs, first, second, low, span, DTYPE: tl.constexpr):
    return (value < _number(first, value, value.dtype),)


@triton.jit
def _bernoulli_of(value, inputs, first, second, low, span, DTYPE: tl.constexpr):
    """Compare with probabilities from a tensor, float64 for float64 results and float32 for all others."""
    p = inputs[0]
    tl.device_assert((p >= 0) & (p <= 1), "a probability that is not between 0 and 1")
    return (value.to(p.dtype) <= p,)


@triton.jit
def _from_to(value, inputs, first, second, low, span, DTYPE: tl.constexpr):
    """Return low + value % span, with wrap-around."""
    drawn = (value % span.to(value.dtype)).to(tl.int64) + low
    return (_from_integer(drawn, DTYPE),)


@triton.jit
def _last_bits(value, inputs, first, second, low, span, DTYPE: tl.constexpr):
    """Return value % span & low."""
    return ((value % span.to(value.dtype)).to(tl.int64) & low,)


@triton.jit
def _all_bits(value, inputs, first, second, low, span, DTYPE: tl.constexpr):
    """Return all 64 bits."""
    return (_from_integer(value.to(tl.int64), DTYPE),)


@triton.jit
def _from_integer(drawn, DTYPE: tl.constexpr):
    """Convert an integer for the result's dtype; 16-bit floats are rounded from float32."""
    if tl.int1 == DTYPE:
        drawn = drawn != 0
    elif DTYPE.is_floating() and DTYPE.primitive_bitwidth == 16:
        drawn = drawn.to(tl.float32)
    return drawn


UNIFORM = Distribution(_uniform, sample.uniform, sample.wide_uniform)
NORMAL = Distribution(_normal, sample.normal, sample.wide_normal)
NORMAL_PARTS = NORMAL._replace(transform=_normal_part)
LOG_NORMAL = NORMAL._replace(transform=_log_normal)
EXPONENTIAL = UNIFORM._replace(transform=exponential_of)
CAUCHY = UNIFORM._replace(transform=_cauchy)
GEOMETRIC = UNIFORM._replace(transform=_geometric)
BERNOULLI = UNIFORM._replace(transform=_bernoulli)
BERNOULLI_OF = UNIFORM._replace(transform=_bernoulli_of)
FROM_TO = Distribution(_from_to, sample.words, sample.wide_words)
LAST_BITS = FROM_TO._replace(transform=_last_bits)
ALL_BITS = FROM_TO._replace(transform=_all_bits)
