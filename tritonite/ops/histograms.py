"""How many elements fall into each of several bins, and how often each integer is there."""

import builtins
import math

import torch

from tritonite import devices
from tritonite.dtypes import FLOATS, FULL_FLOATS, INTS
from tritonite.engine.histogram import Limits, add_at, add_between, bins_of, count_in_bins, limits_of_extrema
from tritonite.engine.movement import fill, fill_zero
from tritonite.engine.outputs import outputs
from tritonite.errors import Decline
from tritonite.ops.creation import linspace
from tritonite.ops.reduction import aminmax
from tritonite.ops.scatter import refuse_if_deterministic
from tritonite.registry import exclude, operator
from tritonite.runtime.contract import empty, read, refuse_if_negative, zeros
from tritonite.runtime.interpreter import reading_on_host

# ATen's kernel for GPUs takes no half types, in which that for CPUs counts to few; that takes no integers.
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
    if not floating and builtins.max(abs(min), abs(max)) >= 2**62:
        raise Decline("edges at which integers may overflow")
    if not floating and not (min == int(min) and max == int(max)):
        raise Decline("a number with a fraction for integers")
    if floating and builtins.max(abs(min), abs(max)) > torch.finfo(self.dtype).max:
        raise Decline("a number that the dtype does not hold")
    if not self.numel():
        fill_zero(out)
        return (out,)
    if min == max:
        limits, flag = limits_of_extrema(self.dtype, aminmax(self))
        refuse_if_negative(flag, "a range that is not finite, or of one integer next to which the dtype has no other")
    else:
        limits = Limits.of_numbers(min, max, floating)
    count_in_bins(out, self, limits, self.dtype if floating else torch.int64)
    return (out,)


exclude("bincount.out", "ATen makes it of the overload without outputs, which has a kernel, and resizes them")


@operator("bincount", accepts=INTS)
def bincount(self, weights=None, minlength=0, outs=()):
    """A fresh result has as many elements as the largest integer tells, for which the host waits."""
    given = (self,) if weights is None else (self, weights)
    outputs((self,), [], [], (), accepts=INTS)
    if (
        self.dim() != 1
        or minlength < 0
        or any(tensor.shape != self.shape or tensor.device != self.device for tensor in given)
    ):
        raise Decline("no vector, or weights of another length")
    if not self.numel():
        return (zeros((minlength,), torch.int64, self.device),)
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
    add_at(totals, needed, self, weights)
    return (totals,)


def _ends(x, given, dim):
    """Where the bins of a column begin and end: as given, or at its extrema, which the host looks at."""
    if given is not None:
        low, high = given[2 * dim], given[2 * dim + 1]
    elif not x.numel():
        low, high = 0.0, 1.0
    else:
        with reading_on_host():
            low, high = float(x[:, dim].min()), float(x[:, dim].max())
    if not (math.isfinite(low) and math.isfinite(high)) or low > high:
        raise Decline("edges that are infinite or in the wrong order", lasting=False)
    return (low, high) if low < high else (low - 0.5, high + 0.5)


def _histogram(x, edges, weight, density, hist):
    """What each bin has of the rows of a matrix, by coordinates, in a contiguous result."""
    fill(hist, 0)
    add_between(hist, x, edges, weight)
    if density:
        with reading_on_host():
            hist.div_(hist.sum())
            for dim, own in enumerate(edges):
                hist.div_(own.diff().reshape([-1 if d == dim else 1 for d in range(len(edges))]))
    return hist


def _check_histogram(self, weight, shape, outs, shapes):
    """The outputs, of float32 or float64, on a CPU: ATen has no other."""
    if self.device.type != "cpu":
        raise Decline("a histogram that ATen has on CPUs alone")
    if weight is not None and (weight.dtype is not self.dtype or tuple(weight.shape) != tuple(shape)):
        raise Decline("weights of another shape or dtype")
    inputs = (self,) if weight is None else (self, weight)
    outs = outputs(inputs, shapes, [self.dtype] * len(shapes), outs, accepts=FULL_FLOATS)
    if not all(out.is_contiguous() for out in outs):
        raise Decline("an output that is not contiguous")
    return outs


@operator("histogram", accepts=FULL_FLOATS, pin=("range",))
def histogram(self, bins=100, range=None, weight=None, density=False, outs=()):
    """Between the edges of as many bins of one width as a number says, or between those that a vector has."""
    several = isinstance(bins, torch.Tensor)
    if several and (bins.dim() != 1 or bins.dtype is not self.dtype or not bins.numel() > 1):
        raise Decline("edges that are no vector of this dtype")
    count = bins.numel() - 1 if several else bins
    if count < 1 or (range is not None and len(range) != 2):
        raise Decline("no bins, or no range")
    hist, edges = _check_histogram(self, weight, self.shape, outs, [(count,), (count + 1,)])
    x = self.reshape(-1, 1)
    if several:
        edges.copy_(bins)
    else:
        linspace(*_ends(x, range, 0), count + 1, outs=(edges,))
    return _histogram(x, [edges], None if weight is None else weight.reshape(-1), density, hist), edges


@operator("_histogramdd_from_bin_cts", accepts=FULL_FLOATS, pin=("range",))
def histogramdd_from_bin_cts(self, bins, range=None, weight=None, density=False, outs=()):
    """Rows are points of as many dimensions as they have elements."""
    if self.dim() < 2 or len(bins) != self.shape[-1] or not bins or min(bins) < 1:
        raise Decline("no points, or no bins for each of their coordinates")
    if range is not None and len(range) != 2 * len(bins):
        raise Decline("no range for each coordinate")
    shape = self.shape[:-1]
    (hist,) = _check_histogram(self, weight, shape, outs, [tuple(bins)])
    x = self.reshape(-1, self.shape[-1])
    edges = []
    for dim, count in enumerate(bins):
        edges.append(empty((count + 1,), self.dtype, self.device))
        linspace(*_ends(x, range, dim), count + 1, outs=(edges[-1],))
    return (_histogram(x, edges, None if weight is None else weight.reshape(-1), density, hist),)
