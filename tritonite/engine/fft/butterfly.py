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
    """Return cos(2 pi k / n)."""
    return math.cos(2 * math.pi * (k % n) / n)


@triton.constexpr_function
def _sine(k: int, n: int) -> float:
    """Return sin(2 pi k / n)."""
    return math.sin(2 * math.pi * (k % n) / n)


@triton.jit
def append(values, x):
    """Return a tuple with one more tensor."""
    return values + (x,)


@triton.jit
def _prepend(values, x):
    """Return a tuple with one more tensor in front."""
    return (x,) + values


@triton.jit
def _butterfly_4(a_re, a_im, b_re, b_im, c_re, c_im, d_re, d_im):
    """Return the transform of four elements as (real parts, imaginary parts)."""
    even_re, even_im, turned_re, turned_im = a_re + c_re, a_im + c_im, a_re - c_re, a_im - c_im
    odd_re, odd_im, other_re, other_im = b_re + d_re, b_im + d_im, b_re - d_re, b_im - d_im
    re = even_re + odd_re, turned_re + other_im, even_re - odd_re, turned_re - other_im
    im = even_im + odd_im, turned_im - other_re, even_im - odd_im, turned_im + other_re
    return re, im


@triton.jit
def _butterfly_8(re, im):
    """Return the transform of eight elements, from those of the even and of the odd elements."""
    e_re, e_im = _butterfly_4(re[0], im[0], re[2], im[2], re[4], im[4], re[6], im[6])
    o_re, o_im = _butterfly_4(re[1], im[1], re[3], im[3], re[5], im[5], re[7], im[7])
    # The odd elements' results 1 and 3 times exp(-pi i / 4) and exp(-3 pi i / 4).
    turned_re, turned_im = (o_re[1] + o_im[1]) * _cosine(1, 8), (o_im[1] - o_re[1]) * _cosine(1, 8)
    other_re, other_im = (o_im[3] - o_re[3]) * _cosine(1, 8), (o_re[3] + o_im[3]) * _cosine(1, 8)
    low_re = e_re[0] + o_re[0], e_re[1] + turned_re, e_re[2] + o_im[2], e_re[3] + other_re
    low_im = e_im[0] + o_im[0], e_im[1] + turned_im, e_im[2] - o_re[2], e_im[3] - other_im
    high_re = e_re[0] - o_re[0], e_re[1] - turned_re, e_re[2] - o_im[2], e_re[3] - other_re
    high_im = e_im[0] - o_im[0], e_im[1] - turned_im, e_im[2] + o_re[2], e_im[3] + other_im
    return low_re + high_re, low_im + high_im


@triton.jit
def _combination(sums_re, sums_im, differences_re, differences_im, first_re, first_im, K: tl.constexpr):
    """Return (re, im) of the part that results K and RADIX - K share, and of the part that the second one subtracts."""
    RADIX: tl.constexpr = 2 * len(sums_re) + 1
    even_re, even_im = first_re + sums_re[0] * _cosine(K, RADIX), first_im + sums_im[0] * _cosine(K, RADIX)
    # -i times a sine and a difference.
    odd_re, odd_im = differences_im[0] * _sine(K, RADIX), differences_re[0] * -_sine(K, RADIX)
    for t in tl.static_range(1, len(sums_re)):
        even_re += sums_re[t] * _cosine(K * (t + 1), RADIX)
        even_im += sums_im[t] * _cosine(K * (t + 1), RADIX)
        odd_re += differences_im[t] * _sine(K * (t + 1), RADIX)
        odd_im += differences_re[t] * _sine(-K * (t + 1), RADIX)
    return even_re, even_im, odd_re, odd_im


@triton.jit
def _butterfly_odd(re, im, RADIX: tl.constexpr):
    """Return the transform of an odd number of elements, from the sums and differences of elements t and RADIX - t."""
    HALF: tl.constexpr = RADIX // 2
    sums_re, sums_im = (re[1] + re[RADIX - 1],), (im[1] + im[RADIX - 1],)
    differences_re, differences_im = (re[1] - re[RADIX - 1],), (im[1] - im[RADIX - 1],)
    for t in tl.static_range(2, HALF + 1):
        sums_re, sums_im = append(sums_re, re[t] + re[RADIX - t]), append(sums_im, im[t] + im[RADIX - t])
        differences_re = append(differences_re, re[t] - re[RADIX - t])
        differences_im = append(differences_im, im[t] - im[RADIX - t])
    first_re, first_im = re[0] + sums_re[0], im[0] + sums_im[0]
    for t in tl.static_range(1, HALF):
        first_re, first_im = first_re + sums_re[t], first_im + sums_im[t]
    even_re, even_im, odd_re, odd_im = _combination(sums_re, sums_im, differences_re, differences_im, re[0], im[0], 1)
    low_re, low_im = (first_re, even_re + odd_re), (first_im, even_im + odd_im)
    high_re, high_im = (even_re - odd_re,), (even_im - odd_im,)
    for k in tl.static_range(2, HALF + 1):
        even_re, even_im, odd_re, odd_im = _combination(
            sums_re, sums_im, differences_re, differences_im, re[0], im[0], k
        )
        low_re, low_im = append(low_re, even_re + odd_re), append(low_im, even_im + odd_im)
        high_re, high_im = _prepend(high_re, even_re - odd_re), _prepend(high_im, even_im - odd_im)
    return low_re + high_re, low_im + high_im


@triton.jit
def butterfly(re, im, RADIX: tl.constexpr):
    """Return the Fourier transform of RADIX complex elements, as (real parts, imaginary parts).

    Results share sums and differences. Triton visits all operations once for every other one and every load, so that
    compile time grows with the square of their number.
    """
    if RADIX == 1:
        out_re, out_im = re, im
    elif RADIX == 2:
        out_re, out_im = (re[0] + re[1], re[0] - re[1]), (im[0] + im[1], im[0] - im[1])
    elif RADIX == 4:
        out_re, out_im = _butterfly_4(re[0], im[0], re[1], im[1], re[2], im[2], re[3], im[3])
    elif RADIX == 8:
        out_re, out_im = _butterfly_8(re, im)
    else:
        out_re, out_im = _butterfly_odd(re, im, RADIX)
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
def _split_in_two(x):
    """Return the first and the second half of a vector."""
    first, second = tl.split(tl.trans(tl.reshape(x, (2, x.shape[0] // 2))))
    return first, second


@triton.jit
def unpack(packed, COUNT: tl.constexpr):
    """Return the COUNT vectors, a power of 2, that one vector consists of.

    Splitting in two again and again leaves elements in their threads. Vectors taken from a matrix of COUNT columns
    would be exchanged between threads, because Triton distributes such columns over threads, too.
    """
    first, second = _split_in_two(packed)
    if COUNT == 2:
        result = first, second
    else:
        result = unpack(first, COUNT // 2) + unpack(second, COUNT // 2)
    return result
