"""Where elements are, and reading an operand at places that a formula computes."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def aligned_to(x, ALIGNED: tl.constexpr):
    """x, a multiple of ALIGNED, so that Triton knows: by itself it knows of arguments whether 16 divides them."""
    return x // ALIGNED * ALIGNED if ALIGNED > 1 else x


@triton.jit
def by_inverse(dividend, factor, shift):
    """A quotient of what is below 2**31, by what `pointwise.blocks.inverse` made of a divisor. All are uint32."""
    return (tl.umulhi(dividend, factor) + dividend) >> shift


@triton.jit
def quotient(x, divisor):
    """x // divisor, which is above 1, of what is not negative: of 32 bits by a product, Granlund and Montgomery 1994.

    What depends on the divisor alone is computed once, and the rest takes two instructions an element. Nothing is added
    to the product, as `by_inverse` does for a divisor of 1: the dividend would stand in a pair of registers for that.
    """
    if x.dtype == tl.int32:
        shift = ((divisor - 1).to(tl.float64).to(tl.int64, bitcast=True) >> 52) - 1023
        factor = (tl.full((), 1, tl.uint64) << (shift + 32).to(tl.uint64)) // divisor.to(tl.uint64) + 1
        found = (tl.umulhi(x.to(tl.uint32), factor.to(tl.uint32)) >> shift.to(tl.uint32)).to(tl.int32)
    else:
        found = x // divisor
    return found


@triton.jit
def strided_offset(linear, shape, strides, ALIGNED: tl.constexpr = 1, REPEATED: tl.constexpr = False):
    """Where element `linear` of a space is, fastest dimension first; `shape` leaves out the slowest.

    An operand that one stride serves needs no more of them. ALIGNED divides the size of the fastest dimension and the
    strides of the others, where there are others. An operand that is REPEATED is the same all along the fastest, and
    its strides are as they are.
    """
    WORD: tl.constexpr = 1 if REPEATED else ALIGNED
    offset = linear * 0
    rest = linear
    last: tl.constexpr = len(strides) - 1
    if ALIGNED == 0:
        # What is not in vectors needs no hints. So quotients are all that is kept, by what a step of each adds.
        if not REPEATED:
            offset += rest * strides[0]
        for d in tl.static_range(last):
            rest = quotient(rest, shape[d])
            step = strides[d + 1]
            if d > 0 or not REPEATED:
                step -= tl.full((), shape[d], rest.dtype) * strides[d]
            offset += rest * step
    else:
        for d in tl.static_range(last):
            size = aligned_to(shape[d], ALIGNED if d == 0 else 1)
            following = rest // size
            if d > 0 or not REPEATED:
                offset += rest % size * aligned_to(strides[d], 1 if d == 0 else WORD)
            rest = following
        offset += rest * aligned_to(strides[last], 1 if last == 0 else WORD)
    return offset


@triton.jit
def read_at(operand, places, inside, other):
    """The elements of a placed operand at `places`, a coordinate for each dimension that it is placed in.

    Where `inside` is false nothing is read and `other` is given. It has to be false where a place is out of bounds.
    """
    pointers, within, strides = operand
    offset = places[0] * strides[0]
    for d in tl.static_range(1, len(strides)):
        offset += places[d] * strides[d]
    return tl.load(pointers + offset, mask=within & inside, other=other)
