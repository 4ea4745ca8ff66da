"""Variances and deviations, by Welford's recurrence and Chan's combination (Chan, Golub, LeVeque 1979)."""

import math

import triton
import triton.language as tl

from tritonite.dtypes import FLOATS, opmath
from tritonite.engine.outputs import dimensions
from tritonite.engine.rows.declare import Reduction, Stage, reduced
from tritonite.engine.rows.formulas import add_states
from tritonite.errors import Decline
from tritonite.language.math import square_root, true_divide
from tritonite.registry import operator


@triton.jit
def moment_leaf(x):
    """(mean, sum of squared distances from it, count) of one element."""
    return x, tl.zeros_like(x), tl.zeros_like(x) + 1.0


@triton.jit
def combine_moments(mean, squares, count, other_mean, other_squares, other_count):
    """Moments of the union of two sets, from (mean, sum of squared distances from it, count) of each."""
    total = count + other_count
    fraction = other_count / tl.maximum(total, 1.0)
    # An empty set's mean does not count, even if the other mean is infinite.
    distance = tl.where((count == 0.0) | (other_count == 0.0), 0.0, other_mean - mean)
    mean = tl.where(count == 0.0, other_mean, mean + distance * fraction)
    return mean, squares + other_squares + distance * (distance * (fraction * count)), total


@triton.jit
def _with_one_more(mean, squares, x, fraction):
    """Moments of a set with one more element x, with `fraction` = 1 / new count: Welford 1962."""
    distance = x - mean
    mean = mean + distance * fraction
    return mean, squares + distance * (x - mean)


@triton.jit
def _variance(mean, squares, own_count, count, correction):
    divisor = tl.maximum(count - correction, 0.0).to(squares.dtype)
    variance = true_divide(squares, tl.broadcast_to(divisor, squares.shape))
    # nan if an element is infinite: inf - inf.
    return tl.where(mean - mean == 0.0, variance, float("nan"))


@triton.jit
def _deviation(mean, squares, own_count, count, correction):
    return square_root(_variance(mean, squares, own_count, count, correction))


@triton.jit
def _variance_mean(mean, squares, own_count, count, correction):
    empty = tl.broadcast_to(count == 0.0, mean.shape)
    return _variance(mean, squares, own_count, count, correction), tl.where(empty, float("nan"), mean)


@triton.jit
def _deviation_mean(mean, squares, own_count, count, correction):
    variance, mean = _variance_mean(mean, squares, own_count, count, correction)
    return square_root(variance), mean


@triton.jit
def _mean_term(x, count):
    return x * true_divide(tl.full((), 1.0, x.dtype), count.to(x.dtype))


@triton.jit
def _mean_error_term(x, estimate, count):
    return _mean_term(x - estimate, count)


@triton.jit
def _corrected(error, estimate):
    return estimate + error


@triton.jit
def _squared_distance(x, estimate, mean, count):
    return (x - mean) * (x - mean)


@triton.jit
def _moments_of_block(estimate, mean, squares, count):
    return mean, squares, count.to(mean.dtype)


def moments(project, results):
    """Return the reduction whose state is (mean, sum of squared distances from it, count).

    A block's mean is a sum of x / count, which does not overflow. A second stage adds the mean distance from it, so
    that equal elements have a variance of exactly 0.
    """
    stages = (
        Stage(0.0, _mean_term, add_states),
        Stage(0.0, _mean_error_term, add_states, _corrected, refining=True),
        Stage(0.0, _squared_distance, add_states),
    )
    gathered = {"stages": stages, "gather": _moments_of_block, "grow": _with_one_more}
    return Reduction((0.0, 0.0, 0.0), moment_leaf, combine_moments, project, (None,) * 3, results, **gathered)


_var, _std = moments(_variance, 1), moments(_deviation, 1)
_var_mean, _std_mean = moments(_variance_mean, 2), moments(_deviation_mean, 2)


def _spread(reduction, self, dim, correction, keepdim, outs):
    if self.dtype not in FLOATS:
        raise Decline(f"dtype {self.dtype}")
    if isinstance(correction, complex) or (not self.numel() and correction is not None and correction < 0):
        raise Decline(f"correction {correction} for {self.numel()} elements")
    numbers = (1.0 if correction is None else float(correction),)
    if not math.prod(self.shape[d] for d in dimensions(dim, self.dim())) > numbers[0]:
        raise Decline(f"correction {correction} is not below the number of elements; ATen warns")
    dtypes = (self.dtype,) * reduction.results
    return reduced(reduction, (self,), dim, keepdim, dtypes, outs, opmath(self.dtype), numbers=numbers)


@operator("var", accepts=FLOATS, pin=("correction",))
def var(self, dim=None, correction=None, keepdim=False, outs=()):
    return _spread(_var, self, dim, correction, keepdim, outs)


@operator("std", accepts=FLOATS, pin=("correction",))
def std(self, dim=None, correction=None, keepdim=False, outs=()):
    return _spread(_std, self, dim, correction, keepdim, outs)


@operator("var_mean", accepts=FLOATS, pin=("correction",))
def var_mean(self, dim=None, correction=None, keepdim=False, outs=()):
    return _spread(_var_mean, self, dim, correction, keepdim, outs)


@operator("std_mean", accepts=FLOATS, pin=("correction",))
def std_mean(self, dim=None, correction=None, keepdim=False, outs=()):
    return _spread(_std_mean, self, dim, correction, keepdim, outs)
