"""Norms of vectors: sums of powers, and the largest or smallest absolute value."""

import math

import torch
import triton
import triton.language as tl

from tritonite.dtypes import FLOATS, opmath
from tritonite.engine.outputs import dimensions
from tritonite.engine.rows.declare import Reduction, reduced
from tritonite.engine.rows.formulas import add_states
from tritonite.errors import Decline
from tritonite.language import libdevice
from tritonite.language.math import maximum_nan, minimum_nan, square_root
from tritonite.ops.reduction.sums import only
from tritonite.registry import operator


@triton.jit
def absolute(x):
    return tl.abs(x)


@triton.jit
def square(x):
    return x * x


@triton.jit
def root(state, count):
    return square_root(state)


@triton.jit
def _one_if_nonzero(x):
    return tl.where(x != 0.0, 1.0, 0.0)


@triton.jit
def power(x, ord):
    return libdevice.pow(tl.abs(x), tl.broadcast_to(ord.to(x.dtype), x.shape))


@triton.jit
def inverse_power(state, count, ord):
    return libdevice.pow(state, tl.broadcast_to((1.0 / ord).to(state.dtype), state.shape))


@triton.jit
def _sum_alone(state, count, ord):
    return state


_NORMS = {
    0.0: Reduction((0.0,), _one_if_nonzero, add_states, only),
    1.0: Reduction((0.0,), absolute, add_states, only),
    2.0: Reduction((0.0,), square, add_states, root),
    math.inf: Reduction((0.0,), absolute, maximum_nan, only),
    -math.inf: Reduction((math.inf,), absolute, minimum_nan, only),
}
_any_norm = Reduction((0.0,), power, add_states, inverse_power, parametric=True)
# Sums of powers, of which norms are the roots.
_POWER_SUMS = {0.0: _NORMS[0.0], 1.0: _NORMS[1.0], 2.0: Reduction((0.0,), square, add_states, only)}
_any_power_sum = Reduction((0.0,), power, add_states, _sum_alone, parametric=True)


def norm_of(self, ord, dtype, one_element):
    """Return (reduction, its numbers) of a norm in `dtype`, of single elements if `one_element`; may decline."""
    if dtype not in FLOATS or self.dtype not in FLOATS or torch.promote_types(dtype, self.dtype) is not dtype:
        raise Decline(f"dtype {dtype}")
    if isinstance(ord, complex) or math.isnan(ord):
        raise Decline(f"ord is {ord}; it has to be real and not nan")
    if one_element and float(ord) not in _NORMS:
        # The norm of one element is its absolute value in ATen; a power and its root would round.
        ord = 1
    if not self.numel() and not 0 <= ord < 2**16:
        raise Decline(f"ord is {ord} for an empty tensor; it has to be in [0, {2**16})")
    reduction = _NORMS.get(float(ord), _any_norm)
    return reduction, (float(ord),) if reduction is _any_norm else ()


def _vector_norm(self, ord, dim, keepdim, dtype, outs):
    dtype = dtype or self.dtype
    one_element = math.prod([self.shape[d] for d in dimensions(dim, self.dim())]) == 1 and (self.dim() > 0 or not dim)
    reduction, numbers = norm_of(self, ord, dtype, one_element)
    return reduced(reduction, (self,), dim, keepdim, (dtype,), outs, opmath(dtype), numbers=numbers)


@operator("linalg_vector_norm", accepts=FLOATS, pin=("ord",))
def linalg_vector_norm(self, ord=2, dim=None, keepdim=False, dtype=None, outs=()):
    return _vector_norm(self, ord, dim, keepdim, dtype, outs)


@operator("norm", accepts=FLOATS, pin=("p",))
def norm(self, p=2, dim=None, keepdim=False, dtype=None, outs=()):
    return _vector_norm(self, 2 if p is None else p, dim, keepdim, dtype, outs)


@operator("linalg__powsum", accepts=FLOATS, pin=("ord",))
def linalg__powsum(self, ord=2, dim=None, keepdim=False, dtype=None, outs=()):
    """Sum absolute values to the power of `ord`; a norm is a root of such sums of its shards."""
    dtype = dtype or self.dtype
    if dtype not in FLOATS or self.dtype not in FLOATS or torch.promote_types(dtype, self.dtype) is not dtype:
        raise Decline(f"dtype {dtype} for a tensor of {self.dtype}; a floating-point dtype as wide is served")
    if isinstance(ord, complex) or math.isnan(ord):
        raise Decline(f"ord is {ord}; it has to be real and not nan")
    reduction = _POWER_SUMS.get(float(ord), _any_power_sum)
    numbers = (float(ord),) if reduction is _any_power_sum else ()
    return reduced(reduction, (self,), dim, keepdim, (dtype,), outs, opmath(dtype), numbers=numbers)
