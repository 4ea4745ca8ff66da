"""Reading an operand at places that a formula computes."""

from __future__ import annotations

import triton
import triton.language as tl


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
