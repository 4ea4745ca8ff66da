"""Batch normalisation, forward and backward: layer normalisation's formulas over all dimensions but the channels'.

Ioffe and Szegedy 2015. Where statistics are not those of the batch every element stands alone.
"""

import torch
import triton
import triton.language as tl

from tritonite.catalog import operator, scalar_kernel
from tritonite.dispatch.call import empty
from tritonite.dtypes import FLOATS, opmath
from tritonite.engine.iteration import has_channels_last
from tritonite.engine.rows.declare import Reduction, RowTransform, outputs
from tritonite.errors import Decline
from tritonite.language.math import inverse, square_root, true_divide
from tritonite.ops.normalization import (
    asked_for,
    by_statistics,
    check_without_gaps,
    expanded,
    gradient,
    gradients,
    mean_and_rstd,
    normalized,
    present,
    product_and_gradient,
    statistics_dtype,
)
from tritonite.ops.reduction import add_pairs, both_added_to_zero, check_floats, over_count


@triton.jit
def _statistics(mean, squares, own_count, count, eps):
    """With the variance that running statistics keep, which is unbiased."""
    mean, rstd = mean_and_rstd(mean, squares, own_count, count, eps)
    return mean, rstd, true_divide(squares, tl.broadcast_to((count - 1.0).to(squares.dtype), squares.shape))


_FORWARD = by_statistics(_statistics, 3)


@triton.jit
def _moved(running_mean, running_var, mean, variance, momentum):
    share = momentum.to(mean.dtype)
    return (1.0 - share) * running_mean + share * mean, (1.0 - share) * running_var + share * variance


@triton.jit
def _as_of_batch(mean, variance, eps):
    return mean, inverse(square_root(variance + eps.to(variance.dtype)))


@triton.jit
def _pair(first, second, count, number):
    return first, second


# Of sets of one element: what becomes of each channel's running statistics, and them as if they were the batch's.
_update = Reduction((0.0, 0.0), _moved, add_pairs, _pair, (None, None), 2, parametric=True)
_given = Reduction((0.0, 0.0), _as_of_batch, add_pairs, _pair, (None, None), 2, parametric=True)


@triton.jit
def _means_and_sums(product, grad, count):
    by_weight, by_bias = both_added_to_zero(product, grad, count)
    return over_count(grad, count), over_count(product, count), by_weight, by_bias


@triton.jit
def _weighted_gradient(grad, x, mean, rstd, weight, mean_grad, mean_product):
    return weight * gradient(grad, x, mean, rstd, mean_grad, mean_product)


# A channel has one weight, so that the sums are the gradients by weight and bias, too.
_sums = Reduction((0.0, 0.0), product_and_gradient, add_pairs, _means_and_sums, (None, None), 4)
_BACKWARD = {
    False: RowTransform(_sums, gradient, 4, applied=2),
    True: RowTransform(_sums, _weighted_gradient, 4, applied=2),
}


@scalar_kernel(accepts=FLOATS, cast=("mean", "variance", "weight", "bias", "eps"), contiguous=True)
def _by_given_statistics(input, mean, variance, weight, bias, eps):
    result = true_divide(input - mean, square_root(variance + eps))
    if weight is not None:
        result *= weight
    if bias is not None:
        result += bias
    return result


@scalar_kernel(accepts=FLOATS, cast=("rstd", "weight"), contiguous=True)
def _gradient_by_given_statistics(grad_out, rstd, weight):
    result = grad_out * rstd
    if weight is not None:
        result *= weight
    return result


def _channels(input, *by_channel):
    """(the dimensions of a channel, a shape that lays its values along it); declines other layouts and no elements."""
    if input.dim() < 2 or not input.numel() or any(tuple(each.shape) != (input.shape[1],) for each in by_channel):
        raise Decline("no channels, no elements, or values of another number of channels")
    if has_channels_last(input):
        raise Decline("channels last")
    dims = tuple(d for d in range(input.dim()) if d != 1)
    return dims, (1, -1, *[1] * (input.dim() - 2))


def _laid(shape, *operands):
    return [None if operand is None else operand.view(shape) for operand in operands]


def _kept(input, *parameters):
    """The dtype of the statistics handed on: as ATen computes on a GPU, as its parameters are, if any, on a CPU.

    Declines unless parameters and running statistics have one dtype: the input's or, of half types, float32.
    """
    found = {each.dtype for each in present(*parameters)}
    if len(found) > 1 or not found <= {input.dtype, opmath(input.dtype)}:
        raise Decline("parameters of several dtypes, or of another than the input's")
    return found.pop() if found and input.device.type == "cpu" else statistics_dtype(input)


def _trained(input, weight, bias, running, moved, momentum, eps, outs):
    """Write (result, mean, rstd) by the batch's own statistics, and into `moved` the `running` ones after it."""
    check_floats(input)
    kept = _kept(input, weight, bias, *running, *moved)
    dims, along = _channels(input, *present(weight, bias, *running, *moved))
    if len({each.dtype for each in (*running, *moved)}) > 1 or input.numel() == input.shape[1]:
        raise Decline("statistics of several dtypes, or one element a channel")
    channels = (input.shape[1],)
    every = present(input, weight, bias, *running)
    outs = outputs(every, [input.shape, channels, channels], [input.dtype, kept, kept], outs)
    compute = opmath(input.dtype)
    # The mean and the variance before they are rounded.
    exact = tuple([empty(channels, compute, input.device) for _ in running])
    affine, written = expanded(input.shape, *_laid(along, weight, bias)), (0, 1, 0, 2)[: 2 + len(exact)]
    normalized(input, *affine, dims, eps, outs[0], (*outs[1:], *exact), _FORWARD, written)
    if running:
        _update.run((*running, *exact), (), moved, compute, (momentum,))
    return outs


def _inferred(input, weight, bias, running_mean, running_var, eps, outs):
    """Write the result by statistics that are given; those of the batch are empty on a CPU, else the given ones'."""
    check_floats(input)
    if running_mean is None or running_var is None:
        raise Decline("no statistics")
    kept = _kept(input, weight, bias, running_mean, running_var)
    _, along = _channels(input, *present(weight, bias, running_mean, running_var))
    check_without_gaps(*outs)
    given = _laid(along, running_mean, running_var, weight, bias)
    size = 0 if input.device.type == "cpu" else input.shape[1]
    saved = outs[1:] or [empty((size,), kept, input.device) for _ in range(2)]
    if any(tuple(out.shape) != (size,) or out.dtype is not kept for out in saved):
        raise Decline("outputs of another shape or dtype")
    (result,) = _by_given_statistics.run((input, *given, eps), outs[:1])
    if size:
        _given.run((running_mean, running_var), (), saved, opmath(input.dtype), (eps,))
    return result, *saved


def _fresh(*running):
    return tuple(empty(each.shape, each.dtype, each.device) for each in running)


def _running(running_mean, running_var):
    if (running_mean is None) != (running_var is None):
        raise Decline("one of two running statistics")
    return tuple(present(running_mean, running_var))


def _declines_cudnn(input, weight, bias, running_mean, running_var, training, eps):
    """Where ATen would have cuDNN do it, which keeps more for the gradient than this does."""
    if input.device.type == "cuda" and weight is not None and bias is not None:
        if running_mean is None or running_var is None:
            raise Decline("no running statistics, with which cuDNN may do it")
        chosen = torch._C._select_batch_norm_backend(input, weight, bias, running_mean, running_var, training, eps)
        if chosen != torch._C._BatchNormBackend.Native:
            raise Decline("cuDNN's batch normalisation")


@operator("native_batch_norm", "_native_batch_norm_legit", accepts=FLOATS)
def native_batch_norm(
    input, weight, bias, running_mean=None, running_var=None, training=True, momentum=0.1, eps=1e-5, outs=()
):
    if not training:
        return _inferred(input, weight, bias, running_mean, running_var, eps, outs)
    running = _running(running_mean, running_var)
    return _trained(input, weight, bias, running, running, momentum, eps, outs)


@operator("_native_batch_norm_legit_no_training", accepts=FLOATS)
def _native_batch_norm_legit_no_training(input, weight, bias, running_mean, running_var, momentum, eps, outs=()):
    return _inferred(input, weight, bias, running_mean, running_var, eps, outs)


@operator("_native_batch_norm_legit_functional", accepts=FLOATS)
def _native_batch_norm_legit_functional(
    input, weight, bias, running_mean, running_var, training, momentum, eps, outs=()
):
    if not training:
        raise Decline("copies of the running statistics")
    running, moved = (running_mean, running_var), _fresh(running_mean, running_var)
    return *_trained(input, weight, bias, running, moved, momentum, eps, ()), *moved


def _reserve(input, outs):
    """What cuDNN would keep for the gradient: nothing."""
    if outs and (outs[3].numel() or outs[3].dtype is not torch.uint8):
        raise Decline("output of another shape or dtype")
    return outs[3] if outs else empty((0,), torch.uint8, input.device)


@operator("_batch_norm_with_update", accepts=FLOATS, pin=("eps",))
def _batch_norm_with_update(input, weight, bias, running_mean, running_var, momentum, eps, outs=()):
    _declines_cudnn(input, weight, bias, running_mean, running_var, True, eps)
    reserve, running = _reserve(input, outs), (running_mean, running_var)
    return *_trained(input, weight, bias, running, running, momentum, eps, outs[:3]), reserve


@operator("_batch_norm_with_update_functional", accepts=FLOATS, pin=("eps",))
def _batch_norm_with_update_functional(input, weight, bias, running_mean, running_var, momentum, eps, outs=()):
    _declines_cudnn(input, weight, bias, running_mean, running_var, True, eps)
    running, moved = (running_mean, running_var), _fresh(running_mean, running_var)
    return *_trained(input, weight, bias, running, moved, momentum, eps, ()), _reserve(input, ()), *moved


@operator("_batch_norm_no_update", accepts=FLOATS)
def _batch_norm_no_update(input, weight, bias, running_mean, running_var, momentum, eps, outs=()):
    if input.device.type != "cpu":
        raise Decline("ATen asks its kernel for CPUs, which refuses")
    reserve = _reserve(input, outs)
    return *_inferred(input, weight, bias, running_mean, running_var, eps, outs[:3]), reserve


def _backward(grad_out, input, weight, running, saved, train, eps, output_mask, outs):
    check_floats(input, grad_out)
    on_gpu = input.device.type != "cpu"
    kept = _kept(input, weight, *running, *(() if on_gpu else saved))
    _channels(input, *present(*running))
    if any(each.dtype is not kept for each in present(*saved)):
        raise Decline("statistics of another dtype than ATen keeps")
    # On a GPU ATen's forward pass hands on the running statistics as if they were the batch's.
    handed_on = on_gpu and saved[0] is not None and saved[0].numel() > 0
    if handed_on and not train and output_mask[0] and any(output_mask[1:]):
        raise Decline("statistics handed on twice, of which the layout decides ATen's")
    as_of_batch = train or handed_on
    statistics = saved if as_of_batch else running
    if None in statistics or grad_out.shape != input.shape:
        raise Decline("no statistics, or operands of several shapes")
    dims, along = _channels(input, *present(weight, *statistics))
    channels = (input.shape[1],)
    every, by_parameters = present(input, grad_out, weight, *statistics), kept
    if on_gpu:
        by_parameters = input.dtype if weight is None else weight.dtype
    results = asked_for(every, (input.shape, channels, channels), output_mask, outs, by_parameters)
    if not as_of_batch:
        statistics = [empty(channels, opmath(input.dtype), input.device) for _ in range(2)]
        _given.run(running, (), statistics, opmath(input.dtype), (eps,))
    mean, rstd, weight = _laid(along, *statistics, weight)
    operands = (grad_out, input, *expanded(input.shape, mean, rstd, weight))
    if train and results[0] is not None:
        sums = {i: result for i, result in ((2, results[1]), (3, results[2])) if result is not None}
        transform, compute = _BACKWARD[weight is not None], opmath(input.dtype)
        transform.run(present(*operands), dims, results[:1], compute, (), tuple(sums.values()), tuple(sums))
        return results
    if results[0] is not None:
        _gradient_by_given_statistics.run((grad_out, rstd, weight), results[:1])
    gradients(*operands, dims, dims, [None, *results[1:]])
    return results


@operator("native_batch_norm_backward", accepts=FLOATS)
def native_batch_norm_backward(
    grad_out, input, weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask, outs=()
):
    running, saved = (running_mean, running_var), (save_mean, save_invstd)
    return _backward(grad_out, input, weight, running, saved, train, eps, output_mask, outs)


@operator("batch_norm_backward", accepts=FLOATS, pin=("eps",))
def batch_norm_backward(
    grad_out,
    input,
    weight,
    running_mean,
    running_var,
    save_mean,
    save_var,
    update,
    eps,
    output_mask,
    reserve,
    outs=(),
):
    _declines_cudnn(input, weight, weight, running_mean, running_var, True, eps)
    running, saved = (running_mean, running_var), (save_mean, save_var)
    return _backward(grad_out, input, weight, running, saved, update, eps, output_mask, outs)
