"""Layer, group and root-mean-square normalisation, forward and backward.

With x' = (x - mean) * rstd the gradient by x is rstd * (h - mean of h - x' * mean of h x'), where h is the output's
gradient g times the weight (Ba, Kiros, Hinton 2016); those by weight and bias are sums of g x' and of g.
"""

import math

import triton
import triton.language as tl

from tritonite.catalog import operator
from tritonite.dtypes import FLOATS, opmath
from tritonite.engine.reduction import Reduction, RowTransform, outputs
from tritonite.errors import Decline
from tritonite.language.math import maximum_nan, square_root, true_divide
from tritonite.ops.reduction import add_states, moments, only, over_count, same


@triton.jit
def _element(x, count):
    return x


@triton.jit
def _shift(largest, count, eps):
    return largest


@triton.jit
def _part_of_mean(x, shift, count):
    return (x - shift) * true_divide(tl.full((), 1.0, x.dtype), count.to(x.dtype))


@triton.jit
def _mean(total, shift, count, eps):
    return shift + total


@triton.jit
def _squared_distance(x, shift, mean, count):
    return (x - mean) * (x - mean)


@triton.jit
def _rstd(squares, shift, mean, count, eps):
    variance = over_count(squares, count) + eps.to(squares.dtype)
    return true_divide(tl.full(squares.shape, 1.0, squares.dtype), square_root(variance))


@triton.jit
def _mean_and_rstd(mean, squares, own_count, count, eps):
    return mean, mean, _rstd(squares, mean, mean, count, eps)


_statistics = moments(_mean_and_rstd, 3)
# Next to an element of the row its others neither overflow in a sum nor, if they are all alike, have a variance.
_stages = (
    Reduction((-math.inf,), _element, maximum_nan, _shift),
    Reduction((0.0,), _part_of_mean, add_states, _mean),
    Reduction((0.0,), _squared_distance, add_states, _rstd),
)


@triton.jit
def _normalize(x, shift, mean, rstd, eps):
    return (x - mean) * rstd


@triton.jit
def _normalize_weight(x, weight, shift, mean, rstd, eps):
    return (x - mean) * rstd * weight


@triton.jit
def _normalize_bias(x, bias, shift, mean, rstd, eps):
    return (x - mean) * rstd + bias


@triton.jit
def _normalize_both(x, weight, bias, shift, mean, rstd, eps):
    return (x - mean) * rstd * weight + bias


_FORWARD = {
    (with_weight, with_bias): RowTransform(_statistics, apply, leaf_inputs=1, stages=_stages)
    for with_weight, with_bias, apply in (
        (False, False, _normalize),
        (True, False, _normalize_weight),
        (False, True, _normalize_bias),
        (True, True, _normalize_both),
    )
}


@triton.jit
def _both_sums(a, b, c, d):
    return a + c, b + d


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
def _gradient(grad, x, mean, rstd, mean_grad, mean_product):
    return rstd * (grad - mean_grad - (x - mean) * rstd * mean_product)


@triton.jit
def _gradient_weight(grad, x, mean, rstd, weight, mean_grad, mean_product):
    return rstd * (grad * weight - mean_grad - (x - mean) * rstd * mean_product)


_BACKWARD = {
    False: RowTransform(Reduction((0.0, 0.0), _projections, _both_sums, _both_means, (None, None), 2), _gradient),
    True: RowTransform(
        Reduction((0.0, 0.0), _projections_weight, _both_sums, _both_means, (None, None), 2), _gradient_weight
    ),
}


@triton.jit
def _product_and_gradient(grad, x, mean, rstd):
    return grad * (x - mean) * rstd, grad


@triton.jit
def _product(grad, x, mean, rstd):
    return grad * (x - mean) * rstd


@triton.jit
def _two(first, second, count):
    return first, second


_WEIGHT_AND_BIAS = Reduction((0.0, 0.0), _product_and_gradient, _both_sums, _two, (None, None), 2)
_WEIGHT = Reduction((0.0,), _product, add_states, only)
_BIAS = Reduction((0.0,), same, add_states, only)


def _trailing(shape, normalized_shape):
    """The dimensions that `normalized_shape` names, and a shape of the statistics."""
    rank = len(normalized_shape)
    if not rank or tuple(shape[len(shape) - rank :]) != tuple(normalized_shape) or 0 in shape:
        raise Decline(f"normalised shape {list(normalized_shape)} of {list(shape)}")
    return tuple(range(len(shape) - rank, len(shape))), (*shape[: len(shape) - rank], *(1,) * rank)


def _check(input, *others):
    if input.dtype not in FLOATS:
        raise Decline(f"dtype {input.dtype}")
    for other in others:
        if other is not None and other.dtype is not input.dtype:
            raise Decline("operands of several dtypes")


def _statistics_dtype(input):
    """What ATen keeps them in: on a GPU as it computes."""
    return input.dtype if input.device.type == "cpu" else opmath(input.dtype)


@operator("native_layer_norm", accepts=FLOATS)
def native_layer_norm(input, normalized_shape, weight, bias, eps, outs=()):
    _check(input, weight, bias)
    dims, rows = _trailing(input.shape, normalized_shape)
    for operand in (weight, bias):
        if operand is not None and tuple(operand.shape) != tuple(normalized_shape):
            raise Decline("weight or bias of another shape")
    kept = _statistics_dtype(input)
    given = [operand for operand in (weight, bias) if operand is not None]
    outs = outputs((input, *given), [input.shape, rows, rows], [input.dtype, kept, kept], outs)
    inputs = [input, *(operand.expand(input.shape) for operand in given)]
    transform = _FORWARD[weight is not None, bias is not None]
    transform.run(inputs, dims, outs[:1], opmath(input.dtype), (eps,), outs[1:], (1, 2))
    return outs


@operator("native_layer_norm_backward", accepts=FLOATS)
def native_layer_norm_backward(grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask, outs=()):
    _check(input, grad_out, weight, bias)
    dims, rows = _trailing(input.shape, normalized_shape)
    if grad_out.shape != input.shape or tuple(mean.shape) != rows or tuple(rstd.shape) != rows:
        raise Decline("operands of other shapes")
    compute = opmath(input.dtype)
    wanted = [
        flag and (i == 0 or operand is not None)
        for i, (flag, operand) in enumerate(zip(output_mask, (input, weight, bias), strict=True))
    ]
    every = [operand for operand in (grad_out, input, mean, rstd, weight) if operand is not None]
    shapes = [input.shape, normalized_shape, normalized_shape]
    chosen = [shape for shape, flag in zip(shapes, wanted, strict=True) if flag]
    if outs and not all(wanted):
        raise Decline("outputs that are not asked for")
    found = iter(outputs(every, chosen, [input.dtype] * len(chosen), outs))
    results = [next(found) if flag else None for flag in wanted]
    full = [operand.expand(input.shape) for operand in every]
    if wanted[0]:
        _BACKWARD[weight is not None].run(full, dims, results[:1], compute)
    leading = tuple(range(dims[0]))
    if wanted[1] and wanted[2]:
        _WEIGHT_AND_BIAS.run(full[:4], leading, results[1:], compute)
    elif wanted[1]:
        _WEIGHT.run(full[:4], leading, results[1:2], compute)
    elif wanted[2]:
        _BIAS.run(full[:1], leading, results[2:], compute)
    return results
