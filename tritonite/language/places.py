"""Where elements are, and reading an operand at places that a formula computes."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def strided_offset(linear, shape, strides):
    """Where element `linear` of a space is, fastest dimension first; `shape` leaves out the slowest."""
    offset = linear * 0
    rest = linear
    for d in tl.static_range(len(strides) - 1):
        offset += (rest % shape[d]) * strides[d]
        rest = rest // shape[d]
    return offset + rest * strides[len(strides) - 1]


@triton.jit
def aligned_to(x, ALIGNED: tl.constexpr):
    """x, a multiple of ALIGNED, so that Triton knows: by itself it knows of arguments whether 16 divides them."""
    return x // ALIGNED * ALIGNED if ALIGNED > 1 else x


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
