"""Scans along a dimension: cumulative sums, products, log-sum-exps, and extrema with their indices.

A scan is declared as a `Reduction`, and the engine reduces the elements so far.
"""

import torch
import triton

from tritonite.dtypes import ALL, FLOATS, opmath
from tritonite.engine.movement import move
from tritonite.engine.outputs import dimensions, outputs
from tritonite.engine.rows.declare import INDEX, Reduction
from tritonite.engine.rows.formulas import add_states
from tritonite.engine.scan import scanned
from tritonite.errors import Decline
from tritonite.ops import aten
from tritonite.ops.reduction.exponentials import log_sum_exp
from tritonite.ops.reduction.extrema import (
    comparable,
    first_largest,
    first_smallest,
    highest,
    largest_before,
    lowest,
    smallest_before,
)
from tritonite.ops.reduction.sums import accumulated_dtype, added_to_zero, check_floats, product, same
from tritonite.registry import operator

_sum = Reduction((0,), same, add_states, added_to_zero)


def _accumulated(reduction, self, dim, dtype, outs):
    """Scan in `dtype`. A 0-d tensor is copied, which keeps the sign of -0.0."""
    dtype = accumulated_dtype(self, dtype, outs)
    if not self.dim():
        dimensions(dim, 0)
        outs = outputs((self,), [()], [dtype], outs, in_place=(self,))
        if outs[0] is not self:
            move(self, outs[0])
        return outs
    # ATen's CPU kernels accumulate float32 in float64.
    compute = torch.float64 if dtype is torch.float32 and aten.on_cpu() else comparable(dtype)
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
def _with_negative_index(x, index):
    """State of one element. Among equals ATen returns the last, which has the lowest negative index."""
    return x, -index


@triton.jit
def _value_and_index(x, negative_index, count):
    return x, -negative_index


@triton.jit
def _largest_after(a, i, b, j):
    """`first_largest` of negative indices, with j after i: b if it is nan or at least a.

    Only lanes past the end hold the identity, and nothing that is written comes after them.
    """
    return largest_before(b, j, a, i)


@triton.jit
def _smallest_after(a, i, b, j):
    return smallest_before(b, j, a, i)


_max = Reduction(lowest, _with_negative_index, first_largest, _value_and_index, (None, INDEX), 2, follow=_largest_after)
_min = Reduction(
    highest, _with_negative_index, first_smallest, _value_and_index, (None, INDEX), 2, follow=_smallest_after
)


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
        raise Decline(f"dimension {dim}; this overload takes no negative one")
    _extrema(reduction, self, dim, (values, indices))
    return ()


@operator("_cummax_helper", accepts=ALL)
def cummax_helper(self, values, indices, dim, outs=()):
    return _extrema_into(_max, self, values, indices, dim)


@operator("_cummin_helper", accepts=ALL)
def cummin_helper(self, values, indices, dim, outs=()):
    return _extrema_into(_min, self, values, indices, dim)
