"""Reductions: sums, means, extrema and their indices, logic, variances, norms, log-sum-exp.

Each is a `Reduction(init, leaf, combine, project)`. Sums accumulate in each lane and then pairwise, variances by
Welford's recurrence and Chan's combination (Chan, Golub, LeVeque 1979): errors grow with the logarithm of the count.
"""

import math

import torch
import triton
import triton.language as tl

from tritonite.dtypes import ALL, FLOATS, opmath
from tritonite.engine.outputs import dimensions
from tritonite.engine.rows.declare import INDEX, Reduction, Stage, reduced
from tritonite.engine.rows.formulas import add_states
from tritonite.errors import Decline
from tritonite.language import libdevice
from tritonite.language.math import LOG2_E, maximum_nan, minimum_nan, square_root, true_divide
from tritonite.ops import aten
from tritonite.registry import operator
from tritonite.runtime.contract import read


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


@triton.jit
def _nonzero(x):
    return (x != 0).to(tl.int32)


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _and(a, b):
    return a & b


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


_NORMS = {
    0.0: Reduction((0.0,), _one_if_nonzero, add_states, only),
    1.0: Reduction((0.0,), absolute, add_states, only),
    2.0: Reduction((0.0,), square, add_states, root),
    math.inf: Reduction((0.0,), absolute, maximum_nan, only),
    -math.inf: Reduction((math.inf,), absolute, minimum_nan, only),
}
_any_norm = Reduction((0.0,), power, add_states, inverse_power, parametric=True)


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


@triton.constexpr_function
def _lowest_finite(dtype):
    return -1.7976931348623157e308 if dtype == tl.float64 else -3.4028234663852886e38


@triton.jit
def at_least_lowest(x):
    """max(x, lowest finite number): -inf - x is -inf for the result x, and not nan."""
    return maximum_nan(x, tl.full(x.shape, _lowest_finite(x.dtype), x.dtype))


@triton.jit
def scaled_exponential(x):
    """(maximum m, sum of exp(x - m)) of one element: the sum is 1, or 0 for -inf, or nan for nan."""
    infinite = tl.abs(x) == float("inf")
    row_sum = tl.where(infinite, tl.where(x > 0, 1.0, 0.0), x * 0.0 + 1.0)
    return at_least_lowest(x), row_sum


@triton.jit
def combine_exponentials(max_a, sum_a, max_b, sum_b):
    """(maximum, sum of exponentials) of two sets: the sum with the lower maximum is rescaled to the higher one."""
    # The difference of equal infinities is 0, too.
    scale = libdevice.exp(tl.where(max_a == max_b, 0.0, -tl.abs(max_a - max_b)))
    return maximum_nan(max_a, max_b), tl.where(max_a >= max_b, sum_a + sum_b * scale, sum_a * scale + sum_b)


@triton.jit
def _log_sum(row_max, row_sum, count):
    return tl.where(row_max == float("inf"), row_max, row_max + libdevice.log(row_sum))


@triton.jit
def _exponential(x, row_max, count):
    return libdevice.exp(x - row_max)


@triton.jit
def _rough_exponential(x, row_max, count):
    return libdevice.exp2((x - row_max) * LOG2_E)


def no_exponentials(dtype):
    """Return the identity of `combine_exponentials`: (lowest finite number, 0)."""
    return torch.finfo(dtype).min, 0.0


def sums_of_exponentials(project, results, rough=False):
    """Return the online-softmax reduction, whose state is (maximum m, sum of exp(x - m)); Milakov and Gimelshein 2018.

    A block finds its maximum first, then the sum, with one exponential an element. `rough` exponentials are exact
    enough for results rounded to 16-bit floats; below 2^-126 they may be 0 if the transform is `flushing`.
    """
    stages = (
        Stage(lambda dtype: torch.finfo(dtype).min, only, maximum_nan, at_least_lowest),
        Stage(0.0, _rough_exponential if rough else _exponential, add_states),
    )
    gathered = {"stages": stages, "gather": both}
    return Reduction(
        no_exponentials, scaled_exponential, combine_exponentials, project, (None, None), results, **gathered
    )


log_sum_exp = sums_of_exponentials(_log_sum, 1)


@operator("logsumexp", accepts=ALL, promotion="int_to_float")
def logsumexp(self, dim, keepdim=False, outs=()):
    if not len(dim):
        raise Decline("an empty list of dimensions")
    dtype = self.dtype if self.dtype.is_floating_point else torch.get_default_dtype()
    return reduced(log_sum_exp, (self,), dim, keepdim, (dtype,), outs, opmath(dtype))
