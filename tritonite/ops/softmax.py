"""Softmax, log-softmax, masked softmax, and their gradients.

Each is a `RowTransform`: an online-softmax reduction gives the row's maximum and sum, and a formula is applied to every
element.
"""

import torch
import triton
import triton.language as tl

from tritonite.dtypes import FLOATS, opmath
from tritonite.engine.outputs import dimensions, outputs
from tritonite.engine.rows.declare import Reduction, RowTransform
from tritonite.engine.rows.formulas import add_states
from tritonite.errors import Decline
from tritonite.language import libdevice
from tritonite.language.math import LOG2_E, inverse
from tritonite.ops import aten
from tritonite.ops.reduction.exponentials import (
    combine_exponentials,
    no_exponentials,
    scaled_exponential,
    sums_of_exponentials,
)
from tritonite.ops.reduction.sums import added_to_zero, check_floats, same
from tritonite.registry import operator


@triton.jit
def _nan_if_infinite(row_max, row_sum):
    # ATen computes exp(inf - inf), which is nan.
    return tl.where(row_max == float("inf"), float("nan"), row_sum)


@triton.jit
def _max_and_inverse_sum(row_max, row_sum, count):
    return row_max, inverse(_nan_if_infinite(row_max, row_sum))


@triton.jit
def _max_and_log_sum(row_max, row_sum, count):
    return row_max, libdevice.log(_nan_if_infinite(row_max, row_sum))


@triton.jit
def _probability(x, row_max, inverse_sum):
    return libdevice.exp(x - row_max) * inverse_sum


# Exponentials are computed times 2^24 and the inverse sum times 2^-24, because probabilities below 2^-126 matter in
# bfloat16, and exponentials that small are flushed to 0.
_SHIFT = tl.constexpr(24)


@triton.jit
def _max_and_shifted_inverse_sum(row_max, row_sum, count):
    return row_max, inverse(_nan_if_infinite(row_max, row_sum)) * (0.5**_SHIFT)


@triton.jit
def _rough_probability(x, row_max, inverse_sum):
    return libdevice.exp2((x - row_max) * LOG2_E + _SHIFT) * inverse_sum


@triton.jit
def _safe_probability(x, row_max, inverse_sum):
    """Softmax that is 0 in a row of -inf, whose sum is 0."""
    return tl.where(inverse_sum == float("inf"), 0.0, libdevice.exp(x - row_max) * inverse_sum)


@triton.jit
def _log_probability(x, row_max, log_sum):
    return x - row_max - log_sum


# Keyed by whether the result's dtype is narrower than the dtype computed in.
_softmax = {
    False: RowTransform(sums_of_exponentials(_max_and_inverse_sum, 2), _probability),
    True: RowTransform(
        sums_of_exponentials(_max_and_shifted_inverse_sum, 2, rough=True), _rough_probability, flushing=True
    ),
}
_log_softmax = {
    rough: RowTransform(sums_of_exponentials(_max_and_log_sum, 2, rough), _log_probability, flushing=rough)
    for rough in (False, True)
}
_safe = dict.fromkeys((False, True), RowTransform(sums_of_exponentials(_max_and_inverse_sum, 2), _safe_probability))


@triton.jit
def _product(grad_output, output):
    return grad_output * output


@triton.jit
def _softmax_gradient(grad_output, output, sum_of_products):
    return (grad_output - sum_of_products) * output


@triton.jit
def _log_softmax_gradient(grad_output, output, grad_sum):
    return grad_output - libdevice.exp(output) * grad_sum


@triton.jit
def _rough_log_softmax_gradient(grad_output, output, grad_sum):
    return grad_output - tl.exp(output) * grad_sum


_softmax_backward = dict.fromkeys(
    (False, True), RowTransform(Reduction((0.0,), _product, add_states, added_to_zero), _softmax_gradient)
)
_sum_of_gradients = Reduction((0.0,), same, add_states, added_to_zero)
_log_softmax_backward = {
    False: RowTransform(_sum_of_gradients, _log_softmax_gradient, leaf_inputs=1),
    True: RowTransform(_sum_of_gradients, _rough_log_softmax_gradient, leaf_inputs=1),
}


def _transform_rows(transforms, inputs, dim, dtype, outs):
    """Apply a transform along `dim`; compute in the operands' compute dtype or the result's, whichever is wider."""
    for value in inputs:
        if value.dtype not in FLOATS:
            raise Decline(f"dtype {value.dtype}")
        if value.shape != inputs[0].shape:
            raise Decline(f"operands of shapes {tuple(inputs[0].shape)} and {tuple(value.shape)}")
    dims = dimensions(dim, inputs[0].dim())
    if any(not out.is_contiguous() for out in outs):
        raise Decline("an output that is not contiguous, which ATen takes for contiguous")
    # No element is read after its result is written, so that an output may be an input.
    outs = outputs(inputs, [inputs[0].shape], [dtype], outs, in_place=inputs)
    compute = torch.promote_types(opmath(inputs[0].dtype), opmath(dtype))
    if inputs[0].numel():
        transforms[dtype.itemsize < compute.itemsize].run(inputs, dims, outs, compute)
    return outs


def _result_dtype(self, half_to_float):
    if half_to_float and self.dtype is not torch.float16:
        raise Decline(f"half_to_float for {self.dtype}; float16 is served")
    # ATen's CPU kernel raises.
    if half_to_float and aten.on_cpu():
        raise Decline("half_to_float on a CPU")
    return torch.float32 if half_to_float else self.dtype


@operator("_softmax", accepts=FLOATS)
def _softmax_(self, dim, half_to_float, outs=()):
    return _transform_rows(_softmax, (self,), dim, _result_dtype(self, half_to_float), outs)


@operator("_log_softmax", accepts=FLOATS)
def _log_softmax_(self, dim, half_to_float, outs=()):
    return _transform_rows(_log_softmax, (self,), dim, _result_dtype(self, half_to_float), outs)


def _without_conversion(transforms, self, dim, dtype, outs):
    if dtype not in (None, self.dtype):
        raise Decline(f"conversion from {self.dtype} to {dtype}")
    return _transform_rows(transforms, (self,), dim, self.dtype, outs)


@operator("softmax", accepts=FLOATS)
def softmax(self, dim, dtype=None, outs=()):
    return _without_conversion(_softmax, self, dim, dtype, outs)


@operator("log_softmax", accepts=FLOATS)
def log_softmax(self, dim, dtype=None, outs=()):
    return _without_conversion(_log_softmax, self, dim, dtype, outs)


@operator("_safe_softmax", accepts=FLOATS)
def _safe_softmax(self, dim, dtype=None, outs=()):
    return _without_conversion(_safe, self, dim, dtype, outs)


def _check_gradient(grad_output, output, input_dtype):
    """Decline dtypes that ATen's kernel for the device does not take: only GPUs convert float32 to float16."""
    converted = grad_output.dtype is torch.float32 and input_dtype is torch.float16 and aten.on_gpu()
    if grad_output.dtype is not output.dtype or not (converted or grad_output.dtype is input_dtype):
        raise Decline(f"gradient of {grad_output.dtype}, output of {output.dtype}, input of {input_dtype}")


@operator("_softmax_backward_data", accepts=FLOATS)
def _softmax_backward_data(grad_output, output, dim, input_dtype, outs=()):
    _check_gradient(grad_output, output, input_dtype)
    return _transform_rows(_softmax_backward, (grad_output, output), dim, input_dtype, outs)


@operator("_log_softmax_backward_data", accepts=FLOATS)
def _log_softmax_backward_data(grad_output, output, dim, input_dtype, outs=()):
    _check_gradient(grad_output, output, input_dtype)
    return _transform_rows(_log_softmax_backward, (grad_output, output), dim, input_dtype, outs)


@triton.jit
def _exponential_unless_masked(x, mask):
    row_max, row_sum = scaled_exponential(x)
    return tl.where(mask != 0, float("-inf"), row_max), tl.where(mask != 0, 0.0, row_sum)


@triton.jit
def _masked_probability(x, mask, row_max, inverse_sum):
    """0 where the mask is set, and nan in a row that is masked everywhere."""
    return tl.where(mask != 0, 0.0, libdevice.exp(x - row_max)) * inverse_sum


@triton.jit
def _product_unless_masked(grad_output, output, mask):
    return tl.where(mask != 0, 0.0, grad_output * output)


@triton.jit
def _masked_gradient(grad_output, output, mask, sum_of_products):
    return tl.where(mask != 0, 0.0, (grad_output - sum_of_products) * output)


_masked = RowTransform(
    Reduction(no_exponentials, _exponential_unless_masked, combine_exponentials, _max_and_inverse_sum, (None, None), 2),
    _masked_probability,
)
_masked_backward = RowTransform(Reduction((0.0,), _product_unless_masked, add_states, added_to_zero), _masked_gradient)


def _expand_mask(mask, shape, mask_type):
    """Expand a mask to `shape`: of (query, key) for type 0, of (batch, key) for type 1, of all elements for type 2."""
    if mask.dtype is not torch.bool:
        raise Decline(f"mask of dtype {mask.dtype}; bool is served")
    if mask.shape == shape:
        return mask
    if len(shape) == 4 and mask_type == 0 and mask.shape == shape[2:]:
        return mask.expand(shape)
    if len(shape) == 4 and mask_type == 1 and tuple(mask.shape) == (shape[0], shape[3]):
        return mask.view(shape[0], 1, 1, shape[3]).expand(shape)
    raise Decline(f"mask of shape {tuple(mask.shape)} and type {mask_type} for an input of {tuple(shape)}")


def _transform_masked_rows(transform, operands, mask, dim, outs):
    check_floats(*operands)
    first = operands[0]
    if any(operand.shape != first.shape for operand in operands) or not first.dim():
        raise Decline("operands of different shapes, or 0-d ones")
    dims = dimensions(-1 if dim is None else dim, first.dim())
    outs = outputs((*operands, mask), [first.shape], [first.dtype], outs)
    if first.numel():
        transform.run((*operands, mask), dims, outs, opmath(first.dtype))
    return outs


@operator("_masked_softmax", accepts=FLOATS)
def _masked_softmax(self, mask, dim=None, mask_type=None, outs=()):
    # ATen's GPU kernel fails to launch.
    if not self.numel() and aten.on_gpu():
        raise Decline("an input without elements")
    if not self.is_contiguous():
        raise Decline("an input that is not contiguous, whose strides ATen may keep")
    # ATen's CPU kernel takes a mask without a type.
    if mask_type not in (0, 1, 2) and (mask_type is not None or aten.on_gpu()):
        raise Decline(f"mask type {mask_type}; 0, 1 and 2 are served")
    return _transform_masked_rows(_masked, (self,), _expand_mask(mask, self.shape, mask_type), dim, outs)


@operator("_masked_softmax_backward", accepts=FLOATS)
def _masked_softmax_backward(grad_output, output, mask, dim=None, outs=()):
    # ATen's GPU result may keep the gradient's strides.
    if aten.on_gpu() and not grad_output.is_contiguous():
        raise Decline("a gradient that is not contiguous")
    return _transform_masked_rows(
        _masked_backward, (grad_output, output), _expand_mask(mask, output.shape, None), dim, outs
    )
