"""Random numbers of a distribution, in place or in a tensor like another."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from tritonite.dtypes import ALL, FLOATS, NUMBERS, opmath
from tritonite.engine.iteration import broadcast_shape
from tritonite.engine.movement import fill, result, strides_like
from tritonite.engine.random import Order, draw, draw_elementwise
from tritonite.errors import Decline
from tritonite.ops.arithmetic import add, mul
from tritonite.ops.random.draws import (
    DIGITS,
    DRAWN,
    INTEGRAL,
    POSITIVE,
    PROBABILITY,
    as_int64,
    draw_integers,
    draw_normal,
    draw_uniform,
    operator,
    row_major,
    target_of,
    written_to,
)
from tritonite.ops.random.transforms import (
    BERNOULLI,
    BERNOULLI_OF,
    CAUCHY,
    EXPONENTIAL,
    FROM_TO,
    GEOMETRIC,
    LOG_NORMAL,
    NORMAL,
)
from tritonite.ops.reduction.logic import all_satisfy, refuse_unless_all
from tritonite.runtime.contract import empty, limit
from tritonite.runtime.symbols import Limits

_INSIDE = Limits(1, 0, math.nextafter(1.0, 0.0), True, math.ulp(0.0))


def _draw_like(distribution, self, accepts, numbers, generator, outs, **settings):
    out, drawn = target_of(self, accepts, outs)
    draw(distribution, drawn, numbers, generator=generator, **settings)
    return written_to(out, drawn)


@operator("uniform", accepts=DRAWN, pin=("from", "to"))
def uniform(self, from_, to, generator=None, outs=()):
    out, drawn = target_of(self, DRAWN, outs)
    draw_uniform(drawn, from_, to, generator)
    return written_to(out, drawn)


@operator("normal", "normal_functional", accepts=DRAWN)
def normal(self, mean, std, generator=None, outs=()):
    """Draw normal numbers (Box and Muller 1958)."""
    out, drawn = target_of(self, DRAWN, outs)
    draw_normal(drawn, mean, std, generator)
    return written_to(out, drawn)


@triton.jit
def _at_least_zero(x):
    return (x >= 0).to(tl.int32)


_not_negative = all_satisfy(_at_least_zero)


def _refuse_negative(deviations):
    """Decline negative deviations. The host waits for the check, as it does in ATen."""
    if deviations.dtype not in FLOATS:
        raise Decline(f"dtype {deviations.dtype}")
    if deviations.numel():
        refuse_unless_all(_not_negative, (deviations,), opmath(deviations.dtype), "a negative deviation")


@operator("normal", accepts=FLOATS)
def normal_around(mean, std, generator=None, outs=()):
    """Draw normal numbers with means and deviations from tensors."""
    inputs = [x for x in (mean, std) if isinstance(x, torch.Tensor)]
    dtype = outs[0].dtype if outs else inputs[0].dtype
    if dtype not in FLOATS:
        raise Decline(f"dtype {dtype}")
    out = result(inputs, broadcast_shape([x.shape for x in inputs]), dtype, outs)
    if not isinstance(std, torch.Tensor):
        draw_normal(out, 0.0, std, generator)
        return add.run((out, mean, 1), (out,))
    if not isinstance(mean, torch.Tensor):
        # ATen rounds the mean to the dtype before it adds it.
        number, mean = mean, empty((), dtype, out.device)
        fill(mean, number)
    _refuse_negative(std)
    draw(NORMAL, out, (0.0, 1.0), generator=generator)
    mul.run((out, std), (out,))
    return add.run((out, mean, 1), (out,))


@operator("log_normal", accepts=FLOATS)
def log_normal(self, mean, std, generator=None, outs=()):
    limit(std, POSITIVE)
    return _draw_like(LOG_NORMAL, self, FLOATS, (mean, std), generator, outs)


@operator("exponential", accepts=FLOATS)
def exponential(self, lambd, generator=None, outs=()):
    limit(lambd, POSITIVE)
    return _draw_like(EXPONENTIAL, self, FLOATS, (lambd, 0.0), generator, outs)


@operator("cauchy", accepts=FLOATS)
def cauchy(self, median, sigma, generator=None, outs=()):
    limit(sigma, POSITIVE)
    return _draw_like(CAUCHY, self, FLOATS, (median, sigma), generator, outs)


@operator("geometric", accepts=NUMBERS)
def geometric(self, p, generator=None, outs=()):
    limit(p, _INSIDE)
    return _draw_like(GEOMETRIC, self, NUMBERS, (p, 0.0), generator, outs)


@operator("bernoulli", accepts=ALL)
def bernoulli(self, p, generator=None, outs=()):
    if isinstance(p, torch.Tensor):
        return _draw_by(self, p, strides_like(self, None), generator, outs)
    limit(p, PROBABILITY)
    inplace = bool(outs) and outs[0] is self
    out, drawn = target_of(self, ALL, outs, None if inplace else row_major(self))
    draw(BERNOULLI, drawn, (p, 0.0), generator=generator)
    return written_to(out, drawn)


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
    out, drawn = target_of(self, ALL, outs, strides)
    if p is not out:
        result((p,), out.shape, out.dtype, (out,))
    if broadcast_shape((p.shape, self.shape)) != tuple(self.shape):
        raise Decline("shapes do not broadcast")
    _draw_bernoulli(drawn, p, generator)
    return written_to(out, drawn)


def _draw_bernoulli(out, p, generator):
    """Draw bools by probabilities. An ATen thread has four elements that are contiguous in ATen's dimension order."""
    dtype = torch.float64 if out.dtype is torch.float64 else torch.float32
    p = p.to(dtype).expand(out.shape)
    order = _apply_order(out.shape, (out.stride(), p.stride()))
    ordered, p = out.permute(order), p.permute(order).contiguous()
    drawn = ordered if ordered.is_contiguous() else empty(ordered.shape, out.dtype, out.device)
    threads = -(-out.numel() // 2048) * 512
    draw_elementwise(BERNOULLI_OF, Order(threads, 4, 12), (p,), (drawn,), generator=generator, asserting=True)
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


@operator("random", accepts=INTEGRAL)
def random(self, generator=None, outs=()):
    """Draw integers up to the largest below which the dtype represents all of them."""
    dtype = self.dtype
    if dtype not in ALL:
        raise Decline(f"dtype {dtype}")
    bits = DIGITS.get(dtype)
    span = 2 if dtype is torch.bool else torch.iinfo(dtype).max + 1 if bits is None else 2**bits + 1
    wide = dtype in (torch.int64, torch.float64)
    return _draw_like(FROM_TO, self, ALL, (0.0, 0.0), generator, outs, span=(0, as_int64(span)), wide=wide)


@operator("random", accepts=INTEGRAL)
def random_from(self, from_, to, generator=None, outs=()):
    out, drawn = target_of(self, INTEGRAL, outs)
    draw_integers(drawn, from_, to, generator)
    return written_to(out, drawn)


@operator("random", accepts=INTEGRAL)
def random_to(self, to, generator=None, outs=()):
    return random_from(self, 0, to, generator, outs)
