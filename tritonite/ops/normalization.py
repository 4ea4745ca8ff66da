"""Layer, root mean square, group and weight normalisation, forward and backward.

With x' = (x - mean) * rstd the gradient by x is rstd * (h - mean of h - x' * mean of h x'), where h is the output's
gradient g times the weight (Ba, Kiros, Hinton 2016); those by weight and bias are sums of g x' and of g.
"""

import torch
import triton

from tritonite.dtypes import FLOATS, SINGLE_FLOATS, opmath
from tritonite.engine.iteration import format_strides, has_channels_last, suggests_channels_last
from tritonite.engine.outputs import outputs
from tritonite.engine.rows.declare import Reduction, RowTransform
from tritonite.engine.rows.formulas import add_pairs
from tritonite.errors import Decline
from tritonite.language.math import inverse, square_root, true_divide
from tritonite.ops.reduction import (
    add_states,
    added_to_zero,
    both_added_to_zero,
    check_floats,
    moments,
    over_count,
    root,
    same,
    square,
)
from tritonite.registry import operator, scalar_kernel
from tritonite.runtime.contract import empty


@triton.jit
def mean_and_rstd(mean, squares, own_count, count, eps):
    variance = over_count(squares, count) + eps.to(squares.dtype)
    return mean, inverse(square_root(variance))


# ATen adds a bias of 0 where there is none, which leaves no -0.0.
@triton.jit
def _normalize(x, mean, rstd, eps):
    return (x - mean) * rstd + 0.0


@triton.jit
def _normalize_weight(x, weight, mean, rstd, eps):
    return (x - mean) * rstd * weight + 0.0


@triton.jit
def _normalize_bias(x, bias, mean, rstd, eps):
    return (x - mean) * rstd + bias


@triton.jit
def _normalize_both(x, weight, bias, mean, rstd, eps):
    return (x - mean) * rstd * weight + bias


def by_statistics(project, results):
    """The transforms, by whether there are a weight and a bias; the first two of the `results` are mean and rstd."""
    statistics = moments(project, results)
    formulas = {
        (False, False): _normalize,
        (True, False): _normalize_weight,
        (False, True): _normalize_bias,
        (True, True): _normalize_both,
    }
    return {given: RowTransform(statistics, apply, 1, applied=2) for given, apply in formulas.items()}


_FORWARD = by_statistics(mean_and_rstd, 2)


@triton.jit
def _both_means(first, second, count):
    return over_count(first, count), over_count(second, count)


@triton.jit
def _projections(grad, x, mean, rstd):
    return grad, grad * (x - mean) * rstd


@triton.jit
def _projections_weight(grad, x, mean, rstd, weight):
    return grad * weight, grad * weight * (x - mean) * rstd


@triton.jit
def gradient(grad, x, mean, rstd, mean_grad, mean_product):
    return rstd * (grad - mean_grad - (x - mean) * rstd * mean_product)


@triton.jit
def _gradient_weight(grad, x, mean, rstd, weight, mean_grad, mean_product):
    return rstd * (grad * weight - mean_grad - (x - mean) * rstd * mean_product)


BACKWARD = {
    False: RowTransform(Reduction((0.0, 0.0), _projections, add_pairs, _both_means, (None, None), 2), gradient),
    True: RowTransform(
        Reduction((0.0, 0.0), _projections_weight, add_pairs, _both_means, (None, None), 2), _gradient_weight
    ),
}


@triton.jit
def product_and_gradient(grad, x, mean, rstd):
    return grad * (x - mean) * rstd, grad


@triton.jit
def _product(grad, x, mean, rstd):
    return grad * (x - mean) * rstd


_WEIGHT_AND_BIAS = Reduction((0.0, 0.0), product_and_gradient, add_pairs, both_added_to_zero, (None, None), 2)
_WEIGHT = Reduction((0.0,), _product, add_states, added_to_zero)
_BIAS = Reduction((0.0,), same, add_states, added_to_zero)


def _parameters_on_cpu(input, *parameters):
    """`parameters_dtype`, which on a GPU ATen wants to be the input's."""
    found = parameters_dtype(input, *parameters)
    if found is not input.dtype and input.device.type != "cpu":
        raise Decline("parameters of another dtype than the input's")
    return found


def _trailing(shape, normalized_shape):
    """The dimensions that `normalized_shape` names, and a shape of the statistics."""
    rank = len(normalized_shape)
    if not rank or tuple(shape[len(shape) - rank :]) != tuple(normalized_shape) or 0 in shape:
        raise Decline(f"normalised shape {list(normalized_shape)} of {list(shape)}")
    return tuple(range(len(shape) - rank, len(shape))), (*shape[: len(shape) - rank], *(1,) * rank)


def parameters_dtype(input, *parameters):
    """The one dtype of parameters and statistics: the input's, which it is if there are none, or float32 for halves."""
    found = {each.dtype for each in present(*parameters)} or {input.dtype}
    if len(found) > 1 or not found <= {input.dtype, opmath(input.dtype)}:
        raise Decline("parameters of several dtypes, or of another than the input's")
    return found.pop()


def kept_dtype(input, parameters):
    """What ATen keeps a batch's statistics in: on a GPU as it computes, on a CPU as the parameters are."""
    return parameters if input.device.type == "cpu" else opmath(input.dtype)


def normalized(input, weight, bias, dims, eps, out, statistics, transforms=_FORWARD, written=(0, 1)):
    """Write the result of operands of one shape, and into `statistics` the `written` ones of rows along `dims`."""
    transform = transforms[weight is not None, bias is not None]
    transform.run(present(input, weight, bias), dims, (out,), opmath(input.dtype), (eps,), statistics, written)


def gradients(grad, input, mean, rstd, weight, dims, parameter_dims, results):
    """Write those gradients that are not None, of operands of one shape; by weight and bias over `parameter_dims`."""
    compute, (own, by_weight, by_bias) = opmath(input.dtype), results
    if own is not None:
        BACKWARD[weight is not None].run(present(grad, input, mean, rstd, weight), dims, (own,), compute)
    if by_weight is not None and by_bias is not None:
        _WEIGHT_AND_BIAS.run((grad, input, mean, rstd), parameter_dims, (by_weight, by_bias), compute)
    elif by_weight is not None:
        _WEIGHT.run((grad, input, mean, rstd), parameter_dims, (by_weight,), compute)
    elif by_bias is not None:
        _BIAS.run((grad,), parameter_dims, (by_bias,), compute)


def asked_for(operands, shapes, wanted, outs, parameters=None, strides=None):
    """Outputs of the shapes whose flags in `wanted` are set, and None for the others.

    The first, which may have `strides`, has the first operand's dtype, and the others have the dtype `parameters`.
    """
    if len(wanted) != len(shapes):
        raise Decline("a mask of another length than there are gradients")
    if outs and not all(wanted):
        raise Decline("outputs that are not asked for")
    own = operands[0].dtype
    dtypes = [own, *[parameters or own] * (len(shapes) - 1)]
    chosen = [i for i, flag in enumerate(wanted) if flag]
    shapes, dtypes = [shapes[i] for i in chosen], [dtypes[i] for i in chosen]
    found = iter(outputs(operands, shapes, dtypes, outs, strides=strides if wanted[0] else None))
    return [next(found) if flag else None for flag in wanted]


def present(*operands):
    return [operand for operand in operands if operand is not None]


def check_without_gaps(*operands):
    """Decline operands and outputs with gaps, which ATen takes as if there were none; None is no operand."""
    if any(not operand.is_contiguous() for operand in present(*operands)):
        raise Decline("operands or outputs with gaps, which ATen takes as if there were none")


def expanded(shape, *operands):
    return [None if operand is None else operand.expand(shape) for operand in operands]


@operator("native_layer_norm", accepts=FLOATS)
def native_layer_norm(input, normalized_shape, weight, bias, eps, outs=()):
    check_floats(input)
    parameters = _parameters_on_cpu(input, weight, bias)
    dims, rows = _trailing(input.shape, normalized_shape)
    if any(tuple(operand.shape) != tuple(normalized_shape) for operand in present(weight, bias)):
        raise Decline("weight or bias of another shape")
    kept = kept_dtype(input, parameters)
    outs = outputs(present(input, weight, bias), [input.shape, rows, rows], [input.dtype, kept, kept], outs)
    normalized(input, *expanded(input.shape, weight, bias), dims, eps, outs[0], outs[1:])
    return outs


@operator("native_layer_norm_backward", accepts=FLOATS)
def native_layer_norm_backward(grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask, outs=()):
    check_floats(input, grad_out)
    on_cpu = input.device.type == "cpu"
    parameters = _parameters_on_cpu(input, weight, bias, *((mean, rstd) if on_cpu else ()))
    dims, rows = _trailing(input.shape, normalized_shape)
    if grad_out.shape != input.shape or tuple(mean.shape) != rows or tuple(rstd.shape) != rows:
        raise Decline("operands of other shapes")
    if any(tuple(operand.shape) != tuple(normalized_shape) for operand in present(weight, bias)):
        raise Decline("weight or bias of another shape")
    if weight is None and bias is not None:
        raise Decline("a bias without a weight, which ATen refuses")
    if any(statistic.dtype is not kept_dtype(input, parameters) for statistic in (mean, rstd)):
        raise Decline("statistics of another dtype than ATen keeps")
    check_without_gaps(mean, rstd)
    if len(output_mask) != 3 or (output_mask[1] and weight is None) or (output_mask[2] and bias is None):
        raise Decline("a gradient by what there is not, or a mask of another length")
    wanted = output_mask
    shapes = (input.shape, normalized_shape, normalized_shape)
    results = asked_for(present(input, grad_out, mean, rstd, weight), shapes, wanted, outs, parameters)
    others = expanded(input.shape, mean, rstd, weight)
    gradients(grad_out, input, *others, dims, tuple(range(dims[0])), results)
    return results


@triton.jit
def _inverse_root_mean_square(squares, count, eps):
    mean = over_count(squares, count) + eps.to(squares.dtype)
    return inverse(square_root(mean))


@triton.jit
def _scale(x, rstd, eps):
    return x * rstd


@triton.jit
def _scale_weight(x, weight, rstd, eps):
    return x * rstd * weight


_root_mean_square = Reduction((0.0,), square, add_states, _inverse_root_mean_square)
_RMS_FORWARD = {
    False: RowTransform(_root_mean_square, _scale),
    True: RowTransform(_root_mean_square, _scale_weight, leaf_inputs=1),
}


@triton.jit
def _scaled_product(grad, x, rstd):
    return grad * x * rstd


@triton.jit
def _scaled_product_weight(grad, x, rstd, weight):
    return grad * weight * x * rstd


@triton.jit
def _scaled_gradient(grad, x, rstd, mean_product):
    return rstd * (grad - x * rstd * mean_product)


@triton.jit
def _scaled_gradient_weight(grad, x, rstd, weight, mean_product):
    return rstd * (grad * weight - x * rstd * mean_product)


RMS_BACKWARD = {
    False: RowTransform(Reduction((0.0,), _scaled_product, add_states, over_count), _scaled_gradient),
    True: RowTransform(Reduction((0.0,), _scaled_product_weight, add_states, over_count), _scaled_gradient_weight),
}
_RMS_WEIGHT = Reduction((0.0,), _scaled_product, add_states, added_to_zero)


@operator("_fused_rms_norm", accepts=FLOATS, cuda_only=("_fused_rms_norm",))
def _fused_rms_norm(input, normalized_shape, weight, eps, outs=()):
    """x / sqrt(mean of squares + eps), and what it is multiplied by: Zhang and Sennrich 2019."""
    check_floats(input, weight)
    dims, rows = _trailing(input.shape, normalized_shape)
    if weight is not None and tuple(weight.shape) != tuple(normalized_shape):
        raise Decline("weight of another shape")
    compute = opmath(input.dtype)
    outs = outputs(present(input, weight), [input.shape, rows], [input.dtype, compute], outs)
    operands = present(input, *expanded(input.shape, weight))
    eps = torch.finfo(compute).eps if eps is None else eps
    _RMS_FORWARD[weight is not None].run(operands, dims, outs[:1], compute, (eps,), outs[1:], (0,))
    return outs


@operator("_fused_rms_norm_backward", accepts=FLOATS, cuda_only=("_fused_rms_norm_backward",))
def _fused_rms_norm_backward(grad_out, input, normalized_shape, rstd, weight, output_mask, outs=()):
    check_floats(input, grad_out, weight)
    dims, rows = _trailing(input.shape, normalized_shape)
    if grad_out.shape != input.shape or tuple(rstd.shape) != rows or rstd.dtype is not opmath(input.dtype):
        raise Decline("operands of other shapes, or statistics of another dtype than ATen keeps")
    if any(tuple(each.shape) != tuple(normalized_shape) for each in present(weight)):
        raise Decline("weight of another shape")
    check_without_gaps(rstd, weight)
    if len(output_mask) != 2 or (output_mask[1] and weight is None):
        raise Decline("a gradient by what there is not, or a mask of another length")
    wanted = output_mask
    every, compute = present(input, grad_out, rstd, weight), opmath(input.dtype)
    own, by_weight = asked_for(every, (input.shape, normalized_shape), wanted, outs)
    operands = (grad_out, input, *present(*expanded(input.shape, rstd, weight)))
    if own is not None:
        RMS_BACKWARD[weight is not None].run(operands, dims, (own,), compute)
    if by_weight is not None:
        _RMS_WEIGHT.run(operands[:3], tuple(range(dims[0])), (by_weight,), compute)
    return own, by_weight


def _groups(N, C, HxW, group, *tensors):
    """(N, group, C / group, HxW); declines what cannot be viewed so, or has no elements.

    On a CPU the channels of all tensors, or of none, may come last; on a GPU ATen refuses them.
    """
    if not (N and C and HxW and group > 0) or C % group:
        raise Decline("no elements, or groups that do not divide the channels")
    last = tensors[0].device.type == "cpu" and all(
        has_channels_last(tensor) and suggests_channels_last(tensor) for tensor in tensors
    )
    if not last and not all(tensor.is_contiguous() for tensor in tensors):
        raise Decline("tensors with gaps, or channels next to each other")
    if any(tensor.numel() != N * C * HxW for tensor in tensors):
        raise Decline("sizes that are not the input's")
    return N, group, C // group, HxW


def _by_channel(shape, *operands):
    """Values of channels as operands of `shape`."""
    return expanded(shape, *(operand if operand is None else operand.view(1, *shape[1:3], 1) for operand in operands))


@operator("native_group_norm", accepts=FLOATS)
def native_group_norm(input, weight, bias, N, C, HxW, group, eps, outs=()):
    check_floats(input)
    parameters = _parameters_on_cpu(input, weight, bias)
    shape = _groups(N, C, HxW, group, input)
    if any(tuple(operand.shape) != (C,) for operand in present(weight, bias)):
        raise Decline("weight or bias of another shape")
    check_without_gaps(weight, bias)
    shapes, dtypes = [input.shape, (N, group), (N, group)], [input.dtype, parameters, parameters]
    strides = format_strides(input.shape, suggests_channels_last(input))
    outs = outputs(present(input, weight, bias), shapes, dtypes, outs, strides=strides)
    _groups(N, C, HxW, group, outs[0])
    normalized(input.view(shape), *_by_channel(shape, weight, bias), (2, 3), eps, outs[0].view(shape), outs[1:])
    return outs


@triton.jit
def _both(first, second):
    return first, second


@triton.jit
def _weighted(product, grad, weight):
    return grad * weight, product * weight


@triton.jit
def _means_of_sums(first, second, count, size):
    return over_count(first, count * size), over_count(second, count * size)


# Of how many elements a channel's gradients are first summed up.
_SUMMED = 32
# Of sums over `size` elements each: their own sums, and the means over a group of what they are the sums of.
_SUMS_OF_SUMS = Reduction((0.0, 0.0), _both, add_pairs, both_added_to_zero, (None, None), 2)
_MEANS_OF_SUMS = Reduction((0.0, 0.0), _weighted, add_pairs, _means_of_sums, (None, None), 2)


@scalar_kernel(accepts=FLOATS, cast=("mean", "rstd", "weight", "mean_grad", "mean_product"))
def _group_gradient(grad, x, mean, rstd, weight, mean_grad, mean_product):
    # What a group or a channel has in common comes first, which is computed once for all of its elements.
    return grad * (weight * rstd) - (x - mean) * (rstd * rstd * mean_product) - rstd * mean_grad


def _gradients_by_channels(grad, input, mean, rstd, weight, results):
    """Write those gradients that are not None, of (N, group, C / group, HxW), by the sums of each image's channels.

    Those are a sum over HxW of what is next to each other, and few: all else that is reduced is reduced of them.
    """
    compute, (own, by_weight, by_bias) = opmath(input.dtype), results
    product, total = (empty(input.shape[:3], compute, input.device) for _ in range(2))
    _WEIGHT_AND_BIAS.run((grad, input, *expanded(input.shape, mean, rstd)), (3,), (product, total), compute)
    if own is not None:
        means = [empty(mean.shape, compute, input.device) for _ in range(2)]
        weights = weight[..., 0].expand(product.shape)
        _MEANS_OF_SUMS.run(
            (product, total, weights), (2,), [each[..., 0, 0] for each in means], compute, (float(input.shape[3]),)
        )
        _group_gradient.run((grad, input, mean, rstd, weight, *means), (own,))
    if by_weight is not None and by_bias is not None:
        _SUMS_OF_SUMS.run((product, total), (0,), (by_weight, by_bias), compute)
    elif by_weight is not None:
        _BIAS.run((product,), (0,), (by_weight,), compute)
    else:
        _BIAS.run((total,), (0,), (by_bias,), compute)


@operator("native_group_norm_backward", accepts=FLOATS)
def native_group_norm_backward(grad_out, input, mean, rstd, weight, N, C, HxW, group, output_mask, outs=()):
    check_floats(input, grad_out)
    parameters = _parameters_on_cpu(input, mean, rstd, weight)
    shape = _groups(N, C, HxW, group, input, grad_out)
    check_without_gaps(mean, rstd, weight)
    if grad_out.shape != input.shape or any(tuple(operand.shape) != (N, group) for operand in (mean, rstd)):
        raise Decline("operands of other shapes")
    if weight is None and any(output_mask[1:]):
        raise Decline("gradients by parameters that there are not, which ATen refuses")
    every, shapes = present(input, grad_out, mean, rstd, weight), (input.shape, (C,), (C,))
    strides = format_strides(input.shape, suggests_channels_last(input))
    results = asked_for(every, shapes, output_mask, outs, parameters, strides)
    if results[0] is not None:
        _groups(N, C, HxW, group, results[0])
    views = [
        None if result is None else result.view(shape if i == 0 else shape[1:3]) for i, result in enumerate(results)
    ]
    operands = grad_out.view(shape), input.view(shape), *(each[:, :, None, None] for each in (mean, rstd))
    # Sums of a few elements each would be as many bytes as the operands.
    summed = any(view is not None for view in views[1:])
    if summed and HxW >= _SUMMED:
        _gradients_by_channels(*operands, weight.view(1, *shape[1:3], 1), views)
    elif summed or views[0] is not None:
        kept = (0, 3) if summed else ()
        gradients(*operands[:2], *expanded(shape, *operands[2:]), *_by_channel(shape, weight), (2, 3), kept, views)
    return results


@triton.jit
def _of_length(v, g, norm):
    return v * true_divide(g, norm)


@triton.jit
def _projection(grad_w, v, g, norm):
    return grad_w * v * inverse(norm)


@triton.jit
def _gradient_of_direction(grad_w, v, g, norm, grad_g):
    return true_divide(g, norm) * (grad_w - v * true_divide(grad_g, norm))


_weight_norm = RowTransform(Reduction((0.0,), square, add_states, root), _of_length, leaf_inputs=1)
_weight_norm_backward = RowTransform(Reduction((0.0,), _projection, add_states, added_to_zero), _gradient_of_direction)


def _slices(v, dim, *others):
    """The dimensions of v's slices along `dim`; declines where ATen stops, or others have no value for each slice."""
    shape = [size if i == dim else 1 for i, size in enumerate(v.shape)]
    if (
        not v.dim()
        or dim not in (0, v.dim() - 1)
        or not v.numel()
        or not all(list(other.shape) == shape and other.is_contiguous() for other in others)
    ):
        raise Decline("a dimension between others, no elements, or lengths of another shape or with gaps")
    return tuple(i for i in range(v.dim()) if i != dim)


def _check_precision(v):
    if v.dtype is torch.float64:
        raise Decline("float64, of which ATen's kernel for GPUs has lengths in float32")


@operator("_weight_norm_interface", accepts=SINGLE_FLOATS)
def _weight_norm_interface(v, g, dim=0, outs=()):
    """v g / |v|, and |v|, of slices along `dim`: Salimans and Kingma 2016."""
    check_floats(v, g)
    _check_precision(v)
    dims = _slices(v, dim, g)
    check_without_gaps(v, *outs)
    outs = outputs((v, g), [v.shape, g.shape], [v.dtype, opmath(v.dtype)], outs)
    _weight_norm.run((v, g.expand(v.shape)), dims, outs[:1], opmath(v.dtype), (), outs[1:], (0,))
    return outs


@operator("_weight_norm_interface_backward", accepts=SINGLE_FLOATS)
def _weight_norm_interface_backward(grad_w, saved_v, saved_g, saved_norms, dim, outs=()):
    check_floats(saved_v, grad_w, saved_g)
    _check_precision(saved_v)
    check_without_gaps(saved_v, grad_w, *outs)
    dims = _slices(saved_v, dim, saved_g, saved_norms)
    if grad_w.shape != saved_v.shape or saved_norms.dtype is not opmath(saved_v.dtype):
        raise Decline("operands of other shapes or dtypes")
    every = (grad_w, saved_v, saved_g, saved_norms)
    outs = outputs(every, [saved_v.shape, saved_g.shape], [saved_v.dtype] * 2, outs)
    operands = [operand.expand(saved_v.shape) for operand in every]
    _weight_norm_backward.run(operands, dims, outs[:1], opmath(saved_v.dtype), (), outs[1:], (0,))
    return outs
