"""Fake quantisation: floats rounded to the numbers that an integer stands for, and gradients of scale and zero point.

A float x stands for the integer q = round(x / scale) + zero_point, clamped to a range, and q for (q - zero_point) *
scale. Scale and zero point are those of a tensor, as numbers or on the device, or of each channel.
"""

import torch
import triton
import triton.language as tl

from tritonite.dtypes import FLOATS, SINGLE_FLOATS
from tritonite.engine.movement import strides_like
from tritonite.engine.outputs import outputs
from tritonite.engine.rows.declare import Reduction
from tritonite.engine.rows.formulas import add_states
from tritonite.errors import Decline
from tritonite.language import libdevice
from tritonite.language.math import multiply_add, true_divide
from tritonite.ops.aten import ON_CPU
from tritonite.ops.reduction.sums import added_to_zero, same
from tritonite.registry import operator, scalar_kernel
from tritonite.runtime.contract import empty_strided

_SUM = Reduction((0,), same, add_states, added_to_zero)


@triton.jit
def _inverse(self, scale):
    """Return 1 / scale, rounded to float32, in the dtype of self."""
    scale = scale.to(tl.float32)
    return true_divide(tl.full(scale.shape, 1.0, tl.float32), scale).to(self.dtype)


@triton.jit
def _as_int64(value):
    """Return whole floats as a conversion to int64 leaves them: nan becomes the least one, on a CPU any overflow."""
    lost = value != value
    if ON_CPU:
        lost = lost | (value >= 9223372036854775808.0)
    return tl.where(lost, -9223372036854775808.0, value)


@triton.jit
def _sum_of_integers(value, zero_point):
    """Return the sum of whole floats as ATen leaves it: converted to int64 on a CPU, wrapped as int64 on a GPU."""
    if ON_CPU:
        return _as_int64(value + zero_point)
    least: tl.constexpr = -9223372036854775808.0
    above = value >= -least
    below = (value <= least) | (value != value)
    total = tl.where(above, -least, tl.where(below, least, value + zero_point))
    return tl.where((above & (zero_point > 0)) | (below & (zero_point < 0)), -total, total)


@triton.jit
def _clamp(value, quant_min, quant_max):
    """Return a value in the range, and whether it was there; nan becomes the least value."""
    clamped = tl.where(value > quant_min, value, quant_min)
    return tl.where(clamped < quant_max, clamped, quant_max), (value >= quant_min) & (value <= quant_max)


@triton.jit
def _dequantized(self, value, scale, zero_point):
    """Return (value - zero_point) * scale, which ATen computes in float32 for float64 as well."""
    return ((value - zero_point).to(tl.float32) * scale.to(tl.float32)).to(self.dtype)


@triton.jit
def _by_integer(self, scale, zero_point, quant_min, quant_max):
    """Quantise with an integral zero point, as a float of the dtype of self; also return whether q is in the range."""
    scale = scale.to(tl.float32)
    value = libdevice.nearbyint(self * _inverse(self, scale)) + zero_point
    clamped, inside = _clamp(value, quant_min, quant_max)
    return _dequantized(self, clamped, scale, zero_point), inside


@scalar_kernel(
    accepts=FLOATS,
    exact=("scale",),
    cast=("zero_point", "quant_min", "quant_max"),
    output_dtypes=(None, torch.bool),
)
def _per_tensor(self, scale, zero_point, quant_min, quant_max):
    return _by_integer(self, scale, zero_point, quant_min, quant_max)


@scalar_kernel(
    accepts=FLOATS,
    own=("scale", "zero_point", "enabled"),
    cast=("quant_min", "quant_max"),
    output_dtypes=(None, torch.bool),
)
def _per_tensor_on_device(self, scale, zero_point, enabled, quant_min, quant_max):
    value, inside = _by_integer(self, scale, zero_point.to(self.dtype), quant_min, quant_max)
    return tl.where(enabled != 0, value, self), inside | (enabled == 0)


@triton.jit
def _of_channel(self, scale, zero_point, quant_min, quant_max, WHOLE: tl.constexpr):
    """Quantise with the numbers of a channel, whose zero point is an integer if WHOLE.

    A float zero point is added before the sum is rounded.
    """
    inverse = _inverse(self, scale)
    if WHOLE:
        value = _sum_of_integers(libdevice.nearbyint(self * inverse), zero_point)
    elif not ON_CPU:
        value = libdevice.nearbyint(multiply_add(self, inverse, zero_point))
    else:
        value = _as_int64(libdevice.nearbyint(self * inverse + zero_point))
    clamped, inside = _clamp(value, quant_min, quant_max)
    if not ON_CPU:
        return _dequantized(self, clamped, scale, zero_point), inside
    wide = (clamped.to(tl.float64) - zero_point.to(tl.float64)) * scale.to(tl.float64)
    return wide.to(self.dtype), inside


@scalar_kernel(
    accepts=FLOATS,
    own=("scale", "zero_point"),
    cast=("quant_min", "quant_max"),
    output_dtypes=(None, torch.bool),
    asserting=True,
)
def _per_channel(self, scale, zero_point, quant_min, quant_max):
    whole: tl.constexpr = not zero_point.dtype.is_floating()
    zero = zero_point.to(self.dtype)
    if whole:
        valid = (zero >= quant_min) & (zero <= quant_max)
        tl.device_assert(valid, "`zero_point` must be between `quant_min` and `quant_max`.")
    return _of_channel(self, scale, zero, quant_min, quant_max, whole)


@scalar_kernel(
    accepts=FLOATS,
    own=("scale", "zero_point", "enabled"),
    cast=("quant_min", "quant_max"),
    output_dtypes=(None, torch.bool),
)
def _per_channel_on_device(self, scale, zero_point, enabled, quant_min, quant_max):
    value, inside = _of_channel(self, scale, zero_point.to(self.dtype), quant_min, quant_max, True)
    return tl.where(enabled != 0, value, self), inside | (enabled == 0)


@triton.jit
def _rounded_zero_point(zero_point, quant_min, quant_max):
    zero_point = libdevice.nearbyint(zero_point.to(tl.float32))
    return tl.minimum(tl.maximum(zero_point, quant_min.to(tl.float32)), quant_max.to(tl.float32))


@scalar_kernel(accepts=FLOATS, own=("scale", "zero_point"), cast=("quant_min", "quant_max"))
def _learnable_per_tensor(self, scale, zero_point, quant_min, quant_max):
    zero = _rounded_zero_point(zero_point, quant_min, quant_max).to(self.dtype)
    return _by_integer(self, scale, zero, quant_min, quant_max)[0]


@scalar_kernel(accepts=FLOATS, own=("scale", "zero_point"), cast=("quant_min", "quant_max"))
def _learnable_per_channel(self, scale, zero_point, quant_min, quant_max):
    zero = _rounded_zero_point(zero_point, quant_min, quant_max).to(self.dtype)
    return _of_channel(self, scale, zero, quant_min, quant_max, True)[0]


@triton.jit
def _gradients(self, grad, scale, zero_point, quant_min, quant_max, grad_factor):
    """Return the gradients by x, scale and zero point (Jain et al., "Trained quantization thresholds")."""
    inverse = _inverse(self, scale)
    value = _as_int64(libdevice.nearbyint(self * inverse) + zero_point)
    clamped, inside = _clamp(value, quant_min, quant_max)
    rounding = (clamped - zero_point) * scale - self
    outside = tl.where(value < quant_min, grad * (quant_min - zero_point), grad * (quant_max - zero_point))
    by_scale = tl.where(inside, grad * rounding * inverse, outside) * grad_factor
    by_zero_point = tl.where(inside, 0.0, grad * -1.0 * scale * grad_factor)
    return grad * inside.to(grad.dtype), by_scale, by_zero_point


@scalar_kernel(
    accepts=(torch.float32,),
    own=("scale", "zero_point"),
    cast=("quant_min", "quant_max", "grad_factor"),
    output_dtypes=(None, None, None),
)
def _tensor_gradients(self, grad, scale, zero_point, quant_min, quant_max, grad_factor):
    # ATen truncates here what the forward pass rounds to the nearest even number.
    zero_point = libdevice.trunc(tl.minimum(tl.maximum(zero_point + 0.5, quant_min), quant_max))
    return _gradients(self, grad, scale, zero_point, quant_min, quant_max, grad_factor)


@scalar_kernel(
    accepts=(torch.float32,),
    own=("scale", "zero_point"),
    cast=("quant_min", "quant_max", "grad_factor"),
    output_dtypes=(None, None, None),
)
def _channel_gradients(self, grad, scale, zero_point, quant_min, quant_max, grad_factor):
    zero_point = _rounded_zero_point(zero_point, quant_min, quant_max)
    return _gradients(self, grad, scale, zero_point, quant_min, quant_max, grad_factor)


def _check_range(quant_min, quant_max):
    if quant_min > quant_max:
        raise Decline(f"quant_min {quant_min} above quant_max {quant_max}")


def _results(self, operands, dtypes, outs):
    """Return outputs in the layout of self, or check `outs`."""
    if self.dtype not in FLOATS:
        raise Decline(f"dtype {self.dtype}")
    if outs:
        return outputs((self, *operands), [self.shape] * len(dtypes), dtypes, outs)
    strides = strides_like(self, None)
    return tuple([empty_strided(self.shape, strides, dtype, self.device) for dtype in dtypes])


def _element(tensor, dtypes, name):
    """Return a tensor of one element without dimensions."""
    if tensor.numel() != 1 or tensor.dtype not in dtypes:
        raise Decline(f"{name} has {tensor.numel()} elements of {tensor.dtype}; one of {dtypes} is served")
    return tensor.view(())


def _first(tensor, dtypes, name):
    """Return a tensor of one element with dimensions, whose first element ATen selects, without them."""
    if not tensor.dim():
        raise Decline(f"{name} without dimensions, of which ATen selects the first element")
    return _element(tensor, dtypes, name)


def _channels(self, vector, axis, dtypes, name):
    """Return a vector with an element for each channel, as a view that broadcasts along the other dimensions."""
    if not 0 <= axis < self.dim() or tuple(vector.shape) != (self.shape[axis],) or vector.dtype not in dtypes:
        raise Decline(
            f"{name} of shape {tuple(vector.shape)} and {vector.dtype} for dimension {axis} of "
            f"{tuple(self.shape)}; an element of {dtypes} for each channel is served"
        )
    if not vector.numel():
        raise Decline(f"{name} without elements, of which ATen takes the least")
    return vector[(slice(None), *[None] * (self.dim() - axis - 1))]


@operator("fake_quantize_per_tensor_affine_cachemask", kernels=(_per_tensor,))
def per_tensor(self, scale, zero_point, quant_min, quant_max, outs=()):
    _check_range(quant_min, quant_max)
    if not quant_min <= zero_point <= quant_max:
        raise Decline(f"zero_point {zero_point} outside [{quant_min}, {quant_max}]")
    outs = _results(self, (), (self.dtype, torch.bool), outs)
    return _per_tensor.run((self, scale, zero_point, quant_min, quant_max), outs)


@operator("_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", kernels=(_per_tensor_on_device,))
def per_tensor_on_device(self, scale, zero_point, fake_quant_enabled, quant_min, quant_max, outs=()):
    _check_range(quant_min, quant_max)
    scale = _element(scale, (torch.float32,), "scale")
    zero_point = _element(zero_point, (torch.int32,), "zero_point")
    enabled = _element(fake_quant_enabled, (torch.int64,), "fake_quant_enabled")
    outs = _results(self, (scale, zero_point, enabled), (self.dtype, torch.bool), outs)
    return _per_tensor_on_device.run((self, scale, zero_point, enabled, quant_min, quant_max), outs)


@operator("fake_quantize_per_channel_affine_cachemask", kernels=(_per_channel,))
def per_channel(self, scale, zero_point, axis, quant_min, quant_max, outs=()):
    _check_range(quant_min, quant_max)
    scale = _channels(self, scale, axis, (torch.float32, torch.bfloat16), "scale")
    zero_point = _channels(self, zero_point, axis, (torch.int32, torch.float32, torch.float16), "zero_point")
    if zero_point.dtype is torch.int32 and not quant_min <= 1 <= quant_max:
        # Lanes past the end of a tensor hold 1, for which the assertion of the kernel would fail.
        raise Decline(f"integral zero points in [{quant_min}, {quant_max}]; ranges with 1 are served")
    outs = _results(self, (scale, zero_point), (self.dtype, torch.bool), outs)
    return _per_channel.run((self, scale, zero_point, quant_min, quant_max), outs)


def channel_quantized(self, scale, zero_point, enabled, quant_min, quant_max, outs):
    """Quantise with a scale and a zero point for each element of the first dimension, if `enabled` is not 0."""
    scale, zero_point = (
        _channels(self, scale, 0, FLOATS, "scale"),
        _channels(self, zero_point, 0, (torch.int32,), "zero"),
    )
    outs = _results(self, (scale, zero_point, enabled), (self.dtype, torch.bool), outs)
    return _per_channel_on_device.run((self, scale, zero_point, enabled, quant_min, quant_max), outs)


@operator("_fake_quantize_learnable_per_tensor_affine", kernels=(_learnable_per_tensor,))
def learnable_per_tensor(self, scale, zero_point, quant_min, quant_max, grad_factor=1.0, outs=()):
    _check_range(quant_min, quant_max)
    scale, zero_point = _first(scale, FLOATS, "scale"), _first(zero_point, FLOATS, "zero_point")
    outs = _results(self, (scale, zero_point), (self.dtype,), outs)
    return _learnable_per_tensor.run((self, scale, zero_point, quant_min, quant_max), outs)


@operator("_fake_quantize_learnable_per_channel_affine", kernels=(_learnable_per_channel,))
def learnable_per_channel(self, scale, zero_point, axis, quant_min, quant_max, grad_factor=1.0, outs=()):
    _check_range(quant_min, quant_max)
    scale = _channels(self, scale, axis, (torch.float32, torch.bfloat16), "scale")
    zero_point = _channels(self, zero_point, axis, SINGLE_FLOATS, "zero_point")
    outs = _results(self, (scale, zero_point), (self.dtype,), outs)
    return _learnable_per_channel.run((self, scale, zero_point, quant_min, quant_max), outs)


def _learned(kernel, grad, self, scale, zero_point, quant_min, quant_max, grad_factor, dims, shape):
    """Return the gradients by self, scale and zero point; the latter two are sums over `dims`, of `shape`."""
    if not quant_min <= 0 <= quant_max:
        raise Decline(f"the range [{quant_min}, {quant_max}] without 0")
    if self.dtype is not torch.float32 or grad.dtype is not self.dtype or grad.shape != self.shape or not self.numel():
        raise Decline(
            f"gradient of {grad.dtype} and shape {tuple(grad.shape)} for an input of {self.dtype} and shape "
            f"{tuple(self.shape)}; float32 with elements is served"
        )
    every = _results(self, (), (self.dtype,) * 3, ())
    gradient, *terms = kernel.run((self, grad, scale, zero_point, quant_min, quant_max, grad_factor), every)
    sums = outputs((self,), [shape] * 2, [self.dtype] * 2, ())
    for term, total in zip(terms, sums, strict=True):
        _SUM.run((term,), dims, (total.view(()) if shape == (1,) and len(dims) == self.dim() else total,), self.dtype)
    return gradient, *sums


@operator("_fake_quantize_learnable_per_tensor_affine_backward", kernels=(_tensor_gradients,))
def learnable_per_tensor_backward(grad, self, scale, zero_point, quant_min, quant_max, grad_factor=1.0, outs=()):
    scale = _first(scale, (torch.float32,), "scale")
    zero_point = _first(zero_point, (torch.float32,), "zero_point")
    numbers = quant_min, quant_max, grad_factor
    return _learned(_tensor_gradients, grad, self, scale, zero_point, *numbers, tuple(range(self.dim())), (1,))


@operator("_fake_quantize_learnable_per_channel_affine_backward", kernels=(_channel_gradients,))
def learnable_per_channel_backward(grad, self, scale, zero_point, axis, quant_min, quant_max, grad_factor=1.0, outs=()):
    scale = _channels(self, scale, axis, (torch.float32,), "scale")
    zero_point = _channels(self, zero_point, axis, (torch.float32,), "zero_point")
    numbers, dims = (quant_min, quant_max, grad_factor), tuple(d for d in range(self.dim()) if d != axis)
    if not dims:
        # ATen's sum over no dimensions is over all.
        return _learned(_channel_gradients, grad, self, scale, zero_point, *numbers, (0,), ())
    return _learned(_channel_gradients, grad, self, scale, zero_point, *numbers, dims, (self.shape[axis],))
