"""Softmax, its logarithm, and their gradients; the largest element and the sum of exponentials come in one pass."""

import torch
import triton
import triton.language as tl

from tritonite.dtypes import FLOATS, opmath
from tritonite.engine.outputs import dimensions, outputs
from tritonite.engine.rows.declare import Reduction, RowTransform
from tritonite.errors import Decline
from tritonite.language import libdevice
from tritonite.language.math import LOG2_E, inverse
from tritonite.ops.reduction import (
    add_states,
    added_to_zero,
    check_floats,
    combine_exponentials,
    no_exponentials,
    same,
    scaled_exponential,
    sums_of_exponentials,
)
from tritonite.registry import operator


@triton.jit
def _total(largest, total):
    # An exponential next to an infinite element is nan, as inf - inf is.
    return tl.where(largest == float("inf"), float("nan"), total)


@triton.jit
def _largest_and_inverse(largest, total, count):
    return largest, inverse(_total(largest, total))


@triton.jit
def _largest_and_logarithm(largest, total, count):
    return largest, libdevice.log(_total(largest, total))


@triton.jit
def _share(x, largest, inverse):
    return libdevice.exp(x - largest) * inverse


# Shares of less than 2^-126 count: exponentials are as many powers of 2 too large, and the inverse is too small.
_SHIFT = tl.constexpr(24)


@triton.jit
def _largest_and_shifted_inverse(largest, total, count):
    return largest, inverse(_total(largest, total)) * (0.5**_SHIFT)


@triton.jit
def _rough_share(x, largest, inverse):
    return libdevice.exp2((x - largest) * LOG2_E + _SHIFT) * inverse


@triton.jit
def _safe_share(x, largest, inverse):
    """0 throughout a row of minus infinities, the inverse of whose sum is infinite."""
    return tl.where(inverse == float("inf"), 0.0, libdevice.exp(x - largest) * inverse)


@triton.jit
def _log_share(x, largest, logarithm):
    return x - largest - logarithm


# By whether the result has a half type.
_softmax = {
    False: RowTransform(sums_of_exponentials(_largest_and_inverse, 2), _share),
    True: RowTransform(sums_of_exponentials(_largest_and_shifted_inverse, 2, rough=True), _rough_share, flushing=True),
}
_log_softmax = {
    rough: RowTransform(sums_of_exponentials(_largest_and_logarithm, 2, rough), _log_share, flushing=rough)
    for rough in (False, True)
}
_safe = dict.fromkeys((False, True), RowTransform(sums_of_exponentials(_largest_and_inverse, 2), _safe_share))


@triton.jit
def _product(grad_output, output):
    return grad_output * output


@triton.jit
def _softmax_gradient(grad_output, output, total):
    return (grad_output - total) * output


@triton.jit
def _log_softmax_gradient(grad_output, output, total):
    return grad_output - libdevice.exp(output) * total


@triton.jit
def _rough_log_softmax_gradient(grad_output, output, total):
    return grad_output - tl.exp(output) * total


_softmax_backward = dict.fromkeys(
    (False, True), RowTransform(Reduction((0.0,), _product, add_states, added_to_zero), _softmax_gradient)
)
_sum_of_gradients = Reduction((0.0,), same, add_states, added_to_zero)
_log_softmax_backward = {
    False: RowTransform(_sum_of_gradients, _log_softmax_gradient, leaf_inputs=1),
    True: RowTransform(_sum_of_gradients, _rough_log_softmax_gradient, leaf_inputs=1),
}


def _rows(transforms, inputs, dim, dtype, outs):
    """A transform along `dim`, in the dtype that elements compute in or the result's, if that is wider."""
    for value in inputs:
        if value.dtype not in FLOATS:
            raise Decline(f"dtype {value.dtype}")
        if value.shape != inputs[0].shape:
            raise Decline("operands of several shapes")
    dims = dimensions(dim, inputs[0].dim())
    if any(not out.is_contiguous() for out in outs):
        raise Decline("output that is not contiguous, which ATen writes as if it were")
    # Every element is read for the last time where its result is written.
    outs = outputs(inputs, [inputs[0].shape], [dtype], outs, in_place=inputs)
    compute = torch.promote_types(opmath(inputs[0].dtype), opmath(dtype))
    if inputs[0].numel():
        transforms[dtype.itemsize < compute.itemsize].run(inputs, dims, outs, compute)
    return outs


def _wider(self, half_to_float):
    if half_to_float and self.dtype is not torch.float16:
        raise Decline("conversion of another dtype than float16")
    if half_to_float and self.device.type == "cpu":
        raise Decline("conversion on a CPU")
    return torch.float32 if half_to_float else self.dtype


@operator("_softmax", accepts=FLOATS)
def _softmax_(self, dim, half_to_float, outs=()):
    return _rows(_softmax, (self,), dim, _wider(self, half_to_float), outs)


@operator("_log_softmax", accepts=FLOATS)
def _log_softmax_(self, dim, half_to_float, outs=()):
    return _rows(_log_softmax, (self,), dim, _wider(self, half_to_float), outs)


def _of_dtype(transforms, self, dim, dtype, outs):
    if dtype not in (None, self.dtype):
        raise Decline("conversion to another dtype")
    return _rows(transforms, (self,), dim, self.dtype, outs)


@operator("softmax", accepts=FLOATS)
def softmax(self, dim, dtype=None, outs=()):
    return _of_dtype(_softmax, self, dim, dtype, outs)


@operator("log_softmax", accepts=FLOATS)
def log_softmax(self, dim, dtype=None, outs=()):
    return _of_dtype(_log_softmax, self, dim, dtype, outs)


@operator("_safe_softmax", accepts=FLOATS)
def _safe_softmax(self, dim, dtype=None, outs=()):
    return _of_dtype(_safe, self, dim, dtype, outs)


def _check_gradient(grad_output, output, input_dtype):
    """Decline dtypes that ATen refuses, or makes something else of on a CPU."""
    converted = grad_output.dtype is torch.float32 and input_dtype is torch.float16 and grad_output.device.type != "cpu"
    if grad_output.dtype is not output.dtype or not (converted or grad_output.dtype is input_dtype):
        raise Decline("gradients of several dtypes")


@operator("_softmax_backward_data", accepts=FLOATS)
def _softmax_backward_data(grad_output, output, dim, input_dtype, outs=()):
    _check_gradient(grad_output, output, input_dtype)
    return _rows(_softmax_backward, (grad_output, output), dim, input_dtype, outs)


@operator("_log_softmax_backward_data", accepts=FLOATS)
def _log_softmax_backward_data(grad_output, output, dim, input_dtype, outs=()):
    _check_gradient(grad_output, output, input_dtype)
    return _rows(_log_softmax_backward, (grad_output, output), dim, input_dtype, outs)


@triton.jit
def _unmasked(x, mask):
    largest, total = scaled_exponential(x)
    return tl.where(mask != 0, float("-inf"), largest), tl.where(mask != 0, 0.0, total)


@triton.jit
def _masked_share(x, mask, largest, inverse):
    """0 where the mask is set; nan throughout a row where it is set everywhere."""
    return tl.where(mask != 0, 0.0, libdevice.exp(x - largest)) * inverse


@triton.jit
def _unmasked_product(grad_output, output, mask):
    return tl.where(mask != 0, 0.0, grad_output * output)


@triton.jit
def _masked_gradient(grad_output, output, mask, total):
    return tl.where(mask != 0, 0.0, (grad_output - total) * output)


_masked = RowTransform(
    Reduction(no_exponentials, _unmasked, combine_exponentials, _largest_and_inverse, (None, None), 2), _masked_share
)
_masked_backward = RowTransform(Reduction((0.0,), _unmasked_product, add_states, added_to_zero), _masked_gradient)


def _spread(mask, shape, mask_type):
    """The mask as one of `shape`: of sources and targets (type 0), of padded keys (1), or of all elements (2)."""
    if mask.dtype is not torch.bool:
        raise Decline(f"mask of dtype {mask.dtype}")
    if mask.shape == shape:
        return mask
    if len(shape) == 4 and mask_type == 0 and mask.shape == shape[2:]:
        return mask.expand(shape)
    if len(shape) == 4 and mask_type == 1 and tuple(mask.shape) == (shape[0], shape[3]):
        return mask.view(shape[0], 1, 1, shape[3]).expand(shape)
    raise Decline("mask of another shape")


def _with_mask(transform, operands, mask, dim, outs):
    check_floats(*operands)
    first = operands[0]
    if any(operand.shape != first.shape for operand in operands) or not first.dim():
        raise Decline("operands of several shapes, or of no dimensions")
    dims = dimensions(-1 if dim is None else dim, first.dim())
    outs = outputs((*operands, mask), [first.shape], [first.dtype], outs)
    if first.numel():
        transform.run((*operands, mask), dims, outs, opmath(first.dtype))
    return outs


@operator("_masked_softmax", accepts=FLOATS)
def _masked_softmax(self, mask, dim=None, mask_type=None, outs=()):
    if not self.numel() and self.device.type != "cpu":
        raise Decline("no elements, for which ATen's launch fails")
    if not self.is_contiguous():
        raise Decline("an input that is not contiguous, whose layout ATen's result may have")
    if mask_type not in (0, 1, 2) and (mask_type is not None or self.device.type != "cpu"):
        raise Decline("a mask without a type")
    return _with_mask(_masked, (self,), _spread(mask, self.shape, mask_type), dim, outs)


@operator("_masked_softmax_backward", accepts=FLOATS)
def _masked_softmax_backward(grad_output, output, mask, dim=None, outs=()):
    if grad_output.device.type != "cpu" and not grad_output.is_contiguous():
        raise Decline("a gradient with gaps, or in another order, which ATen's result may have")
    return _with_mask(_masked_backward, (grad_output, output), _spread(mask, output.shape, None), dim, outs)
