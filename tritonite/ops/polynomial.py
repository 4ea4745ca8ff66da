"""Orthogonal polynomials of degree n at x. n is truncated to an integer; a negative degree gives 0.

Recurrences and special values are from DLMF 18.5 and 18.9. A closed form replaces the recurrence where ATen uses one.
"""

import functools

import triton
import triton.language as tl

from tritonite.dtypes import BOOL, FULL_FLOATS, INTS, Promotion
from tritonite.language import libdevice
from tritonite.language.math import true_divide
from tritonite.registry import pointwise

_polynomial = functools.partial(pointwise, promote=Promotion.INT_TO_FLOAT, accepts=FULL_FLOATS + INTS + BOOL)

# Highest degree that is computed. A longer recurrence would take seconds, and float32 could not count its steps.
_MAX_STEPS = tl.constexpr(2**24)


@triton.jit
def _recurrence(step: tl.constexpr, x, degree, first, known, value, limit: tl.constexpr):
    """Return term `degree` of the sequence 1, first, ...; step(x, q, p, k) follows q, the k-th term, and p before it.

    Lanes where `known` is set return `value` and take no steps. A degree above `limit` gives nan.
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


# The steps below use fused multiply-adds, as ATen does: huge terms cancel before they overflow.


@triton.jit
def _chebyshev_step(x, q, p, k):
    return libdevice.fma(x + x, q, -1.0 * p)


@triton.jit
def _chebyshev(x, exact, degree, first, trigonometric: tl.constexpr, at_ends, threshold: tl.constexpr):
    """Chebyshev polynomial: `at_ends` at -1 and 1; inside and above the degree `threshold` the closed form.

    The closed form is trigonometric(degree, angle, value at the nearer end). The angle is a float64, of x before it is
    rounded: its roundoff is multiplied by the degree, which matters next to a zero of the polynomial.
    """
    known = tl.abs(x) == 1.0
    value = tl.broadcast_to(at_ends, degree.shape)
    inside = (degree > threshold) & (tl.abs(x) < 1.0)
    # Skipped by blocks without such a lane: the closed form costs as much as a hundred steps.
    if tl.max(inside.to(tl.int32), axis=None) > 0:
        angle = libdevice.acos(exact)
        value = tl.where(known, value, trigonometric(degree.to(tl.float64), angle, value).to(x.dtype))
    return _recurrence(_chebyshev_step, x, degree, first, inside | known, value, _MAX_STEPS)


@triton.jit
def _inside_t(degree, angle, at_end):
    return libdevice.cos(degree * angle)


@triton.jit
def _inside_u(degree, angle, at_end):
    return true_divide(libdevice.sin((degree + 1.0) * angle), libdevice.sin(angle))


@triton.jit
def _inside_v(degree, angle, at_end):
    value = true_divide(libdevice.cos((degree + 0.5) * angle), libdevice.cos(0.5 * angle))
    # The quotient is all roundoff next to -1.
    return tl.where(libdevice.sin(0.5 * angle) == 1.0, at_end, value)


@triton.jit
def _inside_w(degree, angle, at_end):
    return true_divide(libdevice.sin((degree + 0.5) * angle), libdevice.sin(0.5 * angle))


@triton.jit
def _argument(x, n, shifted: tl.constexpr):
    """Return x (2 * x - 1 if shifted) in its dtype and in float64, and the degree."""
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
    # ATen returns nan above these degrees.
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
    return _recurrence(_laguerre_step, x, n.to(tl.int64), 1.0 - x, x == 0.0, one, _MAX_STEPS)


@triton.jit
def _legendre_step(x, q, p, k):
    return true_divide(libdevice.fma((k + k + 1) * x, q, -k * p), tl.zeros_like(x) + (k + 1))


@_polynomial("special_legendre_polynomial_p")
def special_legendre_polynomial_p(x, n):
    x, n = tl.broadcast(x, n)
    degree = n.to(tl.int64)
    at_ends = tl.where(x > 0.0, 1, _parity(degree)).to(x.dtype)
    return _recurrence(_legendre_step, x, degree, x, tl.abs(x) == 1.0, at_ends, _MAX_STEPS)
