"""Batch normalisation, forward and backward: layer normalisation's formulas over all dimensions but the channels'.

Ioffe and Szegedy 2015. Where statistics are not those of the batch every element stands alone.
"""

import torch
import triton
import triton.language as tl

from tritonite.dtypes import FLOATS, opmath
from tritonite.engine.iteration import (
    INT32_LIMIT,
    format_strides,
    has_channels_last,
    in_memory_format,
    same_strides,
    span,
    strides_after_conversion,
    suggests_channels_last,
)
from tritonite.engine.outputs import outputs
from tritonite.engine.rows.declare import Reduction, RowTransform
from tritonite.engine.rows.formulas import add_pairs
from tritonite.errors import Decline
from tritonite.language.math import inverse, square_root, true_divide
from tritonite.ops.normalization import (
    asked_for,
    by_statistics,
    expanded,
    gradient,
    gradients,
    kept_dtype,
    mean_and_rstd,
    normalized,
    parameters_dtype,
    present,
    product_and_gradient,
)
from tritonite.ops.reduction import both_added_to_zero, check_floats, over_count
from tritonite.registry import exclude, operator, scalar_kernel
from tritonite.runtime.contract import empty

# What cuDNN normalises, by float32 parameters where it has halves.
_OF_CUDNN = (torch.float16, torch.float32, torch.float64)


@triton.jit
def _statistics(mean, squares, own_count, count, eps):
    """With the variance that running statistics keep, which is unbiased."""
    mean, rstd = mean_and_rstd(mean, squares, own_count, count, eps)
    return mean, rstd, true_divide(squares, tl.broadcast_to((count - 1.0).to(squares.dtype), squares.shape))


_FORWARD = by_statistics(_statistics, 3)


@triton.jit
def _moved(running_mean, running_var, mean, variance, momentum):
    momentum = momentum.to(mean.dtype)
    kept = 1.0 - momentum
    return kept * running_mean + momentum * mean, kept * running_var + momentum * variance


@triton.jit
def _as_of_batch(mean, variance, eps):
    return mean, inverse(square_root(variance + eps.to(variance.dtype)))


@triton.jit
def _pair(first, second, count, number):
    return first, second


# Of sets of one element: what becomes of each channel's running statistics, and them as if they were the batch's.
running_update = Reduction((0.0, 0.0), _moved, add_pairs, _pair, (None, None), 2, parametric=True)
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
    # What a channel has in common comes first, which is computed once for all of its elements.
    scale = inverse(square_root(variance + eps))
    if weight is not None:
        scale *= weight
    result = (input - mean) * scale
    if bias is not None:
        result += bias
    return result


@scalar_kernel(accepts=FLOATS, cast=("rstd", "weight"), contiguous=True)
def _gradient_by_given_statistics(grad_out, rstd, weight):
    result = grad_out * rstd
    if weight is not None:
        result *= weight
    return result


def channels_of(input, *by_channel):
    """(the dimensions of a channel, a shape that lays its values along it); declines no elements."""
    if input.dim() < 2 or not input.numel() or any(tuple(each.shape) != (input.shape[1],) for each in by_channel):
        raise Decline("no channels, no elements, or values of another number of channels")
    dims = tuple(d for d in range(input.dim()) if d != 1)
    return dims, (1, -1, *[1] * (input.dim() - 2))


def along_channels(shape, *operands):
    return [None if operand is None else operand.view(shape) for operand in operands]


def _result_strides(input, *parameters):
    """A GPU's result lies as the input does; a CPU's has its channels last, if the input's seem so, or is row-major."""
    if input.device.type != "cpu":
        return strides_after_conversion(input.shape, input.stride())
    laid_out = in_memory_format(input) and all(each.is_contiguous() for each in present(*parameters))
    return format_strides(input.shape, has_channels_last(input) if laid_out else suggests_channels_last(input))


def _check_layout(outs, strides):
    """Decline given results of other layouts than ATen would choose, by which it may write them all the same."""
    if outs and not same_strides(outs[0].shape, outs[0].stride(), strides):
        raise Decline("a result of another layout than ATen's")
    if any(not out.is_contiguous() for out in outs[1:]):
        raise Decline("statistics with gaps between them, where contiguous ones are served")


def _trained(input, weight, bias, running, moved, momentum, eps, outs, strides=None):
    """Write (result, mean, rstd) by the batch's own statistics, and into `moved` the `running` ones after it."""
    check_floats(input)
    parameters = parameters_dtype(input, weight, bias, *running, *moved)
    dims, along = channels_of(input, *present(weight, bias, *running, *moved))
    if input.numel() == input.shape[1]:
        raise Decline("one element a channel")
    channels, kept = (input.shape[1],), kept_dtype(input, parameters)
    every = present(input, weight, bias, *running)
    if outs and input.device.type == "cpu" and not in_memory_format(input):
        raise Decline("an input with gaps, of which ATen's form with outputs reads a mean that it has not found")
    strides = strides or _result_strides(*every)
    outs = outputs(every, [input.shape, channels, channels], [input.dtype, kept, kept], outs, strides=strides)
    _check_layout(outs, strides)
    compute = opmath(input.dtype)
    # The mean and the variance before they are rounded.
    exact = tuple([empty(channels, compute, input.device) for _ in running])
    affine, written = expanded(input.shape, *along_channels(along, weight, bias)), (0, 1, 0, 2)[: 2 + len(exact)]
    normalized(input, *affine, dims, eps, outs[0], (*outs[1:], *exact), _FORWARD, written)
    if running:
        running_update.run((*running, *exact), (), moved, compute, (momentum,))
    return outs


def _inferred(input, weight, bias, running_mean, running_var, eps, outs, strides=None, size=None, copied=False):
    """Write the result by statistics that are given, and `size` of them each as if they were the batch's.

    Those are none on a CPU and all on a GPU, if it is None. Where ATen's form with outputs has them `copied` from what
    its other form gives, they may have any layout.
    """
    check_floats(input)
    if running_mean is None or running_var is None:
        raise Decline("no statistics")
    parameters = parameters_dtype(input, weight, bias, running_mean, running_var)
    _, along = channels_of(input, *present(weight, bias, running_mean, running_var))
    every = present(input, weight, bias, running_mean, running_var)
    strides, kept = strides or _result_strides(*every), kept_dtype(input, parameters)
    if size is None:
        size = 0 if input.device.type == "cpu" else input.shape[1]
    outs = outputs(every, [input.shape, (size,), (size,)], [input.dtype, kept, kept], outs, strides=strides)
    if not copied:
        _check_layout(outs, strides)
    given = along_channels(along, running_mean, running_var, weight, bias)
    _by_given_statistics.run((input, *given, eps), outs[:1])
    if size:
        _given.run((running_mean, running_var), (), outs[1:], opmath(input.dtype), (eps,))
    return outs


def _fresh(*running):
    return tuple(empty(each.shape, each.dtype, each.device) for each in running)


def running_pair(running_mean, running_var):
    if (running_mean is None) != (running_var is None):
        raise Decline("one of two running statistics")
    return tuple(present(running_mean, running_var))


def _has_cudnn(input, weight, bias, running_mean, running_var, training, eps):
    """Whether ATen has cuDNN do it."""
    if input.device.type != "cuda" or weight is None or bias is None:
        return False
    if running_mean is None or running_var is None:
        raise Decline("no running statistics, with which cuDNN may do it")
    chosen = torch._C._select_batch_norm_backend(input, weight, bias, running_mean, running_var, training, eps)
    if chosen not in (torch._C._BatchNormBackend.Native, torch._C._BatchNormBackend.Cudnn):
        raise Decline("a library other than cuDNN does it")
    return chosen == torch._C._BatchNormBackend.Cudnn


def _check_cudnn(input, *parameters):
    """The strides of what ATen makes with cuDNN; declines what it refuses then."""
    if any(each is None for each in parameters[:2]) or not 2 <= input.dim() <= 5:
        raise Decline("no weight or bias, or neither rows nor images")
    given = present(*parameters)
    if input.dtype not in _OF_CUDNN or any(each.dtype is not opmath(input.dtype) for each in given):
        raise Decline("bfloat16, or parameters of another dtype than is computed in")
    strides = format_strides(input.shape, suggests_channels_last(input))
    if not same_strides(input.shape, input.stride(), strides) or any(not each.is_contiguous() for each in given):
        raise Decline("operands with gaps")
    return strides


@operator("native_batch_norm", "_native_batch_norm_legit", accepts=FLOATS)
def native_batch_norm(
    input, weight, bias, running_mean=None, running_var=None, training=True, momentum=0.1, eps=1e-5, outs=()
):
    if not training:
        return _inferred(input, weight, bias, running_mean, running_var, eps, outs)
    running = running_pair(running_mean, running_var)
    return _trained(input, weight, bias, running, running, momentum, eps, outs)


@operator("_native_batch_norm_legit_no_training", accepts=FLOATS)
def _native_batch_norm_legit_no_training(input, weight, bias, running_mean, running_var, momentum, eps, outs=()):
    return _inferred(input, weight, bias, running_mean, running_var, eps, outs, copied=True)


@operator("_native_batch_norm_legit_functional", accepts=FLOATS)
def _native_batch_norm_legit_functional(
    input, weight, bias, running_mean, running_var, training, momentum, eps, outs=()
):
    if not training:
        raise Decline("copies of the running statistics")
    running, moved = (running_mean, running_var), _fresh(running_mean, running_var)
    return *_trained(input, weight, bias, running, moved, momentum, eps, ()), *moved


def _reserve(input, outs):
    """What is kept for cuDNN's gradient: nothing."""
    if outs and (outs[3].numel() or outs[3].dtype is not torch.uint8):
        raise Decline("output of another shape or dtype")
    return outs[3] if outs else empty((0,), torch.uint8, input.device)


def _trained_by_cudnn(input, weight, bias, running, moved, momentum, eps, outs):
    """`_trained` with the results' layout as ATen has it with cuDNN, whose own gradient may follow all the same."""
    strides = _check_cudnn(input, weight, bias, *running)
    if input.device.type == "cuda" and torch._C._get_cudnn_batch_norm_reserve_space_size(input, True):
        raise Decline("cuDNN keeps for its gradient what only cuDNN has")
    reserve = _reserve(input, outs)
    return *_trained(input, weight, bias, running, moved, momentum, eps, outs[:3], strides), reserve


def _check_epsilon(epsilon):
    # Nor is nan at least 0, which is cuDNN's least.
    if not epsilon >= 0:
        raise Decline("an epsilon that cuDNN refuses")


@operator("cudnn_batch_norm", accepts=_OF_CUDNN, cuda_only=("cudnn_batch_norm",), pin=("epsilon",))
def cudnn_batch_norm(
    input, weight, bias, running_mean, running_var, training, exponential_average_factor, epsilon, outs=()
):
    _check_epsilon(epsilon)
    running = running_pair(running_mean, running_var)
    if training:
        return _trained_by_cudnn(input, weight, bias, running, running, exponential_average_factor, epsilon, outs)
    strides = _check_cudnn(input, weight, bias, *running)
    results = _inferred(input, weight, bias, running_mean, running_var, epsilon, outs[:3], strides, 0)
    return *results, _reserve(input, outs)


exclude("cudnn_batch_norm.out", "ATen's own ends the process (torch 2.11)")


@operator("_batch_norm_with_update", accepts=FLOATS, pin=("eps",))
def _batch_norm_with_update(input, weight, bias, running_mean, running_var, momentum, eps, outs=()):
    reserve, running = _reserve(input, outs), (running_mean, running_var)
    if _has_cudnn(input, weight, bias, *running, True, eps):
        return _trained_by_cudnn(input, weight, bias, running, running, momentum, eps, outs)
    return *_trained(input, weight, bias, running, running, momentum, eps, outs[:3]), reserve


@operator("_batch_norm_with_update_functional", accepts=FLOATS, pin=("eps",))
def _batch_norm_with_update_functional(input, weight, bias, running_mean, running_var, momentum, eps, outs=()):
    running, moved = (running_mean, running_var), _fresh(running_mean, running_var)
    if _has_cudnn(input, weight, bias, *running, True, eps):
        return *_trained_by_cudnn(input, weight, bias, running, moved, momentum, eps, ()), *moved
    return *_trained(input, weight, bias, running, moved, momentum, eps, ()), _reserve(input, ()), *moved


@operator("_batch_norm_no_update", accepts=FLOATS)
def _batch_norm_no_update(input, weight, bias, running_mean, running_var, momentum, eps, outs=()):
    if input.device.type != "cpu":
        raise Decline("ATen asks its kernel for CPUs, which refuses")
    reserve = _reserve(input, outs)
    return *_inferred(input, weight, bias, running_mean, running_var, eps, outs[:3], copied=True), reserve


def has_channels_last_kernels(input):
    """Whether ATen's gradient on a GPU takes its kernels for channels that are next to each other."""
    one_channel = input.dim() in (4, 5) and input.shape[1] == 1
    return has_channels_last(input) or (input.is_contiguous() and (one_channel or input.stride(1) == 1))


def _on_cpu(tensor):
    return tensor.device.type == "cpu"


def _gives_unasked(grad_out, input, *by_channel):
    """Whether ATen adds up by a kernel for channels that are next to each other.

    It returns the gradients by weight and bias, asked for or not, and of no weight such as have no elements.
    """
    last = all(has_channels_last_kernels(each) for each in (grad_out, input))
    last &= span(grad_out.shape, grad_out.stride()) < INT32_LIMIT
    return last and all(each.is_contiguous() for each in present(*by_channel))


def _gradient_strides(grad_out, input, train, fused):
    """Those that ATen chooses; on a GPU the kernel for all gradients at once, and the one by given statistics, none."""
    shape, suggested = input.shape, suggests_channels_last(input)
    if input.device.type == "cpu":
        laid_out = in_memory_format(input) and in_memory_format(grad_out)
        alike = laid_out and suggested == suggests_channels_last(grad_out)
        if alike and has_channels_last(input) != has_channels_last(grad_out):
            raise Decline("operands of two layouts, one of which ATen's kernel reads as if it were the other")
        return format_strides(shape, has_channels_last(input) if alike else suggested)
    if fused or not train:
        return format_strides(shape, False)
    if input.is_contiguous() and grad_out.is_contiguous():
        return input.stride() if input.stride(1) == grad_out.stride(1) == 1 else format_strides(shape, False)
    return format_strides(shape, suggested)


def _backward(grad_out, input, weight, running, saved, train, eps, output_mask, outs, strides=None):
    check_floats(input, grad_out)
    on_cpu = _on_cpu(input)
    parameters = parameters_dtype(input, weight, *running, *(saved if on_cpu else ()))
    channels_of(input, *present(*running))
    if any(each.dtype is not kept_dtype(input, parameters) for each in present(*saved)):
        raise Decline("statistics of another dtype than ATen keeps")
    if not on_cpu and weight is None and any(output_mask[1:]):
        raise Decline("gradients by parameters that there are not")
    # On a GPU ATen's forward pass hands on the given statistics as if they were the batch's, and all but one of its
    # kernels take them.
    fused = any((train, *output_mask[1:])) and output_mask[0] and not has_channels_last_kernels(input)
    handed_on = not (on_cpu or fused) and saved[0] is not None and saved[0].numel() > 0
    as_of_batch = train or handed_on
    statistics = saved if as_of_batch else running
    if None in statistics or grad_out.shape != input.shape:
        raise Decline("no statistics, or operands of several shapes")
    dims, along = channels_of(input, *present(weight, *statistics))
    channels, unasked = (input.shape[1],), False
    if not on_cpu and (train or any(output_mask[1:])):
        unasked = _gives_unasked(grad_out, input, weight, *statistics[: 2 if as_of_batch else 1])
    if unasked:
        output_mask = (output_mask[0], weight is not None, weight is not None)
    results = asked_for(
        *(present(input, grad_out, weight, *statistics), (input.shape, channels, channels), output_mask, outs),
        parameters,
        strides or _gradient_strides(grad_out, input, train, fused),
    )
    if not as_of_batch:
        statistics = [empty(channels, opmath(input.dtype), input.device) for _ in range(2)]
        _given.run(running, (), statistics, opmath(input.dtype), (eps,))
    mean, rstd, weight = along_channels(along, *statistics, weight)
    operands = (grad_out, input, *expanded(input.shape, mean, rstd, weight))
    if train and results[0] is not None:
        sums = {i: result for i, result in ((2, results[1]), (3, results[2])) if result is not None}
        transform, compute = _BACKWARD[weight is not None], opmath(input.dtype)
        transform.run(present(*operands), dims, results[:1], compute, (), tuple(sums.values()), tuple(sums))
    else:
        if results[0] is not None:
            _gradient_by_given_statistics.run((grad_out, rstd, weight), results[:1])
        gradients(*operands, dims, dims, [None, *results[1:]])
    if unasked and weight is None:
        results[1:] = [empty((0,), opmath(input.dtype), input.device) for _ in range(2)]
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
    running, saved = (running_mean, running_var), (save_mean, save_var)
    if _has_cudnn(input, weight, weight, *running, True, eps):
        return cudnn_batch_norm_backward(input, grad_out, weight, *running, *saved, eps, reserve, outs)
    return _backward(grad_out, input, weight, running, saved, update, eps, output_mask, outs)


@operator(
    "cudnn_batch_norm_backward",
    accepts=_OF_CUDNN,
    cuda_only=("cudnn_batch_norm_backward", "cudnn_batch_norm_backward.out"),
    pin=("epsilon",),
)
def cudnn_batch_norm_backward(
    input, grad_output, weight, running_mean, running_var, save_mean, save_var, epsilon, reserveSpace, outs=()
):
    """Of a training step; the forward pass may have been cuDNN's own."""
    _check_epsilon(epsilon)
    saved = save_mean, save_var
    if None in saved:
        raise Decline("no statistics")
    strides, running = _check_cudnn(input, weight, *saved), (None, None)
    return _backward(grad_output, input, weight, running, saved, True, epsilon, (True,) * 3, outs, strides)
