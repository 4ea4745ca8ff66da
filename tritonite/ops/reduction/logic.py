"""Reductions of flags: whether any or all elements are nonzero or equal, and how many are nonzero."""

import torch
import triton
import triton.language as tl

from tritonite.dtypes import ALL
from tritonite.engine.rows.declare import Reduction, reduced
from tritonite.engine.rows.formulas import add_states
from tritonite.errors import Decline
from tritonite.ops.reduction.sums import only
from tritonite.registry import operator
from tritonite.runtime.contract import read, refuse_if_negative


@triton.jit
def _nonzero(x):
    return (x != 0).to(tl.int32)


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _and(a, b):
    return a & b


@triton.jit
def _minus_one(state, count):
    return state - 1


def all_satisfy(condition):
    """Return the reduction to 0 if `condition`, a formula with the result 0 or 1, is 1 for all elements, else to -1."""
    return Reduction((1,), condition, _and, _minus_one, (torch.int32,))


def refuse_unless_all(satisfied, inputs, compute, reason):
    """Decline unless the elements satisfy a condition, a reduction of `all_satisfy`. The host waits for the result."""
    (flag,) = reduced(satisfied, inputs, None, False, (torch.int64,), (), compute)
    refuse_if_negative(flag, reason)


ALL_NONZERO = all_satisfy(_nonzero)
_any = Reduction((0,), _nonzero, _or, only, (torch.int32,))
_all = Reduction((1,), _nonzero, _and, only, (torch.int32,))
_count_nonzero = Reduction((0,), _nonzero, add_states, only, (torch.int64,))


def _logical(reduction, self, dim, keepdim, outs):
    dtype = torch.uint8 if self.dtype is torch.uint8 else torch.bool
    return reduced(reduction, (self,), dim, keepdim, (dtype,), outs, self.dtype, keep_empty=True)


@operator("any", accepts=ALL, promotion="bool")
def any(self, dim=None, keepdim=False, outs=()):
    return _logical(_any, self, dim, keepdim, outs)


@operator("all", accepts=ALL, promotion="bool")
def all(self, dim=None, keepdim=False, outs=()):
    return _logical(_all, self, dim, keepdim, outs)


def _check_bool(self):
    if self.dtype is not torch.bool:
        raise Decline(f"dtype {self.dtype}")


@operator("_is_any_true", accepts=(torch.bool,))
def is_any_true(self, outs=()):
    _check_bool(self)
    return _logical(_any, self, None, False, outs)


@operator("_is_all_true", accepts=(torch.bool,))
def is_all_true(self, outs=()):
    _check_bool(self)
    return _logical(_all, self, None, False, outs)


@triton.jit
def _same_value(x, y):
    return (x == y).to(tl.int32)


_equal = Reduction((1,), _same_value, _and, only, (torch.int32,))


@operator("equal", accepts=ALL, promotion="bool")
def equal(self, other, outs=()):
    """Compare all elements. The host reads the answer from the device, as for ATen's kernel."""
    if self.dtype is not other.dtype or self.device != other.device:
        raise Decline(f"{self.dtype} on {self.device} and {other.dtype} on {other.device}")
    if self.shape != other.shape:
        return (False,)
    (result,) = reduced(_equal, (self, other), None, False, (torch.int64,), outs, self.dtype)
    return read(result)


@operator("count_nonzero", accepts=ALL, promotion="int64")
def count_nonzero(self, dim=None, outs=()):
    return reduced(_count_nonzero, (self,), dim, False, (torch.int64,), outs, self.dtype)
