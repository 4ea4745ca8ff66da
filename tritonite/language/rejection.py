"""Rejection samplers, which draw a variable number of words, as cuRAND and ATen do on CUDA.

A sampler takes (seed, counter, thread, used, elements, mask, DTYPE):

- seed, counter, thread: the generator's state.
- used: the number of words that each thread has drawn.
- elements: blocks of the operands' elements, valid where `mask` is set.
- DTYPE: the dtype of the result.

The sampler returns the samples and the new `used`.
"""

import triton
import triton.language as tl

from tritonite.language import approximate, libdevice
from tritonite.language.math import multiply_add, square_root, true_divide
from tritonite.language.random import box_muller, uniform, uniform_of, wide_normal, words

# float32 coefficients of cuRAND's approximation of the incomplete gamma function: (factor, shift, offset) of `_slope`.
_ALPHA = tl.constexpr((1.4324803352355957, 0.12400979548692703, 0.0002536107087507844))
_BETA = tl.constexpr((0.21096734702587128, 1.9738116264343262, 0.9420173168182373))
# log(k!) minus Stirling's approximation, for k below 10.
_TAILS = tl.constexpr(
    (
        *(0.0810614667953272, 0.0413406959554092, 0.0276779256849983, 0.02079067210376509, 0.0166446911898211),
        *(0.0138761288230707, 0.0118967099458917, 0.0104112652619720, 0.00925546218271273, 0.00833056343336287),
    )
)


@triton.jit
def any_of(pending):
    return tl.max(pending.to(tl.int32), axis=0) > 0


@triton.jit
def next_word(seed, counter, thread, used):
    """Return each thread's next word, as curand: word number `used` of its sequence."""
    a, b, c, d = words(seed, counter + (used >> 2), thread)
    i = used & 3
    return tl.where(i == 0, a, tl.where(i == 1, b, tl.where(i == 2, c, d)))


@triton.jit
def _exp(x):
    return approximate.exp2((x.to(tl.float64) * 1.4426950408889634).to(tl.float32))


@triton.jit
def _log(x):
    return (approximate.log2(x).to(tl.float64) * 0.6931471805599453).to(tl.float32)


@triton.jit
def _slope(rate, coefficients: tl.constexpr):
    """Return the approximation's alpha or beta: factor / sqrt(rate - shift) + offset."""
    root = approximate.inverse_root(rate - coefficients[1])
    factor = tl.full(rate.shape, coefficients[0], tl.float32)
    return multiply_add(root, factor, tl.full(rate.shape, coefficients[2], tl.float32))


@triton.jit
def _incomplete_gamma(rate, x, alpha, beta):
    t = 1.0 + _exp(multiply_add(alpha, rate - x, -beta))
    return approximate.reciprocal(t * t)


@triton.jit
def _log_factorial(x):
    """Return log((x - 1)!): above 8 by Stirling's approximation (Hart et al. 1968, 5404), by lgamma elsewhere."""
    x = x.to(tl.float64)
    s = 1.0 / x
    t = s * s
    series = -0.1633436431e-2 * t + 0.83645878922e-3
    series = series * t - 0.5951896861197e-3
    series = series * t + 0.793650576493454e-3
    series = series * t - 0.277777777735865004e-2
    series = series * t + 0.833333333333331018375e-1
    series = series * s + 0.918938533204672
    product = 0.5 * libdevice.log(x) * (x - 0.5)
    large = (product - x) + (product + series)
    return tl.where(x > 8, large, libdevice.lgamma(tl.where(x > 8, 1.0, x)))


@triton.jit
def _poisson_by_products(seed, counter, thread, rate, pending):
    """Count uniform factors until 1 falls below exp(-rate) (Knuth, The Art of Computer Programming, volume 2).

    The product starts at exp(rate) and is compared with 1.
    """
    product = libdevice.exp(tl.where(pending, rate, 0.0))
    count = tl.zeros(rate.shape, tl.float64)
    while any_of(pending):
        drawn = uniform(seed, counter, thread)
        for i in tl.static_range(4):
            product = tl.where(pending, product * drawn[i], product)
            pending = pending & (product > 1.0)
            count += pending.to(tl.float64)
        counter += 1
    return count


@triton.jit
def _poisson_by_rejection(seed, counter, thread, rate, pending):
    """Invert an approximation of the incomplete gamma function, and reject by the true density."""
    rate = tl.where(pending, rate, 64.0)
    log_rate = _log(rate)
    alpha, beta = _slope(rate, _ALPHA), _slope(rate, _BETA)
    samples = tl.zeros(rate.shape, tl.float32)
    while any_of(pending):
        drawn = uniform(seed, counter, thread)
        for i in tl.static_range(2):
            t = beta + _log(approximate.inverse_root(drawn[2 * i]) - 1.0)
            x = libdevice.floor(multiply_add(-t, approximate.reciprocal(alpha), rate))
            height = _incomplete_gamma(rate, x + 1.0, alpha, beta) - _incomplete_gamma(rate, x, alpha, beta)
            height = height * 1.2999999523162842
            density = multiply_add(x, log_rate, -rate) - _log_factorial(1.0 + x).to(tl.float32)
            accepted = pending & (drawn[2 * i + 1] * height < _exp(density)) & (height.to(tl.float64) >= 1e-20)
            samples = tl.where(accepted, x, samples)
            pending = pending & (accepted == 0)
        counter += 1
    return samples.to(tl.float64)


@triton.jit
def poisson(seed, counter, thread, used, elements, mask, DTYPE: tl.constexpr):
    """Sample a Poisson distribution as curand_poisson, by one of three methods: rate < 64, rate <= 4000, above."""
    rate = elements[0].to(tl.float64)
    tl.device_assert((rate >= 0) | (mask == 0), "poisson: a rate is negative")
    narrow = rate.to(tl.float32)
    samples = _poisson_by_products(seed, counter, thread, narrow, mask & (rate < 64))
    between = mask & (rate >= 64) & (rate <= 4000)
    if any_of(between):
        samples = tl.where(between, _poisson_by_rejection(seed, counter, thread, narrow, between), samples)
    large = mask & (rate > 4000)
    if any_of(large):
        deviate = multiply_add(square_root(rate), wide_normal(seed, counter, thread)[0], rate) + 0.5
        # Clamped to uint32, as in cuRAND.
        deviate = libdevice.floor(tl.minimum(tl.maximum(deviate, 0.0), 4294967295.0))
        samples = tl.where(large, deviate, samples)
    if DTYPE.primitive_bitwidth == 16:
        samples = samples.to(tl.float32)
    return samples.to(DTYPE), used


@triton.jit
def gamma(seed, counter, thread, used, elements, mask, DTYPE: tl.constexpr):
    """Sample a gamma distribution by the cube of a normal number (Marsaglia and Tsang 2000).

    For alpha < 1, sample alpha + 1 and multiply by a uniform number to the power 1 / alpha.
    """
    WIDE: tl.constexpr = tl.float64 if tl.float64 == DTYPE else tl.float32
    LEAST: tl.constexpr = 2.0**-1022 if tl.float64 == DTYPE else 2.0**-14 if tl.float16 == DTYPE else 2.0**-126
    alpha = tl.where(mask, elements[0].to(WIDE), 1.0)
    boosted = (alpha < 1.0) & (alpha != 0.0)
    base = 1.0 - uniform_of(next_word(seed, counter, thread, used)).to(WIDE)
    power = libdevice.pow(base, true_divide(tl.full(alpha.shape, 1.0, WIDE), tl.where(boosted, alpha, 1.0)))
    scale = tl.where(boosted, power, 1.0)
    used += boosted.to(tl.int32)
    zero = alpha == 0.0
    alpha = tl.where(boosted, (alpha + 1.0).to(DTYPE).to(WIDE), alpha)
    d = alpha - 0.3333333432674408
    # A negative alpha has no distribution, and ATen's kernel never ends; the result is nan here.
    pending = mask & (zero == 0) & (d > 0)
    d = tl.where(d > 0, d, 1.0)
    one = tl.full(d.shape, 1.0, WIDE)
    c = true_divide(one, square_root(9.0 * d))
    samples = tl.where(zero, 0.0, tl.full(d.shape, float("nan"), WIDE))
    second = tl.zeros(d.shape, tl.float32)
    has_second = tl.zeros(d.shape, tl.int1)
    while any_of(pending):
        draws = pending & (has_second == 0)
        a = next_word(seed, counter, thread, used)
        b = next_word(seed, counter, thread, used + 1)
        first, other = box_muller(a, b)
        x = tl.where(has_second, second, first).to(WIDE)
        second = tl.where(draws, other, second)
        used += 2 * draws.to(tl.int32)
        has_second = has_second ^ pending
        y = multiply_add(c, x, one)
        inside = pending & (y > 0)
        u = 1.0 - uniform_of(next_word(seed, counter, thread, used)).to(WIDE)
        used += inside.to(tl.int32)
        v = y * y * y
        square = x * x
        quick = u < multiply_add(-(0.03310000151395798 * square), square, one)
        limit = multiply_add(d, 1.0 - v + libdevice.log(tl.where(inside, v, 1.0)), 0.5 * square)
        accepted = inside & (quick | (libdevice.log(u) < limit))
        samples = tl.where(accepted, scale * d * v, samples)
        pending = pending & (accepted == 0)
    samples = samples.to(DTYPE).to(WIDE)
    return tl.where(samples < LEAST, LEAST, samples).to(DTYPE), used


@triton.jit
def _uniform_bits(word, DTYPE: tl.constexpr):
    """Return a uniform number in [0, 1) from a word's low 24 bits."""
    return ((word & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08).to(DTYPE)


@triton.jit
def _tail(k, DTYPE: tl.constexpr):
    """Return the error of Stirling's approximation of log(k!); a table below 10, a series from 10 on."""
    wide = k.to(tl.float64)
    next_k = wide + 1.0
    square = ((k + 1.0) * (k + 1.0)).to(tl.float64)
    tail = (1.0 / 12 - (1.0 / 360 - 1.0 / 1260 / square) / square) / next_k
    tail = tail.to(DTYPE)
    for i in tl.static_range(10):
        tail = tl.where((wide >= i) & (wide < i + 1), _TAILS[i], tail)
    return tail


@triton.jit
def _binomial_by_gaps(seed, counter, thread, used, count, p, pending, DTYPE: tl.constexpr):
    """Count successes by drawing the geometric gaps between them until they exceed `count` trials."""
    samples, trials = tl.zeros(p.shape, DTYPE), tl.zeros(p.shape, DTYPE)
    log_failure = libdevice.log1p(-tl.where(pending, p, 0.5))
    while any_of(pending):
        u = _uniform_bits(next_word(seed, counter, thread, used), DTYPE)
        used += pending.to(tl.int32)
        trials += libdevice.ceil(true_divide(libdevice.log(u), log_failure))
        pending = pending & ((trials > count) == 0)
        samples = tl.where(pending, samples + 1.0, samples)
    return samples, used


@triton.jit
def _binomial_by_rejection(seed, counter, thread, used, count, p, pending, DTYPE: tl.constexpr):
    """Sample by transformed rejection (Hoermann 1993, BTRS)."""
    count, p = tl.where(pending, count, 100.0), tl.where(pending, p, 0.5)
    wide = p.to(tl.float64)
    deviation = square_root(count * p * (1.0 - p)).to(tl.float64)
    b = (1.15 + 2.53 * deviation).to(DTYPE)
    a = (-0.0873 + 0.0248 * b.to(tl.float64) + 0.01 * wide).to(DTYPE)
    middle = ((count * p).to(tl.float64) + 0.5).to(DTYPE)
    tight = (0.92 - 4.2 / b.to(tl.float64)).to(DTYPE)
    r = true_divide(p, 1.0 - p)
    alpha = ((2.83 + 5.1 / b.to(tl.float64)) * deviation).to(DTYPE)
    m = libdevice.floor((count + 1.0) * p)
    samples = tl.zeros(p.shape, DTYPE)
    while any_of(pending):
        u = _uniform_bits(next_word(seed, counter, thread, used), DTYPE) - 0.5
        v = _uniform_bits(next_word(seed, counter, thread, used + 1), DTYPE)
        used += 2 * pending.to(tl.int32)
        us = 0.5 - tl.abs(u)
        k = libdevice.floor(multiply_add(true_divide(2.0 * a, us) + b, u, middle))
        possible = pending & ((k < 0) == 0) & ((k > count) == 0)
        k = tl.where(possible, k, 0.0)
        quick = (us.to(tl.float64) >= 0.07) & (v <= tight)
        height = libdevice.log(true_divide(v * alpha, true_divide(a, us * us) + b))
        left = count - k + 1.0
        bound = (m.to(tl.float64) + 0.5) * libdevice.log(true_divide(m + 1.0, r * (count - m + 1.0))).to(tl.float64)
        bound += ((count + 1.0) * libdevice.log(true_divide(count - m + 1.0, left))).to(tl.float64)
        bound += (k.to(tl.float64) + 0.5) * libdevice.log(true_divide(r * left, k + 1.0)).to(tl.float64)
        bound += _tail(m, DTYPE).to(tl.float64) + _tail(count - m, DTYPE).to(tl.float64)
        bound = bound - _tail(k, DTYPE).to(tl.float64) - _tail(count - k, DTYPE).to(tl.float64)
        accepted = possible & (quick | (height <= bound.to(DTYPE)))
        samples = tl.where(accepted, k, samples)
        pending = pending & (accepted == 0)
    return samples, used


@triton.jit
def binomial(seed, counter, thread, used, elements, mask, DTYPE: tl.constexpr):
    """Sample a binomial distribution of float32 or float64 from elements = (count, p).

    The rarer outcome is sampled, and its complement returned for p > 0.5. Ten or more expected successes take
    rejection, fewer take geometric gaps.
    """
    count, p = elements[0], elements[1]
    # An infinite number of trials draws nothing, as in ATen's kernel.
    drawn = mask & (count > 0) & (count < float("inf")) & (p > 0) & (p < 1)
    many = p > 0.5
    rare = tl.where(many, 1.0 - p, p)
    rejects = drawn & (count * rare >= 10)
    samples, used = _binomial_by_gaps(seed, counter, thread, used, count, rare, drawn & (rejects == 0), DTYPE)
    if any_of(rejects):
        rejected, used = _binomial_by_rejection(seed, counter, thread, used, count, rare, rejects, DTYPE)
        samples = tl.where(rejects, rejected, samples)
    samples = tl.where(many, count - samples, samples)
    # The special cases in ATen's order; a nan probability has no answer there, and gives nan here.
    samples = tl.where(p != p, float("nan"), tl.where(p >= 1, count, samples))
    return tl.where((count <= 0) | (p <= 0), 0.0, samples), used
