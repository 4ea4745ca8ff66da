"""Scans along a dimension: sums, products, logarithms of sums of exponentials, extrema with their places.

Each is the reduction of the elements so far.
"""

import torch
import triton

from tritonite.dtypes import ALL, FLOATS, opmath
from tritonite.engine.movement import move
from tritonite.engine.outputs import dimensions, outputs
from tritonite.engine.rows.declare import INDEX, Reduction
from tritonite.engine.scan import scanned
from tritonite.errors import Decline
from tritonite.ops.reduction import (
    accumulated_dtype,
    add_states,
    added_to_zero,
    check_floats,
    comparable,
    first_largest,
    first_smallest,
    highest,
    largest_before,
    log_sum_exp,
    lowest,
    product,
    same,
    smallest_before,
)
from tritonite.registry import operator

_sum = Reduction((0,), same, add_states, added_to_zero)


def _accumulated(reduction, self, dim, dtype, outs):
    """On a CPU ATen adds float32 up in float64, and so does this.

    The sum of a tensor without dimensions is its element, with the sign that its zero has.
    """
    dtype = accumulated_dtype(self, dtype, outs)
    if not self.dim():
        dimensions(dim, 0)
        outs = outputs((self,), [()], [dtype], outs, in_place=(self,))
        if outs[0] is not self:
            move(self, outs[0])
        return outs
    compute = torch.float64 if dtype is torch.float32 and self.device.type == "cpu" else comparable(dtype)
    return scanned(reduction, self, dim, (dtype,), outs, compute)


@operator("cumsum", accepts=ALL, promotion="integers to int64")
def cumsum(self, dim, dtype=None, outs=()):
    return _accumulated(_sum, self, dim, dtype, outs)


@operator("cumprod", accepts=ALL, promotion="integers to int64")
def cumprod(self, dim, dtype=None, outs=()):
    return _accumulated(product, self, dim, dtype, outs)


@operator("logcumsumexp", "_logcumsumexp", accepts=FLOATS)
def logcumsumexp(self, dim, outs=()):
    check_floats(self)
    return scanned(log_sum_exp, self, dim, (self.dtype,), outs, opmath(self.dtype))


@triton.jit
def _placed_from_end(x, index):
    """Of equals ATen takes the last, which is the first by negative places."""
    return x, -index


@triton.jit
def _value_and_place(x, place, count):
    return x, -place


@triton.jit
def _largest_after(a, i, b, j):
    """`first_largest` of places from the end, where j is after i: b if it is as large, or nan.

    Nothing that is written comes after the identity, which a place from the end would go before.
    """
    return largest_before(b, j, a, i)


@triton.jit
def _smallest_after(a, i, b, j):
    return smallest_before(b, j, a, i)


_max = Reduction(lowest, _placed_from_end, first_largest, _value_and_place, (None, INDEX), 2, follow=_largest_after)
_min = Reduction(highest, _placed_from_end, first_smallest, _value_and_place, (None, INDEX), 2, follow=_smallest_after)


def _extrema(reduction, self, dim, outs):
    return scanned(reduction, self, dim, (self.dtype, torch.int64), outs, comparable(self.dtype))


@operator("cummax", accepts=ALL)
def cummax(self, dim, outs=()):
    return _extrema(_max, self, dim, outs)


@operator("cummin", accepts=ALL)
def cummin(self, dim, outs=()):
    return _extrema(_min, self, dim, outs)


def _extrema_into(reduction, self, values, indices, dim):
    if dim < 0:
        raise Decline("a dimension counted from the last, which ATen does not take here")
    _extrema(reduction, self, dim, (values, indices))
    return ()


@operator("_cummax_helper", accepts=ALL)
def cummax_helper(self, values, indices, dim, outs=()):
    return _extrema_into(_max, self, values, indices, dim)


@operator("_cummin_helper", accepts=ALL)
def cummin_helper(self, values, indices, dim, outs=()):
    return _extrema_into(_min, self, values, indices, dim)
