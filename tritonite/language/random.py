"""Philox-4x32-10 (Salmon et al. 2011) and what cuRAND makes of its words, to the bit where arithmetic is exact.

A sampler takes (seed, counter, thread), the counter counting draws of four words by each thread, and returns the values
of one draw in order: four of 32 bits, or two of 64.
"""

import triton
import triton.language as tl

from tritonite.language import approximate, libdevice
from tritonite.language.math import multiply_add, square_root

_INVERSE = tl.constexpr(2.0**-32)
# Of float32: 2**-32 times the circle, rounded.
_CIRCLE = tl.constexpr(6.2831854820251465 * 2.0**-32)
_WIDE_INVERSE = tl.constexpr(2.0**-53)


# The multipliers of a round, and what it adds to the keys.
_TIMES_A, _TIMES_C = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
_TO_FIRST, _TO_SECOND = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)
_ROUNDS = tl.constexpr(10)


@triton.jit
def _halves(x):
    """The 32 high and the 32 low bits of numbers of 64."""
    return (x >> 32).to(tl.uint32), (x & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def interleave4(a, b, c, d):
    """Elements of four tensors by turns."""
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def words(seed, counter, thread, ROUNDS: tl.constexpr = _ROUNDS):
    """curand4: four words of 32 bits.

    A product of 64 bits gives both halves, which are two multiplications if asked for one by one.
    """
    d, c = _halves(thread.to(tl.uint64))
    high, low = _halves(counter.to(tl.uint64))
    a, b = tl.broadcast_to(low, thread.shape), tl.broadcast_to(high, thread.shape)
    second_key, first_key = _halves(seed.to(tl.uint64))
    for _ in tl.static_range(ROUNDS):
        high_of_a, low_of_a = _halves(a.to(tl.uint64) * _TIMES_A)
        high_of_c, low_of_c = _halves(c.to(tl.uint64) * _TIMES_C)
        a, b, c, d = high_of_c ^ b ^ first_key, low_of_c, high_of_a ^ d ^ second_key, low_of_a
        first_key += _TO_FIRST
        second_key += _TO_SECOND
    return a, b, c, d


@triton.jit
def wide_words(seed, counter, thread):
    """Two words of 64 bits, the first of each pair the high one."""
    a, b, c, d = words(seed, counter, thread)
    return (a.to(tl.uint64) << 32) | b.to(tl.uint64), (c.to(tl.uint64) << 32) | d.to(tl.uint64)


@triton.jit
def uniform_of(word):
    """In (0, 1]."""
    return word.to(tl.float32) * _INVERSE + _INVERSE / 2


@triton.jit
def _uniform_bits(low, high):
    """The 53 bits that cuRAND makes a float64 of."""
    return (low.to(tl.uint64) ^ (high.to(tl.uint64) << 21)).to(tl.float64)


@triton.jit
def uniform(seed, counter, thread):
    """curand_uniform4: four float32 in (0, 1]."""
    a, b, c, d = words(seed, counter, thread)
    return uniform_of(a), uniform_of(b), uniform_of(c), uniform_of(d)


@triton.jit
def wide_uniform(seed, counter, thread):
    """curand_uniform2_double: two float64 in (0, 1]."""
    a, b, c, d = words(seed, counter, thread)
    first = _uniform_bits(a, b) * _WIDE_INVERSE + _WIDE_INVERSE / 2
    return first, _uniform_bits(c, d) * _WIDE_INVERSE + _WIDE_INVERSE / 2


@triton.jit
def box_muller(x, y):
    """Two normal numbers of two words (Box and Muller 1958)."""
    angle = y.to(tl.float32)
    circle = tl.full(angle.shape, _CIRCLE, tl.float32)
    angle = multiply_add(angle, circle, circle / 2)
    radius = square_root(-2.0 * libdevice.log(uniform_of(x)))
    return approximate.sin(angle) * radius, approximate.cos(angle) * radius


@triton.jit
def normal(seed, counter, thread):
    """curand_normal4: four float32."""
    a, b, c, d = words(seed, counter, thread)
    first, second = box_muller(a, b)
    third, fourth = box_muller(c, d)
    return first, second, third, fourth


@triton.jit
def wide_normal(seed, counter, thread):
    """curand_normal2_double: two float64."""
    a, b, c, d = words(seed, counter, thread)
    radius = square_root(-2.0 * libdevice.log(_uniform_bits(a, b) * _WIDE_INVERSE + _WIDE_INVERSE / 2))
    angle = _uniform_bits(c, d) * (2 * _WIDE_INVERSE) + _WIDE_INVERSE
    return approximate.sinpi(angle) * radius, approximate.cospi(angle) * radius
