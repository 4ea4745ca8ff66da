"""Transforms of one radix in registers, and the packing of a radix's tensors into one.

A butterfly takes and returns tuples of tensors, an element of the transform each. The packed form has the elements in
the first dimension, as many as the next power of 2.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl


@triton.constexpr_function
def _cosine(k: int, n: int) -> float:
    """Return cos(2 pi k / n), exact at multiples of a quarter."""
    return (1.0, 0.0, -1.0, 0.0)[4 * k // n % 4] if 4 * k % n == 0 else math.cos(2 * math.pi * (k % n) / n)


@triton.constexpr_function
def _sine(k: int, n: int) -> float:
    """Return sin(2 pi k / n), exact at multiples of a quarter."""
    return (0.0, 1.0, 0.0, -1.0)[4 * k // n % 4] if 4 * k % n == 0 else math.sin(2 * math.pi * (k % n) / n)


@triton.jit
def _plus_product(total, x, FACTOR: tl.constexpr):
    """Return total + x * FACTOR. Factors of 0, 1 and -1 cost no product."""
    if FACTOR == 0.0:
        result = total
    elif FACTOR == 1.0:
        result = total + x
    elif FACTOR == -1.0:
        result = total - x
    else:
        result = total + x * FACTOR
    return result


@triton.jit
def _component(re, im, K: tl.constexpr, RADIX: tl.constexpr):
    """Return element K of the transform: the sum of x[t] exp(-2 pi i K t / RADIX) over t."""
    sum_re, sum_im = re[0], im[0]
    for t in tl.static_range(1, RADIX):
        sum_re = _plus_product(sum_re, re[t], _cosine(K * t, RADIX))
        sum_re = _plus_product(sum_re, im[t], _sine(K * t, RADIX))
        sum_im = _plus_product(sum_im, im[t], _cosine(K * t, RADIX))
        sum_im = _plus_product(sum_im, re[t], _sine(-K * t, RADIX))
    return sum_re, sum_im


@triton.jit
def append(values, x):
    """Return a tuple with one more tensor."""
    return values + (x,)


@triton.jit
def butterfly(re, im, RADIX: tl.constexpr):
    """Return the Fourier transform of RADIX complex elements, as (real parts, imaginary parts)."""
    first_re, first_im = _component(re, im, 0, RADIX)
    out_re, out_im = (first_re,), (first_im,)
    for k in tl.static_range(1, RADIX):
        next_re, next_im = _component(re, im, k, RADIX)
        out_re, out_im = append(out_re, next_re), append(out_im, next_im)
    return out_re, out_im


@triton.jit
def _pack_4(a, b, c, d):
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (a.shape[0], 4))


@triton.jit
def pack(x, RADIX: tl.constexpr):
    """Return the tensors of a tuple as one vector, the first tensor first, filled up to a power of 2 of tensors."""
    LANES: tl.constexpr = x[0].shape[0]
    if RADIX == 2:
        packed = tl.join(x[0], x[1])
    elif RADIX == 3:
        packed = _pack_4(x[0], x[1], x[2], x[2])
    elif RADIX == 4:
        packed = _pack_4(x[0], x[1], x[2], x[3])
    elif RADIX == 5:
        even, odd = _pack_4(x[0], x[2], x[4], x[4]), _pack_4(x[1], x[3], x[4], x[4])
        packed = tl.reshape(tl.join(even, odd), (LANES, 8))
    elif RADIX == 7:
        even, odd = _pack_4(x[0], x[2], x[4], x[6]), _pack_4(x[1], x[3], x[5], x[6])
        packed = tl.reshape(tl.join(even, odd), (LANES, 8))
    else:
        even, odd = _pack_4(x[0], x[2], x[4], x[6]), _pack_4(x[1], x[3], x[5], x[7])
        packed = tl.reshape(tl.join(even, odd), (LANES, 8))
    return tl.reshape(tl.trans(packed), (packed.shape[0] * packed.shape[1],))


@triton.jit
def _unpack_2(x):
    a, b = tl.split(x)
    return a, b


@triton.jit
def _unpack_4(x):
    even, odd = tl.split(tl.reshape(x, (x.shape[0], 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _unpack_8(x):
    even, odd = tl.split(tl.reshape(x, (x.shape[0], 4, 2)))
    a, c, e, g = _unpack_4(even)
    b, d, f, h = _unpack_4(odd)
    return a, b, c, d, e, f, g, h


@triton.jit
def unpack(packed, LANES: tl.constexpr, COUNT: tl.constexpr):
    """Return the COUNT vectors of LANES elements, a power of 2, that one vector consists of."""
    x = tl.trans(tl.reshape(packed, (COUNT, LANES)))
    if COUNT == 2:
        result = _unpack_2(x)
    elif COUNT == 4:
        result = _unpack_4(x)
    else:
        result = _unpack_8(x)
    return result
