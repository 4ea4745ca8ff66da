"""Softmax, its logarithm, and their gradients; the largest element and the sum of exponentials come in one pass."""

import torch
import triton
import triton.language as tl

from tritonite.catalog import operator
from tritonite.dtypes import FLOATS, opmath
from tritonite.engine.reduction import Reduction, RowTransform, dimensions, outputs
from tritonite.errors import Decline
from tritonite.language import libdevice
from tritonite.language.math import true_divide
from tritonite.ops.reduction import add_states, only, sums_of_exponentials


@triton.jit
def _total(largest, total):
    # An exponential next to an infinite element is nan, as inf - inf is.
    return tl.where(largest == float("inf"), float("nan"), total)


@triton.jit
def _largest_and_inverse(largest, total, count):
    return largest, true_divide(tl.full(total.shape, 1.0, total.dtype), _total(largest, total))


@triton.jit
def _largest_and_logarithm(largest, total, count):
    return largest, libdevice.log(_total(largest, total))


@triton.jit
def _share(x, largest, inverse):
    return libdevice.exp(x - largest) * inverse


@triton.jit
def _safe_share(x, largest, inverse):
    """0 throughout a row of minus infinities, the inverse of whose sum is infinite."""
    return tl.where(inverse == float("inf"), 0.0, libdevice.exp(x - largest) * inverse)


@triton.jit
def _log_share(x, largest, logarithm):
    return x - largest - logarithm


_softmax = RowTransform(sums_of_exponentials(_largest_and_inverse, 2), _share)
_safe = RowTransform(sums_of_exponentials(_largest_and_inverse, 2), _safe_share)
_log_softmax = RowTransform(sums_of_exponentials(_largest_and_logarithm, 2), _log_share)


@triton.jit
def _product(grad_output, output):
    return grad_output * output


@triton.jit
def _softmax_gradient(grad_output, output, total):
    return (grad_output - total) * output


@triton.jit
def _gradient_alone(grad_output, output):
    return grad_output


@triton.jit
def _log_softmax_gradient(grad_output, output, total):
    return grad_output - libdevice.exp(output) * total


_softmax_backward = RowTransform(Reduction((0.0,), _product, add_states, only), _softmax_gradient)
_log_softmax_backward = RowTransform(Reduction((0.0,), _gradient_alone, add_states, only), _log_softmax_gradient)


def _rows(transform, inputs, dim, dtype, outs):
    """`transform` along `dim`, in the dtype that elements compute in or the result's, if that is wider."""
    for value in inputs:
        if value.dtype not in FLOATS:
            raise Decline(f"dtype {value.dtype}")
        if value.shape != inputs[0].shape:
            raise Decline("operands of several shapes")
    dims = dimensions(dim, inputs[0].dim())
    outs = outputs(inputs, [inputs[0].shape], [dtype], outs)
    compute = torch.promote_types(opmath(inputs[0].dtype), opmath(dtype))
    if inputs[0].numel():
        transform.run(inputs, dims, outs, compute)
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


def _of_dtype(transform, self, dim, dtype, outs):
    if dtype not in (None, self.dtype):
        raise Decline("conversion to another dtype")
    return _rows(transform, (self,), dim, self.dtype, outs)


@operator("softmax", accepts=FLOATS)
def softmax(self, dim, dtype=None, outs=()):
    return _of_dtype(_softmax, self, dim, dtype, outs)


@operator("log_softmax", accepts=FLOATS)
def log_softmax(self, dim, dtype=None, outs=()):
    return _of_dtype(_log_softmax, self, dim, dtype, outs)


@operator("_safe_softmax", accepts=FLOATS)
def _safe_softmax(self, dim, dtype=None, outs=()):
    return _of_dtype(_safe, self, dim, dtype, outs)


@operator("_softmax_backward_data", accepts=FLOATS)
def _softmax_backward_data(grad_output, output, dim, input_dtype, outs=()):
    return _rows(_softmax_backward, (grad_output, output), dim, input_dtype, outs)


@operator("_log_softmax_backward_data", accepts=FLOATS)
def _log_softmax_backward_data(grad_output, output, dim, input_dtype, outs=()):
    return _rows(_log_softmax_backward, (grad_output, output), dim, input_dtype, outs)
