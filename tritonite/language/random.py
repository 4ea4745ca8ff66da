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


@triton.jit
def words(seed, counter, thread):
    """curand4: four words of 32 bits."""
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = (counter >> 32).to(tl.uint32)
    thread = thread.to(tl.int64)
    return tl.philox(
        seed,
        tl.broadcast_to(low, thread.shape),
        tl.broadcast_to(high, thread.shape),
        (thread & 0xFFFFFFFF).to(tl.uint32),
        (thread >> 32).to(tl.uint32),
    )


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
