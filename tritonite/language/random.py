"""Philox-4x32-10 (Salmon et al. 2011) and cuRAND's distributions of its words, to the bit where arithmetic is exact.

A sampler takes (seed, counter, thread). `counter` counts the draws of a thread, each of four 32-bit words. A sampler
returns the values of one draw in order: four 32-bit values, or two 64-bit ones.
"""

import triton
import triton.language as tl

from tritonite.language import approximate, libdevice
from tritonite.language.math import multiply_add, square_root

_INVERSE = tl.constexpr(2.0**-32)
# 2 pi * 2**-32, with 2 pi rounded to float32.
_CIRCLE = tl.constexpr(6.2831854820251465 * 2.0**-32)
_WIDE_INVERSE = tl.constexpr(2.0**-53)


# A round's multipliers, and its increments of both keys.
_TIMES_A, _TIMES_C = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
_TO_FIRST, _TO_SECOND = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)
_ROUNDS = tl.constexpr(10)


@triton.jit
def _high_low(x):
    """Return the high and the low 32 bits of 64-bit integers."""
    return (x >> 32).to(tl.uint32), (x & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def interleave4(a, b, c, d):
    """Interleave four tensors along their last dimension: a0, b0, c0, d0, a1, ..."""
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def words(seed, counter, thread, ROUNDS: tl.constexpr = _ROUNDS):
    """Return four 32-bit words, as curand4.

    One 64-bit product has both 32-bit results of a round; separate high and low products would be two instructions.
    """
    d, c = _high_low(thread.to(tl.uint64))
    high, low = _high_low(counter.to(tl.uint64))
    a, b = tl.broadcast_to(low, thread.shape), tl.broadcast_to(high, thread.shape)
    second_key, first_key = _high_low(seed.to(tl.uint64))
    for _ in tl.static_range(ROUNDS):
        high_of_a, low_of_a = _high_low(a.to(tl.uint64) * _TIMES_A)
        high_of_c, low_of_c = _high_low(c.to(tl.uint64) * _TIMES_C)
        a, b, c, d = high_of_c ^ b ^ first_key, low_of_c, high_of_a ^ d ^ second_key, low_of_a
        first_key += _TO_FIRST
        second_key += _TO_SECOND
    return a, b, c, d


@triton.jit
def wide_words(seed, counter, thread):
    """Return two 64-bit words; the first 32-bit word of each pair is the high one."""
    a, b, c, d = words(seed, counter, thread)
    return (a.to(tl.uint64) << 32) | b.to(tl.uint64), (c.to(tl.uint64) << 32) | d.to(tl.uint64)


@triton.jit
def uniform_of(word):
    """Return a float32 in (0, 1] for a 32-bit word, as cuRAND does."""
    return word.to(tl.float32) * _INVERSE + _INVERSE / 2


@triton.jit
def _uniform_bits(low, high):
    """Return the 53 bits that cuRAND makes a float64 of, as a float64 integer."""
    return (low.to(tl.uint64) ^ (high.to(tl.uint64) << 21)).to(tl.float64)


@triton.jit
def uniform(seed, counter, thread):
    """Return four float32 in (0, 1], as curand_uniform4."""
    a, b, c, d = words(seed, counter, thread)
    return uniform_of(a), uniform_of(b), uniform_of(c), uniform_of(d)


@triton.jit
def wide_uniform(seed, counter, thread):
    """Return two float64 in (0, 1], as curand_uniform2_double."""
    a, b, c, d = words(seed, counter, thread)
    first = _uniform_bits(a, b) * _WIDE_INVERSE + _WIDE_INVERSE / 2
    return first, _uniform_bits(c, d) * _WIDE_INVERSE + _WIDE_INVERSE / 2


@triton.jit
def box_muller(x, y):
    """Return two normal float32 for two words (Box and Muller 1958)."""
    angle = y.to(tl.float32)
    circle = tl.full(angle.shape, _CIRCLE, tl.float32)
    angle = multiply_add(angle, circle, circle / 2)
    radius = square_root(-2.0 * libdevice.log(uniform_of(x)))
    return approximate.sin(angle) * radius, approximate.cos(angle) * radius


@triton.jit
def normal(seed, counter, thread):
    """Return four normal float32, as curand_normal4."""
    a, b, c, d = words(seed, counter, thread)
    first, second = box_muller(a, b)
    third, fourth = box_muller(c, d)
    return first, second, third, fourth


@triton.jit
def wide_normal(seed, counter, thread):
    """Return two normal float64, as curand_normal2_double."""
    a, b, c, d = words(seed, counter, thread)
    radius = square_root(-2.0 * libdevice.log(_uniform_bits(a, b) * _WIDE_INVERSE + _WIDE_INVERSE / 2))
    angle = _uniform_bits(c, d) * (2 * _WIDE_INVERSE) + _WIDE_INVERSE
    return approximate.sinpi(angle) * radius, approximate.cospi(angle) * radius
