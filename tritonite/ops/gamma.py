"""The gamma function and its relatives: log-gamma, polygamma, zeta, incomplete gamma."""

import math

import torch
import triton
import triton.language as tl

from tritonite.dtypes import BOOL, FULL_FLOATS, INTS, Promotion
from tritonite.errors import Decline
from tritonite.language import libdevice
from tritonite.language.math import inverse, polynomial, true_divide
from tritonite.registry import pointwise

INT_TO_FLOAT = Promotion.INT_TO_FLOAT
FULL = FULL_FLOATS + INTS + BOOL


@pointwise("lgamma", promote=INT_TO_FLOAT)
def lgamma(self):
    return libdevice.lgamma(self)


@triton.jit
def psi(self):
    """Digamma as in Cephes' psi.c: recurrence up to 10, asymptotic series (DLMF 5.11.2), reflection below 0."""
    negative = self < 0
    fraction = self - libdevice.trunc(self)
    # float64, because float32 has no digits left next to a pole.
    wide = 3.141592653589793 * fraction.to(tl.float64)
    cotangent = (3.141592653589793 / libdevice.tan(wide)).to(self.dtype)
    x = tl.where(negative, 1.0 - self, self)
    shift = tl.zeros_like(x)
    for _ in range(10):
        small = x < 10
        shift = shift - tl.where(small, inverse(x), tl.zeros_like(x))
        x = tl.where(small, x + 1.0, x)
    z = inverse(x * x)
    series = z * polynomial(
        z,
        (
            8.33333333333333333333e-2,
            -2.10927960927960927961e-2,
            7.57575757575757575758e-3,
            -4.16666666666666666667e-3,
            3.96825396825396825397e-3,
            -8.33333333333333333333e-3,
            8.33333333333333333333e-2,
        ),
    )
    series = tl.where(x < 1e17, series, tl.zeros_like(x))
    result = libdevice.log(x) - true_divide(tl.full(x.shape, 0.5, x.dtype), x) - series + shift
    result = tl.where(negative, result - cotangent, result)
    pole = (fraction == 0) & negative
    result = tl.where(pole, tl.full(x.shape, float("nan"), x.dtype), result)
    at_zero = libdevice.copysign(tl.full(x.shape, float("inf"), x.dtype), -1.0 * self)
    result = tl.where(self == 0, at_zero, result)
    return tl.where(self == float("inf"), self, tl.where(self == float("-inf"), float("nan"), result))


@pointwise("digamma", promote=INT_TO_FLOAT)
def digamma(self):
    return psi(self)


# B(2k) / (2k)!, k = 1 to 12.
_BERNOULLI = tl.constexpr(
    (
        8.333333333333333e-2,
        -1.388888888888889e-3,
        3.306878306878307e-5,
        -8.267195767195768e-7,
        2.08767569878681e-8,
        -5.284190138687493e-10,
        1.3382536530684679e-11,
        -3.3896802963225829e-13,
        8.586062056277845e-15,
        -2.174868698558062e-16,
        5.5090028283602295e-18,
        -1.3954464685812523e-19,
    )
)


@triton.jit
def _zeta_right(x, q):
    """Hurwitz zeta function for x > 1 and q > 0 in float64, by Euler-Maclaurin summation (DLMF 25.11.10).

    Terms are added until there are ten and q + n exceeds 9. The integral of the rest and twelve corrections follow.
    The method and the results at the ends of the range are those of Cephes' zeta.c.
    """
    total = libdevice.pow(q, -1.0 * x)
    a = q
    term = total
    done = q != q
    for n in range(10):
        running = (done == 0) & ((n < 9) | (a <= 9.0))
        a = tl.where(running, a + 1.0, a)
        term = tl.where(running, libdevice.pow(a, -1.0 * x), term)
        total = tl.where(running, total + term, total)
        done = done | (running & (tl.abs(term) < tl.abs(total) * 1e-17))
    correction = term * true_divide(x, a)
    result = total + true_divide(term * a, x - 1.0) - 0.5 * term
    step = true_divide(tl.full(a.shape, 1.0, tl.float64), a * a)
    for i in tl.static_range(12):
        result = result + correction * _BERNOULLI[i]
        correction = correction * ((x + (2 * i + 1)) * (x + (2 * i + 2)) * step)
    # Above 2.4e13 the product of 23 factors x + k overflows in ATen, and the corrections become 0 * inf.
    result = tl.where((term == 0) & (x > 2.4e13), float("nan"), result)
    return tl.where(done, total, result)


@triton.jit
def _zeta(x, q):
    """Hurwitz zeta function, computed in float64 because terms next to poles cancel for negative q.

    The terms left of 0 are zeta(x, c - q) - zeta(x, 1 - q), with c the next integer above q. ATen adds them one by one,
    in |q| steps.
    """
    dtype: tl.constexpr = x.dtype
    x, q = tl.broadcast(x.to(tl.float64), q.to(tl.float64))
    below = libdevice.floor(q)
    whole = q == below
    outside = (q <= 0) & (whole | (x != libdevice.floor(x)))
    left = (q < 0) & (outside == 0) & (x > 1.0)
    result = _zeta_right(x, tl.where(left, q - below, q))
    if tl.max(left.to(tl.int32), axis=None) != 0:
        beyond = _zeta_right(x, tl.where(left, 1.0 - q, 1.0))
        mirrored = _zeta_right(x, tl.where(left, below + 1.0 - q, 1.0)) - tl.where(beyond == beyond, beyond, 0.0)
        odd = x - 2.0 * libdevice.floor(0.5 * x) == 1.0
        result = tl.where(left, result + tl.where(odd, -1.0 * mirrored, mirrored), result)
    result = tl.where(outside, tl.where(whole, float("inf"), float("nan")), result)
    result = tl.where(x < 1.0, float("nan"), result)
    result = tl.where(((x != x) & ((q > 0) | (whole == 0))) | (q != q), x + q, result)
    return tl.where(x == 1.0, float("inf"), result).to(dtype)


@pointwise("special_zeta", promote=INT_TO_FLOAT, accepts=FULL)
def special_zeta(self, other):
    return _zeta(self, other)


def _polygamma_arguments(n, self):
    if n < 0:
        raise Decline(f"order {n}; it has to be at least 0")
    sign = 1.0 if n % 2 else -1.0
    # n is compiled in: orders 0 and 1, and one kernel for all others.
    return self, n + 1, sign * math.factorial(n) if n < 171 else sign * float("inf"), min(n, 2)


@pointwise("polygamma", promote=INT_TO_FLOAT, prepare=_polygamma_arguments, static=("n",))
def polygamma(self, order, factor, n):
    """(-1)^(n+1) n! zeta(n + 1, x), DLMF 5.15.2; digamma and trigamma for orders 0 and 1."""
    if n == 0:
        result = psi(self)
    elif n == 1:
        result = _trigamma(self)
    else:
        result = factor * _zeta(order, self)
    return result


@triton.jit
def _trigamma(self):
    """Trigamma function: recurrence up to 6, ATen's terms of the series (DLMF 5.15.8), reflection below 1/2."""
    reflected = self < 0.5
    # Distance from the nearest integer: the sine is exact next to its zeros.
    sine = libdevice.sin(3.141592653589793 * (self - libdevice.nearbyint(self)))
    # At a pole ATen's sine is the roundoff of pi.
    sine = tl.where(sine == 0.0, libdevice.sin(3.141592653589793 * self), sine)
    one = tl.full(self.shape, 1.0, self.dtype)
    x = tl.where(reflected, 1.0 - self, self)
    total = tl.zeros_like(x)
    for _ in range(6):
        total = total + true_divide(one, x * x)
        x = x + 1.0
    z = true_divide(one, x * x)
    series = polynomial(z, (1.0 / 42, -1.0 / 30, 1.0 / 6))
    total = total + true_divide(1.0 + true_divide(one, 2.0 * x) + z * series, x)
    mirrored = true_divide(tl.full(x.shape, 9.869604401089358, x.dtype), sine * sine) - total
    return tl.where(reflected, mirrored, total)


def _mvlgamma_arguments(self, p):
    if p < 1 or p > 64 or self.dtype is torch.bool:
        raise Decline(f"p is {p} and the dtype {self.dtype}; p from 1 to 64 and no bool are served")
    return self, p, 0.25 * p * (p - 1) * math.log(math.pi)


@pointwise("mvlgamma", promote=INT_TO_FLOAT, prepare=_mvlgamma_arguments, static=("p",), contiguous=True)
def mvlgamma(self, p, constant):
    """Sum of lgamma(x - j / 2) for j < p, plus p (p - 1) / 4 log(pi): DLMF 35.3.4."""
    total = libdevice.lgamma(self)
    for j in range(1, p):
        total = total + libdevice.lgamma(self - 0.5 * j)
    return total + constant


@triton.jit
def _log1p_minus_x(x):
    """log1p(x) - x, without cancellation for small x."""
    square = x * x
    near = square * polynomial(
        x,
        (
            1.0 / 21,
            -1.0 / 20,
            1.0 / 19,
            -1.0 / 18,
            1.0 / 17,
            -1.0 / 16,
            1.0 / 15,
            -1.0 / 14,
            1.0 / 13,
            -1.0 / 12,
            1.0 / 11,
            -1.0 / 10,
            1.0 / 9,
            -1.0 / 8,
            1.0 / 7,
            -1.0 / 6,
            1.0 / 5,
            -1.0 / 4,
            1.0 / 3,
            -1.0 / 2,
        ),
    )
    return tl.where(tl.abs(x) < 0.2, near, libdevice.log1p(x) - x)


@triton.jit
def _prefactor(a, x):
    """x^a exp(-x) / gamma(a + 1), by Stirling's series (DLMF 5.11.1) for large a, where the factors overflow."""
    direct = libdevice.exp(a * libdevice.log(x) - x - libdevice.lgamma(a + 1.0))
    one = tl.full(a.shape, 1.0, a.dtype)
    r = true_divide(one, a)
    stirling = r * (1.0 / 12 - r * r * (1.0 / 360 - r * r * (1.0 / 1260 - r * r * (1.0 / 1680))))
    power = a * _log1p_minus_x(true_divide(x - a, a)) - stirling
    scaled = true_divide(libdevice.exp(power), libdevice.exp(0.5 * libdevice.log(6.283185307179586 * a)))
    return tl.where(a > 10, scaled, direct)


@triton.jit
def _lgamma_1p(a):
    """log(gamma(1 + a)) for a in [0, 2]; by DLMF 5.7.3 near 0, where 1 + a would round a away."""
    near = polynomial(
        a,
        (
            2.1207184805554666e-7,
            -4.492469198764566e-7,
            9.5514121304074198e-7,
            -2.0392157538013662e-6,
            4.3748667899074878e-6,
            -9.4394882752683959e-6,
            2.0507212775670692e-5,
            -4.4926236738133142e-5,
            9.9457512781808534e-5,
            -0.00022315475845357938,
            0.00050966952474304242,
            -0.001192753911703261,
            0.0028905103307415233,
            -0.0073855510286739853,
            0.020580808427784548,
            -0.067352301053198095,
            0.32246703342411322,
        ),
    )
    near = a * (a * near + 0.42278433509846714) - libdevice.log1p(a)
    return tl.where(a < 0.25, near, libdevice.lgamma(a + 1.0))


@triton.jit
def _upper_gamma_by_series(a, x, near, epsilon: tl.constexpr):
    """Q in the lanes `near`, of small a and x, where 1 - P would cancel: DLMF 8.7.3, as in Cephes' igam.c."""
    step = tl.where(near, -1.0 * x, tl.zeros_like(x))
    power = tl.full(a.shape, 1.0, a.dtype)
    term = power
    total = tl.zeros_like(a)
    n = 0
    while (n < 100) & (tl.max((tl.abs(term) > tl.abs(total) * (0.1 * epsilon)).to(tl.int32), axis=None) != 0):
        n += 1
        power = power * step * true_divide(tl.full((), 1.0, a.dtype), n.to(a.dtype))
        term = true_divide(power, a + n)
        total = total + term
    wide = a.to(tl.float64)
    first = -libdevice.expm1(wide * libdevice.log(x.to(tl.float64)) - _lgamma_1p(wide))
    # x^a / gamma(a) = a * x^a / gamma(1 + a), and x^a / gamma(1 + a) = 1 - first.
    return (first - wide * (1.0 - first) * total.to(tl.float64)).to(a.dtype)


@triton.jit
def _igamma_pair(a, x):
    """Return P and Q, the regularised incomplete gamma functions.

    For x < a + 1 by the power series (DLMF 8.7.1), above by Legendre's continued fraction (DLMF 8.9.2), as in Cephes'
    igam.c. For a > 10000 by the first terms of Temme's uniform expansion, "The asymptotic expansion of the incomplete
    gamma functions", SIAM J. Math. Anal. 10 (1979).
    """
    a, x = tl.broadcast(a, x)
    one = tl.full(a.shape, 1.0, a.dtype)
    huge = a > 10000.0
    valid = (a > 0) & (x > 0) & (x < float("inf")) & (a < float("inf")) & (huge == 0)
    safe_a = tl.where(valid, a, one)
    safe_x = tl.where(valid, x, one)
    lower = safe_x < safe_a + 1.0
    factor = _prefactor(safe_a.to(tl.float64), safe_x.to(tl.float64)).to(a.dtype)

    if a.dtype == tl.float64:
        epsilon: tl.constexpr = 2.3e-16
    else:
        epsilon: tl.constexpr = 1.2e-7

    # The power series. Other lanes have sx = 0 and converge at once.
    sx = tl.where(lower, safe_x, tl.zeros_like(a))
    term = one
    total = one
    denominator = safe_a
    n = 0
    while (n < 2000) & (tl.max((tl.abs(term) > tl.abs(total) * (0.1 * epsilon)).to(tl.int32), axis=None) != 0):
        denominator = denominator + 1.0
        term = term * true_divide(sx, denominator)
        total = total + term
        n += 1
    series = factor * total

    # The continued fraction by Lentz's method.
    cx = tl.where(lower, safe_a + 2.0, safe_x)
    b = cx + 1.0 - safe_a
    c = one * 1e30
    d = true_divide(one, b)
    h = d
    change = one * 2.0
    k = 0
    while (k < 2000) & (tl.max((tl.abs(change - 1.0) > epsilon).to(tl.int32), axis=None) != 0):
        k += 1
        coefficient = -1.0 * k * (k - safe_a)
        b = b + 2.0
        d = coefficient * d + b
        d = true_divide(one, tl.where(tl.abs(d) < 1e-30, one * 1e-30, d))
        c = b + true_divide(coefficient, c)
        c = tl.where(tl.abs(c) < 1e-30, one * 1e-30, c)
        # Converged lanes stop: thousands of factors next to 1 would drift.
        change = tl.where(tl.abs(change - 1.0) > epsilon, d * c, one)
        h = h * change
    fraction = factor * safe_a * h

    p = tl.where(lower, series, 1.0 - fraction)
    q = tl.where(lower, 1.0 - series, fraction)
    smallest = tl.where(safe_x <= 0.5, true_divide(-0.4 * one, libdevice.log(safe_x)), 1.1 * safe_x)
    near = valid & lower & (safe_x <= 2.0) & (safe_a <= smallest)
    if tl.max(near.to(tl.int32), axis=None) != 0:
        q = tl.where(near, _upper_gamma_by_series(safe_a, safe_x, near, epsilon), q)

    # Temme's expansion.
    ratio = tl.where(huge, true_divide(x - a, a), tl.zeros_like(a))
    half_square = -1.0 * _log1p_minus_x(ratio)
    eta = libdevice.copysign(libdevice.sqrt(2.0 * tl.maximum(half_square, 0.0)), ratio)
    c0 = polynomial(eta, (1.0 / 864, -2.0 / 135, 1.0 / 12, -1.0 / 3))
    c1 = polynomial(eta, (1.0 / 378, -1.0 / 288, -1.0 / 540))
    correction = (c0 + true_divide(c1, a)) * libdevice.exp(-1.0 * a * half_square)
    correction = true_divide(correction, libdevice.sqrt(6.283185307179586 * tl.where(huge, a, one)))
    spread = eta * libdevice.sqrt(0.5 * tl.where(huge, a, one))
    correction = tl.where(a * half_square > 700.0, tl.zeros_like(a), correction)
    p = tl.where(huge, 0.5 * libdevice.erfc(-1.0 * spread) - correction, p)
    q = tl.where(huge, 0.5 * libdevice.erfc(spread) + correction, q)

    zero = tl.zeros_like(a)
    nan = one * float("nan")
    p = tl.where(x == 0, zero, p)
    q = tl.where(x == 0, one, q)
    p = tl.where((a == 0) & (x > 0), one, p)
    q = tl.where((a == 0) & (x > 0), zero, q)
    p = tl.where((a == float("inf")) & (x != 0), zero, p)
    q = tl.where((a == float("inf")) & (x != 0), one, q)
    p = tl.where((x == float("inf")) & (a != float("inf")), one, p)
    q = tl.where((x == float("inf")) & (a != float("inf")), zero, q)
    # ATen tests for infinities and zeros before nan.
    bad = (x < 0) | (a < 0) | ((x != x) & (a != float("inf"))) | ((a == 0) & (x == 0))
    bad = bad | ((a != a) & (x != float("inf")) & (x != 0))
    bad = bad | ((a == float("inf")) & (x == float("inf")))
    return tl.where(bad, nan, p), tl.where(bad, nan, q)


@pointwise("igamma", accepts=FULL_FLOATS)
def igamma(self, other):
    p, _ = _igamma_pair(self, other)
    return p


@pointwise("igammac", accepts=FULL_FLOATS)
def igammac(self, other):
    _, q = _igamma_pair(self, other)
    return q
