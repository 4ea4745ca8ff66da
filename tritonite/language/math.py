"""Mathematical device functions that several formulas share.

float32 versions avoid libdevice's special-case branches, which every element of a block would pay for.
"""

import triton
import triton.language as tl

from tritonite.language import approximate, libdevice

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def true_divide(x, y):
    """Return x / y, correctly rounded; Triton's own float32 division is an approximation."""
    if x.dtype == tl.float32:
        x, y = tl.broadcast(x, y)
        quotient = tl.div_rn(x, y)
    else:
        quotient = x / y
    return quotient


@triton.jit
def _inverse_float32(x):
    size = tl.abs(x)
    # Scaled so that neither x nor the inverse is subnormal.
    scale = tl.where(size > 4.253529586511731e37, 5.421010862427522e-20, 1.0)
    scale = tl.where(size < 2.350988701644575e-38, 1.8446744073709552e19, scale)
    x = x * scale
    near = approximate.reciprocal(x)
    rest = libdevice.fma(-x, near, tl.full(x.shape, 1.0, x.dtype))
    # For 0 and infinity the remainder is nan, and the approximation exact.
    return tl.where(rest == rest, libdevice.fma(near, rest, near), near) * scale


@triton.jit
def inverse(x):
    """Return 1 / x, correctly rounded except for subnormal results, whose last bit may differ.

    float32 takes the instructions that NVIDIA's compiler emits for ordinary numbers, without a branch to the others.
    """
    if x.dtype == tl.float32:
        result = _inverse_float32(x)
    else:
        result = true_divide(tl.full(x.shape, 1.0, x.dtype), x)
    return result


@triton.jit
def _divide_by_one(x, y):
    size = tl.abs(y)
    # Scaled so that neither the divisor nor its inverse nears the ends of the range.
    scale = tl.where(size < 1e-30, 1.8446744073709552e19, tl.where(size > 1e30, 5.421010862427522e-20, 1.0))
    size = size * scale
    near = approximate.reciprocal(size)
    rest = libdevice.fma(near * -1.0, size, tl.full(size.shape, 1.0, size.dtype))
    # For 0 and infinity the remainder is nan, and the approximation exact.
    inverse = tl.where(rest == rest, libdevice.fma(near, rest, near), near)
    x, size = tl.broadcast(x, size)
    x, inverse = tl.broadcast(x, inverse)
    near = x * inverse
    # Both the remainder and the factor are negated, so that a quotient of -0.0 stays -0.0.
    quotient = libdevice.fma(libdevice.fma(near, size, x * -1.0), inverse * -1.0, near)
    return tl.where(quotient == quotient, quotient, near) * libdevice.copysign(scale, y)


@triton.jit
def divide(x, y):
    """Return x / y as `true_divide` does, but multiply by the inverse where float32 y has one element.

    One remainder step corrects the quotient to the nearest float32 (Markstein 1990). Below about 1e-30 the remainder is
    itself rounded, and the last bit may differ.
    """
    if x.dtype == tl.float32 and y.numel == 1:
        quotient = _divide_by_one(x, y)
    else:
        quotient = true_divide(x, y)
    return quotient


@triton.jit
def _root_of_ordinary(x):
    """Return the square root of a float32 that is neither 0 nor infinity, and has no subnormal remainder."""
    inverse = approximate.inverse_root(x)
    near = x * inverse
    rest = libdevice.fma(near * -1.0, near, x)
    return libdevice.fma(rest, 0.5 * inverse, near)


@triton.jit
def _root_float32(x):
    # Scaled so that neither x nor the remainder is subnormal.
    small = x < 7.888609052210118e-31
    scaled = tl.where(small, x * 1.8446744073709552e19, x)
    root = _root_of_ordinary(scaled)
    root = tl.where((scaled == 0.0) | (scaled == float("inf")), scaled, root)
    return root * tl.where(small, 2.3283064365386963e-10, 1.0)


@triton.jit
def square_root(x):
    """Return the square root, correctly rounded; Triton's own float32 root is an approximation.

    float32 takes the instructions that NVIDIA's compiler emits for ordinary numbers, without a branch to the others.
    """
    if x.dtype == tl.float32:
        root = _root_float32(x)
    else:
        root = libdevice.sqrt(x)
    return root


@triton.jit
def polynomial(x, coefficients: tl.constexpr):
    """Evaluate a polynomial at x by Horner's rule; coefficients from the highest power down."""
    result = tl.zeros_like(x) + coefficients[0]
    for i in tl.static_range(1, len(coefficients)):
        result = result * x + coefficients[i]
    return result


@triton.jit
def rational(x, numerator: tl.constexpr, denominator: tl.constexpr):
    """Evaluate the ratio of two polynomials at x; coefficients from the highest power down."""
    top, bottom = polynomial(x, numerator), polynomial(x, denominator)
    if x.dtype == tl.float32:
        result = top * inverse(bottom)
    else:
        result = true_divide(top, bottom)
    return result


@triton.constexpr_function
def _powers(coefficients):
    """Expand a Chebyshev series into powers, highest first, without leading terms too small for float32."""
    begin, rest = 0, abs(coefficients[0])
    while rest < 2.0**-32 * abs(coefficients[-1]):
        begin += 1
        rest += abs(coefficients[begin])
    terms = coefficients[begin:][::-1]
    # Powers of 2 T_k(x / 2) and 2 T_(k+1)(x / 2), lowest first.
    current, following = [2.0], [0.0, 1.0]
    powers = [0.0] * len(terms)
    for k, term in enumerate(terms):
        for power, factor in enumerate(current):
            powers[power] += (0.25 if k == 0 else 0.5) * term * factor
        shifted = [0.0, *following]
        after = [factor - (current[i] if i < len(current) else 0.0) for i, factor in enumerate(shifted)]
        current, following = following, after
    return tuple(powers[::-1])


@triton.jit
def chebyshev_series(x, coefficients: tl.constexpr):
    """Evaluate the Chebyshev series sum' c_k T_k(x / 2), x in [-2, 2]; coefficients from the highest order down.

    The term of order 0 counts half, as in Cephes. float64 takes Clenshaw's recurrence. float32 takes Horner's rule on
    the expanded polynomial, which needs half the steps and loses less where coefficients fall quickly.
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
    """Return log(x) and log(1 - x) for x in [0, 1]; nan outside.

    In float32 the smaller of x and 1 - x has a logarithm of at most -0.69. NVIDIA's approximation is accurate there to
    three units in the last place. The logarithm of the larger is a polynomial in the smaller. 1 - x is exact where it
    is the smaller.
    """
    if x.dtype == tl.float32:
        # Written as -(x - 1), which is -0.0 for x = 1, so that the polynomial gives 0.0.
        rest = -1.0 * (x - 1.0)
        smaller = tl.minimum(x, rest)
        log_of_smaller = approximate.log(smaller)
        # A minimax polynomial with an error of 2.3e-8.
        log_of_larger = smaller * polynomial(
            smaller,
            (
                -1.4411079, 1.6958119, -1.2576697, 0.20353886, -0.26961273, -0.24280508, -0.33370063, -0.49999284, -1.0,
            ),
        )  # fmt: skip
        log = tl.where(x < rest, log_of_smaller, log_of_larger)
        log_of_rest = tl.where(x < rest, log_of_larger, log_of_smaller)
    else:
        log, log_of_rest = libdevice.log(x), libdevice.log1p(-1.0 * x)
    return log, log_of_rest


@triton.jit
def by_range(x, near, of_near: tl.constexpr, of_far: tl.constexpr):
    """Return of_near(x) where `near` is set and of_far(x) elsewhere; a block that is all near skips of_far."""
    if tl.min(near.to(tl.int32), axis=None) != 0:
        result = of_near(x)
    else:
        result = tl.where(near, of_near(x), of_far(x))
    return result


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x)), which neither overflows nor loses its tail for negative x."""
    return inverse(1.0 + libdevice.exp(-x))


@triton.jit
def silu_derivative(x, gate):
    """Return the derivative of x * sigmoid(x), where `gate` is sigmoid(x).

    Near the derivative's root at -1.28 the sum 1 + x is exact, and the product next to it is small. The sum that is
    used for positive x has a product near -1 there, whose roundoff would be three times as large.
    """
    return gate * tl.where(x < 0.0, (1.0 + x) - x * gate, 1.0 + x * (1.0 - gate))


@triton.jit
def maximum_nan(x, y):
    """Return the larger of x and y; nan where either is nan."""
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
    """Return the smaller of x and y; nan where either is nan."""
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
    """Return x * y + z, for floats with a single rounding."""
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
    """Return (x / 2**lift)**y for normal positive x and |y| <= 1e12, as exp2(y * log2(x)).

    The logarithm is a float32 head (`log`) plus a float32 `tail`. For the mantissa m and s = (m - 1) / (m + 1),
    log2(m) = 2 / ln(2) * (s + s**3 / 3 + ...) (Muller et al., Handbook of Floating-Point Arithmetic, chapter 10).
    """
    bits = x.to(tl.int32, bitcast=True)
    # x = m * 2**exponent, with m between sqrt(1/2) and sqrt(2).
    exponent = (bits - 0x3F3504F3) >> 23
    m = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    scale = exponent.to(tl.float32) - lift
    plus, minus = m + 1.0, m - 1.0
    rounding = m - (plus - 1.0)
    inverse = 1.0 / plus
    s = minus * inverse
    square = s * s
    tail = inverse * libdevice.fma(-s, rounding, libdevice.fma(-s, plus, minus))
    tail += s * square * polynomial(square, (0.090909091, 0.11111111, 0.14285715, 0.2, 0.33333334))
    # 2 / ln(2) is this head plus the tail 3.8519259e-08.
    factor = tl.full(s.shape, 2.885390043258667, tl.float32)
    # An explicit fma, so that the compiler cannot fuse the product with what follows: the tail needs it rounded.
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
    # A block of positive normal bases, the common case, skips every special case.
    if tl.min(ordinary.to(tl.int32), axis=None) != 0:
        result = _power_of_normal(x, y, 0.0)
    else:
        size = tl.abs(x)
        subnormal = size < 1.1754943508222875e-38
        extreme = (size == 0.0) | (size == float("inf"))
        normal = tl.where(subnormal, size * 16777216.0, size)
        normal = tl.where(extreme | (x != x), 1.0, normal)
        # Beyond these bounds only powers of 1 and -1 are finite and nonzero, and every exponent is even.
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
    """Return float32 x unchanged, as a value that formally depends on y.

    Where x and y are contiguous along different dimensions, Triton would otherwise convert the layout of every
    intermediate that depends on x alone. LLVM, which runs after layouts are fixed, proves `zero` to be 0 and drops it.
    """
    zero = (y.to(tl.uint32, bitcast=True) >> 16) >> 16
    return (x.to(tl.uint32, bitcast=True) | zero).to(tl.float32, bitcast=True)


@triton.jit
def real_power(x, y):
    """Return x**y, with the special cases of C's pow."""
    x, y = tl.broadcast(x, y)
    if x.dtype == tl.float32:
        result = _power_float32(_in_the_layout_of_both(x, y), y)
    else:
        result = libdevice.pow(x, y)
    return result


@triton.jit
def hyperbolic_sine(x):
    """Return sinh(x); in float32 a series for |x| < 1, and exponentials above."""
    if x.dtype == tl.float32:
        size, square = tl.abs(x), x * x
        terms = polynomial(square, (1.0 / 39916800, 1.0 / 362880, 1.0 / 5040, 1.0 / 120, 1.0 / 6))
        # exp(|x| - 1) overflows only where the result does.
        power = libdevice.exp(size - 1.0)
        far = 1.3591409142295225 * power - 0.18393972058572117 * approximate.reciprocal(power)
        result = tl.where(size < 1.0, x + x * square * terms, libdevice.copysign(far, x))
    else:
        result = libdevice.sinh(x)
    return result


@triton.jit
def _log1p_or_log_of_twice(rest, x):
    """Return log(1 + rest), or log(2 x) where x is so large that its square may overflow."""
    large = x > 1e9
    return libdevice.log1p(tl.where(large, x, rest)) + tl.where(large, 0.6931471805599453, 0.0)


@triton.jit
def inverse_hyperbolic_sine(x):
    """Return asinh(x) = sign(x) log(1 + u + u^2 / (1 + sqrt(1 + u^2))), u = |x|."""
    if x.dtype == tl.float32:
        size = tl.abs(x)
        square = size * size
        rest = size + square * approximate.reciprocal(1.0 + _root_of_ordinary(1.0 + square))
        result = libdevice.copysign(_log1p_or_log_of_twice(rest, size), x)
    else:
        result = libdevice.asinh(x)
    return result


@triton.jit
def inverse_hyperbolic_cosine(x):
    """Return acosh(x) = log(1 + t + sqrt(t (x + 1))), t = x - 1."""
    if x.dtype == tl.float32:
        rest = x - 1.0
        rest = tl.where(x > 1.0, rest + _root_of_ordinary(rest * (x + 1.0)), rest)
        result = tl.where(x < 1.0, float("nan"), _log1p_or_log_of_twice(rest, x))
    else:
        result = libdevice.acosh(x)
    return result


@triton.jit
def pack_complex(low, high):
    """Pack two 16-bit or 32-bit numbers into an integer of twice the width, as a complex number lies in memory."""
    if low.dtype.primitive_bitwidth == 16:
        packed = low.to(tl.uint16, bitcast=True).to(tl.int32) | (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        packed = low.to(tl.uint32, bitcast=True).to(tl.int64) | (high.to(tl.int32, bitcast=True).to(tl.int64) << 32)
    return packed
