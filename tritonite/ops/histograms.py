"""histc, bincount, histogram, histogramdd: counts and sums of weights in bins."""

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
from tritonite.ops.reduction.extrema import aminmax
from tritonite.ops.scatter import refuse_if_deterministic
from tritonite.registry import exclude, operator
from tritonite.runtime.contract import empty, read, refuse_if_negative, zeros
from tritonite.runtime.interpreter import reading_on_host

# ATen serves integers on GPUs only, and 16-bit floats nowhere but on CPUs, where it counts in them and saturates early.
_COUNTED = FULL_FLOATS if devices.current.aten == "cpu" else (*FULL_FLOATS, *INTS)


@operator("histc", accepts=_COUNTED, pin=("min", "max"))
def histc(self, bins=100, min=0, max=0, outs=()):
    """Count elements in bins between two numbers, or between the extrema if the numbers are equal."""
    (out,) = outputs((self,), [(bins,)], [self.dtype], outs, accepts=_COUNTED) if bins > 0 else (None,)
    if out is None or isinstance(min, complex) or isinstance(max, complex):
        raise Decline(f"{bins} bins, or complex limits")
    floating = self.dtype.is_floating_point
    if floating:
        refuse_if_deterministic()
    if not (math.isfinite(min) and math.isfinite(max)) or min > max:
        raise Decline(f"limits {min} and {max}, which are not finite or in the wrong order")
    # ATen multiplies the distance of an integer from `min` by the number of bins, in int64.
    largest = builtins.max(abs(min), abs(max))
    if not floating and (largest >= 2**62 or max - min >= 2**32):
        raise Decline(f"limits {min} and {max}, between which int64 may overflow")
    if not floating and not (min == int(min) and max == int(max)):
        raise Decline(f"limits {min} and {max}, not integers, for {self.dtype}")
    if floating and largest > torch.finfo(self.dtype).max:
        raise Decline(f"limits {min} and {max}, out of range for {self.dtype}")
    if floating and 0 < max - min <= torch.finfo(self.dtype).eps * largest:
        # ATen takes the extrema for limits that are equal once they are rounded: on a CPU to float64.
        raise Decline(f"limits {min} and {max}, which may be one number in {self.dtype}")
    if not self.numel():
        fill_zero(out)
        return (out,)
    if min == max:
        limits, flag = limits_of_extrema(self.dtype, aminmax(self))
        refuse_if_negative(flag, "extrema that are not finite, or limits out of range for the dtype of integers")
    else:
        limits = Limits.of_numbers(min, max, floating)
    count_in_bins(out, self, limits, self.dtype if floating else torch.int64)
    return (out,)


exclude("bincount.out", "ATen makes it of the overload without outputs, which has a kernel, and resizes them")


@operator("bincount", accepts=INTS)
def bincount(self, weights=None, minlength=0, outs=()):
    """Count each integer. The host waits for the largest one, which decides the size of the result."""
    given = (self,) if weights is None else (self, weights)
    outputs((self,), [], [], (), accepts=INTS)
    if (
        self.dim() != 1
        or minlength < 0
        or any(tensor.shape != self.shape or tensor.device != self.device for tensor in given)
    ):
        raise Decline(f"integers of shape {tuple(self.shape)}, minlength {minlength}, or weights of another shape")
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
        raise Decline("a negative integer", lasting=False)
    totals = zeros((needed,), dtype, self.device)
    add_at(totals, needed, self, weights)
    return (totals,)


def _ends(x, given, dim):
    """Return the limits of a column's bins: as given, or its extrema, which the host reads."""
    if given is not None:
        low, high = given[2 * dim], given[2 * dim + 1]
    elif not x.numel():
        low, high = 0.0, 1.0
    else:
        with reading_on_host():
            low, high = float(x[:, dim].min()), float(x[:, dim].max())
    if not (math.isfinite(low) and math.isfinite(high)) or low > high:
        raise Decline(f"limits {low} and {high}, which are not finite or in the wrong order", lasting=False)
    if low < high:
        return low, high
    wider = torch.tensor([low - 0.5, high + 0.5], dtype=x.dtype).tolist()
    if wider[0] == wider[1]:
        raise Decline(f"elements of {low} alone, around which bins have no width", lasting=False)
    return tuple(wider)


def _histogram(x, edges, widths, weight, density, hist):
    """Write the counts, or the density, of the rows of a matrix to a contiguous result.

    `widths` has the width of each dimension's bins, or None where the edges are given.
    """
    fill(hist, 0)
    add_between(hist, x, edges, weight)
    if density:
        with reading_on_host():
            hist.div_(hist.sum())
            for dim, (own, width) in enumerate(zip(edges, widths, strict=True)):
                hist.div_(width or own.diff().reshape([-1 if d == dim else 1 for d in range(len(edges))]))
    return hist


def _check_histogram(self, weight, shape, outs, shapes):
    """Return the outputs, of float32 or float64 on a CPU. Decline others, which ATen does not serve."""
    if devices.current.aten != "cpu":
        raise Decline("a histogram on a GPU, which ATen has on CPUs only")
    if weight is not None and (weight.dtype is not self.dtype or tuple(weight.shape) != tuple(shape)):
        raise Decline(f"weights of {weight.dtype} and shape {tuple(weight.shape)}, not {self.dtype} and {tuple(shape)}")
    inputs = (self,) if weight is None else (self, weight)
    outs = outputs(inputs, shapes, [self.dtype] * len(shapes), outs, accepts=FULL_FLOATS)
    if not all(out.is_contiguous() for out in outs):
        raise Decline("an output that is not contiguous")
    return outs


@operator("histogram", accepts=FULL_FLOATS, pin=("range",))
def histogram(self, bins=100, range=None, weight=None, density=False, outs=()):
    """Count elements between the edges in a vector, or in a number of bins of equal width."""
    several = isinstance(bins, torch.Tensor)
    if several and (bins.dim() != 1 or bins.dtype is not self.dtype or not bins.numel() > 1):
        raise Decline(f"edges of {bins.dtype} and shape {tuple(bins.shape)}, not a vector of {self.dtype}")
    count = bins.numel() - 1 if several else bins
    if count < 1 or (range is not None and len(range) != 2):
        raise Decline(f"{count} bins, or a range that is not two numbers")
    hist, edges = _check_histogram(self, weight, self.shape, outs, [(count,), (count + 1,)])
    x = self.reshape(-1, 1)
    if several:
        edges.copy_(bins)
        width = None
    else:
        low, high = _ends(x, range, 0)
        linspace(low, high, count + 1, outs=(edges,))
        # Edges are rounded, so that their differences are less exact.
        width = (high - low) / count
    return _histogram(x, [edges], [width], None if weight is None else weight.reshape(-1), density, hist), edges


@operator("_histogramdd_from_bin_cts", accepts=FULL_FLOATS, pin=("range",))
def histogramdd_from_bin_cts(self, bins, range=None, weight=None, density=False, outs=()):
    """Count points, the rows of a matrix, in bins of several dimensions."""
    if self.dim() < 2 or len(bins) != self.shape[-1] or not bins or min(bins) < 1:
        raise Decline(f"{list(bins)} bins for points of shape {tuple(self.shape)}")
    if range is not None and len(range) != 2 * len(bins):
        raise Decline(f"a range of {len(range)} numbers for {len(bins)} dimensions, not two for each")
    shape = self.shape[:-1]
    (hist,) = _check_histogram(self, weight, shape, outs, [tuple(bins)])
    x = self.reshape(-1, self.shape[-1])
    edges, widths = [], []
    for dim, count in enumerate(bins):
        low, high = _ends(x, range, dim)
        edges.append(empty((count + 1,), self.dtype, self.device))
        linspace(low, high, count + 1, outs=(edges[-1],))
        widths.append((high - low) / count)
    return (_histogram(x, edges, widths, None if weight is None else weight.reshape(-1), density, hist),)
