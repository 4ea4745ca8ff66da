"""Entropy, and functions of the normal distribution."""

import triton
import triton.language as tl

from tritonite.dtypes import BOOL, FULL_FLOATS, INTS, Promotion
from tritonite.language import libdevice
from tritonite.language.math import by_range, inverse, rational, square_root
from tritonite.registry import pointwise

INT_TO_FLOAT = Promotion.INT_TO_FLOAT
FULL = FULL_FLOATS + INTS + BOOL


@pointwise("special_entr", promote=INT_TO_FLOAT)
def special_entr(self):
    """-x log(x); 0 at 0, -inf below."""
    inside = tl.where(self > 0, -1.0 * self * libdevice.log(self), tl.zeros_like(self))
    below = tl.where(self < 0, tl.full(self.shape, float("-inf"), self.dtype), inside)
    return tl.where(self != self, self, below)


@pointwise("special_erfcx", promote=INT_TO_FLOAT, accepts=FULL)
def special_erfcx(self):
    return libdevice.erfcx(self)


@pointwise("special_xlog1py", promote=INT_TO_FLOAT)
def special_xlog1py(self, other):
    """self * log1p(other); 0 where self is 0, even if the logarithm is infinite."""
    x, y = tl.broadcast(self, other)
    product = tl.where(x == 0, tl.zeros_like(x), x * libdevice.log1p(y))
    return tl.where(y != y, y, product)


@pointwise("special_log_ndtr", promote=INT_TO_FLOAT, accepts=FULL)
def special_log_ndtr(self):
    """Log of the cumulative normal distribution; by erfcx in the lower tail, where the distribution underflows."""
    t = self * 0.7071067811865476
    tail = libdevice.log(0.5 * libdevice.erfcx(-1.0 * t)) - t * t
    body = libdevice.log1p(-0.5 * libdevice.erfc(t))
    return tl.where(self < -1.0, tail, body)


@triton.jit
def _tail_near(z):
    return z * rational(
        z,
        (
            4.05544892305962419923e0,
            3.15251094599893866154e1,
            5.71628192246421288162e1,
            4.40805073893200834700e1,
            1.46849561928858024014e1,
            2.18663306850790267539e0,
            -1.40256079171354495875e-1,
            -3.50424626827848203418e-2,
            -8.57456785154685413611e-4,
        ),
        (
            1.0,
            1.57799883256466749731e1,
            4.53907635128879210584e1,
            4.13172038254672030440e1,
            1.50425385692907503408e1,
            2.50464946208309415979e0,
            -1.42182922854787788574e-1,
            -3.80806407691578277194e-2,
            -9.33259480895457427372e-4,
        ),
    )


@triton.jit
def _tail_far(z):
    return z * rational(
        z,
        (
            3.23774891776946035970e0,
            6.91522889068984211695e0,
            3.93881025292474443415e0,
            1.33303460815807542389e0,
            2.01485389549179081538e-1,
            1.23716634817820021358e-2,
            3.01581553508235416007e-4,
            2.65806974686737550832e-6,
            6.23974539184983293730e-9,
        ),
        (
            1.0,
            6.02427039364742014255e0,
            3.67983563856160859403e0,
            1.37702099489081330271e0,
            2.16236993594496635890e-1,
            1.34204006088543189037e-2,
            3.28014464682127739104e-4,
            2.89247864745380683936e-6,
            6.79019408009981274425e-9,
        ),
    )


@pointwise("special_ndtri", promote=INT_TO_FLOAT, accepts=FULL)
def special_ndtri(self):
    """Inverse of the cumulative normal distribution: the three rational approximations of Cephes' ndtri.c."""
    upper = self > 1.0 - 0.13533528323661269189
    y = tl.where(upper, 1.0 - self, self)
    w = y - 0.5
    w2 = w * w
    middle = w + w * (
        w2
        * rational(
            w2,
            (
                -5.99633501014107895267e1,
                9.80010754185999661536e1,
                -5.66762857469070293439e1,
                1.39312609387279679503e1,
                -1.23916583867381258016e0,
            ),
            (
                1.0,
                1.95448858338141759834e0,
                4.67627912898881538453e0,
                8.63602421390890590575e1,
                -2.25462687854119370527e2,
                2.00260212380060660359e2,
                -8.20372256168333339912e1,
                1.59056225126211695515e1,
                -1.18331621121330003142e0,
            ),
        )
    )
    middle = middle * 2.50662827463100050242
    x = square_root(-2.0 * libdevice.log(y))
    z = inverse(x)
    x0 = x - libdevice.log(x) * z
    # "Near" is the negation of x >= 8, so that nan counts as near.
    tail = x0 - by_range(z, (x >= 8.0) == 0, _tail_near, _tail_far)
    tail = tl.where(upper, tail, -1.0 * tail)
    result = tl.where(y > 0.13533528323661269189, middle, tail)
    result = tl.where(self == 0, tl.full(x.shape, float("-inf"), x.dtype), result)
    result = tl.where(self == 1, tl.full(x.shape, float("inf"), x.dtype), result)
    return tl.where((self < 0) | (self > 1), tl.full(x.shape, float("nan"), x.dtype), result)
