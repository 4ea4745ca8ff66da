"""The steps of `torch.nn.SyncBatchNorm`: batch normalisation, between whose steps processes exchange statistics.

ATen has these operators on CUDA only. Statistics have the compute dtype, parameters that or the input's dtype.
"""

import torch
import triton
import triton.language as tl

from tritonite.dtypes import FLOATS, opmath
from tritonite.engine.iteration import INT32_LIMIT, format_strides, same_strides, span, suggests_channels_last
from tritonite.engine.outputs import outputs
from tritonite.engine.rows.declare import Reduction
from tritonite.engine.rows.formulas import add_pairs, add_states
from tritonite.errors import Decline
from tritonite.language.math import inverse, square_root, true_divide
from tritonite.ops.batch_norm import (
    along_channels,
    channels_of,
    has_channels_last_kernels,
    running_pair,
    running_update,
)
from tritonite.ops.normalization import check_contiguous, expanded, parameters_dtype, present
from tritonite.ops.reduction.moments import combine_moments, moments
from tritonite.ops.reduction.sums import added_to_zero, both_added_to_zero, check_floats, over_count, same
from tritonite.registry import operator, scalar_kernel
from tritonite.runtime.contract import empty


@triton.jit
def _inverse_deviation(variance, eps):
    """1 / sqrt(variance + eps); 0 if both are 0."""
    total = variance + eps.to(variance.dtype)
    return tl.where(total == 0.0, 0.0, inverse(square_root(total)))


@triton.jit
def _mean_and_rstd(mean, squares, own_count, count, eps):
    return mean, _inverse_deviation(over_count(squares, count), eps)


@triton.jit
def _moments_of_process(mean, invstd, count, eps):
    """Recover a process's moments: mean, sum of squared distances from the mean, count."""
    deviation = inverse(invstd)
    return mean, (deviation * deviation - eps.to(mean.dtype)) * count, count


@triton.jit
def _moments_of_equal_process(mean, invstd, eps, count):
    return _moments_of_process(mean, invstd, count.to(mean.dtype), eps)


@triton.jit
def _global_statistics(mean, squares, total, count, eps):
    """Return mean, rstd, and the unbiased variance, which running statistics track."""
    rstd = inverse(square_root(true_divide(squares, total) + eps.to(squares.dtype)))
    return mean, rstd, true_divide(squares, total - 1.0)


@triton.jit
def _global_statistics_of_equal(mean, squares, total, count, eps, process_count):
    return _global_statistics(mean, squares, total, count, eps)


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
_gathered = Reduction(
    _STATES[0], _moments_of_process, combine_moments, _global_statistics, _STATES[1], 3, parametric=True
)
_gathered_equal = Reduction(
    _STATES[0], _moments_of_equal_process, combine_moments, _global_statistics_of_equal, _STATES[1], 3, parametric=True
)
_sums = Reduction((0.0, 0.0), _gradient_and_product, add_pairs, both_added_to_zero, (None, None), 2)
# Reductions of one element, that is pointwise kernels.
_of_parameters = Reduction((0.0, 0.0), _by_weight_and_bias, add_pairs, both_added_to_zero, (None, None), 2)
_product = Reduction((0.0,), _times, add_states, added_to_zero)
_total = Reduction((0.0,), same, add_states, added_to_zero)


@scalar_kernel(accepts=FLOATS, cast=("mean", "invstd", "weight", "bias"))
def _normalized(input, mean, invstd, weight, bias):
    result = input - mean
    if weight is not None:
        # Before rstd, as in ATen: a weight of 0 prevents an overflow.
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
    """Return the dimensions of a channel and the shape of values by channel. Decline dtypes for which ATen raises."""
    check_floats(input)
    parameters_dtype(input, *parameters)
    if any(each.dtype is not opmath(input.dtype) for each in statistics):
        raise Decline(f"statistics whose dtype is not {opmath(input.dtype)}")
    return channels_of(input, *statistics, *present(*parameters))


@operator("batch_norm_stats", accepts=FLOATS, cuda_only=("batch_norm_stats", "batch_norm_stats.out"))
def batch_norm_stats(input, eps, outs=()):
    """Mean and rstd of each channel."""
    dims, _ = _checked(input, ())
    compute, channels = opmath(input.dtype), (input.shape[1],)
    outs = outputs((input,), [channels] * 2, [compute] * 2, outs)
    _stats.run((input,), dims, outs, compute, (eps,))
    return outs


@operator("batch_norm_elemt", accepts=FLOATS, cuda_only=("batch_norm_elemt", "batch_norm_elemt.out"))
def batch_norm_elemt(input, weight, bias, mean, invstd, eps, outs=()):
    """Normalise by given statistics."""
    _, along = _checked(input, (mean, invstd), weight, bias)
    strides = format_strides(input.shape, suggests_channels_last(input))
    if outs and not all(same_strides(input.shape, each.stride(), strides) for each in (input, outs[0])):
        raise Decline("an input and an output that are not both in the input's memory format")
    outs = outputs(present(input, weight, bias, mean, invstd), [input.shape], [input.dtype], outs, strides=strides)
    _normalized.run((input, *along_channels(along, mean, invstd, weight, bias)), outs)
    return outs


def _gathered_statistics(reduction, input, statistics, counts, running, momentum, numbers, outs):
    """Combine the statistics of processes, a row each, into the global ones, and update the running ones."""
    check_floats(input)
    mean, invstd = statistics
    if mean.dim() != 2 or not mean.numel() or invstd.shape != mean.shape:
        raise Decline(
            f"statistics of shapes {tuple(mean.shape)} and {tuple(invstd.shape)}; (processes, channels) is served"
        )
    channels, dtype = (mean.shape[1],), running[0].dtype if running else input.dtype
    if any(tuple(each.shape) != channels or each.dtype is not dtype for each in running):
        raise Decline(f"running statistics that are not of shape {channels} and of {dtype}")
    if dtype not in FLOATS or any(each.dtype is not opmath(dtype) for each in statistics):
        raise Decline(f"statistics of {mean.dtype} and {invstd.dtype} for {dtype}")
    if any(tuple(each.shape) != mean.shape[:1] or each.dtype is not dtype for each in counts):
        raise Decline(f"counts that are not one of {dtype} for each process")
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
    """Combine the statistics of processes with `count` elements each."""
    running = running_pair(running_mean, running_var)
    if (running[0] if running else input).dtype.itemsize < 4:
        raise Decline("a count that ATen rounds to a 16-bit float")
    numbers = eps, float(count)
    return _gathered_statistics(_gathered_equal, input, (mean, invstd), (), running, momentum, numbers, outs)


def _have_channels_last_kernels(grad_out, input):
    """Return whether ATen's channels-last kernels serve the gradient, and whether they serve the input."""
    if grad_out.shape != input.shape or grad_out.dtype is not input.dtype:
        raise Decline(f"gradient of shape {tuple(grad_out.shape)} and {grad_out.dtype}, unlike the input")
    if any(span(each.shape, each.stride()) >= INT32_LIMIT for each in (grad_out, input)):
        raise Decline("operands that need 64-bit offsets, which some of ATen's kernels lack")
    return has_channels_last_kernels(grad_out), has_channels_last_kernels(input)


@operator(
    "batch_norm_backward_reduce",
    accepts=FLOATS,
    cuda_only=("batch_norm_backward_reduce", "batch_norm_backward_reduce.out"),
)
def batch_norm_backward_reduce(grad_out, input, mean, invstd, weight, input_g, weight_g, bias_g, outs=()):
    """Sum the gradient g and g * (x - mean) over each channel; the gradients by weight and bias follow from both."""
    dims, along = _checked(input, (mean, invstd), weight)
    check_contiguous(mean, invstd, weight)
    last, compute, channels = all(_have_channels_last_kernels(grad_out, input)), opmath(input.dtype), mean.shape
    if last:
        # ATen's channels-last kernel ignores the flags.
        input_g, weight_g, bias_g = True, weight is not None, weight is not None
    wanted = (input_g, input_g, weight_g, bias_g)
    if weight is None and (weight_g or bias_g):
        raise Decline("gradients by weight or bias without a weight")
    if outs and not all(wanted):
        raise Decline(f"outputs with the flags {wanted}; all have to be set")
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
    """Gradient by the input, from the sums and counts of all processes."""
    statistics = mean, invstd, sum_dy, sum_dy_xmu
    _, along = _checked(input, statistics, weight)
    check_contiguous(*statistics, weight, count)
    (last, alike), compute = _have_channels_last_kernels(grad_out, input), opmath(input.dtype)
    if last and not alike:
        raise Decline("an input in another memory format than the gradient, which ATen reads as the same")
    if not last and weight is not None and weight.dtype is not compute:
        raise Decline("a 16-bit weight with channels that are not last, for which ATen raises")
    if count.dtype is not torch.int32 or not count.numel():
        raise Decline(f"{count.numel()} counts of {count.dtype}; int32 is served")
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
