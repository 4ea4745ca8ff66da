"""Index arithmetic: fast quotients, offsets of strided layouts, and loads at computed indices."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def aligned_to(x, ALIGNED: tl.constexpr):
    """Return x, which the caller promises is a multiple of ALIGNED, in a form that Triton's alignment analysis sees.

    Triton itself only knows which kernel arguments are multiples of 16.
    """
    return x // ALIGNED * ALIGNED if ALIGNED > 1 else x


@triton.jit
def divide_by_inverse(dividend, factor, shift):
    """Return dividend // divisor, given the divisor's `factor` and `shift` from `pointwise.blocks.inverse`.

    All operands are uint32; the dividend is below 2**31.
    """
    return (tl.umulhi(dividend, factor) + dividend) >> shift


@triton.jit
def quotient(x, divisor):
    """Return x // divisor for x >= 0 and divisor > 1; for int32 by multiplication (Granlund and Montgomery 1994).

    Only two instructions depend on x. Unlike `divide_by_inverse` this function excludes a divisor of 1, whose extra
    addition would keep the dividend in a pair of registers.
    """
    if x.dtype == tl.int32:
        shift = ((divisor - 1).to(tl.float64).to(tl.int64, bitcast=True) >> 52) - 1023
        factor = (tl.full((), 1, tl.uint64) << (shift + 32).to(tl.uint64)) // divisor.to(tl.uint64) + 1
        result = (tl.umulhi(x.to(tl.uint32), factor.to(tl.uint32)) >> shift.to(tl.uint32)).to(tl.int32)
    else:
        result = x // divisor
    return result


@triton.jit
def strided_offset(linear, shape, strides, ALIGNED: tl.constexpr = 1, REPEATED: tl.constexpr = False):
    """Return the element offset of linear index `linear`, given sizes and strides with the fastest dimension first.

    Args:
        linear: linear indices into the iteration space.
        shape: sizes of all dimensions but the slowest. Without one, `strides` has a single element.
        strides: an element stride for each dimension.
        ALIGNED: a divisor of the fastest dimension's size and of the other dimensions' strides; 0 for scalar accesses.
        REPEATED: the operand is broadcast along the fastest dimension; ALIGNED says nothing about its strides.
    """
    STRIDE_ALIGNED: tl.constexpr = 1 if REPEATED else ALIGNED
    offset = linear * 0
    rest = linear
    last: tl.constexpr = len(strides) - 1
    if ALIGNED == 0:
        # Scalar accesses need no alignment hints. Without remainders only quotients stay in registers: each adds its
        # stride minus what the faster dimension has counted too much.
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
                offset += rest % size * aligned_to(strides[d], 1 if d == 0 else STRIDE_ALIGNED)
            rest = following
        offset += rest * aligned_to(strides[last], 1 if last == 0 else STRIDE_ALIGNED)
    return offset


@triton.jit
def read_at(operand, indices, inside, other):
    """Load elements of a gathered operand at `indices`, a tuple with an index for each gathered dimension.

    Where `inside` is false nothing is loaded and the result is `other`. `inside` has to be false where an index is out
    of bounds.
    """
    pointers, within, strides = operand
    offset = indices[0] * strides[0]
    for d in tl.static_range(1, len(strides)):
        offset += indices[d] * strides[d]
    return tl.load(pointers + offset, mask=within & inside, other=other)
