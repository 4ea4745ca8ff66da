"""Random numbers, permutations and dropout, equal to ATen's on CUDA for a seed and offset of the generator."""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl

from tritonite.dtypes import ALL, COMPLEX, FLOATS, NUMBERS, UNSIGNED, opmath
from tritonite.engine.iteration import (
    broadcast_shape,
    contiguous_strides,
    is_dense,
    may_overlap,
    suggests_channels_last,
)
from tritonite.engine.movement import fill, move, result, strides_in, strides_like, words
from tritonite.engine.random import Distribution, Order, draw, draw_elementwise, elementwise, permute, vectors
from tritonite.engine.rows.declare import Reduction, reduced
from tritonite.engine.sorting.lookback import check_length
from tritonite.errors import Decline
from tritonite.language import approximate, libdevice
from tritonite.language import random as sample
from tritonite.language.math import multiply_add, true_divide
from tritonite.ops import aten
from tritonite.ops.activation import leaky_relu_backward
from tritonite.ops.arithmetic import add, mul
from tritonite.ops.creation import alike, check_contiguous, fresh
from tritonite.registry import exclude, scalar_kernel
from tritonite.registry import operator as any_operator
from tritonite.runtime.contract import empty, empty_strided, limit, refuse_if_negative, unrepeatable
from tritonite.runtime.symbols import Limits, limits_of, number_type, zero_or_one

operator = functools.partial(any_operator, tensors_only=True)
_DRAWN = (*FLOATS, *COMPLEX)
_INTEGRAL = (*ALL, *UNSIGNED)
_FLOAT64 = limits_of(torch.float64)._replace(finite=True)
_POSITIVE = _FLOAT64._replace(least=math.ulp(0.0))
_NOT_NEGATIVE = _FLOAT64._replace(least=0.0)
_PROBABILITY = Limits(0, 1, 1.0, True, 0.0)
_INSIDE = Limits(1, 0, math.nextafter(1.0, 0.0), True, math.ulp(0.0))


# Transforms of samples, computed in the samples' dtype, as ATen's are. `engine/random.py`, Distribution, has their
# parameters.


@triton.jit
def _number(number, like, DTYPE: tl.constexpr):
    """Return a number of the call as a block, rounded to the result's dtype first, as ATen does."""
    number = number.to(like.dtype)
    return tl.broadcast_to(number.to(DTYPE).to(like.dtype), like.shape)


@triton.jit
def _uniform(value, inputs, first, second, low, span, DTYPE: tl.constexpr):
    """Map a uniform number of (0, 1] to [first, second); a result equal to `second` becomes `first`."""
    begin, end = _number(first, value, DTYPE), _number(second, value, DTYPE)
    width = (end - begin).to(DTYPE).to(value.dtype)
    drawn = multiply_add(value, width, begin).to(DTYPE).to(value.dtype)
    return (tl.where(drawn == end, begin, drawn),)


@triton.jit
def _normal(value, inputs, first, second, low, span, DTYPE: tl.constexpr):
    mean, deviation = _number(first, value, value.dtype), _number(second, value, value.dtype)
    return (multiply_add(value, deviation, mean),)


@triton.jit
def _normal_part(value, inputs, first, second, low, span, DTYPE: tl.constexpr):
    """Return one part of a complex normal number, whose variance is the sum of both parts' variances."""
    return _normal(value, inputs, first, second / 1.4142135623730951, low, span, DTYPE)


@triton.jit
def _log_normal(value, inputs, first, second, low, span, DTYPE: tl.constexpr):
    exponent = _normal(value, inputs, first, second, low, span, DTYPE)[0]
    if value.dtype == tl.float64:
        drawn = libdevice.exp(exponent)
    else:
        drawn = approximate.exp(exponent)
    return (drawn,)


@triton.jit
def _logarithm(x):
    """Return the logarithm of uniform numbers with ATen's precision."""
    if x.dtype == tl.float64:
        logarithm = libdevice.log(x)
    else:
        logarithm = approximate.log(x)
    return logarithm


@triton.jit
def exponential_of(value, inputs, first, second, low, span, DTYPE: tl.constexpr):
    """Return an exponential number of rate `first`, from a logarithm that is at most -epsilon / 2."""
    HALF: tl.constexpr = 2.0**-53 if value.dtype == tl.float64 else 2.0**-24
    logarithm = tl.where(value >= 1 - HALF, -HALF, _logarithm(value))
    rate = _number(first, value, value.dtype)
    return (true_divide(tl.full(value.shape, -1.0, value.dtype), rate) * logarithm,)


@triton.jit
def _cauchy(value, inputs, first, second, low, span, DTYPE: tl.constexpr):
    """Return a Cauchy number, from a tangent that is kept away from its poles."""
    median, scale = _number(first, value, value.dtype), _number(second, value, value.dtype)
    if value.dtype == tl.float64:
        tangent = libdevice.tan((value - 0.5) * 3.141592653589793)
    else:
        value = tl.minimum(tl.maximum(value, 2.0**-23), 1 - 2.0**-23)
        tangent = approximate.tan((value - 0.5) * 3.1415927410125732)
    return (multiply_add(scale, tangent, median),)


@triton.jit
def _truncated(value, DTYPE: tl.constexpr):
    """Convert a number for the result's dtype; integers are truncated to int64 first, as in ATen."""
    if DTYPE.is_int() and tl.int1 != DTYPE:
        value = value.to(tl.int64)
    return value


@triton.jit
def _geometric(value, inputs, first, second, low, span, DTYPE: tl.constexpr):
    p = _number(first, value, value.dtype)
    if value.dtype == tl.float64:
        failure = libdevice.log1p(-p)
    else:
        failure = approximate.log(1.0 - p)
    return (_truncated(libdevice.ceil(true_divide(_logarithm(value), failure)), DTYPE),)


@triton.jit
def _bernoulli(value, inputs, first, second, low, span, DTYPE: tl.constexpr):
    return (value < _number(first, value, value.dtype),)


@triton.jit
def _bernoulli_of(value, inputs, first, second, low, span, DTYPE: tl.constexpr):
    """Compare with probabilities from a tensor, float64 for float64 results and float32 for all others."""
    p = inputs[0]
    tl.device_assert((p >= 0) & (p <= 1), "a probability that is not between 0 and 1")
    return (value.to(p.dtype) <= p,)


@triton.jit
def _from_to(value, inputs, first, second, low, span, DTYPE: tl.constexpr):
    """Return low + value % span, with wrap-around."""
    drawn = (value % span.to(value.dtype)).to(tl.int64) + low
    return (_from_integer(drawn, DTYPE),)


@triton.jit
def _last_bits(value, inputs, first, second, low, span, DTYPE: tl.constexpr):
    """Return value % span & low."""
    return ((value % span.to(value.dtype)).to(tl.int64) & low,)


@triton.jit
def _all_bits(value, inputs, first, second, low, span, DTYPE: tl.constexpr):
    """Return all 64 bits."""
    return (_from_integer(value.to(tl.int64), DTYPE),)


@triton.jit
def _from_integer(drawn, DTYPE: tl.constexpr):
    """Convert an integer for the result's dtype; 16-bit floats are rounded from float32."""
    if tl.int1 == DTYPE:
        drawn = drawn != 0
    elif DTYPE.is_floating() and DTYPE.primitive_bitwidth == 16:
        drawn = drawn.to(tl.float32)
    return drawn


@triton.jit
def _kept(value, x, kept):
    """Return (result, mask) of dropout: elements kept with probability `kept`, and divided by it."""
    if x.dtype != tl.float64:
        x = x.to(tl.float32)
    kept = kept.to(x.dtype)
    scale = (1.0 / kept.to(tl.float64)).to(x.dtype)
    mask = value < kept
    return x * mask.to(x.dtype) * scale, mask


@triton.jit
def _dropout(value, inputs, first, second, low, span, DTYPE: tl.constexpr):
    return _kept(value, inputs[0], 1.0 - first)


@triton.jit
def _dropout_of_kept(value, inputs, first, second, low, span, DTYPE: tl.constexpr):
    return _kept(value, inputs[0], first)


@triton.jit
def _leaky(value, inputs, first, second, low, span, DTYPE: tl.constexpr):
    """Return (result, noise) of rrelu: elements at or below 0 times a slope between `first` and `second`."""
    x, wide = inputs[0], value.to(DTYPE).to(tl.float64)
    begin, width = tl.broadcast_to(first, wide.shape), tl.broadcast_to(second - first, wide.shape)
    slope = multiply_add(wide, width, begin)
    if tl.float64 != DTYPE:
        slope = slope.to(tl.float32)
    slope = slope.to(DTYPE).to(value.dtype)
    x = x.to(value.dtype)
    below = x <= 0
    return tl.where(below, x * slope, x), tl.where(below, slope, 1.0)


_UNIFORM = Distribution(_uniform, sample.uniform, sample.wide_uniform)
_NORMAL = Distribution(_normal, sample.normal, sample.wide_normal)
_NORMAL_PARTS = _NORMAL._replace(transform=_normal_part)
_LOG_NORMAL = _NORMAL._replace(transform=_log_normal)
_EXPONENTIAL = _UNIFORM._replace(transform=exponential_of)
_CAUCHY = _UNIFORM._replace(transform=_cauchy)
_GEOMETRIC = _UNIFORM._replace(transform=_geometric)
_BERNOULLI = _UNIFORM._replace(transform=_bernoulli)
_BERNOULLI_OF = _UNIFORM._replace(transform=_bernoulli_of)
_DROPOUT = _UNIFORM._replace(transform=_dropout)
_DROPOUT_OF_KEPT = _UNIFORM._replace(transform=_dropout_of_kept)
_LEAKY = _UNIFORM._replace(transform=_leaky)
_FROM_TO = Distribution(_from_to, sample.words, sample.wide_words)
_LAST_BITS = _FROM_TO._replace(transform=_last_bits)
_ALL_BITS = _FROM_TO._replace(transform=_all_bits)


def _target(self, accepts, outs, strides=None):
    """Return (the output, the tensor to draw into), which differ if ATen copies to out= from a tensor like `self`."""
    if self.dtype not in accepts:
        raise Decline(f"dtype {self.dtype}")
    inputs = () if outs and outs[0] is self else (self,)
    strides = strides_like(self, None) if strides is None else strides
    out = result(inputs, self.shape, self.dtype, outs, strides)
    if not outs or not inputs:
        return out, out
    same = is_dense(out.shape, out.stride()) and tuple(out.stride()) == tuple(strides)
    return out, out if same else result((self,), self.shape, self.dtype, (), strides)


def _done(out, drawn):
    if drawn is not out:
        out.copy_(drawn)
    return (out,)


def _draw_like(distribution, self, accepts, numbers, generator, outs, **settings):
    out, drawn = _target(self, accepts, outs)
    draw(distribution, drawn, numbers, generator=generator, **settings)
    return _done(out, drawn)


def _draw_uniform(out, begin, end, generator):
    if out.is_complex():
        out = torch.view_as_real(out)
    largest = torch.finfo(out.dtype).max
    if not (-largest <= begin <= end <= largest and end - begin <= largest):
        raise Decline(f"range from {begin} to {end}, which {out.dtype} does not represent")
    draw(_UNIFORM, out, (float(begin), float(end)), generator=generator)


def _draw_normal(out, mean, deviation, generator):
    limit(deviation, _NOT_NEGATIVE)
    parts = torch.view_as_real(out) if out.is_complex() else out
    draw(_NORMAL_PARTS if out.is_complex() else _NORMAL, parts, (mean, deviation), generator=generator)


@operator("uniform", accepts=_DRAWN, pin=("from", "to"))
def uniform(self, from_, to, generator=None, outs=()):
    out, drawn = _target(self, _DRAWN, outs)
    _draw_uniform(drawn, from_, to, generator)
    return _done(out, drawn)


@operator("normal", "normal_functional", accepts=_DRAWN)
def normal(self, mean, std, generator=None, outs=()):
    """Draw normal numbers (Box and Muller 1958)."""
    out, drawn = _target(self, _DRAWN, outs)
    _draw_normal(drawn, mean, std, generator)
    return _done(out, drawn)


@triton.jit
def _at_least_zero(x):
    return (x >= 0).to(tl.int32)


@triton.jit
def _and(a, b):
    return a & b


@triton.jit
def _minus_one(state, count):
    return state - 1


_not_negative = Reduction((1,), _at_least_zero, _and, _minus_one, (torch.int32,))


def _refuse_negative(deviations):
    """Decline negative deviations. The host waits for the check, as it does in ATen."""
    if deviations.dtype not in FLOATS:
        raise Decline(f"dtype {deviations.dtype}")
    if deviations.numel():
        (flag,) = reduced(_not_negative, (deviations,), None, False, (torch.int64,), (), opmath(deviations.dtype))
        refuse_if_negative(flag, "a negative deviation")


@operator("normal", accepts=FLOATS)
def normal_around(mean, std, generator=None, outs=()):
    """Draw normal numbers with means and deviations from tensors."""
    inputs = [x for x in (mean, std) if isinstance(x, torch.Tensor)]
    dtype = outs[0].dtype if outs else inputs[0].dtype
    if dtype not in FLOATS:
        raise Decline(f"dtype {dtype}")
    out = result(inputs, broadcast_shape([x.shape for x in inputs]), dtype, outs)
    if not isinstance(std, torch.Tensor):
        _draw_normal(out, 0.0, std, generator)
        return add.run((out, mean, 1), (out,))
    if not isinstance(mean, torch.Tensor):
        # ATen rounds the mean to the dtype before it adds it.
        number, mean = mean, empty((), dtype, out.device)
        fill(mean, number)
    _refuse_negative(std)
    draw(_NORMAL, out, (0.0, 1.0), generator=generator)
    mul.run((out, std), (out,))
    return add.run((out, mean, 1), (out,))


@operator("normal", accepts=_DRAWN)
def normal_of_size(mean, std, size, generator=None, dtype=None, layout=None, device=None, pin_memory=None, outs=()):
    """Draw a fresh tensor of normal numbers."""
    return _fresh_normal(size, mean, std, generator, (dtype, layout, device, pin_memory), outs)


@operator("log_normal", accepts=FLOATS)
def log_normal(self, mean, std, generator=None, outs=()):
    limit(std, _POSITIVE)
    return _draw_like(_LOG_NORMAL, self, FLOATS, (mean, std), generator, outs)


@operator("exponential", accepts=FLOATS)
def exponential(self, lambd, generator=None, outs=()):
    limit(lambd, _POSITIVE)
    return _draw_like(_EXPONENTIAL, self, FLOATS, (lambd, 0.0), generator, outs)


@operator("cauchy", accepts=FLOATS)
def cauchy(self, median, sigma, generator=None, outs=()):
    limit(sigma, _POSITIVE)
    return _draw_like(_CAUCHY, self, FLOATS, (median, sigma), generator, outs)


@operator("geometric", accepts=NUMBERS)
def geometric(self, p, generator=None, outs=()):
    limit(p, _INSIDE)
    return _draw_like(_GEOMETRIC, self, NUMBERS, (p, 0.0), generator, outs)


@operator("bernoulli", accepts=ALL)
def bernoulli(self, p, generator=None, outs=()):
    if isinstance(p, torch.Tensor):
        return _draw_by(self, p, strides_like(self, None), generator, outs)
    limit(p, _PROBABILITY)
    inplace = bool(outs) and outs[0] is self
    out, drawn = _target(self, ALL, outs, None if inplace else _contiguous(self))
    draw(_BERNOULLI, drawn, (p, 0.0), generator=generator)
    return _done(out, drawn)


@operator("bernoulli", accepts=FLOATS)
def bernoulli_by(self, generator=None, outs=()):
    if self.dtype not in FLOATS:
        raise Decline(f"dtype {self.dtype}")
    dtype = outs[0].dtype if outs else self.dtype
    if dtype not in ALL:
        raise Decline(f"dtype {dtype}")
    out = result((self,), self.shape, dtype, outs)
    _draw_bernoulli(out, self, generator)
    return (out,)


def _draw_by(self, p, strides, generator, outs):
    if p.dtype not in FLOATS:
        raise Decline(f"probabilities of dtype {p.dtype}")
    out, drawn = _target(self, ALL, outs, strides)
    if p is not out:
        result((p,), out.shape, out.dtype, (out,))
    if broadcast_shape((p.shape, self.shape)) != tuple(self.shape):
        raise Decline("shapes do not broadcast")
    _draw_bernoulli(drawn, p, generator)
    return _done(out, drawn)


def _draw_bernoulli(out, p, generator):
    """Draw bools by probabilities. An ATen thread has four elements that are contiguous in ATen's dimension order."""
    dtype = torch.float64 if out.dtype is torch.float64 else torch.float32
    p = p.to(dtype).expand(out.shape)
    order = _apply_order(out.shape, (out.stride(), p.stride()))
    ordered, p = out.permute(order), p.permute(order).contiguous()
    drawn = ordered if ordered.is_contiguous() else empty(ordered.shape, out.dtype, out.device)
    threads = -(-out.numel() // 2048) * 512
    draw_elementwise(_BERNOULLI_OF, Order(threads, 4, 12), (p,), (drawn,), generator=generator, asserting=True)
    if drawn is not ordered:
        ordered.copy_(drawn)


def _apply_order(shape, strides):
    """Return the dimension order, slowest first, of ATen's apply kernels."""
    order = list(range(len(shape)))
    for i in range(len(order)):
        for j in range(i + 1, len(order)):
            a, b = order[i], order[j]
            if shape[a] != 1 and shape[b] != 1:
                steps = [own[a] - own[b] for own in strides]
                if min(steps) < 0 and max(steps) <= 0:
                    order[i], order[j] = b, a
    return order


@operator("random", accepts=_INTEGRAL)
def random(self, generator=None, outs=()):
    """Draw integers up to the largest below which the dtype represents all of them."""
    dtype = self.dtype
    if dtype not in ALL:
        raise Decline(f"dtype {dtype}")
    bits = _DIGITS.get(dtype)
    span = 2 if dtype is torch.bool else torch.iinfo(dtype).max + 1 if bits is None else 2**bits + 1
    wide = dtype in (torch.int64, torch.float64)
    return _draw_like(_FROM_TO, self, ALL, (0.0, 0.0), generator, outs, span=(0, _signed(span)), wide=wide)


@operator("random", accepts=_INTEGRAL)
def random_from(self, from_, to, generator=None, outs=()):
    out, drawn = _target(self, _INTEGRAL, outs)
    _draw_integers(drawn, from_, to, generator)
    return _done(out, drawn)


@operator("random", accepts=_INTEGRAL)
def random_to(self, to, generator=None, outs=()):
    return random_from(self, 0, to, generator, outs)


# Bits of the integers that a float dtype represents without gaps.
_DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}


def _signed(number):
    """Return the int64 with the bits of an unsigned 64-bit integer."""
    return (number + 2**63) % 2**64 - 2**63


def _largest(dtype):
    """Return the largest integer that is drawn for a dtype."""
    digits = _DIGITS.get(dtype)
    return 2**digits if digits else 1 if dtype is torch.bool else torch.iinfo(dtype).max


def _draw_integers(out, begin, end, generator):
    """Draw integers of [begin, end), or up to the largest of the dtype if `end` is None."""
    dtype = out.dtype
    least = -(2**63) if dtype is torch.int64 else 0 if dtype in (torch.bool, *UNSIGNED) else None
    if least is None:
        least = -_largest(dtype) if dtype in _DIGITS else torch.iinfo(dtype).min
    largest = min(_largest(dtype), 2**63 - 1)
    last = largest if end is None else end - 1
    if end is None and dtype is torch.uint64:
        raise Decline("no end for uint64, whose largest integer ATen takes for -1")
    if type(begin) is not int or not least <= begin <= last <= largest:
        raise Decline(f"range from {begin} to {end}, which {dtype} does not represent")
    if dtype in UNSIGNED:
        out = words(out)
    if end is None and begin == -(2**63):
        draw(_ALL_BITS, out, generator=generator, wide=True)
        return
    span = last - begin + 1
    # ATen draws 64 bits for wide spans, over which 32 bits would not be uniform.
    draw(_FROM_TO, out, span=(begin, _signed(span)), generator=generator, wide=span >= 2**28)


# Fresh tensors.


def _fresh_uniform(size, generator, placement, outs):
    dtype, *others = placement
    out = fresh(size, torch.get_default_dtype() if dtype is None else dtype, *others, outs)
    if out.dtype not in _DRAWN:
        raise Decline(f"dtype {out.dtype}")
    _draw_uniform(out, 0.0, 1.0, generator)
    return (out,)


def _fresh_normal(size, mean, deviation, generator, placement, outs):
    dtype, *others = placement
    out = fresh(size, torch.get_default_dtype() if dtype is None else dtype, *others, outs)
    if out.dtype not in _DRAWN:
        raise Decline(f"dtype {out.dtype}")
    _draw_normal(out, mean, deviation, generator)
    return (out,)


def _drawn_like(self, memory_format, placement, accepts, outs, fill_in):
    """Fill a tensor like `self` with `fill_in`; to out= of another layout it is copied, as in ATen."""
    strides = strides_like(self, memory_format)
    out = alike(self, self.shape, *placement, outs, strides)
    if out.dtype not in accepts:
        raise Decline(f"dtype {out.dtype}")
    same = not outs or (is_dense(out.shape, out.stride()) and tuple(out.stride()) == tuple(strides))
    drawn = out if same else result((self,), self.shape, out.dtype, (), strides)
    fill_in(drawn)
    return _done(out, drawn)


@operator("rand", accepts=_DRAWN)
def rand(size, generator=None, dtype=None, layout=None, device=None, pin_memory=None, outs=()):
    return _fresh_uniform(size, generator, (dtype, layout, device, pin_memory), outs)


@operator("rand_like", accepts=_DRAWN)
def rand_like(self, generator=None, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None, outs=()):
    placement = (dtype, layout, device, pin_memory)
    return _drawn_like(
        self, memory_format, placement, _DRAWN, outs, lambda out: _draw_uniform(out, 0.0, 1.0, generator)
    )


@operator("randn", accepts=_DRAWN)
def randn(size, generator=None, dtype=None, layout=None, device=None, pin_memory=None, outs=()):
    """Draw a fresh tensor of standard normal numbers."""
    return _fresh_normal(size, 0.0, 1.0, generator, (dtype, layout, device, pin_memory), outs)


@operator("randn_like", accepts=_DRAWN)
def randn_like(
    self, generator=None, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None, outs=()
):
    """Draw a tensor of standard normal numbers like another."""
    placement = (dtype, layout, device, pin_memory)
    return _drawn_like(self, memory_format, placement, _DRAWN, outs, lambda out: _draw_normal(out, 0.0, 1.0, generator))


@operator("randint", accepts=_INTEGRAL)
def randint(high, size, low=0, generator=None, dtype=None, layout=None, device=None, pin_memory=None, outs=()):
    # The schema's default is a dtype's number, which means int64. None is the default dtype.
    dtype = dtype if dtype is None or isinstance(dtype, torch.dtype) else torch.int64
    out = fresh(size, dtype, layout, device, pin_memory, outs)
    if out.dtype not in _INTEGRAL:
        raise Decline(f"dtype {out.dtype}")
    _draw_integers(out, 0 if low is None else low, high, generator)
    return (out,)


@operator("randint_like", accepts=_INTEGRAL)
def randint_like(
    self,
    high,
    low=0,
    generator=None,
    dtype=None,
    layout=None,
    device=None,
    pin_memory=None,
    memory_format=None,
    outs=(),
):
    placement, begin = (dtype, layout, device, pin_memory), 0 if low is None else low
    return _drawn_like(
        self, memory_format, placement, _INTEGRAL, outs, lambda out: _draw_integers(out, begin, high, generator)
    )


for _name in ("Tensor", "Tensor_out", "Tensor_generator", "Tensor_generator_out"):
    exclude(
        f"randint_like.{_name}",
        "the host reads its end, a tensor on the CPU, and calls random_.from, which has a kernel",
    )
for _name in ("_philox_normal", "_philox_uniform"):
    for _form in ("", ".out"):
        exclude(f"{_name}{_form}", "new in torch 2.13, by keys in a tensor; no GPU has been compared with ATen's")


@operator("randperm", accepts=(torch.int64, torch.int32, torch.int16, torch.float32, torch.float16, torch.float64))
def randperm(n, generator=None, dtype=None, layout=None, device=None, pin_memory=None, outs=()):
    """Sort random keys, of enough bits that few are equal, and shuffle the equal ones."""
    dtype = dtype if isinstance(dtype, torch.dtype) else torch.int64
    check_contiguous(outs)
    if n < 0:
        raise Decline(f"n = {n}, which is negative")
    check_length(n)
    out = fresh((n,), dtype, layout, device, pin_memory, outs)
    if out.dtype not in NUMBERS or out.dtype is torch.bfloat16 or n > _largest(out.dtype):
        raise Decline(f"dtype {out.dtype}")
    if not n:
        return (out,)
    bits = math.ceil(math.log2(n - (6 * n * n + 1) / (12 * math.log(0.9))))
    keys = empty((n,), torch.int32 if bits <= 32 else torch.int64, out.device)
    if bits == 32:
        _draw_integers(keys, -(2**31), 2**31 - 1, generator)
    else:
        # ATen draws from the least to the largest integer, without that, and keeps the lowest bits.
        width = 8 * keys.dtype.itemsize
        draw(_LAST_BITS, keys, span=(2**bits - 1, _signed(2**width - 1)), generator=generator, wide=True)
    permute(keys, out, bits, generator)
    return (out,)


# Functions of operands and random numbers.


def _dropped(distribution, self, p, mask_dtype, generator, outs):
    """Drop elements. ATen's vectors, on which the numbers depend, have up to 16 bytes, and divide a dense tensor."""
    if self.dtype not in FLOATS:
        raise Decline(f"dtype {self.dtype}")
    strides, numel = strides_like(self, None), self.numel()
    given = outs or (None, None)
    found = [
        result((self,), self.shape, dtype, () if out is None else (out,), strides)
        for out, dtype in zip(given, (self.dtype, mask_dtype), strict=True)
    ]
    if outs and may_overlap(*found):
        raise Decline("a result and a mask that overlap")
    if not numel:
        return found
    vector = 16 // self.dtype.itemsize if is_dense(self.shape, self.stride()) else 1
    while numel % vector:
        vector //= 2
    if vector > 1 and self.data_ptr() % 16:
        unrepeatable("an address that is not a multiple of 16 decides the width of ATen's vectors")
        while self.data_ptr() % (vector * self.dtype.itemsize):
            vector //= 2
    # Vectors follow memory order; single elements follow the order of dimensions.
    order = vectors(numel, vector, self.device) if vector > 1 else elementwise(numel, 4, self.device)
    laid_out = strides if vector > 1 else contiguous_strides(self.shape)
    source = self if vector > 1 else self.contiguous()
    drawn = [
        out if tuple(out.stride()) == tuple(laid_out) else empty_strided(out.shape, laid_out, out.dtype, out.device)
        for out in found
    ]
    draw_elementwise(distribution, order, (source,), drawn, (p, 0.0), generator)
    for out, buffer in zip(found, drawn, strict=True):
        if out is not buffer:
            out.copy_(buffer)
    return found


@operator("native_dropout", accepts=FLOATS, pin_zero_or_one=("p",))
def native_dropout(input, p, train, outs=()):
    if aten.on_cpu() and not input.numel():
        raise Decline("no elements")
    limit(p, _PROBABILITY)
    if train is not False and zero_or_one(p) != 1:
        return _dropped(_DROPOUT, input, p, torch.bool, None, outs)
    if input.dtype not in FLOATS:
        raise Decline(f"dtype {input.dtype}")
    strides = strides_like(input, None)
    kept = train is False
    out = result((input,), input.shape, input.dtype, outs[:1], strides)
    mask = result((input,), input.shape, torch.bool, outs[1:], strides)
    if kept:
        move(input, out)
    else:
        fill(out, 0)
    fill(mask, int(kept))
    return out, mask


@operator("_fused_dropout", accepts=FLOATS, cuda_only=("_fused_dropout", "_fused_dropout.out"))
def fused_dropout(self, p, generator=None, outs=()):
    """Drop elements; `p` is the probability to keep an element."""
    return _dropped(_DROPOUT_OF_KEPT, self, p, torch.uint8, generator, outs)


@scalar_kernel(accepts=FLOATS, own=("mask",), cast=("scale",))
def _scaled(self, mask, scale):
    return mask.to(self.dtype) * self * scale


@operator("_masked_scale", kernels=(_scaled,), cuda_only=("_masked_scale", "_masked_scale.out"))
def masked_scale(self, mask, scale, outs=()):
    """Return the gradient of `_fused_dropout`."""
    if mask.dtype is not torch.uint8 or mask.shape != self.shape:
        raise Decline(f"a mask of {mask.dtype} and shape {tuple(mask.shape)}, not of uint8 and {tuple(self.shape)}")
    if not outs:
        form = torch.channels_last if suggests_channels_last(self) else torch.contiguous_format
        form = torch.channels_last_3d if self.dim() == 5 and form is torch.channels_last else form
        outs = (result((self, mask), self.shape, self.dtype, (), strides_in(self.shape, form)),)
    return _scaled.run((self, mask, scale), outs)


@scalar_kernel(accepts=FLOATS, exact=("lower", "upper"))
def _slope_of_both(self, lower, upper):
    return tl.where(self > 0, self, self * ((lower + upper) / 2).to(self.dtype))


def _check_slopes(*slopes):
    if any(number_type(slope) not in (int, float) for slope in slopes):
        raise Decline("slopes that are neither int nor float")


def _leaked(self, noise, lower, upper, training, generator, outs, strides=None):
    """Multiply elements at or below 0 by random slopes, and write all slopes to the noise (1 above 0)."""
    if self.dtype not in FLOATS or noise.dtype is not self.dtype or noise.shape != self.shape:
        raise Decline(f"noise of {noise.dtype} and shape {tuple(noise.shape)} for {self.dtype} and {tuple(self.shape)}")
    if noise.device != self.device:
        raise Decline(f"noise on {noise.device}, not on {self.device}")
    if aten.on_cpu() and training and self.dtype is torch.float16:
        raise Decline(f"dtype {self.dtype}, which ATen does not serve on CPUs")
    _check_slopes(lower, upper)
    inplace, strides = bool(outs) and outs[0] is self, _contiguous(self) if strides is None else strides
    if not training:
        out = result(() if inplace else (self,), self.shape, self.dtype, outs, strides)
        return _slope_of_both.run((self, lower, upper), (out,))
    out = result((noise,) if inplace else (self, noise), self.shape, self.dtype, outs, strides)
    if may_overlap(noise, self):
        raise Decline("noise that overlaps the input")
    drawn = out if out.is_contiguous() else empty(out.shape, out.dtype, out.device)
    wide = out.dtype is torch.float64
    # Like ATen, do not write to noise that is not contiguous.
    noise = noise if noise.is_contiguous() else empty(noise.shape, noise.dtype, noise.device)
    if out.numel():
        order = elementwise(out.numel(), 2 if wide else 4, out.device)
        draw_elementwise(_LEAKY, order, (self.contiguous(),), (drawn, noise), (lower, upper), generator, wide=wide)
    return _done(out, drawn)


@operator("rrelu_with_noise", accepts=FLOATS)
def rrelu_with_noise(self, noise, lower, upper, training, generator=None, outs=()):
    return _leaked(self, noise, lower, upper, training, generator, outs)


@operator("rrelu_with_noise_functional", accepts=FLOATS)
def rrelu_with_noise_functional(self, noise, lower, upper, training, generator=None, outs=()):
    copied = result((noise,), noise.shape, noise.dtype, (), strides_like(noise, None))
    if not (training and noise.is_contiguous()):
        move(noise, copied)
    return *_leaked(self, copied, lower, upper, training, generator, (), strides_like(self, None)), copied


@operator("rrelu_with_noise_backward", accepts=FLOATS, pin=("lower", "upper"))
def rrelu_with_noise_backward(grad_output, self, noise, lower, upper, training, self_is_result, outs=()):
    if grad_output.dtype not in FLOATS:
        raise Decline(f"dtype {grad_output.dtype}")
    _check_slopes(lower, upper)
    if training:
        return mul.run((noise, grad_output), outs)
    slope = (float(lower) + float(upper)) / 2
    if self_is_result and not slope >= 0:
        raise Decline(f"slope {slope}, which is negative, with the result in place of the input")
    return leaky_relu_backward.run((self, grad_output, slope), outs)


def _contiguous(self):
    return strides_in(self.shape, torch.contiguous_format)
