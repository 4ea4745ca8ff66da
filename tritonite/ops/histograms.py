"""How many elements fall into each of several bins, and how often each integer is there."""

import builtins
import math

import torch

from tritonite import devices
from tritonite.catalog import operator
from tritonite.dispatch.call import read, zeros
from tritonite.dtypes import FLOATS, FULL_FLOATS, INTS
from tritonite.engine.histogram import add_at, bins_of, count_in_bins, edges_of
from tritonite.engine.movement import move
from tritonite.engine.rows.declare import outputs
from tritonite.errors import Decline
from tritonite.ops.reduction import aminmax
from tritonite.ops.scatter import refuse_if_deterministic
from tritonite.ops.searching import refuse_if_negative
from tritonite.ops.sets import into

# ATen's kernel for GPUs takes no half types, in which that for CPUs counts no further than to 256. It takes no integers.
_COUNTED = FULL_FLOATS if devices.current.type == "cpu" else (*FULL_FLOATS, *INTS)


@operator("histc", accepts=_COUNTED, pin=("min", "max"))
def histc(self, bins=100, min=0, max=0, outs=()):
    """Bins between two numbers, or where they are equal between the extrema of what there is."""
    (out,) = outputs((self,), [(bins,)], [self.dtype], outs, accepts=_COUNTED) if bins > 0 else (None,)
    if out is None or isinstance(min, complex) or isinstance(max, complex):
        raise Decline("no bins, or no real numbers")
    floating = self.dtype.is_floating_point
    if floating:
        refuse_if_deterministic()
    if not (math.isfinite(min) and math.isfinite(max)) or min > max:
        raise Decline("edges that are infinite or in the wrong order")
    if not floating and not (min == int(min) and max == int(max)):
        raise Decline("a number with a fraction for integers")
    if floating and builtins.max(abs(min), abs(max)) > torch.finfo(self.dtype).max:
        raise Decline("a number that the dtype does not hold")
    number = float if floating else int
    from_data = min == max and self.numel() > 0
    extrema = aminmax(self) if from_data else ()
    edges, flag = edges_of(self.dtype, self.device, number(min), number(max), tuple(extrema), 1)
    if from_data and floating:
        refuse_if_negative(flag, "a range that is not finite")
    move(count_in_bins(self, edges, bins), out)
    return (out,)


@operator("bincount", accepts=INTS)
def bincount(self, weights=None, minlength=0, outs=()):
    """A fresh result has as many elements as the largest integer tells, for which the host waits."""
    given = (self,) if weights is None else (self, weights)
    outputs((self,), [], [], (), accepts=INTS)
    if self.dim() != 1 or minlength < 0 or any(tensor.shape != self.shape or tensor.device != self.device for tensor in given):
        raise Decline("no vector, or weights of another length")
    if not self.numel():
        return into(outs, (zeros((minlength,), torch.int64, self.device),))
    dtype = torch.int64
    if weights is not None:
        refuse_if_deterministic()
        dtype = torch.float32 if weights.dtype is torch.float32 else torch.float64
        if weights.dtype not in (*FLOATS, *INTS, torch.bool):
            raise Decline(f"dtype {weights.dtype}")
    (needed,) = read(bins_of(*aminmax(self), minlength))
    if needed.value < 0:
        raise Decline("a number below 0", lasting=False)
    totals = zeros((needed,), dtype, self.device)
    add_at(totals, self, weights)
    return into(outs, (totals,))
