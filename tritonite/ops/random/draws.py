"""Drawing into a tensor, and the limits of a distribution's numbers."""

from __future__ import annotations

import functools
import math

import torch

from tritonite.dtypes import ALL, COMPLEX, FLOATS, UNSIGNED
from tritonite.engine.iteration import is_dense
from tritonite.engine.movement import result, strides_in, strides_like, words
from tritonite.engine.random import draw
from tritonite.errors import Decline
from tritonite.ops.random.transforms import ALL_BITS, FROM_TO, NORMAL, NORMAL_PARTS, UNIFORM
from tritonite.registry import operator as any_operator
from tritonite.runtime.contract import limit
from tritonite.runtime.symbols import Limits, limits_of

operator = functools.partial(any_operator, tensors_only=True)
DRAWN = (*FLOATS, *COMPLEX)
INTEGRAL = (*ALL, *UNSIGNED)
_FLOAT64 = limits_of(torch.float64)._replace(finite=True)
POSITIVE = _FLOAT64._replace(least=math.ulp(0.0))
NOT_NEGATIVE = _FLOAT64._replace(least=0.0)
PROBABILITY = Limits(0, 1, 1.0, True, 0.0)


def target_of(self, accepts, outs, strides=None):
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


def written_to(out, drawn):
    """Copy what was drawn to the output, unless it is the same tensor. Returns the outputs of the call."""
    if drawn is not out:
        out.copy_(drawn)
    return (out,)


def draw_uniform(out, begin, end, generator):
    """Draw uniform numbers of [begin, end)."""
    if out.is_complex():
        out = torch.view_as_real(out)
    largest = torch.finfo(out.dtype).max
    if not (-largest <= begin <= end <= largest and end - begin <= largest):
        raise Decline(f"range from {begin} to {end}, which {out.dtype} does not represent")
    draw(UNIFORM, out, (float(begin), float(end)), generator=generator)


def draw_normal(out, mean, deviation, generator):
    """Draw normal numbers. The variance of a complex number is the sum of its parts' variances."""
    limit(deviation, NOT_NEGATIVE)
    parts = torch.view_as_real(out) if out.is_complex() else out
    draw(NORMAL_PARTS if out.is_complex() else NORMAL, parts, (mean, deviation), generator=generator)


# Bits of the integers that a float dtype represents without gaps.
DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}


def as_int64(number):
    """Return the int64 with the bits of an unsigned 64-bit integer."""
    return (number + 2**63) % 2**64 - 2**63


def largest_integer(dtype):
    """Return the largest integer that is drawn for a dtype."""
    digits = DIGITS.get(dtype)
    return 2**digits if digits else 1 if dtype is torch.bool else torch.iinfo(dtype).max


def draw_integers(out, begin, end, generator):
    """Draw integers of [begin, end), or up to the largest of the dtype if `end` is None."""
    dtype = out.dtype
    least = -(2**63) if dtype is torch.int64 else 0 if dtype in (torch.bool, *UNSIGNED) else None
    if least is None:
        least = -largest_integer(dtype) if dtype in DIGITS else torch.iinfo(dtype).min
    largest = min(largest_integer(dtype), 2**63 - 1)
    last = largest if end is None else end - 1
    if end is None and dtype is torch.uint64:
        raise Decline("no end for uint64, whose largest integer ATen takes for -1")
    if type(begin) is not int or not least <= begin <= last <= largest:
        raise Decline(f"range from {begin} to {end}, which {dtype} does not represent")
    if dtype in UNSIGNED:
        out = words(out)
    if end is None and begin == -(2**63):
        draw(ALL_BITS, out, generator=generator, wide=True)
        return
    span = last - begin + 1
    # ATen draws 64 bits for wide spans, over which 32 bits would not be uniform.
    draw(FROM_TO, out, span=(begin, as_int64(span)), generator=generator, wide=span >= 2**28)


def row_major(self):
    """Return the strides of a contiguous tensor of the shape of `self`."""
    return strides_in(self.shape, torch.contiguous_format)
