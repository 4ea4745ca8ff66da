"""Extrema, and the indices at which they occur first."""

import math

import torch
import triton
import triton.language as tl

from tritonite.dtypes import ALL, opmath
from tritonite.engine.rows.declare import INDEX, Reduction, reduced
from tritonite.errors import Decline
from tritonite.language.math import maximum_nan, minimum_nan
from tritonite.ops.reduction.sums import both, only, same
from tritonite.registry import operator


def lowest(dtype):
    return (-math.inf if dtype.is_floating_point else torch.iinfo(dtype).min,)


def highest(dtype):
    return (math.inf if dtype.is_floating_point else torch.iinfo(dtype).max,)


@triton.jit
def _twice(x):
    return x, x


@triton.jit
def _both_extrema(a_min, a_max, b_min, b_max):
    return minimum_nan(a_min, b_min), maximum_nan(a_max, b_max)


largest = Reduction(lowest, same, maximum_nan, only)
_amin = Reduction(highest, same, minimum_nan, only)
# No prefetch of the next block: its registers would cost a program per multiprocessor. regressions:
# aminmax_without_prefetch
_aminmax = Reduction(
    lambda dtype: highest(dtype) + lowest(dtype), _twice, _both_extrema, both, (None, None), 2, prefetch=False
)


def comparable(dtype):
    """Return the dtype in which elements are compared: int32 for bool and narrow integers."""
    return opmath(dtype) if dtype.is_floating_point or dtype is torch.int64 else torch.int32


def _extremum(reduction, self, dim, keepdim, outs):
    compute = comparable(self.dtype)
    if len({out.stride() for out in outs}) > 1:
        raise Decline("outputs with different strides")
    dtypes = (self.dtype, torch.int64) if INDEX in reduction.states else (self.dtype,) * reduction.results
    return reduced(reduction, (self,), dim, keepdim, dtypes, outs, compute, empty=False)


@operator("amax", accepts=ALL)
def amax(self, dim=None, keepdim=False, outs=()):
    return _extremum(largest, self, dim, keepdim, outs)


@operator("amin", accepts=ALL)
def amin(self, dim=None, keepdim=False, outs=()):
    return _extremum(_amin, self, dim, keepdim, outs)


@operator("aminmax", "_aminmax", accepts=ALL)
def aminmax(self, dim=None, keepdim=False, outs=()):
    if dim is None and keepdim:
        raise Decline("keepdim without dim")
    return _extremum(_aminmax, self, dim, keepdim, outs)


@triton.jit
def _with_index(x, index):
    return x, index


@triton.jit
def _first(closer, a, i, b, j):
    """Choose between two elements: nan first, then the one `closer` to the extremum, then the lower index."""
    ahead = (closer & (b == b)) | ((a != a) & (b == b))
    ahead = ahead | (((a == b) | ((a != a) & (b != b))) & (i < j))
    return tl.where(ahead, a, b), tl.where(ahead, i, j)


@triton.jit
def first_largest(a, i, b, j):
    return _first(a > b, a, i, b, j)


@triton.jit
def first_smallest(a, i, b, j):
    return _first(a < b, a, i, b, j)


@triton.jit
def largest_before(a, i, b, j):
    """`first_largest` for i before j: b if it is larger, or nan while a is not."""
    stays = (a >= b) | (a != a)
    return tl.where(stays, a, b), tl.where(stays, i, j)


@triton.jit
def smallest_before(a, i, b, j):
    """`first_smallest` for i before j."""
    stays = (a <= b) | (a != a)
    return tl.where(stays, a, b), tl.where(stays, i, j)


@triton.jit
def _index(value, index, count):
    return index


_max = Reduction(lowest, _with_index, first_largest, both, (None, INDEX), 2, follow=largest_before)
_min = Reduction(highest, _with_index, first_smallest, both, (None, INDEX), 2, follow=smallest_before)
_argmax = Reduction(lowest, _with_index, first_largest, _index, (None, INDEX), follow=largest_before)
_argmin = Reduction(highest, _with_index, first_smallest, _index, (None, INDEX), follow=smallest_before)


@operator("max", accepts=ALL)
def max(self, dim=None, keepdim=False, outs=()):
    if dim is None:
        return _extremum(largest, self, None, False, outs)
    return _extremum(_max, self, dim, keepdim, outs)


@operator("min", accepts=ALL)
def min(self, dim=None, keepdim=False, outs=()):
    if dim is None:
        return _extremum(_amin, self, None, False, outs)
    return _extremum(_min, self, dim, keepdim, outs)


def _arg(reduction, self, dim, keepdim, outs):
    if self.dtype is torch.bool:
        raise Decline("argmax or argmin of bool")
    return reduced(reduction, (self,), dim, keepdim, (torch.int64,), outs, comparable(self.dtype), empty=False)


@operator("argmax", accepts=ALL[:-1], promotion="int64")
def argmax(self, dim=None, keepdim=False, outs=()):
    return _arg(_argmax, self, dim, keepdim, outs)


@operator("argmin", accepts=ALL[:-1], promotion="int64")
def argmin(self, dim=None, keepdim=False, outs=()):
    return _arg(_argmin, self, dim, keepdim, outs)
