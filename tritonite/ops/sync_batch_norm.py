"""What `torch.nn.SyncBatchNorm` is made of: batch normalisation in steps, between which processes talk to each other.

ATen has these on CUDA alone. Statistics are in the dtype computed in, and parameters in that or the input's.
"""

import torch
import triton
import triton.language as tl

from tritonite.dtypes import FLOATS, opmath
from tritonite.engine.iteration import INT32_LIMIT, format_strides, same_strides, span, suggests_channels_last
from tritonite.engine.outputs import outputs
from tritonite.engine.rows.declare import Reduction
from tritonite.engine.rows.formulas import add_pairs
from tritonite.errors import Decline
from tritonite.language.math import inverse, square_root, true_divide
from tritonite.ops.batch_norm import (
    along_channels,
    channels_of,
    has_channels_last_kernels,
    running_pair,
    running_update,
)
from tritonite.ops.normalization import check_without_gaps, expanded, parameters_dtype, present
from tritonite.ops.reduction import (
    add_states,
    added_to_zero,
    both_added_to_zero,
    check_floats,
    combine_moments,
    moments,
    over_count,
    same,
)
from tritonite.registry import operator, scalar_kernel
from tritonite.runtime.contract import empty


@triton.jit
def _inverse_deviation(variance, eps):
    """0 where there is no variance, and nothing is added to it."""
    total = variance + eps.to(variance.dtype)
    return tl.where(total == 0.0, 0.0, inverse(square_root(total)))


@triton.jit
def _mean_and_rstd(mean, squares, own_count, count, eps):
    return mean, _inverse_deviation(over_count(squares, count), eps)


@triton.jit
def _moments_of_part(mean, invstd, count, eps):
    """The mean of a process's elements, and the sum of their squared distances from it."""
    deviation = inverse(invstd)
    return mean, (deviation * deviation - eps.to(mean.dtype)) * count, count


@triton.jit
def _moments_of_equal_part(mean, invstd, eps, count):
    return _moments_of_part(mean, invstd, count.to(mean.dtype), eps)


@triton.jit
def _statistics_of_all(mean, squares, total, count, eps):
    """With the variance that running statistics keep, which is unbiased."""
    rstd = inverse(square_root(true_divide(squares, total) + eps.to(squares.dtype)))
    return mean, rstd, true_divide(squares, total - 1.0)


@triton.jit
def _statistics_of_equal_parts(mean, squares, total, count, eps, of_part):
    return _statistics_of_all(mean, squares, total, count, eps)


@triton.jit
def _gradient_and_product(grad, x, mean):
    return grad, grad * (x - mean)


@triton.jit
def _by_weight_and_bias(total, product, rstd):
    return product * rstd, total


@triton.jit
def _times(product, rstd):
    return product * rstd


_stats = moments(_mean_and_rstd, 2)
_STATES = (0.0, 0.0, 0.0), (None, None, None)
_gathered = Reduction(_STATES[0], _moments_of_part, combine_moments, _statistics_of_all, _STATES[1], 3, parametric=True)
_gathered_equal = Reduction(
    _STATES[0], _moments_of_equal_part, combine_moments, _statistics_of_equal_parts, _STATES[1], 3, parametric=True
)
_sums = Reduction((0.0, 0.0), _gradient_and_product, add_pairs, both_added_to_zero, (None, None), 2)
# Of sets of one element.
_of_parameters = Reduction((0.0, 0.0), _by_weight_and_bias, add_pairs, both_added_to_zero, (None, None), 2)
_product = Reduction((0.0,), _times, add_states, added_to_zero)
_total = Reduction((0.0,), same, add_states, added_to_zero)


@scalar_kernel(accepts=FLOATS, cast=("mean", "invstd", "weight", "bias"))
def _normalized(input, mean, invstd, weight, bias):
    result = input - mean
    if weight is not None:
        # First, as ATen's kernels have it: of a weight of 0 nothing overflows.
        result *= weight
    result *= invstd
    if bias is not None:
        result += bias
    return result


@scalar_kernel(accepts=FLOATS, cast=("mean", "invstd", "weight", "sum_dy", "sum_dy_xmu", "count"))
def _gradient(grad_out, input, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
    inverse_count = inverse(count)
    scale = invstd if weight is None else invstd * weight
    return (grad_out - sum_dy * inverse_count - (input - mean) * (invstd * invstd * sum_dy_xmu * inverse_count)) * scale


def _checked(input, statistics, *parameters):
    """(the dimensions of a channel, a shape that lays its values along it); declines what ATen refuses."""
    check_floats(input)
    parameters_dtype(input, *parameters)
    if any(each.dtype is not opmath(input.dtype) for each in statistics):
        raise Decline("statistics of another dtype than ATen keeps")
    return channels_of(input, *statistics, *present(*parameters))


@operator("batch_norm_stats", accepts=FLOATS, cuda_only=("batch_norm_stats", "batch_norm_stats.out"))
def batch_norm_stats(input, eps, outs=()):
    """The mean of each channel, and the inverse of its standard deviation."""
    dims, _ = _checked(input, ())
    compute, channels = opmath(input.dtype), (input.shape[1],)
    outs = outputs((input,), [channels] * 2, [compute] * 2, outs)
    _stats.run((input,), dims, outs, compute, (eps,))
    return outs


@operator("batch_norm_elemt", accepts=FLOATS, cuda_only=("batch_norm_elemt", "batch_norm_elemt.out"))
def batch_norm_elemt(input, weight, bias, mean, invstd, eps, outs=()):
    """The result by statistics that are given."""
    _, along = _checked(input, (mean, invstd), weight, bias)
    strides = format_strides(input.shape, suggests_channels_last(input))
    if outs and not all(same_strides(input.shape, each.stride(), strides) for each in (input, outs[0])):
        raise Decline("an input and a result of two layouts, or with gaps")
    outs = outputs(present(input, weight, bias, mean, invstd), [input.shape], [input.dtype], outs, strides=strides)
    _normalized.run((input, *along_channels(along, mean, invstd, weight, bias)), outs)
    return outs


def _gathered_statistics(reduction, input, statistics, counts, running, momentum, numbers, outs):
    """The statistics of all processes' elements, from each one's, which lie in rows; running ones move on."""
    check_floats(input)
    mean, invstd = statistics
    if mean.dim() != 2 or not mean.numel() or invstd.shape != mean.shape:
        raise Decline("statistics that do not lie in rows, or none")
    channels, kind = (mean.shape[1],), running[0].dtype if running else input.dtype
    if any(tuple(each.shape) != channels or each.dtype is not kind for each in running):
        raise Decline("running statistics of another number of channels, or of two dtypes")
    if kind not in FLOATS or any(each.dtype is not opmath(kind) for each in statistics):
        raise Decline("statistics of another dtype than ATen keeps")
    if any(tuple(each.shape) != mean.shape[:1] or each.dtype is not kind for each in counts):
        raise Decline("not one count for each process, of the running statistics' dtype")
    compute = mean.dtype
    outs = outputs((*statistics, *counts, *running), [channels] * 2, [compute] * 2, outs)
    unbiased = empty(channels, compute, mean.device)
    operands = *statistics, *(each[:, None].expand(mean.shape) for each in counts)
    reduction.run(operands, (0,), (*outs, unbiased), compute, numbers)
    if running:
        running_update.run((*running, outs[0], unbiased), (), running, compute, (momentum,))
    return outs


@operator(
    "batch_norm_gather_stats_with_counts",
    accepts=FLOATS,
    cuda_only=("batch_norm_gather_stats_with_counts", "batch_norm_gather_stats_with_counts.out"),
)
def batch_norm_gather_stats_with_counts(input, mean, invstd, running_mean, running_var, momentum, eps, counts, outs=()):
    running = running_pair(running_mean, running_var)
    return _gathered_statistics(_gathered, input, (mean, invstd), (counts,), running, momentum, (eps,), outs)


@operator(
    "batch_norm_gather_stats",
    accepts=FLOATS,
    pin=("count",),
    cuda_only=("batch_norm_gather_stats", "batch_norm_gather_stats.out"),
)
def batch_norm_gather_stats(input, mean, invstd, running_mean, running_var, momentum, eps, count, outs=()):
    """Of processes that have as many elements each."""
    running = running_pair(running_mean, running_var)
    if (running[0] if running else input).dtype.itemsize < 4:
        raise Decline("a count that ATen rounds to a half type")
    numbers = eps, float(count)
    return _gathered_statistics(_gathered_equal, input, (mean, invstd), (), running, momentum, numbers, outs)


def _lie_last(grad_out, input):
    """Whether ATen has kernels for channels that are next to each other, for the gradient and for the input."""
    if grad_out.shape != input.shape or grad_out.dtype is not input.dtype:
        raise Decline("operands of several shapes or dtypes")
    if any(span(each.shape, each.stride()) >= INT32_LIMIT for each in (grad_out, input)):
        raise Decline("offsets of 64 bits, which some of ATen's kernels lack")
    return has_channels_last_kernels(grad_out), has_channels_last_kernels(input)


@operator(
    "batch_norm_backward_reduce",
    accepts=FLOATS,
    cuda_only=("batch_norm_backward_reduce", "batch_norm_backward_reduce.out"),
)
def batch_norm_backward_reduce(grad_out, input, mean, invstd, weight, input_g, weight_g, bias_g, outs=()):
    """The sums of the gradient and of it times x - mean, and the gradients by weight and bias, which follow."""
    dims, along = _checked(input, (mean, invstd), weight)
    check_without_gaps(mean, invstd, weight)
    last, compute, channels = all(_lie_last(grad_out, input)), opmath(input.dtype), mean.shape
    if last:
        # ATen's kernel does not ask what is wanted.
        input_g, weight_g, bias_g = True, weight is not None, weight is not None
    wanted = (input_g, input_g, weight_g, bias_g)
    if weight is None and (weight_g or bias_g):
        raise Decline("gradients by parameters that there are not")
    if outs and not all(wanted):
        raise Decline("outputs that are not asked for")
    dtypes = [compute, compute, *[compute if weight is None else weight.dtype] * 2]
    chosen = [i for i in range(4) if wanted[i]]
    found = iter(
        outputs(
            *(present(grad_out, input, mean, invstd, weight), [channels] * len(chosen), [dtypes[i] for i in chosen]),
            outs,
        )
    )
    results = [next(found) if flag else None for flag in wanted]
    sums = [empty(channels, compute, input.device) if each is None else each for each in results[:2]]
    (means,) = expanded(input.shape, *along_channels(along, mean))
    _sums.run((grad_out, input, means), dims, sums, compute)
    if weight_g and bias_g:
        _of_parameters.run((*sums, invstd), (), results[2:], compute)
    elif weight_g:
        _product.run((sums[1], invstd), (), results[2:3], compute)
    elif bias_g:
        _total.run(sums[:1], (), results[3:], compute)
    if last and weight is None:
        results[2:] = (empty((0,), compute, input.device) for _ in range(2))
    return results


@operator(
    "batch_norm_backward_elemt",
    accepts=FLOATS,
    cuda_only=("batch_norm_backward_elemt", "batch_norm_backward_elemt.out"),
)
def batch_norm_backward_elemt(grad_out, input, mean, invstd, weight, sum_dy, sum_dy_xmu, count, outs=()):
    """The gradient by the input, from the sums and the counts of all processes."""
    statistics = mean, invstd, sum_dy, sum_dy_xmu
    _, along = _checked(input, statistics, weight)
    check_without_gaps(*statistics, weight, count)
    (last, alike), compute = _lie_last(grad_out, input), opmath(input.dtype)
    if last and not alike:
        raise Decline("operands of two layouts, of which ATen's kernel reads the input as it does the gradient")
    if not last and weight is not None and weight.dtype is not compute:
        raise Decline("a weight of a half type, which ATen refuses where channels are apart")
    if count.dtype is not torch.int32 or not count.numel():
        raise Decline("counts of another dtype, or none")
    strides = input.stride() if last else format_strides(input.shape, False)
    every = present(grad_out, input, *statistics, weight, count)
    outs = outputs(every, [input.shape], [input.dtype], outs, strides=strides)
    total = count
    if count.numel() > 1:
        total = empty((1,), compute, input.device)
        _total.run((count.view(-1),), (0,), (total[0],), compute)
    given = along_channels(along, mean, invstd, weight, sum_dy, sum_dy_xmu)
    _gradient.run((grad_out, input, *given, total.view([1] * input.dim())), outs)
    return outs
