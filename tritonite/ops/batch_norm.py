"""Batch normalisation, forward and backward (Ioffe and Szegedy 2015).

With the batch's own statistics the formulas are those of layer normalisation, over all dimensions but the channels.
With given statistics they are pointwise.
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
from tritonite.engine.outputs import check_layout, outputs
from tritonite.engine.rows.declare import Reduction, RowTransform
from tritonite.engine.rows.formulas import add_pairs
from tritonite.errors import Decline
from tritonite.language.math import inverse, square_root, true_divide
from tritonite.ops import aten
from tritonite.ops.normalization import (
    expanded,
    gradient,
    mean_and_rstd,
    normalize,
    normalizing_transforms,
    parameters_dtype,
    present,
    product_and_gradient,
    statistics_dtype,
    wanted_outputs,
    write_gradients,
)
from tritonite.ops.reduction.moments import moments
from tritonite.ops.reduction.sums import both_added_to_zero, check_floats, over_count
from tritonite.registry import exclude, operator, scalar_kernel
from tritonite.runtime.contract import empty

# Dtypes that cuDNN normalises; float16 takes float32 parameters.
_CUDNN_DTYPES = (torch.float16, torch.float32, torch.float64)


@triton.jit
def _unbiased(squares, count):
    """Return the unbiased variance, from the sum of squared distances from the mean."""
    return true_divide(squares, tl.broadcast_to((count - 1.0).to(squares.dtype), squares.shape))


@triton.jit
def _statistics(mean, squares, own_count, count, eps):
    """Return mean, rstd, and the unbiased variance, which running statistics track."""
    mean, rstd = mean_and_rstd(mean, squares, own_count, count, eps)
    return mean, rstd, _unbiased(squares, count)


@triton.jit
def _mean_and_variances(mean, squares, own_count, count):
    """Return the mean, the variance, and in the compute dtype the mean and the unbiased variance."""
    return mean, over_count(squares, count), mean, _unbiased(squares, count)


_variances = moments(_mean_and_variances, 4)
_FORWARD = normalizing_transforms(_statistics, 3)


@triton.jit
def _update(running_mean, running_var, mean, variance, momentum):
    momentum = momentum.to(mean.dtype)
    kept = 1.0 - momentum
    return kept * running_mean + momentum * mean, kept * running_var + momentum * variance


@triton.jit
def _mean_and_rstd_of_variance(mean, variance, eps):
    return mean, inverse(square_root(variance + eps.to(variance.dtype)))


@triton.jit
def _pair(first, second, count, number):
    return first, second


# Reductions of one element, that is pointwise kernels with two results: the new running statistics of each channel,
# and given statistics as (mean, rstd).
running_update = Reduction((0.0, 0.0), _update, add_pairs, _pair, (None, None), 2, parametric=True)
_given_statistics = Reduction(
    (0.0, 0.0), _mean_and_rstd_of_variance, add_pairs, _pair, (None, None), 2, parametric=True
)


@triton.jit
def _means_and_sums(product, grad, count):
    by_weight, by_bias = both_added_to_zero(product, grad, count)
    return over_count(grad, count), over_count(product, count), by_weight, by_bias


@triton.jit
def _weighted_gradient(grad, x, mean, rstd, weight, mean_grad, mean_product):
    return weight * gradient(grad, x, mean, rstd, mean_grad, mean_product)


# The sums are the gradients by weight and bias, too, because a channel has one weight.
_sums = Reduction((0.0, 0.0), product_and_gradient, add_pairs, _means_and_sums, (None, None), 4)
_BACKWARD = {
    False: RowTransform(_sums, gradient, 4, applied=2),
    True: RowTransform(_sums, _weighted_gradient, 4, applied=2),
}


@scalar_kernel(accepts=FLOATS, cast=("mean", "variance", "weight", "bias", "eps"), contiguous=True)
def _by_given_statistics(input, mean, variance, weight, bias, eps):
    # Factors of a channel are multiplied first: the engine computes them once for all of its elements.
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
    """Return the dimensions of a channel and the shape (1, C, 1, ...) of values by channel. Decline empty inputs."""
    if input.dim() < 2 or not input.numel() or any(tuple(each.shape) != (input.shape[1],) for each in by_channel):
        raise Decline(f"input of shape {tuple(input.shape)}, or values by channel that do not fit it")
    dims = tuple(d for d in range(input.dim()) if d != 1)
    return dims, (1, -1, *[1] * (input.dim() - 2))


def along_channels(shape, *operands):
    return [None if operand is None else operand.view(shape) for operand in operands]


def _result_strides(input, *parameters):
    """Return the strides of ATen's result: the input's on a GPU; channels-last or contiguous on a CPU."""
    if aten.on_gpu():
        return strides_after_conversion(input.shape, input.stride())
    dense = in_memory_format(input) and all(each.is_contiguous() for each in present(*parameters))
    return format_strides(input.shape, has_channels_last(input) if dense else suggests_channels_last(input))


def _check_layout(outs, strides):
    """Decline outputs whose strides are not those that ATen chooses."""
    check_layout(outs[:1], strides)
    if any(not out.is_contiguous() for out in outs[1:]):
        raise Decline("output statistics that are not contiguous")


def _train(input, weight, bias, running, updated, momentum, eps, outs, strides=None):
    """Normalise by the batch's statistics. Write (result, mean, rstd), and the running statistics `updated`."""
    check_floats(input)
    parameters = parameters_dtype(input, weight, bias, *running, *updated)
    dims, along = channels_of(input, *present(weight, bias, *running, *updated))
    if input.numel() == input.shape[1]:
        raise Decline("one element a channel")
    channels, kept = (input.shape[1],), statistics_dtype(input, parameters)
    every = present(input, weight, bias, *running)
    # ATen's CPU form with out= reads a mean that it has not computed.
    if outs and aten.on_cpu() and not in_memory_format(input):
        raise Decline("an input that is not dense, with out=")
    strides = strides or _result_strides(*every)
    outs = outputs(every, [input.shape, channels, channels], [input.dtype, kept, kept], outs, strides=strides)
    _check_layout(outs, strides)
    compute = opmath(input.dtype)
    # Mean and variance in the compute dtype.
    exact = tuple([empty(channels, compute, input.device) for _ in running])
    affine, written = expanded(input.shape, *along_channels(along, weight, bias)), (0, 1, 0, 2)[: 2 + len(exact)]
    normalize(input, *affine, dims, eps, outs[0], (*outs[1:], *exact), _FORWARD, written)
    if running:
        running_update.run((*running, *exact), (), updated, compute, (momentum,))
    return outs


def _infer(input, weight, bias, running_mean, running_var, eps, outs, strides=None, size=None, copied=False):
    """Normalise by given statistics. Write the result, and the first `size` values of mean and rstd.

    `size` None means all on a GPU and none on a CPU, as in ATen. `copied`: ATen's out= form copies the other form's
    results, so that outputs may have any strides.
    """
    check_floats(input)
    if running_mean is None or running_var is None:
        raise Decline("no running statistics")
    parameters = parameters_dtype(input, weight, bias, running_mean, running_var)
    _, along = channels_of(input, *present(weight, bias, running_mean, running_var))
    every = present(input, weight, bias, running_mean, running_var)
    strides, kept = strides or _result_strides(*every), statistics_dtype(input, parameters)
    if size is None:
        size = 0 if aten.on_cpu() else input.shape[1]
    outs = outputs(every, [input.shape, (size,), (size,)], [input.dtype, kept, kept], outs, strides=strides)
    if not copied:
        _check_layout(outs, strides)
    given = along_channels(along, running_mean, running_var, weight, bias)
    _by_given_statistics.run((input, *given, eps), outs[:1])
    if size:
        _given_statistics.run((running_mean, running_var), (), outs[1:], opmath(input.dtype), (eps,))
    return outs


def _empty_like(*running):
    return tuple(empty(each.shape, each.dtype, each.device) for each in running)


def running_pair(running_mean, running_var):
    if (running_mean is None) != (running_var is None):
        raise Decline("a running mean without a running variance, or the other way round")
    return tuple(present(running_mean, running_var))


def _has_cudnn(input, weight, bias, running_mean, running_var, training, eps):
    """Return whether ATen calls cuDNN. Decline where another library might be called."""
    if aten.on_cpu() or weight is None or bias is None:
        return False
    if running_mean is None or running_var is None:
        raise Decline("no running statistics, for which ATen may call cuDNN")
    chosen = torch._C._select_batch_norm_backend(input, weight, bias, running_mean, running_var, training, eps)
    if chosen not in (torch._C._BatchNormBackend.Native, torch._C._BatchNormBackend.Cudnn):
        raise Decline(f"ATen's backend {chosen}; its own and cuDNN are served")
    return chosen == torch._C._BatchNormBackend.Cudnn


def _check_cudnn(input, *parameters):
    """Return the strides of cuDNN's result. Decline operands for which ATen raises before it calls cuDNN."""
    if any(each is None for each in parameters[:2]) or not 2 <= input.dim() <= 5:
        raise Decline(f"{input.dim()} dimensions, or no weight, bias or statistics")
    given = present(*parameters)
    if input.dtype not in _CUDNN_DTYPES or any(each.dtype is not opmath(input.dtype) for each in given):
        raise Decline(f"{input.dtype} with parameters of {[str(each.dtype) for each in given]}")
    strides = format_strides(input.shape, suggests_channels_last(input))
    if not same_strides(input.shape, input.stride(), strides) or any(not each.is_contiguous() for each in given):
        raise Decline("operands that are not contiguous or channels-last")
    return strides


@operator("native_batch_norm", "_native_batch_norm_legit", accepts=FLOATS)
def native_batch_norm(
    input, weight, bias, running_mean=None, running_var=None, training=True, momentum=0.1, eps=1e-5, outs=()
):
    if not training:
        return _infer(input, weight, bias, running_mean, running_var, eps, outs)
    running = running_pair(running_mean, running_var)
    return _train(input, weight, bias, running, running, momentum, eps, outs)


@operator("_native_batch_norm_legit_no_training", accepts=FLOATS)
def _native_batch_norm_legit_no_training(input, weight, bias, running_mean, running_var, momentum, eps, outs=()):
    return _infer(input, weight, bias, running_mean, running_var, eps, outs, copied=True)


@operator("_native_batch_norm_legit_functional", accepts=FLOATS)
def _native_batch_norm_legit_functional(
    input, weight, bias, running_mean, running_var, training, momentum, eps, outs=()
):
    if not training:
        raise Decline("training is False, for which ATen returns copies of the running statistics")
    running, updated = (running_mean, running_var), _empty_like(running_mean, running_var)
    return *_train(input, weight, bias, running, updated, momentum, eps, ()), *updated


def _reserve(input, outs):
    """Return the reserve for cuDNN's gradient, which is empty."""
    if outs and (outs[3].numel() or outs[3].dtype is not torch.uint8):
        raise Decline(f"reserve of {outs[3].numel()} elements of {outs[3].dtype}; an empty one of uint8 is served")
    return outs[3] if outs else empty((0,), torch.uint8, input.device)


def _train_as_cudnn(input, weight, bias, running, updated, momentum, eps, outs):
    """`_train` with the strides of cuDNN's results; the gradient may be cuDNN's own all the same."""
    strides = _check_cudnn(input, weight, bias, *running)
    if aten.on_gpu() and torch._C._get_cudnn_batch_norm_reserve_space_size(input, True):
        raise Decline("a batch for which cuDNN fills a reserve of its own")
    reserve = _reserve(input, outs)
    return *_train(input, weight, bias, running, updated, momentum, eps, outs[:3], strides), reserve


def _check_epsilon(epsilon):
    if not epsilon >= 0:
        raise Decline(f"epsilon is {epsilon}; cuDNN requires at least 0")


@operator("cudnn_batch_norm", accepts=_CUDNN_DTYPES, cuda_only=("cudnn_batch_norm",), pin=("epsilon",))
def cudnn_batch_norm(
    input, weight, bias, running_mean, running_var, training, exponential_average_factor, epsilon, outs=()
):
    _check_epsilon(epsilon)
    running = running_pair(running_mean, running_var)
    if training:
        return _train_as_cudnn(input, weight, bias, running, running, exponential_average_factor, epsilon, outs)
    strides = _check_cudnn(input, weight, bias, *running)
    results = _infer(input, weight, bias, running_mean, running_var, epsilon, outs[:3], strides, 0)
    return *results, _reserve(input, outs)


exclude("cudnn_batch_norm.out", "ATen's kernel ends the process (torch 2.11)")


@operator("_batch_norm_with_update", accepts=FLOATS, pin=("eps",))
def _batch_norm_with_update(input, weight, bias, running_mean, running_var, momentum, eps, outs=()):
    reserve, running = _reserve(input, outs), (running_mean, running_var)
    if _has_cudnn(input, weight, bias, *running, True, eps):
        return _train_as_cudnn(input, weight, bias, running, running, momentum, eps, outs)
    return *_train(input, weight, bias, running, running, momentum, eps, outs[:3]), reserve


@operator("_batch_norm_with_update_functional", accepts=FLOATS, pin=("eps",))
def _batch_norm_with_update_functional(input, weight, bias, running_mean, running_var, momentum, eps, outs=()):
    running, updated = (running_mean, running_var), _empty_like(running_mean, running_var)
    if _has_cudnn(input, weight, bias, *running, True, eps):
        return *_train_as_cudnn(input, weight, bias, running, updated, momentum, eps, ()), *updated
    return *_train(input, weight, bias, running, updated, momentum, eps, ()), _reserve(input, ()), *updated


@operator("_batch_norm_no_update", accepts=FLOATS)
def _batch_norm_no_update(input, weight, bias, running_mean, running_var, momentum, eps, outs=()):
    # On a GPU ATen calls its CPU kernel, which raises.
    if aten.on_gpu():
        raise Decline("a tensor on a GPU")
    reserve = _reserve(input, outs)
    return *_infer(input, weight, bias, running_mean, running_var, eps, outs[:3], copied=True), reserve


@operator("batch_norm_update_stats", accepts=FLOATS)
def batch_norm_update_stats(input, running_mean, running_var, momentum, outs=()):
    """Mean and variance of each channel; the running statistics move towards them in place."""
    check_floats(input)
    running = running_pair(running_mean, running_var)
    # ATen's kernel for GPUs converts between the statistics of a float64 input and float32 ones that they update.
    converted = aten.on_gpu() and input.dtype is torch.float64 and {each.dtype for each in running} == {torch.float32}
    parameters = torch.float32 if converted else parameters_dtype(input, *running)
    dims, _ = channels_of(input, *running)
    if input.numel() == input.shape[1]:
        raise Decline("one element a channel")
    channels, kept, compute = (input.shape[1],), statistics_dtype(input, parameters), opmath(input.dtype)
    outs = outputs((input, *running), [channels] * 2, [kept] * 2, outs)
    # Mean and unbiased variance in the compute dtype.
    exact = [empty(channels, compute, input.device) for _ in range(2)]
    _variances.run((input,), dims, (*outs, *exact), compute)
    if running:
        running_update.run((*running, *exact), (), running, compute, (momentum,))
    return outs


def has_channels_last_kernels(input):
    """Return whether ATen's GPU gradient uses its channels-last kernels for this operand."""
    one_channel = input.dim() in (4, 5) and input.shape[1] == 1
    return has_channels_last(input) or (input.is_contiguous() and (one_channel or input.stride(1) == 1))


def _gives_unasked(grad_out, input, *by_channel):
    """Return whether ATen's channels-last reduction serves the call.

    It returns the gradients by weight and bias whether they are wanted or not, and empty ones without a weight.
    """
    last = all(has_channels_last_kernels(each) for each in (grad_out, input))
    last &= span(grad_out.shape, grad_out.stride()) < INT32_LIMIT
    return last and all(each.is_contiguous() for each in present(*by_channel))


def _gradient_strides(grad_out, input, train, fused):
    """Return the strides of ATen's gradient by the input.

    On a GPU the fused kernel and the kernel for given statistics have contiguous ones.
    """
    shape, suggested = input.shape, suggests_channels_last(input)
    if aten.on_cpu():
        dense = in_memory_format(input) and in_memory_format(grad_out)
        alike = dense and suggested == suggests_channels_last(grad_out)
        if alike and has_channels_last(input) != has_channels_last(grad_out):
            raise Decline("an input and a gradient in different memory formats, which ATen reads as one")
        return format_strides(shape, has_channels_last(input) if alike else suggested)
    if fused or not train:
        return format_strides(shape, False)
    if input.is_contiguous() and grad_out.is_contiguous():
        return input.stride() if input.stride(1) == grad_out.stride(1) == 1 else format_strides(shape, False)
    return format_strides(shape, suggested)


def _backward(grad_out, input, weight, running, saved, train, eps, output_mask, outs, strides=None):
    check_floats(input, grad_out)
    on_cpu = aten.on_cpu()
    parameters = parameters_dtype(input, weight, *running, *(saved if on_cpu else ()))
    channels_of(input, *present(*running))
    if any(each.dtype is not statistics_dtype(input, parameters) for each in present(*saved)):
        raise Decline(f"saved statistics of {[str(each.dtype) for each in present(*saved)]} for {input.dtype}")
    if not on_cpu and weight is None and any(output_mask[1:]):
        raise Decline("gradients by weight or bias without a weight")
    # On a GPU ATen's forward pass in evaluation saves the given statistics as the batch's. All its backward kernels but
    # the fused one read the saved ones.
    fused = any((train, *output_mask[1:])) and output_mask[0] and not has_channels_last_kernels(input)
    use_saved = not (on_cpu or fused) and saved[0] is not None and saved[0].numel() > 0
    as_of_batch = train or use_saved
    statistics = saved if as_of_batch else running
    if None in statistics or grad_out.shape != input.shape:
        raise Decline(f"no statistics, or a gradient of shape {tuple(grad_out.shape)}, not {tuple(input.shape)}")
    dims, along = channels_of(input, *present(weight, *statistics))
    channels, unasked = (input.shape[1],), False
    if not on_cpu and (train or any(output_mask[1:])):
        unasked = _gives_unasked(grad_out, input, weight, *statistics[: 2 if as_of_batch else 1])
    if unasked:
        output_mask = (output_mask[0], weight is not None, weight is not None)
    results = wanted_outputs(
        *(present(input, grad_out, weight, *statistics), (input.shape, channels, channels), output_mask, outs),
        parameters,
        strides or _gradient_strides(grad_out, input, train, fused),
    )
    if not as_of_batch:
        statistics = [empty(channels, opmath(input.dtype), input.device) for _ in range(2)]
        _given_statistics.run(running, (), statistics, opmath(input.dtype), (eps,))
    mean, rstd, weight = along_channels(along, *statistics, weight)
    operands = (grad_out, input, *expanded(input.shape, mean, rstd, weight))
    if train and results[0] is not None:
        sums = {i: result for i, result in ((2, results[1]), (3, results[2])) if result is not None}
        transform, compute = _BACKWARD[weight is not None], opmath(input.dtype)
        transform.run(present(*operands), dims, results[:1], compute, (), tuple(sums.values()), tuple(sums))
    else:
        if results[0] is not None:
            _gradient_by_given_statistics.run((grad_out, rstd, weight), results[:1])
        write_gradients(*operands, dims, dims, [None, *results[1:]])
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
    accepts=_CUDNN_DTYPES,
    cuda_only=("cudnn_batch_norm_backward", "cudnn_batch_norm_backward.out"),
    pin=("epsilon",),
)
def cudnn_batch_norm_backward(
    input, grad_output, weight, running_mean, running_var, save_mean, save_var, epsilon, reserveSpace, outs=()
):
    """Gradients of a training step, whose forward pass may have been cuDNN's own."""
    _check_epsilon(epsilon)
    saved = save_mean, save_var
    if None in saved:
        raise Decline("no saved statistics")
    strides, running = _check_cudnn(input, weight, *saved), (None, None)
    return _backward(grad_output, input, weight, running, saved, True, epsilon, (True,) * 3, outs, strides)
