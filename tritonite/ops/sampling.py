"""multinomial, poisson, binomial, gamma and Dirichlet samples, and gradients with respect to their parameters."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.dtypes import FLOATS, FULL_FLOATS
from tritonite.engine.iteration import INT32_LIMIT, broadcast_shape
from tritonite.engine.movement import move, result, strides_like
from tritonite.engine.multinomial import check_weights, normalized, sample_rows
from tritonite.engine.random import Distribution, draw_elementwise, elementwise, sample_each
from tritonite.errors import Decline
from tritonite.language import libdevice, rejection
from tritonite.language import random as sample
from tritonite.language.math import square_root, true_divide
from tritonite.ops.gamma import psi
from tritonite.ops.random.transforms import exponential_of
from tritonite.ops.reduction.extrema import argmax
from tritonite.ops.reduction.sums import sum
from tritonite.ops.scan import cumsum
from tritonite.ops.sorting import topk
from tritonite.registry import operator as any_operator
from tritonite.registry import scalar_kernel
from tritonite.runtime.contract import empty, empty_strided

operator = functools.partial(any_operator, tensors_only=True)
# Elements of an ATen thread that samples several, as in torch 2.11.
_TURNS = 8


# Categories by their weights.


@triton.jit
def _race(value, inputs, first, second, low, span, DTYPE: tl.constexpr):
    """Return a weight divided by an exponential number, which is rounded before the division, as in ATen."""
    rate = tl.full((), 1.0, tl.float64)
    drawn = exponential_of(value, inputs, rate, second, low, span, DTYPE)[0].to(DTYPE)
    return (true_divide(inputs[0].to(value.dtype), drawn.to(value.dtype)),)


_RACE = Distribution(_race, sample.uniform, sample.wide_uniform)


def _first_of_race(weights, count, generator, out):
    """Sample without replacement: the largest weights divided by exponential numbers (Efraimidis and Spirakis 2006)."""
    strides = strides_like(weights, None)
    if weights.numel() * weights.dtype.itemsize >= INT32_LIMIT:
        raise Decline(f"{weights.numel()} weights, which 32-bit offsets do not reach")
    ratios, source = (empty_strided(weights.shape, strides, weights.dtype, weights.device) for _ in range(2))
    if tuple(weights.stride()) == tuple(strides):
        source = weights
    else:
        move(weights, source)
    wide = weights.dtype is torch.float64
    order = elementwise(weights.numel(), 2 if wide else 4, weights.device)
    draw_elementwise(_RACE, order, (source,), (ratios,), generator=generator, wide=wide)
    if count == 1:
        argmax(ratios, -1, True, (out,))
    else:
        topk(ratios, count, -1, True, True, (empty(out.shape, weights.dtype, out.device), out))


@operator("multinomial", accepts=FLOATS)
def multinomial(self, num_samples, replacement=False, generator=None, outs=()):
    """Sample categories: with replacement by search in cumulative sums, without by a race of exponential times."""
    if self.dtype not in FLOATS or self.dim() not in (1, 2):
        raise Decline(f"dtype {self.dtype} and {self.dim()} dimensions, not 1 or 2")
    categories = self.shape[-1]
    if not 0 < num_samples <= (num_samples if replacement else categories) or not 0 < categories <= 2**24:
        raise Decline(f"{num_samples} samples of {categories} categories, replacement={replacement}")
    out = result((self,), (*self.shape[:-1], num_samples), torch.int64, outs)
    if not out.numel():
        return (out,)
    weights = self if self.dim() == 2 else self.unsqueeze(0)
    if not replacement or num_samples == 1:
        check_weights(weights)
        _first_of_race(self, num_samples, generator, out)
        return (out,)
    if self.dtype not in FULL_FLOATS:
        raise Decline(f"dtype {self.dtype}, whose sums ATen rounds after each term")
    check_weights(weights)
    probabilities = normalized(weights)
    drawn = out if out.is_contiguous() else empty(out.shape, torch.int64, out.device)
    sample_rows(probabilities, cumsum(probabilities, 1)[0], drawn, generator)
    if drawn is not out:
        out.copy_(drawn)
    return (out,)


# Samples of distributions by elements.


def _check(operands, accepts, on_cpu=True):
    """Decline operands of several dtypes, and operands that do not broadcast to the shape of the first."""
    first = operands[0]
    if any(x.dtype is not first.dtype or x.dtype not in accepts for x in operands):
        raise Decline(f"operands of {', '.join(str(x.dtype) for x in operands)}")
    if devices.current.aten == "cpu" and first.dtype.itemsize == 2 and not on_cpu:
        raise Decline(f"dtype {first.dtype}, which ATen does not serve on CPUs")
    if broadcast_shape([x.shape for x in operands]) != tuple(first.shape):
        raise Decline("operands that broadcast to another shape than the first one's, for which ATen warns")


def _sampled(sampler, parameters, advance, generator, outs, turns=1, asserting=False):
    """Return (the output, a contiguous tensor with the samples); a fresh output is contiguous, as in ATen."""
    shape, dtype = parameters[0].shape, parameters[0].dtype
    out = result(parameters, shape, dtype, outs)
    drawn = out if out.is_contiguous() else empty(out.shape, dtype, out.device)
    sources = [x.expand(shape).contiguous() for x in parameters]
    sample_each(sampler, sources, drawn, advance, turns, generator, asserting)
    return out, drawn


def _done(out, drawn):
    if drawn is not out:
        out.copy_(drawn)
    return (out,)


@operator("poisson", accepts=FLOATS)
def poisson(self, generator=None, outs=()):
    """Sample as cuRAND does: by Knuth's products, by rejection with the incomplete gamma function, or by rounding.

    The last rounds a normal number, for large rates.
    """
    _check((self,), FLOATS)
    return _done(*_sampled(rejection.poisson, (self,), 20, generator, outs, asserting=True))


@operator("binomial", accepts=FULL_FLOATS)
def binomial(count, prob, generator=None, outs=()):
    """Sample by geometric gaps between successes, or by transformed rejection (Hoermann 1993)."""
    _check((count, prob), FULL_FLOATS)
    return _done(*_sampled(rejection.binomial, (count, prob), 44, generator, outs, turns=_TURNS))


@operator("_standard_gamma", accepts=FLOATS)
def standard_gamma(self, generator=None, outs=()):
    """Sample by rejection (Marsaglia and Tsang 2000)."""
    _check((self,), FLOATS, on_cpu=False)
    return _done(*_sampled(rejection.gamma, (self,), 12, generator, outs))


@scalar_kernel(accepts=FLOATS, exact=("least", "most"))
def _clamped_quotient(self, total, least, most):
    quotient = true_divide(self, total)
    quotient = tl.where(quotient < least.to(self.dtype), least.to(self.dtype), quotient)
    return tl.where(quotient > most.to(self.dtype), most.to(self.dtype), quotient)


@operator("_sample_dirichlet", accepts=FLOATS)
def sample_dirichlet(self, generator=None, outs=()):
    """Sample gamma numbers and divide them by their sum."""
    _check((self,), FLOATS, on_cpu=False)
    out, drawn = _sampled(rejection.gamma, (self,), 12, generator, outs)
    if out.numel():
        info = torch.finfo(out.dtype)
        (total,) = sum(drawn, -1 if self.dim() else None, True)
        _clamped_quotient.run((drawn, total, info.tiny, 1 - info.eps), (drawn,))
    return _done(out, drawn)


# Gradients with respect to the parameters, in float64 because terms cancel. The approximations are all ATen's, since
# they differ from each other at the boundaries between them.


@triton.jit
def _digamma(x):
    """Return the digamma function, infinity at poles as in ATen."""
    pole = (x <= 0) & (x == libdevice.floor(x))
    return tl.where(pole, float("inf"), psi(tl.where(pole, 1.0, x)))


@triton.jit
def _not_nan(x):
    return tl.where(x != x, 0.0, x)


@triton.jit
def _negative(x):
    """Return -x, also for zeros, which Triton's minus subtracts from 0."""
    return x * -1.0


@triton.jit
def _gamma_gradient_near_zero(alpha, x):
    """Return the gradient by the series of the distribution function."""
    number = tl.full(x.shape, 1.0, tl.float64)
    below = alpha
    first, second = number / below, number / (below * below)
    for i in tl.static_range(1, 6):
        number = number * (-x / i)
        below = below + 1.0
        first += number / below
        second += number / (below * below)
    power = libdevice.pow(x, alpha)
    density = libdevice.pow(x, alpha - 1.0) * libdevice.exp(-x)
    slope = (libdevice.log(x) - _digamma(alpha)) * (power * first) - power * second
    return _not_nan(_negative(slope) / density)


@triton.jit
def _gamma_gradient_at_saddle(alpha, x):
    """Return the gradient for large alpha, by Rice's saddle point expansion, and by its series for x near alpha."""
    above = (1.0 + 24.0 * alpha * (1.0 + 12.0 * alpha)) * (
        1440.0 * alpha * alpha + 6.0 * x * (53.0 - 120.0 * x) - 65.0 * x * x / alpha + alpha * (107.0 + 3600.0 * x)
    )
    near = above / (1244160.0 * (alpha * alpha) * (alpha * alpha))
    root = square_root(8.0 * alpha)
    ratio = libdevice.log(x / alpha)
    distance = alpha - x
    second = root / distance
    third = libdevice.pow(x - alpha - alpha * ratio, tl.full(x.shape, -1.5, tl.float64))
    both = tl.where(x < alpha, second - third, second + third)
    first = ratio * both - square_root(2.0 / alpha) * (alpha + x) / (distance * distance)
    stirling = 1.0 + 1.0 / (12.0 * alpha) * (1.0 + 1.0 / (24.0 * alpha))
    # The bounds are float32 numbers.
    inside = (0.8999999761581421 * alpha <= x) & (x <= 1.100000023841858 * alpha)
    return tl.where(inside, near, _negative(stirling) * (x * first) / root)


@triton.jit
def _rational(u, v, first: tl.constexpr, second: tl.constexpr, third: tl.constexpr):
    """Return a polynomial in v, highest power first, whose coefficients are quadratic polynomials in u."""
    total = tl.zeros_like(v)
    for i in tl.static_range(len(first)):
        total = total * v + (first[i] + u * (second[i] + u * third[i]))
    return total


@triton.jit
def _gamma_gradient_between(alpha, x):
    """Return the gradient for all other x and alpha, by a rational approximation of its logarithm."""
    u, v = libdevice.log(x / alpha), libdevice.log(alpha)
    above = _rational(
        u,
        v,
        (-0.0030648343, 0.025146376, -0.094634809, 0.16009398),
        (-0.0015649758, 0.065735949, 0.1298071, 0.53487893),
        (-0.0013441777, -0.0026286047, -0.0065914022, 0.040121004),
    )
    below = _rational(
        u,
        v,
        (0.0014179084, 0.10406089, 0.32668115, 1.0),
        (-0.00058392623, -0.0035938915, 0.020070113, 0.16639465),
        (-1.5247877e-07, 0.00085092367, -0.0021309326, 0.017050642),
    )
    return libdevice.exp(above / below)


@scalar_kernel(accepts=FLOATS)
def _gamma_gradient(self, output):
    alpha, x = tl.broadcast(self.to(tl.float64), output.to(tl.float64))
    near_zero = x < 0.800000011920929
    saddle = (near_zero == 0) & (alpha > 8.0)
    found = _gamma_gradient_between(alpha, x)
    if tl.max(near_zero.to(tl.int32), axis=None) != 0:
        found = tl.where(near_zero, _gamma_gradient_near_zero(alpha, x), found)
    if tl.max(saddle.to(tl.int32), axis=None) != 0:
        found = tl.where(saddle, _gamma_gradient_at_saddle(alpha, x), found)
    return found.to(self.dtype)


@triton.jit
def _beta_gradient_by_first(x, alpha, beta):
    """Return the gradient with respect to alpha for x near 0, by a Taylor series."""
    factor = _digamma(alpha) - _digamma(alpha + beta) - libdevice.log(x)
    number = tl.full(x.shape, 1.0, tl.float64)
    series = number / alpha * (factor + 1.0 / alpha)
    for i in tl.static_range(1, 11):
        number = number * ((i - beta) * x / i)
        below = alpha + i
        series += number / below * (factor + 1.0 / below)
    return _not_nan(x * libdevice.pow(1.0 - x, -beta) * series)


@triton.jit
def _beta_gradient_by_second(x, alpha, beta):
    """Return the gradient with respect to beta for x near 0, by a Taylor series."""
    factor = _digamma(alpha + beta) - _digamma(beta)
    number = tl.full(x.shape, 1.0, tl.float64)
    betas, slopes, series = number, tl.zeros_like(x), factor / alpha
    for i in tl.static_range(1, 9):
        number = number * (-x / i)
        slopes = slopes * (beta - i) + betas
        betas = betas * (beta - i)
        series += number / (alpha + i) * (slopes + factor * betas)
    return _not_nan(_negative(libdevice.pow(1.0 - x, 1.0 - beta)) * series)


@triton.jit
def _stirling(x):
    return 1.0 + 1.0 / (12.0 * x) + 1.0 / (288.0 * x * x)


@triton.jit
def _beta_gradient_at_saddle(x, alpha, beta):
    """Return the gradient for large alpha and beta, by Rice's saddle point expansion, or its series near the mean."""
    total = alpha + beta
    mean = alpha / total
    deviation = square_root(alpha * beta / (total + 1.0)) / total
    square = beta * beta
    last = 8.0 * (1.0 - x) * (135.0 * beta - 11.0)
    fourth = (453.0 + 1620.0 * beta * (1.0 - x) - 455.0 * x) * beta + alpha * last
    third = 3.0 * (59.0 + 180.0 * beta - 90.0 * x) * square + alpha * fourth
    second = (43.0 + 20.0 * (16.0 + 27.0 * beta) * x) * square * beta + alpha * third
    series = 47.0 * x * square * square + alpha * second
    above = (1.0 + 12.0 * alpha) * (1.0 + 12.0 * beta) / (total * total)
    below = 12960.0 * alpha * alpha * alpha * beta * beta * (1.0 + 12.0 * total)
    near = above / (1.0 - x) * series / below
    scale = _negative(x) / square_root(2.0 * alpha * beta / total)
    stirling = _stirling(alpha) * _stirling(beta) / _stirling(total)
    distance = alpha * (x - 1.0) + beta * x
    above = 2.0 * (alpha * alpha) * (x - 1.0) + alpha * beta * (x - 1.0) - x * square
    exponent = tl.full(x.shape, 1.5, tl.float64)
    first = above / (square_root(2.0 * alpha / beta) * libdevice.pow(total, exponent) * distance * distance)
    ratio = libdevice.log(alpha / (total * x))
    third = square_root(8.0 * alpha * beta / total) / distance
    base = beta * libdevice.log(beta / (total * (1.0 - x))) + alpha * ratio
    fourth = libdevice.pow(base, -exponent)
    terms = first + 0.5 * ratio * (third + tl.where(x < mean, fourth, -fourth))
    inside = (mean - 0.1 * deviation <= x) & (x <= mean + 0.1 * deviation)
    return tl.where(inside, near, stirling * scale * terms)


# Coefficients of the correction's numerator and denominator, polynomials in u = log(x), a = log(alpha) - u and
# b = log(total) - a: 3 powers of u, 3 of a, and 4 of b, the highest of b first.
_ABOVE = tl.constexpr(
    (
        *(0.01201642863, -0.0657888334, -0.01061107488, 1.003668233),
        *(-0.001465281033, 0.05486251648, -0.3557432599, 0.6336835991),
        *(-0.0001557569013, 0.002429354597, 0.004474107445, -0.03276231906),
        *(0.01074823814, 0.01799915743, -0.3187676331, 0.221950385),
        *(0.001550077057, 0.01535556598, 0.06219954479, -0.2951249643),
        *(6.976601077e-05, 0.001292462449, 0.004170831599, 0.02155310298),
        *(0.002319392565, 0.01085618172, 0.008441916499, -0.05980841433),
        *(0.000751041181, -0.002721828457, 0.01400243777, 0.02911413504),
        *(5.385558597e-05, -9.495446725e-06, -0.001936558688, 0.005900514878),
    )
)
_BELOW = tl.constexpr(
    (
        *(0.007285809825, -0.04438342661, -0.02924021934, 1.0),
        *(-0.002407477521, 0.05454656494, -0.3473456711, 0.6357567472),
        *(-0.0002307248149, 0.00231480583, 0.004845219414, -0.03301322327),
        *(0.000564515273, 0.01505928619, -0.1757678135, 0.5925320577),
        *(-0.0007316646956, 0.01272886114, -0.06589186703, 0.1014815858),
        *(-4.12701925e-05, 0.0003934994223, 0.001096195486, -0.007258481865),
        *(-5.896963079e-05, 0.002902096474, -0.0236701437, 0.06469649321),
        *(-6.063713228e-05, 0.0008000589141, -0.002869809258, 0.001925008108),
        *(-1.650964693e-06, 1.097287507e-05, 6.959756487e-05, -0.0003477407336),
    )
)


@triton.jit
def _polynomial(u, a, b, coefficients: tl.constexpr):
    """Return a polynomial in u, a and b with 36 coefficients."""
    total = tl.zeros_like(b)
    power = tl.full(b.shape, 1.0, tl.float64)
    for i in tl.static_range(3):
        both = power
        for j in tl.static_range(3):
            inner = tl.zeros_like(b)
            for k in tl.static_range(4):
                inner = inner * b + coefficients[12 * i + 4 * j + k]
            total += both * inner
            both = both * a
        power = power * u
    return total


@triton.jit
def _beta_gradient_between(x, alpha, total, beta):
    """Return the gradient for all other arguments, by a rational correction of the analytic approximation."""
    u = libdevice.log(x)
    a = libdevice.log(alpha) - u
    b = libdevice.log(total) - a
    ratio = _polynomial(u, a, b, _ABOVE) / _polynomial(u, a, b, _BELOW)
    return ratio * (x * (_digamma(total) - _digamma(alpha)) / beta)


@scalar_kernel(accepts=FULL_FLOATS)
def _dirichlet_gradient(x, alpha, total):
    dtype: tl.constexpr = x.dtype
    x, alpha = tl.broadcast(x, alpha)
    x, total = tl.broadcast(x, total)
    alpha, total = tl.broadcast(alpha, total)
    # Boundaries between the approximations are compared in the operands' dtype.
    beta, boundary = total - alpha, total * x * (1.0 - x)
    first = (x <= 0.5) & (boundary < 2.5)
    second = (first == 0) & (x >= 0.5) & (boundary < 0.75)
    saddle = ((first | second) == 0) & (alpha > 6.0) & (beta > 6.0)
    x, alpha, total, beta = x.to(tl.float64), alpha.to(tl.float64), total.to(tl.float64), beta.to(tl.float64)
    found = _beta_gradient_between(x, alpha, total, total - alpha)
    if tl.max(first.to(tl.int32), axis=None) != 0:
        found = tl.where(first, _beta_gradient_by_first(x, alpha, beta), found)
    if tl.max(second.to(tl.int32), axis=None) != 0:
        found = tl.where(second, _negative(_beta_gradient_by_second(1.0 - x, beta, alpha)), found)
    if tl.max(saddle.to(tl.int32), axis=None) != 0:
        found = tl.where(saddle, _beta_gradient_at_saddle(x, alpha, total - alpha), found)
    return found.to(dtype)


def _gradient(kernel, operands, accepts, outs):
    """Run a gradient's formula, with a contiguous fresh result as in ATen."""
    _check(operands, accepts, on_cpu=False)
    return kernel.run(operands, (result(operands, operands[0].shape, operands[0].dtype, outs),))


@operator("_standard_gamma_grad", kernels=(_gamma_gradient,))
def standard_gamma_grad(self, output, outs=()):
    return _gradient(_gamma_gradient, (self, output), FLOATS, outs)


@operator("_dirichlet_grad", kernels=(_dirichlet_gradient,))
def dirichlet_grad(x, alpha, total, outs=()):
    return _gradient(_dirichlet_gradient, (x, alpha, total), FULL_FLOATS, outs)
