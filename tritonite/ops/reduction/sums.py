"""Sums, means and products. Sums accumulate in each lane and then pairwise."""

import torch
import triton
import triton.language as tl

from tritonite.dtypes import ALL, FLOATS, opmath
from tritonite.engine.rows.declare import Reduction, reduced
from tritonite.engine.rows.formulas import add_states
from tritonite.errors import Decline
from tritonite.language.math import true_divide
from tritonite.ops import aten
from tritonite.registry import operator


@triton.jit
def same(x):
    return x


@triton.jit
def _multiply(a, b):
    return a * b


@triton.jit
def only(state, count):
    return state


@triton.jit
def both(first, second, count):
    return first, second


@triton.jit
def added_to_zero(state, count):
    """state + 0: ATen's sums start at 0.0, so that no result is -0.0."""
    return state + tl.zeros_like(state)


@triton.jit
def both_added_to_zero(first, second, count):
    return added_to_zero(first, count), added_to_zero(second, count)


@triton.jit
def over_count(state, count):
    return true_divide(state + tl.zeros_like(state), tl.broadcast_to(count.to(state.dtype), state.shape))


_sum = Reduction((0,), same, add_states, added_to_zero)
_mean = Reduction((0,), same, add_states, over_count)
product = Reduction((1,), same, _multiply, only)


@triton.jit
def _not_nan(x):
    return tl.where(x != x, 0, x)


_nansum = Reduction((0,), _not_nan, add_states, added_to_zero)


def check_floats(*tensors):
    """Decline unless all tensors have the same floating-point dtype; None is skipped."""
    found = {tensor.dtype for tensor in tensors if tensor is not None}
    if len(found) > 1 or not found <= set(FLOATS):
        raise Decline(f"dtypes {', '.join(sorted(map(str, found)))}; one floating-point dtype is served")


def accumulated_dtype(self, dtype, outs):
    """Return the dtype of a sum, to which elements are converted. Decline conversions that are not served."""
    if dtype is None:
        dtype = outs[0].dtype if outs else self.dtype if self.dtype.is_floating_point else torch.int64
    if self.dtype.is_floating_point and not dtype.is_floating_point and dtype.itemsize < 4:
        raise Decline(f"sum of {self.dtype} in {dtype}, to which devices convert floats differently")
    if dtype not in ALL or dtype is torch.bool or (opmath(dtype) is not dtype and self.dtype is not dtype):
        raise Decline(f"{self.dtype} in {dtype}")
    return dtype


def _summed(reduction, self, dim, keepdim, dtype, outs):
    dtype = accumulated_dtype(self, dtype, outs)
    return reduced(reduction, (self,), dim, keepdim, (dtype,), outs, opmath(dtype))


def _check_natural(self, dim, dtype, outs):
    """Decline an output of a full reduction whose dtype is not the result's own: ATen raises."""
    natural = dtype or (self.dtype if self.dtype.is_floating_point else torch.int64)
    if outs and dim is None and outs[0].dtype is not natural:
        raise Decline(f"output of dtype {outs[0].dtype}, not {natural}")


@operator("sum", accepts=ALL, promotion="integers to int64")
def sum(self, dim=None, keepdim=False, dtype=None, outs=()):
    _check_natural(self, dim, dtype, outs)
    return _summed(_sum, self, dim, keepdim, dtype, outs)


@operator("nansum", accepts=FLOATS)
def nansum(self, dim=None, keepdim=False, dtype=None, outs=()):
    check_floats(self)
    if dtype not in (None, *FLOATS):
        raise Decline(f"dtype {dtype}")
    _check_natural(self, None, dtype, outs)
    return _summed(_nansum, self, dim, keepdim, dtype, outs)


@operator("mean", accepts=FLOATS)
def mean(self, dim=None, keepdim=False, dtype=None, outs=()):
    if not (dtype or self.dtype).is_floating_point:
        raise Decline(f"dtype {dtype or self.dtype}")
    dtype = dtype or (outs[0].dtype if outs else self.dtype)
    if not dtype.is_floating_point:
        raise Decline(f"output of dtype {dtype}")
    return _summed(_mean, self, dim, keepdim, dtype, outs)


@operator("prod", accepts=ALL, promotion="integers to int64")
def prod(self, dim=None, keepdim=False, dtype=None, outs=()):
    _check_natural(self, dim, dtype, outs)
    return _summed(product, self, dim, keepdim, dtype, outs)


@operator("trace", accepts=ALL, promotion="integers to int64")
def trace(self, outs=()):
    # ATen's CPU kernel has no bool.
    if self.dim() != 2 or (self.dtype is torch.bool and aten.on_cpu()):
        raise Decline(f"trace of {self.dim()} dimensions of {self.dtype} on {self.device.type}")
    _check_natural(self, None, None, outs)
    return _summed(_sum, self.diagonal(), None, False, None, outs)
