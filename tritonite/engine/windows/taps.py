"""Device functions for loops over the elements of windows, which are called taps."""

from __future__ import annotations

import math

import triton
import triton.language as tl


@triton.constexpr_function
def count_of(unrolled):
    """Return the number of taps of an unrolled loop."""
    return math.prod(unrolled)


@triton.constexpr_function
def _static_tap(unrolled, n, d):
    return n // math.prod(unrolled[d + 1 :]) % unrolled[d]


@triton.jit
def unrolled_tap(UNROLLED: tl.constexpr, n: tl.constexpr):
    """Return the coordinates of the n-th of UNROLLED taps, a compile-time tuple, in row-major order."""
    tap = ()
    for d in tl.static_range(len(UNROLLED)):
        tap = tap + (_static_tap(UNROLLED, n, d),)
    return tap


@triton.jit
def tap_of(n, taps):
    """Return the coordinates of the n-th of `taps`, in row-major order."""
    tap, rest = (), n
    for d in tl.static_range(len(taps)):
        inner = product(taps, d + 1)
        tap = tap + (rest // inner,)
        rest = rest % inner
    return tap


@triton.jit
def product(sizes, FIRST: tl.constexpr):
    """Return the product of the sizes from dimension FIRST on."""
    result = 1
    for d in tl.static_range(FIRST, len(sizes)):
        result = result * sizes[d]
    return result


@triton.jit
def row_major(at, sizes):
    """Return the index of an element among those of a row-major image."""
    index = at[0]
    for d in tl.static_range(1, len(sizes)):
        index = index * sizes[d] + at[d]
    return index


@triton.jit
def zeros_for(operand):
    """Return zeros in the dtype that sums of a gathered operand are accumulated in: float32, or its own float64."""
    element: tl.constexpr = operand[0].dtype.element_ty
    return tl.zeros(operand[0].shape, tl.float64 if element == tl.float64 else tl.float32)
