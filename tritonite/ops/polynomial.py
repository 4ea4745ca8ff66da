"""Orthogonal polynomials of degree n, rounded towards zero, at x; 0 for a negative degree.

Recurrences and values are those of DLMF 18.5 and 18.9. Where ATen prefers a closed form to the recurrence, so do these.
"""

import functools

import triton
import triton.language as tl

from tritonite.dtypes import BOOL, FULL_FLOATS, INTS, Promotion
from tritonite.language import libdevice
from tritonite.language.math import true_divide
from tritonite.registry import pointwise

_polynomial = functools.partial(pointwise, promote=Promotion.INT_TO_FLOAT, accepts=FULL_FLOATS + INTS + BOOL)

# Beyond this degree a recurrence would run for a second or more, and float32 cannot count its steps.
_MOST_STEPS = tl.constexpr(2**24)


@triton.jit
def _recurrence(step: tl.constexpr, x, degree, first, known, value, limit: tl.constexpr):
    """Term `degree` of the sequence 1, first, ..., in which step(x, q, p, k) follows p and the k-th term q.

    Where `known` holds the result is `value` and costs no steps; beyond the degree `limit` it is nan.
    """
    known = known | (degree < 0)
    value = tl.where(degree < 0, 0.0, value)
    beyond = degree > limit
    degree = tl.where(known | beyond, 0, degree).to(tl.int32)
    p = tl.full(degree.shape, 1.0, x.dtype)
    q = tl.broadcast_to(first, degree.shape)
    result = tl.where(degree == 0, p, q)
    for k in range(1, tl.max(degree, axis=None)):
        r = step(x, q, p, k)
        p = q
        q = r
        result = tl.where(degree == k + 1, q, result)
    return tl.where(known, value, tl.where(beyond, float("nan"), result))


@triton.jit
def _parity(degree):
    """1 for an even degree, -1 for an odd one."""
    return 1 - 2 * (degree & 1)


# In these steps a fused multiply-add lets terms near the largest number cancel before they overflow, as in ATen.


@triton.jit
def _chebyshev_step(x, q, p, k):
    return libdevice.fma(x + x, q, -1.0 * p)


@triton.jit
def _chebyshev(x, exact, degree, first, trigonometric: tl.constexpr, at_ends, threshold: tl.constexpr):
    """A Chebyshev polynomial: trigonometric(degree, angle, value at the end next to it) inside (-1, 1) beyond the
    degree `threshold`, and `at_ends` at -1 and 1.

    The former is of float64, and of `exact`, x before it is rounded: an angle's roundoff is multiplied by the degree,
    and all of it shows next to a zero.
    """
    known = tl.abs(x) == 1.0
    value = tl.broadcast_to(at_ends, degree.shape)
    inside = (degree > threshold) & (tl.abs(x) < 1.0)
    # As many instructions as a hundred steps of the recurrence, for blocks that need them.
    if tl.max(inside.to(tl.int32), axis=None) > 0:
        angle = libdevice.acos(exact)
        value = tl.where(known, value, trigonometric(degree.to(tl.float64), angle, value).to(x.dtype))
    return _recurrence(_chebyshev_step, x, degree, first, inside | known, value, _MOST_STEPS)


@triton.jit
def _inside_t(degree, angle, at_end):
    return libdevice.cos(degree * angle)


@triton.jit
def _inside_u(degree, angle, at_end):
    return true_divide(libdevice.sin((degree + 1.0) * angle), libdevice.sin(angle))


@triton.jit
def _inside_v(degree, angle, at_end):
    value = true_divide(libdevice.cos((degree + 0.5) * angle), libdevice.cos(0.5 * angle))
    # Next to -1 the quotient is of roundoff alone.
    return tl.where(libdevice.sin(0.5 * angle) == 1.0, at_end, value)


@triton.jit
def _inside_w(degree, angle, at_end):
    return true_divide(libdevice.sin((degree + 0.5) * angle), libdevice.sin(0.5 * angle))


@triton.jit
def _argument(x, n, shifted: tl.constexpr):
    """x, or 2 * x - 1, in its dtype and in float64, and the degree."""
    x, n = tl.broadcast(x, n)
    exact = x.to(tl.float64)
    if shifted:
        exact = exact + exact - 1.0
        x = x + x - 1.0
    return x, exact, n


@triton.jit
def _chebyshev_t(x, n, shifted: tl.constexpr, threshold: tl.constexpr):
    x, exact, n = _argument(x, n, shifted)
    degree = n.to(tl.int64)
    at_ends = tl.where(x > 0.0, 1, _parity(degree)).to(x.dtype)
    return _chebyshev(x, exact, degree, x, _inside_t, at_ends, threshold)


@triton.jit
def _chebyshev_u(x, n, shifted: tl.constexpr, threshold: tl.constexpr):
    x, exact, n = _argument(x, n, shifted)
    degree = n.to(tl.int64)
    at_ends = (tl.where(x > 0.0, 1, _parity(degree)) * (degree + 1)).to(x.dtype)
    return _chebyshev(x, exact, degree, x + x, _inside_u, at_ends, threshold)


@triton.jit
def _chebyshev_v(x, n, shifted: tl.constexpr, threshold: tl.constexpr):
    x, exact, n = _argument(x, n, shifted)
    degree = n.to(tl.int64)
    at_ends = tl.where(x > 0.0, 1, _parity(degree) * (2 * degree + 1)).to(x.dtype)
    return _chebyshev(x, exact, degree, x + x - 1.0, _inside_v, at_ends, threshold)


@triton.jit
def _chebyshev_w(x, n, shifted: tl.constexpr, threshold: tl.constexpr):
    x, exact, n = _argument(x, n, shifted)
    degree = n.to(tl.int64)
    at_ends = tl.where(x > 0.0, 2 * degree + 1, _parity(degree)).to(x.dtype)
    return _chebyshev(x, exact, degree, x + x + 1.0, _inside_w, at_ends, threshold)


@_polynomial("special_chebyshev_polynomial_t")
def special_chebyshev_polynomial_t(x, n):
    return _chebyshev_t(x, n, False, 6)


@_polynomial("special_chebyshev_polynomial_u")
def special_chebyshev_polynomial_u(x, n):
    return _chebyshev_u(x, n, False, 8)


@_polynomial("special_chebyshev_polynomial_v")
def special_chebyshev_polynomial_v(x, n):
    return _chebyshev_v(x, n, False, 8)


@_polynomial("special_chebyshev_polynomial_w")
def special_chebyshev_polynomial_w(x, n):
    return _chebyshev_w(x, n, False, 8)


@_polynomial("special_shifted_chebyshev_polynomial_t")
def special_shifted_chebyshev_polynomial_t(x, n):
    return _chebyshev_t(x, n, True, 6)


@_polynomial("special_shifted_chebyshev_polynomial_u")
def special_shifted_chebyshev_polynomial_u(x, n):
    return _chebyshev_u(x, n, True, 6)


@_polynomial("special_shifted_chebyshev_polynomial_v")
def special_shifted_chebyshev_polynomial_v(x, n):
    return _chebyshev_v(x, n, True, 6)


@_polynomial("special_shifted_chebyshev_polynomial_w")
def special_shifted_chebyshev_polynomial_w(x, n):
    return _chebyshev_w(x, n, True, 4)


@triton.constexpr_function
def _hermite_limit(dtype):
    # The degrees from which ATen gives nan.
    return 512 if dtype == tl.float64 else 128


@triton.jit
def _hermite(step: tl.constexpr, x, degree, first):
    return _recurrence(step, x, degree, first, degree < 0, tl.zeros_like(x), _hermite_limit(x.dtype))


@triton.jit
def _hermite_h_step(x, q, p, k):
    return libdevice.fma(x + x, q, -(k + k) * p)


@triton.jit
def _hermite_he_step(x, q, p, k):
    return libdevice.fma(x, q, -k * p)


@_polynomial("special_hermite_polynomial_h")
def special_hermite_polynomial_h(x, n):
    x, n = tl.broadcast(x, n)
    return _hermite(_hermite_h_step, x, n.to(tl.int64), x + x)


@_polynomial("special_hermite_polynomial_he")
def special_hermite_polynomial_he(x, n):
    x, n = tl.broadcast(x, n)
    return _hermite(_hermite_he_step, x, n.to(tl.int64), x)


@triton.jit
def _laguerre_step(x, q, p, k):
    return true_divide(libdevice.fma(k + k + (1.0 - x), q, -k * p), tl.zeros_like(x) + (k + 1))


@_polynomial("special_laguerre_polynomial_l")
def special_laguerre_polynomial_l(x, n):
    x, n = tl.broadcast(x, n)
    one = tl.full(x.shape, 1.0, x.dtype)
    return _recurrence(_laguerre_step, x, n.to(tl.int64), 1.0 - x, x == 0.0, one, _MOST_STEPS)


@triton.jit
def _legendre_step(x, q, p, k):
    return true_divide(libdevice.fma((k + k + 1) * x, q, -k * p), tl.zeros_like(x) + (k + 1))


@_polynomial("special_legendre_polynomial_p")
def special_legendre_polynomial_p(x, n):
    x, n = tl.broadcast(x, n)
    degree = n.to(tl.int64)
    at_ends = tl.where(x > 0.0, 1, _parity(degree)).to(x.dtype)
    return _recurrence(_legendre_step, x, degree, x, tl.abs(x) == 1.0, at_ends, _MOST_STEPS)
