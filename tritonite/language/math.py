"""Device functions that several formulas share."""

import triton
import triton.language as tl

from tritonite.language import approximate, libdevice

LOG2_E = tl.constexpr(1.4426950408889634)


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
def _inverse_of_float32(x):
    size = tl.abs(x)
    # So that neither it nor the inverse is subnormal.
    scale = tl.where(size > 4.253529586511731e37, 5.421010862427522e-20, 1.0)
    scale = tl.where(size < 2.350988701644575e-38, 1.8446744073709552e19, scale)
    x = x * scale
    near = approximate.reciprocal(x)
    rest = libdevice.fma(-x, near, tl.full(x.shape, 1.0, x.dtype))
    # The inverse of 0 or of infinity has no remainder.
    return tl.where(rest == rest, libdevice.fma(near, rest, near), near) * scale


@triton.jit
def inverse(x):
    """1 / x, correctly rounded unless that is subnormal, when the last bit may be another.

    float32's by the instructions that NVIDIA's compiler takes for ordinary numbers, without its branch for every
    element to the others.
    """
    if x.dtype == tl.float32:
        result = _inverse_of_float32(x)
    else:
        result = true_divide(tl.full(x.shape, 1.0, x.dtype), x)
    return result


@triton.jit
def _divide_by_one(x, y):
    size = tl.abs(y)
    # So that neither the divisor nor its inverse is near the ends of the range.
    scale = tl.where(size < 1e-30, 1.8446744073709552e19, tl.where(size > 1e30, 5.421010862427522e-20, 1.0))
    size = size * scale
    near = approximate.reciprocal(size)
    rest = libdevice.fma(near * -1.0, size, tl.full(size.shape, 1.0, size.dtype))
    # The inverse of 0 or of infinity has no remainder.
    share = tl.where(rest == rest, libdevice.fma(near, rest, near), near)
    x, size = tl.broadcast(x, size)
    x, share = tl.broadcast(x, share)
    near = x * share
    # The remainder's sign is turned twice, so that a quotient of -0.0 stays that.
    quotient = libdevice.fma(libdevice.fma(near, size, x * -1.0), share * -1.0, near)
    return tl.where(quotient == quotient, quotient, near) * libdevice.copysign(scale, y)


@triton.jit
def divide(x, y):
    """`true_divide`; by the inverse where a block has one divisor, without a branch for every element.

    The remainder corrects the quotient to the nearest float32 (Markstein 1990), unless it is itself rounded, as that
    of numbers below 1e-30 is: there the last bit may be another.
    """
    if x.dtype == tl.float32 and y.numel == 1:
        quotient = _divide_by_one(x, y)
    else:
        quotient = true_divide(x, y)
    return quotient


@triton.jit
def _root_of_ordinary(x):
    """The square root of a float32 that is neither 0 nor infinity, and whose remainder is not subnormal."""
    inverse = approximate.inverse_root(x)
    near = x * inverse
    rest = libdevice.fma(near * -1.0, near, x)
    return libdevice.fma(rest, 0.5 * inverse, near)


@triton.jit
def _root_of_float32(x):
    # So that neither it nor its remainder is subnormal.
    small = x < 7.888609052210118e-31
    scaled = tl.where(small, x * 1.8446744073709552e19, x)
    root = _root_of_ordinary(scaled)
    root = tl.where((scaled == 0.0) | (scaled == float("inf")), scaled, root)
    return root * tl.where(small, 2.3283064365386963e-10, 1.0)


@triton.jit
def square_root(x):
    """The square root, correctly rounded; Triton's own of float32 is an approximation.

    float32's by the instructions that NVIDIA's compiler takes for ordinary numbers, without its branch for every
    element to the others.
    """
    if x.dtype == tl.float32:
        root = _root_of_float32(x)
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
def rational(x, numerator: tl.constexpr, denominator: tl.constexpr):
    """The ratio of two polynomials at x; of float32 without a branch for every element."""
    above, below = polynomial(x, numerator), polynomial(x, denominator)
    if x.dtype == tl.float32:
        result = above * inverse(below)
    else:
        result = true_divide(above, below)
    return result


@triton.constexpr_function
def _powers(coefficients):
    """The polynomial, highest power first, that a Chebyshev series is, but for terms that float32 does not hold."""
    begin, rest = 0, abs(coefficients[0])
    while rest < 2.0**-32 * abs(coefficients[-1]):
        begin += 1
        rest += abs(coefficients[begin])
    terms = coefficients[begin:][::-1]
    # 2 T_k(x / 2) and the one after it, lowest power first.
    own, following = [2.0], [0.0, 1.0]
    total = [0.0] * len(terms)
    for k, term in enumerate(terms):
        for power, factor in enumerate(own):
            total[power] += (0.25 if k == 0 else 0.5) * term * factor
        steps = [0.0, *following]
        own, following = following, [step - (own[i] if i < len(own) else 0.0) for i, step in enumerate(steps)]
    return tuple(total[::-1])


@triton.jit
def chebyshev_series(x, coefficients: tl.constexpr):
    """The Chebyshev series sum' c_k T_k(x / 2), x in [-2, 2], by Clenshaw's recurrence; coefficients highest first.

    As in Cephes, the term of order 0 counts half. float32's is a polynomial by Horner's rule, which takes half of the
    steps and, of series that fall as fast as these, loses less.
    """
    if x.dtype == tl.float32:
        result = polynomial(x, _powers(coefficients))
    else:
        last = tl.zeros_like(x)
        before = last
        total = last + coefficients[0]
        for i in tl.static_range(1, len(coefficients)):
            before = last
            last = total
            total = x * last - before + coefficients[i]
        result = 0.5 * (total - before)
    return result


@triton.jit
def log_and_log1m(x):
    """log(x) and log(1 - x) for x in [0, 1], nan outside; of float32 without a branch for every element.

    Of the smaller of x and 1 - x the logarithm is -0.69 or less, which NVIDIA's approximation has to three units of its
    last place, and that of the other is a polynomial in the smaller. 1 - x is exact where it is the smaller.
    """
    if x.dtype == tl.float32:
        # By two steps, to -0.0 where x is 1, so that its logarithm is 0.0.
        rest = -1.0 * (x - 1.0)
        less = tl.minimum(x, rest)
        log_of_less = approximate.log(less)
        # The minimax polynomial of its degree, to 2.3e-8.
        log_of_more = less * polynomial(
            less,
            (
                -1.4411079, 1.6958119, -1.2576697, 0.20353886, -0.26961273, -0.24280508, -0.33370063, -0.49999284, -1.0,
            ),
        )  # fmt: skip
        log = tl.where(x < rest, log_of_less, log_of_more)
        log_of_rest = tl.where(x < rest, log_of_more, log_of_less)
    else:
        log, log_of_rest = libdevice.log(x), libdevice.log1p(-1.0 * x)
    return log, log_of_rest


@triton.jit
def by_range(x, near, of_near: tl.constexpr, of_far: tl.constexpr):
    """of_near(x) where `near`, of_far(x) elsewhere; a block of elements that are all near does without the latter."""
    if tl.min(near.to(tl.int32), axis=None) != 0:
        result = of_near(x)
    else:
        result = tl.where(near, of_near(x), of_far(x))
    return result


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), which neither overflows nor loses its tail for negative x."""
    return inverse(1.0 + libdevice.exp(-x))


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


@triton.jit
def _power_of_normal(x, y, lift):
    """(x / 2**lift) to the y, for normal positive x and |y| <= 1e12: exp2(y * log2(x)), the logarithm in two parts.

    log2 of the mantissa m is that of (1 + s) / (1 - s), s = (m - 1) / (m + 1), whose series is
    2 / ln(2) * (s + s**3 / 3 + s**5 / 5 + ...) (Muller et al., Handbook of Floating-Point Arithmetic, chapter 10).
    """
    bits = x.to(tl.int32, bitcast=True)
    # The mantissa, between the square roots of 1/2 and 2, and its power of 2.
    exponent = (bits - 0x3F3504F3) >> 23
    m = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    scale = exponent.to(tl.float32) - lift
    above, below = m + 1.0, m - 1.0
    rounding = m - (above - 1.0)
    inverse = 1.0 / above
    s = below * inverse
    square = s * s
    tail = inverse * libdevice.fma(-s, rounding, libdevice.fma(-s, above, below))
    tail += s * square * polynomial(square, (0.090909091, 0.11111111, 0.14285715, 0.2, 0.33333334))
    # 2 / ln(2), in two parts.
    factor = tl.full(s.shape, 2.885390043258667, tl.float32)
    # By a multiply-add, which the compiler does not fuse with what follows: the tail is of the rounded product.
    product = libdevice.fma(s, factor, tl.zeros_like(s))
    tail = libdevice.fma(s, factor, -product) + (s * 3.8519259e-08 + tail * factor)
    mantissa_log = product + tail
    tail -= mantissa_log - product
    log = scale + mantissa_log
    tail += mantissa_log - (log - scale)
    product = y * log
    tail = libdevice.fma(y, log, -product) + y * tail
    result = tl.exp2(product)
    return tl.where(result < float("inf"), libdevice.fma(result, tail * 0.6931471805599453, result), result)


@triton.jit
def _power_float32(x, y):
    bits = x.to(tl.int32, bitcast=True)
    ordinary = (bits >= 0x00800000) & (bits < 0x7F800000) & (tl.abs(y) < 1e12)
    # Positive normal bases are nearly all there is, and a block of them skips every special case.
    if tl.min(ordinary.to(tl.int32), axis=None) != 0:
        result = _power_of_normal(x, y, 0.0)
    else:
        size = tl.abs(x)
        subnormal = size < 1.1754943508222875e-38
        extreme = (size == 0.0) | (size == float("inf"))
        normal = tl.where(subnormal, size * 16777216.0, size)
        normal = tl.where(extreme | (x != x), 1.0, normal)
        # No power beyond these bounds is finite but those of 1 and -1, which are even.
        bounded = tl.minimum(tl.maximum(y, -1e12), 1e12)
        result = _power_of_normal(normal, bounded, tl.where(subnormal, 24.0, 0.0))
        result = tl.where(extreme, tl.where((y < 0.0) == (size == 0.0), float("inf"), 0.0), result)
        whole = libdevice.floor(y) == y
        odd = whole & (libdevice.floor(y * 0.5) != y * 0.5)
        result = tl.where(odd, libdevice.copysign(result, x), result)
        undefined = ((x < 0.0) & (size != float("inf")) & (whole == 0)) | (x != x) | (y != y)
        result = tl.where(undefined, float("nan"), result)
        result = tl.where((x == 1.0) | (y == 0.0), 1.0, result)
    return result


@triton.jit
def _in_the_layout_of_both(x, y):
    """x of float32, laid out as what is computed from x and y.

    Of operands that lie across each other's grain Triton would otherwise bring every value to the other's layout by
    itself that x alone decides. LLVM, which comes when layouts are settled, finds that `zero` is one, and drops it.
    """
    zero = (y.to(tl.uint32, bitcast=True) >> 16) >> 16
    return (x.to(tl.uint32, bitcast=True) | zero).to(tl.float32, bitcast=True)


@triton.jit
def real_power(x, y):
    """x to the y, with the special cases of C's pow."""
    x, y = tl.broadcast(x, y)
    if x.dtype == tl.float32:
        result = _power_float32(_in_the_layout_of_both(x, y), y)
    else:
        result = libdevice.pow(x, y)
    return result


@triton.jit
def hyperbolic_sine(x):
    """sinh(x), of float32 without a branch for every element: the series below 1, and exponentials above."""
    if x.dtype == tl.float32:
        size, square = tl.abs(x), x * x
        terms = polynomial(square, (1.0 / 39916800, 1.0 / 362880, 1.0 / 5040, 1.0 / 120, 1.0 / 6))
        # Of one less, so that it overflows only where the result does.
        power = libdevice.exp(size - 1.0)
        far = 1.3591409142295225 * power - 0.18393972058572117 * approximate.reciprocal(power)
        result = tl.where(size < 1.0, x + x * square * terms, libdevice.copysign(far, x))
    else:
        result = libdevice.sinh(x)
    return result


@triton.jit
def _log_of_1_and(rest, x):
    """log(1 + rest), which is log(2 x) where x is so large that its square may overflow."""
    large = x > 1e9
    return libdevice.log1p(tl.where(large, x, rest)) + tl.where(large, 0.6931471805599453, 0.0)


@triton.jit
def inverse_hyperbolic_sine(x):
    """asinh(x) = log(1 + u + u^2 / (1 + sqrt(1 + u^2))) with the sign of x, of whose size u is."""
    if x.dtype == tl.float32:
        size = tl.abs(x)
        square = size * size
        rest = size + square * approximate.reciprocal(1.0 + _root_of_ordinary(1.0 + square))
        result = libdevice.copysign(_log_of_1_and(rest, size), x)
    else:
        result = libdevice.asinh(x)
    return result


@triton.jit
def inverse_hyperbolic_cosine(x):
    """acosh(x) = log(1 + t + sqrt(t (x + 1))), t = x - 1."""
    if x.dtype == tl.float32:
        rest = x - 1.0
        rest = tl.where(x > 1.0, rest + _root_of_ordinary(rest * (x + 1.0)), rest)
        result = tl.where(x < 1.0, float("nan"), _log_of_1_and(rest, x))
    else:
        result = libdevice.acosh(x)
    return result


@triton.jit
def pack_complex(low, high):
    """The bits of two numbers of 16 or 32 bits as one integer, as a complex number lies in memory."""
    if low.dtype.primitive_bitwidth == 16:
        word = low.to(tl.uint16, bitcast=True).to(tl.int32) | (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        word = low.to(tl.uint32, bitcast=True).to(tl.int64) | (high.to(tl.int32, bitcast=True).to(tl.int64) << 32)
    return word
