"""Device functions: the positions of a window along one dimension, and the windows that cover a position.

Both take the numbers of `Windows` for the dimension, and a KIND of window. A range is (begin, end), without the end.
Operands of divisions are never negative, because Triton rounds quotients towards zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Kinds of windows. Products of adaptive windows need 64 bits in long dimensions.
STRIDED = tl.constexpr(0)
ADAPTIVE = tl.constexpr(1)
ADAPTIVE_64 = tl.constexpr(2)
FRACTIONAL = tl.constexpr(3)


@triton.jit
def _scaled(position, size, count, KIND: tl.constexpr):
    """Return the range of positions in `size` that one of `count` equal parts of a dimension touches."""
    wide = position.to(tl.int64) if KIND == ADAPTIVE_64 else position
    begin = wide * size // count
    end = ((wide + 1) * size + count - 1) // count
    return begin.to(position.dtype), end.to(position.dtype)


@triton.jit
def positions_of(window, size, count, kernel, step, dilation, pad, KIND: tl.constexpr):
    """Return the positions of a window. A strided one may start and end in the padding.

    Adaptive windows start at floor(window * size / count) and end where the next one starts, rounded up.
    """
    if KIND == STRIDED:
        begin = window * step - pad
        end = begin + (kernel - 1) * dilation + 1
    else:
        begin, end = _scaled(window, size, count, KIND)
    return begin, end


@triton.jit
def windows_over(position, size, count, kernel, step, dilation, pad, KIND: tl.constexpr):
    """Return the windows that cover a position: those that reach from before it, or from it, to behind it.

    Adaptive windows cover positions as positions are covered, with sizes and counts exchanged. Fractional window i of n
    starts less than 1 from i (size - kernel) / (n - 1) for any sample; `pad` is added for roundoff.
    """
    if KIND == STRIDED:
        padded = position + pad
        first = tl.maximum(padded - (kernel - 1) * dilation + step - 1, 0) // step
        end = tl.minimum(padded // step + 1, count)
    elif KIND == FRACTIONAL:
        spare = tl.maximum(tl.full((), size - kernel, tl.int64), 1)
        steps = tl.full((), count - 1, tl.int64)
        first = (tl.maximum(position - kernel - pad, 0) * steps // spare).to(position.dtype)
        end = tl.minimum((position + 1 + pad) * steps // spare + 1, count).to(position.dtype)
    else:
        first, end = _scaled(position, count, size, KIND)
    return first, end


@triton.jit
def length(begin, end, size, pad, PADDED: tl.constexpr):
    """Return the elements of a range that are in the image, or with PADDED in the image and its padding."""
    if PADDED:
        result = tl.minimum(end, size + pad) - begin
    else:
        result = tl.minimum(end, size) - tl.maximum(begin, 0)
    return result
