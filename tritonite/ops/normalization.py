"""Layer, root mean square, group and weight normalisation, forward and backward.

Let x' = (x - mean) * rstd, g the output's gradient, and h = g * weight. The gradient by x is
rstd * (h - mean(h) - x' * mean(h * x')) (Ba, Kiros, Hinton 2016). The gradients by weight and bias are the sums of
g * x' and of g.
"""

# Over 500 lines: layer, root mean square and group norms share formulas of their gradients.

import torch
import triton

from tritonite.dtypes import FLOATS, SINGLE_FLOATS, opmath
from tritonite.engine.iteration import format_strides, has_channels_last, suggests_channels_last
from tritonite.engine.outputs import outputs
from tritonite.engine.rows.declare import Reduction, RowTransform
from tritonite.engine.rows.formulas import add_pairs, add_states
from tritonite.errors import Decline
from tritonite.language.math import inverse, square_root, true_divide
from tritonite.ops import aten
from tritonite.ops.reduction.moments import moments
from tritonite.ops.reduction.norms import root, square
from tritonite.ops.reduction.sums import added_to_zero, both_added_to_zero, check_floats, over_count, same
from tritonite.registry import operator, scalar_kernel
from tritonite.runtime.contract import empty


@triton.jit
def mean_and_rstd(mean, squares, own_count, count, eps):
    variance = over_count(squares, count) + eps.to(squares.dtype)
    return mean, inverse(square_root(variance))


# + 0.0: ATen adds a bias of 0 where none is given, so that no result is -0.0.
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


def normalizing_transforms(project, results):
    """Return the transforms, keyed by (has weight, has bias). The first two of `results` results are mean and rstd."""
    statistics = moments(project, results)
    formulas = {
        (False, False): _normalize,
        (True, False): _normalize_weight,
        (False, True): _normalize_bias,
        (True, True): _normalize_both,
    }
    return {given: RowTransform(statistics, apply, 1, applied=2) for given, apply in formulas.items()}


_FORWARD = normalizing_transforms(mean_and_rstd, 2)


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


def _checked_parameters_dtype(input, *parameters):
    """`parameters_dtype`; ATen's GPU kernels take parameters of the input's dtype only."""
    dtype = parameters_dtype(input, *parameters)
    if dtype is not input.dtype and aten.on_gpu():
        raise Decline(f"parameters of {dtype} for an input of {input.dtype}")
    return dtype


def _trailing(shape, normalized_shape):
    """Return the dimensions that `normalized_shape` covers, and the shape of the statistics."""
    rank = len(normalized_shape)
    if not rank or tuple(shape[len(shape) - rank :]) != tuple(normalized_shape) or 0 in shape:
        raise Decline(f"normalized shape {list(normalized_shape)} for an input of shape {list(shape)}")
    return tuple(range(len(shape) - rank, len(shape))), (*shape[: len(shape) - rank], *(1,) * rank)


def parameters_dtype(input, *parameters):
    """Return the dtype of parameters and statistics: the input's, or float32 for a 16-bit input."""
    found = {each.dtype for each in present(*parameters)} or {input.dtype}
    if len(found) > 1 or not found <= {input.dtype, opmath(input.dtype)}:
        raise Decline(f"parameters of dtypes {sorted(map(str, found))} for an input of {input.dtype}")
    return found.pop()


def statistics_dtype(input, parameters):
    """Return the dtype of mean and rstd: the parameters' on a CPU, the compute dtype on a GPU."""
    return parameters if aten.on_cpu() else opmath(input.dtype)


def normalize(input, weight, bias, dims, eps, out, statistics, transforms=_FORWARD, written=(0, 1)):
    """Normalise rows along `dims`. `statistics` receive those results of the rows that `written` numbers."""
    transform = transforms[weight is not None, bias is not None]
    transform.run(present(input, weight, bias), dims, (out,), opmath(input.dtype), (eps,), statistics, written)


def write_gradients(grad, input, mean, rstd, weight, dims, parameter_dims, results):
    """Write the gradients in `results` that are not None. Those by weight and bias are sums over `parameter_dims`."""
    compute, (own, by_weight, by_bias) = opmath(input.dtype), results
    if own is not None:
        BACKWARD[weight is not None].run(present(grad, input, mean, rstd, weight), dims, (own,), compute)
    if by_weight is not None and by_bias is not None:
        _WEIGHT_AND_BIAS.run((grad, input, mean, rstd), parameter_dims, (by_weight, by_bias), compute)
    elif by_weight is not None:
        _WEIGHT.run((grad, input, mean, rstd), parameter_dims, (by_weight,), compute)
    elif by_bias is not None:
        _BIAS.run((grad,), parameter_dims, (by_bias,), compute)


def wanted_outputs(operands, shapes, wanted, outs, parameters=None, strides=None):
    """Return an output for each shape whose flag in `wanted` is set, else None.

    The first output has the first operand's dtype, and `strides` if given. The others have the dtype `parameters`.
    """
    if len(wanted) != len(shapes):
        raise Decline(f"output mask of {len(wanted)} flags, not {len(shapes)}")
    if outs and not all(wanted):
        raise Decline(f"outputs with the mask {list(wanted)}; all have to be wanted")
    own = operands[0].dtype
    dtypes = [own, *[parameters or own] * (len(shapes) - 1)]
    chosen = [i for i, flag in enumerate(wanted) if flag]
    shapes, dtypes = [shapes[i] for i in chosen], [dtypes[i] for i in chosen]
    found = iter(outputs(operands, shapes, dtypes, outs, strides=strides if wanted[0] else None))
    return [next(found) if flag else None for flag in wanted]


def present(*operands):
    """Return the operands that are not None."""
    return [operand for operand in operands if operand is not None]


def check_contiguous(*operands):
    """Decline operands and outputs that are not contiguous, which ATen takes for contiguous; None is skipped."""
    if any(not operand.is_contiguous() for operand in present(*operands)):
        raise Decline("operands or outputs that are not contiguous, which ATen takes for contiguous")


def expanded(shape, *operands):
    return [None if operand is None else operand.expand(shape) for operand in operands]


@operator("native_layer_norm", accepts=FLOATS)
def native_layer_norm(input, normalized_shape, weight, bias, eps, outs=()):
    check_floats(input)
    parameters = _checked_parameters_dtype(input, weight, bias)
    dims, rows = _trailing(input.shape, normalized_shape)
    if any(tuple(operand.shape) != tuple(normalized_shape) for operand in present(weight, bias)):
        raise Decline(f"weight or bias whose shape is not {list(normalized_shape)}")
    kept = statistics_dtype(input, parameters)
    outs = outputs(present(input, weight, bias), [input.shape, rows, rows], [input.dtype, kept, kept], outs)
    normalize(input, *expanded(input.shape, weight, bias), dims, eps, outs[0], outs[1:])
    return outs


@operator("native_layer_norm_backward", accepts=FLOATS)
def native_layer_norm_backward(grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask, outs=()):
    check_floats(input, grad_out)
    # On a CPU the statistics have the parameters' dtype.
    parameters = _checked_parameters_dtype(input, weight, bias, *((mean, rstd) if aten.on_cpu() else ()))
    dims, rows = _trailing(input.shape, normalized_shape)
    if grad_out.shape != input.shape or tuple(mean.shape) != rows or tuple(rstd.shape) != rows:
        raise Decline(f"a gradient or statistics that do not fit an input of shape {list(input.shape)}")
    if any(tuple(operand.shape) != tuple(normalized_shape) for operand in present(weight, bias)):
        raise Decline(f"weight or bias whose shape is not {list(normalized_shape)}")
    if weight is None and bias is not None:
        raise Decline("a bias without a weight, for which ATen raises")
    if any(statistic.dtype is not statistics_dtype(input, parameters) for statistic in (mean, rstd)):
        raise Decline(f"statistics of {mean.dtype} and {rstd.dtype} for an input of {input.dtype}")
    check_contiguous(mean, rstd)
    if len(output_mask) != 3 or (output_mask[1] and weight is None) or (output_mask[2] and bias is None):
        raise Decline(f"output mask {list(output_mask)}, which wants the gradient by a missing operand")
    wanted = output_mask
    shapes = (input.shape, normalized_shape, normalized_shape)
    results = wanted_outputs(present(input, grad_out, mean, rstd, weight), shapes, wanted, outs, parameters)
    others = expanded(input.shape, mean, rstd, weight)
    write_gradients(grad_out, input, *others, dims, tuple(range(dims[0])), results)
    return results


@triton.jit
def _inverse_rms(squares, count, eps):
    mean = over_count(squares, count) + eps.to(squares.dtype)
    return inverse(square_root(mean))


@triton.jit
def _scale(x, rstd, eps):
    return x * rstd


@triton.jit
def _scale_weight(x, weight, rstd, eps):
    return x * rstd * weight


_rms = Reduction((0.0,), square, add_states, _inverse_rms)
_RMS_FORWARD = {
    False: RowTransform(_rms, _scale),
    True: RowTransform(_rms, _scale_weight, leaf_inputs=1),
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
    """x / sqrt(mean(x^2) + eps), times the weight, and the factor of x: Zhang and Sennrich 2019."""
    check_floats(input, weight)
    dims, rows = _trailing(input.shape, normalized_shape)
    if weight is not None and tuple(weight.shape) != tuple(normalized_shape):
        raise Decline(f"weight of shape {list(weight.shape)}, not {list(normalized_shape)}")
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
        raise Decline(f"a gradient or rstd that does not fit an input of shape {list(input.shape)} and {input.dtype}")
    if any(tuple(each.shape) != tuple(normalized_shape) for each in present(weight)):
        raise Decline(f"weight whose shape is not {list(normalized_shape)}")
    check_contiguous(rstd, weight)
    if len(output_mask) != 2 or (output_mask[1] and weight is None):
        raise Decline(f"output mask {list(output_mask)}, which wants the gradient by a missing operand")
    wanted = output_mask
    every, compute = present(input, grad_out, rstd, weight), opmath(input.dtype)
    own, by_weight = wanted_outputs(every, (input.shape, normalized_shape), wanted, outs)
    operands = (grad_out, input, *present(*expanded(input.shape, rstd, weight)))
    if own is not None:
        RMS_BACKWARD[weight is not None].run(operands, dims, (own,), compute)
    if by_weight is not None:
        _RMS_WEIGHT.run(operands[:3], tuple(range(dims[0])), (by_weight,), compute)
    return own, by_weight


def _groups(N, C, HxW, group, *tensors):
    """Return the shape (N, group, C / group, HxW). Decline tensors without such a view or without elements.

    ATen's CPU kernel takes channels-last tensors, if all are; its GPU kernel raises for them.
    """
    if not (N and C and HxW and group > 0) or C % group:
        raise Decline(f"no elements, or groups that do not divide the channels: {N}, {C}, {HxW} and {group}")
    channels_last = aten.on_cpu() and all(
        has_channels_last(tensor) and suggests_channels_last(tensor) for tensor in tensors
    )
    if not channels_last and not all(tensor.is_contiguous() for tensor in tensors):
        raise Decline("tensors that are neither contiguous nor, on a CPU, channels-last")
    if any(tensor.numel() != N * C * HxW for tensor in tensors):
        raise Decline(f"a tensor that does not have {N} x {C} x {HxW} elements")
    return N, group, C // group, HxW


def _expand_channels(shape, *operands):
    """Expand tensors of one value a channel to `shape`, (N, group, C / group, HxW)."""
    return expanded(shape, *(operand if operand is None else operand.view(1, *shape[1:3], 1) for operand in operands))


@operator("native_group_norm", accepts=FLOATS)
def native_group_norm(input, weight, bias, N, C, HxW, group, eps, outs=()):
    check_floats(input)
    parameters = _checked_parameters_dtype(input, weight, bias)
    shape = _groups(N, C, HxW, group, input)
    if any(tuple(operand.shape) != (C,) for operand in present(weight, bias)):
        raise Decline(f"weight or bias whose shape is not ({C},)")
    check_contiguous(weight, bias)
    shapes, dtypes = [input.shape, (N, group), (N, group)], [input.dtype, parameters, parameters]
    strides = format_strides(input.shape, suggests_channels_last(input))
    outs = outputs(present(input, weight, bias), shapes, dtypes, outs, strides=strides)
    _groups(N, C, HxW, group, outs[0])
    normalize(input.view(shape), *_expand_channels(shape, weight, bias), (2, 3), eps, outs[0].view(shape), outs[1:])
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


# Smallest HxW for which each channel's gradients are summed first. Sums of fewer elements would be nearly as many bytes
# as the operands.
_MIN_SUMMED = 32
# Over the sums of `size` elements each: the sums of the sums, and the means of the elements over a group.
_SUMS_OF_SUMS = Reduction((0.0, 0.0), _both, add_pairs, both_added_to_zero, (None, None), 2)
_MEANS_OF_SUMS = Reduction((0.0, 0.0), _weighted, add_pairs, _means_of_sums, (None, None), 2)


@scalar_kernel(accepts=FLOATS, cast=("mean", "rstd", "weight", "mean_grad", "mean_product"))
def _group_gradient(grad, x, mean, rstd, weight, mean_grad, mean_product):
    # Factors of a group or channel are multiplied first: the engine computes them once a row.
    return grad * (weight * rstd) - (x - mean) * (rstd * rstd * mean_product) - rstd * mean_grad


def _gradients_by_channels(grad, input, mean, rstd, weight, results):
    """Write the gradients in `results` that are not None, for operands of shape (N, group, C / group, HxW).

    The sums over HxW, which is contiguous, come first. All other reductions read these few sums.
    """
    compute, (own, by_weight, by_bias) = opmath(input.dtype), results
    product_sum, grad_sum = (empty(input.shape[:3], compute, input.device) for _ in range(2))
    _WEIGHT_AND_BIAS.run((grad, input, *expanded(input.shape, mean, rstd)), (3,), (product_sum, grad_sum), compute)
    if own is not None:
        means = [empty(mean.shape, compute, input.device) for _ in range(2)]
        weights = weight[..., 0].expand(product_sum.shape)
        _MEANS_OF_SUMS.run(
            (product_sum, grad_sum, weights),
            (2,),
            [each[..., 0, 0] for each in means],
            compute,
            (float(input.shape[3]),),
        )
        _group_gradient.run((grad, input, mean, rstd, weight, *means), (own,))
    if by_weight is not None and by_bias is not None:
        _SUMS_OF_SUMS.run((product_sum, grad_sum), (0,), (by_weight, by_bias), compute)
    elif by_weight is not None:
        _BIAS.run((product_sum,), (0,), (by_weight,), compute)
    else:
        _BIAS.run((grad_sum,), (0,), (by_bias,), compute)


@operator("native_group_norm_backward", accepts=FLOATS)
def native_group_norm_backward(grad_out, input, mean, rstd, weight, N, C, HxW, group, output_mask, outs=()):
    check_floats(input, grad_out)
    parameters = _checked_parameters_dtype(input, mean, rstd, weight)
    shape = _groups(N, C, HxW, group, input, grad_out)
    check_contiguous(mean, rstd, weight)
    if grad_out.shape != input.shape or any(tuple(operand.shape) != (N, group) for operand in (mean, rstd)):
        raise Decline(f"a gradient or statistics that do not fit an input of shape {list(input.shape)}")
    if weight is None and any(output_mask[1:]):
        raise Decline("gradients by weight or bias without a weight, for which ATen raises")
    every, shapes = present(input, grad_out, mean, rstd, weight), (input.shape, (C,), (C,))
    strides = format_strides(input.shape, suggests_channels_last(input))
    results = wanted_outputs(every, shapes, output_mask, outs, parameters, strides)
    if results[0] is not None:
        _groups(N, C, HxW, group, results[0])
    views = [
        None if result is None else result.view(shape if i == 0 else shape[1:3]) for i, result in enumerate(results)
    ]
    operands = grad_out.view(shape), input.view(shape), *(each[:, :, None, None] for each in (mean, rstd))
    parameters_wanted = any(view is not None for view in views[1:])
    if parameters_wanted and HxW >= _MIN_SUMMED:
        _gradients_by_channels(*operands, weight.view(1, *shape[1:3], 1), views)
    elif parameters_wanted or views[0] is not None:
        reduced = (0, 3) if parameters_wanted else ()
        write_gradients(
            *operands[:2], *expanded(shape, *operands[2:]), *_expand_channels(shape, weight), (2, 3), reduced, views
        )
    return results


@triton.jit
def _scale_to_length(v, g, norm):
    return v * true_divide(g, norm)


@triton.jit
def _projection(grad_w, v, g, norm):
    return grad_w * v * inverse(norm)


@triton.jit
def _gradient_of_direction(grad_w, v, g, norm, grad_g):
    return true_divide(g, norm) * (grad_w - v * true_divide(grad_g, norm))


_weight_norm = RowTransform(Reduction((0.0,), square, add_states, root), _scale_to_length, leaf_inputs=1)
_weight_norm_backward = RowTransform(Reduction((0.0,), _projection, add_states, added_to_zero), _gradient_of_direction)


def _slices(v, dim, *others):
    """Return the dimensions of a slice of v along `dim`. Decline unless `others` have one value for each slice."""
    shape = [size if i == dim else 1 for i, size in enumerate(v.shape)]
    if (
        not v.dim()
        or dim not in (0, v.dim() - 1)
        or not v.numel()
        or not all(list(other.shape) == shape and other.is_contiguous() for other in others)
    ):
        raise Decline(f"dimension {dim} of shape {list(v.shape)}, or lengths that are not contiguous or not {shape}")
    return tuple(i for i in range(v.dim()) if i != dim)


def _check_precision(v):
    if v.dtype is torch.float64:
        raise Decline("float64, for which ATen's GPU kernel returns norms in float32")


@operator("_weight_norm_interface", accepts=SINGLE_FLOATS)
def _weight_norm_interface(v, g, dim=0, outs=()):
    """v * g / |v|, and |v|, for slices along `dim`: Salimans and Kingma 2016."""
    check_floats(v, g)
    _check_precision(v)
    dims = _slices(v, dim, g)
    check_contiguous(v, *outs)
    outs = outputs((v, g), [v.shape, g.shape], [v.dtype, opmath(v.dtype)], outs)
    _weight_norm.run((v, g.expand(v.shape)), dims, outs[:1], opmath(v.dtype), (), outs[1:], (0,))
    return outs


@operator("_weight_norm_interface_backward", accepts=SINGLE_FLOATS)
def _weight_norm_interface_backward(grad_w, saved_v, saved_g, saved_norms, dim, outs=()):
    check_floats(saved_v, grad_w, saved_g)
    _check_precision(saved_v)
    check_contiguous(saved_v, grad_w, *outs)
    dims = _slices(saved_v, dim, saved_g, saved_norms)
    if grad_w.shape != saved_v.shape or saved_norms.dtype is not opmath(saved_v.dtype):
        raise Decline(f"gradient of shape {list(grad_w.shape)} and norms of {saved_norms.dtype} for {saved_v.dtype}")
    every = (grad_w, saved_v, saved_g, saved_norms)
    outs = outputs(every, [saved_v.shape, saved_g.shape], [saved_v.dtype] * 2, outs)
    operands = [operand.expand(saved_v.shape) for operand in every]
    _weight_norm_backward.run(operands, dims, outs[:1], opmath(saved_v.dtype), (), outs[1:], (0,))
    return outs
