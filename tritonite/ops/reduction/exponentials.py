"""Log-sum-exp, and the online softmax's reduction, which softmax and losses use, too."""

import torch
import triton
import triton.language as tl

from tritonite.dtypes import ALL, opmath
from tritonite.engine.rows.declare import Reduction, Stage, reduced
from tritonite.engine.rows.formulas import add_states
from tritonite.errors import Decline
from tritonite.language import libdevice
from tritonite.language.math import LOG2_E, maximum_nan
from tritonite.ops.reduction.sums import both, only
from tritonite.registry import operator


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
