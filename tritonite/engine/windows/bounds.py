"""Device functions: the positions of a window along one dimension, and the windows that cover a position.

All take the same numbers of `Windows`. A range is (begin, end), without the end. Operands of divisions are never
negative, because Triton rounds quotients towards zero.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def strided_window(window, size, count, kernel, step, dilation, pad):
    """Return the positions of a strided window, which may start and end in the padding."""
    begin = window * step - pad
    return begin, begin + (kernel - 1) * dilation + 1


@triton.jit
def windows_over(position, size, count, kernel, step, dilation, pad):
    """Return the strided windows that reach from before a position to behind it."""
    padded = position + pad
    first = tl.maximum(padded - (kernel - 1) * dilation + step - 1, 0) // step
    return first, tl.minimum(padded // step + 1, count)


@triton.jit
def _scaled(position, size, count):
    """Return the range of positions in `size` that one of `count` equal parts of a dimension touches."""
    return position * size // count, ((position + 1) * size + count - 1) // count


@triton.jit
def adaptive_window(window, size, count, kernel, step, dilation, pad):
    """Return the positions of an adaptive window: floor(window * size / count) up to the next window's, rounded up."""
    return _scaled(window, size, count)


@triton.jit
def adaptive_windows_over(position, size, count, kernel, step, dilation, pad):
    """Return the adaptive windows over a position, by the same formula with sizes and counts exchanged."""
    return _scaled(position, count, size)


@triton.jit
def adaptive_window_64(window, size, count, kernel, step, dilation, pad):
    """Return the positions of an adaptive window where products exceed 32 bits."""
    begin, end = _scaled(window.to(tl.int64), size, count)
    return begin.to(window.dtype), end.to(window.dtype)


@triton.jit
def adaptive_windows_over_64(position, size, count, kernel, step, dilation, pad):
    """Return the adaptive windows over a position where products exceed 32 bits."""
    begin, end = _scaled(position.to(tl.int64), count, size)
    return begin.to(position.dtype), end.to(position.dtype)


@triton.jit
def fractional_windows_over(position, size, count, kernel, step, dilation, pad):
    """Return the windows of `kernel` elements that may cover a position in fractional pooling.

    Window i of n starts less than 1 from i (size - kernel) / (n - 1), whatever the sample; `pad` is added for roundoff.
    """
    spare = tl.maximum(tl.full((), size - kernel, tl.int64), 1)
    steps = tl.full((), count - 1, tl.int64)
    first = tl.maximum(position - kernel - pad, 0) * steps // spare
    last = (position + 1 + pad) * steps // spare
    return first.to(position.dtype), tl.minimum(last + 1, count).to(position.dtype)


@triton.jit
def length(begin, end, size, pad, PADDED: tl.constexpr):
    """Return the elements of a range that are in the image, or with PADDED in the image and its padding."""
    if PADDED:
        result = tl.minimum(end, size + pad) - begin
    else:
        result = tl.minimum(end, size) - tl.maximum(begin, 0)
    return result
