"""Operators over lists of tensors that reduce each tensor to one element."""

import math

import torch
import triton

from tritonite.dtypes import ALL, FLOATS, opmath
from tritonite.engine.lists.reduce import Task, reduce_each
from tritonite.engine.rows.declare import Reduction
from tritonite.engine.rows.formulas import add_states
from tritonite.errors import Decline
from tritonite.ops.reduction.extrema import comparable, largest
from tritonite.ops.reduction.norms import absolute, norm_of, power, square
from tritonite.ops.reduction.sums import only
from tritonite.registry import operator, schemas


@triton.jit
def _state(state, count, ord):
    return state


_sums_of_powers = {
    1.0: Reduction((0.0,), absolute, add_states, only),
    2.0: Reduction((0.0,), square, add_states, only),
}
_any_sum_of_powers = Reduction((0.0,), power, add_states, _state, parametric=True)


def _returned(tensors, tasks, outs):
    if outs and len(outs[0]) != len(tensors):
        raise Decline(f"{len(outs[0])} outputs for {len(tensors)} tensors")
    results = reduce_each(tensors, tasks, outs[0] if outs else ())
    # out= overloads return nothing.
    return () if outs else (results,)


def check_order(ord):
    """Decline an order of a norm that is no int of 64 bits and no float: ATen raises."""
    if isinstance(ord, (bool, complex)) or (isinstance(ord, int) and not -(2**63) <= ord < 2**63):
        raise Decline(f"ord is {ord}; it has to be an int of 64 bits or a float")


def norm_task(x, ord, dtype):
    """Return the task of a tensor's norm in `dtype`, or in the tensor's."""
    dtype = dtype or x.dtype
    reduction, numbers = norm_of(x, ord, dtype, x.numel() == 1)
    if math.isinf(ord) and not x.numel():
        raise Decline(f"the norm of order {ord} of an empty tensor")
    return Task(reduction, opmath(dtype), dtype, *numbers)


@operator("_foreach_norm", accepts=FLOATS, pin=("ord",))
def foreach_norm(self, ord=2, dtype=None, outs=()):
    check_order(ord)
    return _returned(self, [norm_task(x, ord, dtype) for x in self], outs)


def _powers_task(x, ord, dtype):
    dtype = dtype or x.dtype
    if dtype not in FLOATS or x.dtype not in FLOATS or torch.promote_types(dtype, x.dtype) is not dtype:
        raise Decline(f"sum of powers of {x.dtype} in {dtype}")
    if math.isnan(ord) or (not x.numel() and not 0 <= ord < math.inf):
        raise Decline(f"ord is {ord} for {x.numel()} elements")
    if float(ord) in _sums_of_powers:
        return Task(_sums_of_powers[float(ord)], opmath(dtype), dtype)
    return Task(_any_sum_of_powers, opmath(dtype), dtype, float(ord))


# ATen has the operator since torch 2.13.
if schemas("_foreach_powsum"):

    @operator("_foreach_powsum", accepts=FLOATS, pin=("ord",))
    def foreach_powsum(self, ord=2, dtype=None, outs=()):
        check_order(ord)
        return _returned(self, [_powers_task(x, ord, dtype) for x in self], outs)


def _largest_task(x):
    if x.dtype not in ALL or not x.numel():
        raise Decline(f"the maximum of {x.numel()} elements of {x.dtype}")
    return Task(largest, comparable(x.dtype), x.dtype)


@operator("_foreach_max", accepts=ALL)
def foreach_max(self, outs=()):
    return _returned(self, [_largest_task(x) for x in self], outs)
