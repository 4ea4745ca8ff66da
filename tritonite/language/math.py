"""Device functions that several formulas share."""

import triton
import triton.language as tl

from tritonite.language import libdevice


@triton.jit
def true_divide(x, y):
    """x / y, correctly rounded; Triton's own division of float32 is an approximation."""
    if x.dtype == tl.float32:
        x, y = tl.broadcast(x, y)
        quotient = tl.div_rn(x, y)
    else:
        quotient = x / y
    return quotient


@triton.jit
def square_root(x):
    """The square root, correctly rounded; Triton's own of float32 is an approximation."""
    if x.dtype == tl.float32:
        root = tl.sqrt_rn(x)
    else:
        root = libdevice.sqrt(x)
    return root


@triton.jit
def polynomial(x, coefficients: tl.constexpr):
    """The polynomial with these coefficients, highest power first, at x."""
    result = tl.zeros_like(x) + coefficients[0]
    for i in tl.static_range(1, len(coefficients)):
        result = result * x + coefficients[i]
    return result


@triton.jit
def chebyshev_series(x, coefficients: tl.constexpr):
    """The Chebyshev series sum' c_k T_k(x / 2), x in [-2, 2], by Clenshaw's recurrence; coefficients highest first.

    As in Cephes, the term of order 0 counts half.
    """
    last = tl.zeros_like(x)
    before = last
    result = last + coefficients[0]
    for i in tl.static_range(1, len(coefficients)):
        before = last
        last = result
        result = x * last - before + coefficients[i]
    return 0.5 * (result - before)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), which neither overflows nor loses its tail for negative x."""
    return true_divide(tl.full(x.shape, 1.0, x.dtype), 1.0 + libdevice.exp(-x))


@triton.jit
def maximum_nan(x, y):
    """The larger of two, nan where either is."""
    x, y = tl.broadcast(x, y)
    if x.dtype == tl.int1:
        result = x | y
    elif x.dtype.is_floating():
        result = tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)
    else:
        result = tl.maximum(x, y)
    return result


@triton.jit
def minimum_nan(x, y):
    """The smaller of two, nan where either is."""
    x, y = tl.broadcast(x, y)
    if x.dtype == tl.int1:
        result = x & y
    elif x.dtype.is_floating():
        result = tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)
    else:
        result = tl.minimum(x, y)
    return result


@triton.jit
def multiply_add(x, y, z):
    """x * y + z; for floats rounded once."""
    if x.dtype.is_floating():
        x, y = tl.broadcast(x, y)
        x, z = tl.broadcast(x, z)
        y, z = tl.broadcast(y, z)
        result = libdevice.fma(x, y, z)
    else:
        result = x * y + z
    return result
