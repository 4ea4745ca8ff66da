"""Activation functions and their gradients."""

import math

import torch
import triton
import triton.language as tl

from tritonite.dtypes import FLOATS, NUMBERS, SINGLE_FLOATS
from tritonite.engine.outputs import is_expanded, outputs, share_storage
from tritonite.errors import Decline
from tritonite.language import libdevice
from tritonite.language.math import inverse, maximum_nan, minimum_nan, polynomial, sigmoid, silu_derivative, true_divide
from tritonite.ops import aten
from tritonite.ops.aten import ON_CPU
from tritonite.registry import operator, pointwise, scalar_kernel
from tritonite.runtime.contract import empty


@pointwise("relu", accepts=NUMBERS)
def relu(self):
    return tl.where(self <= 0, tl.zeros_like(self), self)


@pointwise("threshold", accepts=NUMBERS)
def threshold(self, threshold, value):
    return tl.where(self <= threshold, value, self)


@pointwise(
    "threshold_backward",
    accepts=NUMBERS,
    one_dtype=True,
    prepare=lambda grad_output, self, threshold: (self, grad_output, threshold),
)
def threshold_backward(self, grad_output, threshold):
    return tl.where(self <= threshold, tl.zeros_like(grad_output), grad_output)


@triton.jit
def _normal(x):
    """Return the cumulative normal distribution at x, and exp(-x * x / 2).

    In float32 the tail is exp(-x * x / 2) times a polynomial in 1 / (1 + 0.34 |x|): the form of Abramowitz and Stegun
    7.1.26, with coefficients fitted to a relative error of 1.3e-7 for |x| <= 6.
    """
    if x.dtype == tl.float32:
        root = x * 0.8493218002880191
        kernel = tl.exp2(-root * root)
        t = 1.0 / (1.0 + 0.34 * tl.abs(x))
        coefficients: tl.constexpr = (
            0.04645213870888687,
            -0.2075961147842242,
            0.2766155665569345,
            -0.0423071541176047,
            0.16243726973340555,
            0.12821353398325672,
            0.13618470033639862,
        )
        tail = kernel * t * polynomial(t, coefficients)
        cumulative = tl.where(x < 0, tail, 1.0 - tail)
    else:
        kernel = libdevice.exp(-0.5 * x * x)
        cumulative = 0.5 * (1.0 + libdevice.erf(x * 0.7071067811865476))
    return cumulative, kernel


@triton.jit
def _logistic(x):
    """Return 1 / (1 + exp(-x)) and its derivative, without cancellation in float32."""
    if x.dtype == tl.float32:
        small = tl.exp(-tl.abs(x))
        large = 1.0 / (1.0 + small)
        value, slope = tl.where(x < 0, small * large, large), small * large * large
    else:
        tangent = libdevice.tanh(0.5 * x)
        value, slope = 0.5 * (1.0 + tangent), 0.25 * (1.0 - tangent * tangent)
    return value, slope


@triton.jit
def _gelu_inner(x):
    return 1.5957691216057308 * (x + 0.044715 * x * x * x)


# Dimensions of the largest tensors of oneDNN, which serves GELU in ATen on a CPU.
_MOST_DIMS_ON_CPU = 12


def _check_gelu(*values):
    if values[-1] not in ("none", "tanh"):
        raise Decline(f"approximate is {values[-1]!r}, not 'none' or 'tanh'")
    if aten.on_cpu() and values[0].dim() > _MOST_DIMS_ON_CPU:
        raise Decline(f"{values[0].dim()} dimensions; ATen raises for more than {_MOST_DIMS_ON_CPU} on a CPU")
    return values


@pointwise("gelu", accepts=FLOATS, prepare=lambda self, approximate: _check_gelu(self, approximate))
def gelu(self, approximate):
    """Hendrycks and Gimpel, "Gaussian Error Linear Units". Their tanh form equals x / (1 + exp(-inner))."""
    if approximate == "tanh":
        return self * _logistic(_gelu_inner(self))[0]
    return self * _normal(self)[0]


@pointwise(
    "gelu_backward",
    accepts=FLOATS,
    one_dtype=True,
    prepare=lambda grad_output, self, approximate: _check_gelu(grad_output, self, approximate),
)
def gelu_backward(grad_output, self, approximate):
    if approximate == "tanh":
        logistic, logistic_slope = _logistic(_gelu_inner(self))
        derivative = logistic + self * logistic_slope * (1.5957691216057308 * (1.0 + 3 * 0.044715 * self * self))
    else:
        cumulative, kernel = _normal(self)
        derivative = cumulative + self * (kernel * 0.3989422804014327)
    return grad_output * derivative


@pointwise("silu", accepts=FLOATS)
def silu(self):
    return self * sigmoid(self)


@pointwise("silu_backward", accepts=FLOATS, one_dtype=True)
def silu_backward(grad_output, self):
    return grad_output * silu_derivative(self, sigmoid(self))


@pointwise("mish", accepts=FLOATS)
def mish(self):
    """x * tanh(log(1 + e)) with e = exp(x). The tangent is n / (n + 2) with n = e * (e + 2)."""
    e = libdevice.exp(self)
    n = e * (e + 2.0)
    return tl.where(self > 20.0, self, self * (n * inverse(n + 2.0)))


@pointwise("mish_backward", accepts=FLOATS, one_dtype=True)
def mish_backward(grad_output, self):
    """4 e w / d^2 with e = exp(x), d = e * (e + 2) + 2 and w = x + 1 + e (x + 3/2 + e (1 + e/4)).

    The factor w has the derivative's root near -1.19 with less roundoff than the sum of the product rule.
    """
    e = libdevice.exp(self)
    scale = inverse(e * (e + 2.0) + 2.0)
    factor = self + 1.0 + e * (self + 1.5 + e * (1.0 + 0.25 * e))
    # The derivative is 0, not -0, where e is 0. Above 25 it is 1, and nan for infinity.
    derivative = 0.0 + (4.0 * e * scale) * (factor * scale)
    return grad_output * tl.where(self > 25.0, 1.0 + 0.0 * self, derivative)


@triton.jit
def _exponential_linear(self, alpha, scale, input_scale):
    positive = self > 0
    # Zero takes the linear branch in ATen's CPU kernel and the exponential one in its GPU kernel.
    if ON_CPU:
        positive = self >= 0
    return tl.where(positive, self * scale, libdevice.expm1(self * input_scale) * (alpha * scale))


@pointwise("elu", accepts=FLOATS)
def elu(self, alpha, scale, input_scale):
    return _exponential_linear(self, alpha, scale, input_scale)


def _celu_as_elu(self, alpha):
    if isinstance(alpha, complex) or not alpha or not math.isfinite(alpha):
        raise Decline(f"alpha is {alpha}; it has to be real, finite and not 0")
    return self, alpha, 1.0, 1.0 / alpha


@pointwise("celu", accepts=FLOATS, prepare=_celu_as_elu, pin=("alpha",))
def celu(self, alpha, scale, input_scale):
    return _exponential_linear(self, alpha, scale, input_scale)


def _elu_arguments(grad_output, alpha, scale, input_scale, is_result, self_or_result):
    if isinstance(alpha, complex) or (is_result and not alpha >= 0):
        raise Decline(f"alpha is {alpha}; with is_result it has to be real and at least 0")
    return grad_output, alpha, scale, input_scale, is_result, self_or_result


@pointwise("elu_backward", accepts=FLOATS, one_dtype=True, prepare=_elu_arguments, pin=("alpha",))
def elu_backward(grad_output, alpha, scale, input_scale, is_result, self_or_result):
    if is_result:
        negative = grad_output * input_scale * (self_or_result + alpha * scale)
    else:
        negative = grad_output * input_scale * (alpha * scale) * libdevice.exp(self_or_result * input_scale)
    return tl.where(self_or_result <= 0, negative, grad_output * scale)


@pointwise("leaky_relu", accepts=FLOATS)
def leaky_relu(self, negative_slope):
    return tl.where(self > 0, self, self * negative_slope)


def _leaky_relu_arguments(grad_output, self, negative_slope, self_is_result):
    if isinstance(negative_slope, complex) or (self_is_result and not negative_slope >= 0):
        raise Decline(f"negative_slope is {negative_slope}; with self_is_result it has to be real and at least 0")
    return self, grad_output, negative_slope


@pointwise(
    "leaky_relu_backward", accepts=FLOATS, one_dtype=True, prepare=_leaky_relu_arguments, pin=("negative_slope",)
)
def leaky_relu_backward(self, grad_output, negative_slope):
    return tl.where(self > 0, grad_output, grad_output * negative_slope)


@pointwise("hardtanh", accepts=NUMBERS)
def hardtanh(self, min_val, max_val):
    return minimum_nan(maximum_nan(self, min_val), max_val)


@pointwise("hardtanh_backward", accepts=FLOATS, one_dtype=True)
def hardtanh_backward(grad_output, self, min_val, max_val):
    return tl.where((self <= min_val) | (self >= max_val), tl.zeros_like(grad_output), grad_output)


# 1/6 rounded to float32.
_SIXTH = tl.constexpr(0.1666666716337204)


@triton.jit
def _relu6(x):
    return tl.where(x < 0.0, tl.zeros_like(x), tl.where(x > 6.0, tl.full(x.shape, 6.0, x.dtype), x))


@pointwise("hardsigmoid", accepts=SINGLE_FLOATS)
def hardsigmoid(self):
    """Hard sigmoid. float64 is left out: ATen multiplies by the float32 value of 1/6 on GPUs only."""
    return _relu6(self + 3.0) * _SIXTH


@pointwise("hardsigmoid_backward", accepts=FLOATS, one_dtype=True)
def hardsigmoid_backward(grad_output, self):
    # ATen multiplies by the float32 value in float64 too, on every device.
    return tl.where((self > -3.0) & (self < 3.0), grad_output * _SIXTH, tl.zeros_like(grad_output))


@pointwise("hardswish", accepts=SINGLE_FLOATS)
def hardswish(self):
    """Hard swish. float64 is left out for the reason in `hardsigmoid`."""
    return self * _relu6(self + 3.0) * _SIXTH


@pointwise("hardswish_backward", accepts=FLOATS, one_dtype=True)
def hardswish_backward(grad_output, self):
    middle = grad_output * (true_divide(self, tl.full(self.shape, 3.0, self.dtype)) + 0.5)
    return tl.where(self <= -3.0, tl.zeros_like(middle), tl.where(self < 3.0, middle, grad_output))


def _check_not_nan(*values):
    if isinstance(values[-1], complex) or math.isnan(values[-1]):
        raise Decline(f"lambd is {values[-1]}; it has to be real and not nan")
    return values


@pointwise("hardshrink", accepts=FLOATS, prepare=lambda self, lambd: _check_not_nan(self, lambd), pin=("lambd",))
def hardshrink(self, lambd):
    return tl.where((self >= -1.0 * lambd) & (self <= lambd), tl.zeros_like(self), self)


@pointwise(
    "hardshrink_backward",
    accepts=FLOATS,
    one_dtype=True,
    prepare=lambda grad_out, self, lambd: _check_not_nan(grad_out, self, lambd),
    pin=("lambd",),
)
def hardshrink_backward(grad_out, self, lambd):
    return tl.where((self >= -1.0 * lambd) & (self <= lambd), tl.zeros_like(grad_out), grad_out)


def _check_lambd(self, lambd):
    highest = torch.finfo(self.dtype if self.is_floating_point() else torch.float32).max
    if isinstance(lambd, complex) or not 0 <= lambd <= highest:
        raise Decline(f"lambd is {lambd}; it has to be in [0, {highest}]")
    return self, lambd


@pointwise("softshrink", accepts=FLOATS, prepare=_check_lambd, pin=("lambd",))
def softshrink(self, lambd):
    inside = tl.where(self != self, self, 0.0)
    return tl.where(self > lambd, self - lambd, tl.where(self < -1.0 * lambd, self + lambd, inside))


@pointwise(
    "softshrink_backward",
    accepts=FLOATS,
    one_dtype=True,
    prepare=lambda grad_output, self, lambd: _check_not_nan(grad_output, self, lambd),
    pin=("lambd",),
)
def softshrink_backward(grad_output, self, lambd):
    return tl.where((self >= -1.0 * lambd) & (self <= lambd), tl.zeros_like(grad_output), grad_output)


@pointwise("softplus", accepts=FLOATS)
def softplus(self, beta, threshold):
    scaled = self * beta
    return tl.where(scaled > threshold, self, true_divide(libdevice.log1p(libdevice.exp(scaled)), beta))


@pointwise("softplus_backward", accepts=FLOATS, one_dtype=True)
def softplus_backward(grad_output, self, beta, threshold):
    scaled = self * beta
    growth = libdevice.exp(scaled)
    return tl.where(scaled > threshold, grad_output, true_divide(grad_output * growth, growth + 1.0))


# ATen's CPU results are contiguous; its GPU results have the input's strides.
@scalar_kernel(accepts=FLOATS, contiguous=aten.on_cpu())
def _log_sigmoid(self):
    return tl.where(self < 0.0, self, tl.zeros_like(self)) - libdevice.log1p(libdevice.exp(-tl.abs(self)))


@scalar_kernel(accepts=FLOATS, contiguous=aten.on_cpu())
def _log_sigmoid_buffer(self):
    return libdevice.exp(-tl.abs(self))


@operator("log_sigmoid_forward", kernels=(_log_sigmoid, _log_sigmoid_buffer))
def log_sigmoid_forward(self, outs=()):
    """Log-sigmoid, and the buffer for its gradient: exp(-|x|) on a CPU, empty on a GPU."""
    if aten.on_cpu():
        if any(not out.is_contiguous() or share_storage(out, self) for out in outs):
            raise Decline("an output that is not contiguous, or that shares memory with the input")
        (buffer,) = _log_sigmoid_buffer.run((self,), outs[1:])
    elif outs:
        buffer = outs[1]
    else:
        buffer = empty((0,), self.dtype, self.device)
    (output,) = _log_sigmoid.run((self,), outs[:1])
    return output, buffer


def _log_sigmoid_arguments(grad_output, self, buffer):
    if grad_output.shape != self.shape:
        raise Decline(f"gradient of shape {tuple(grad_output.shape)} for an input of shape {tuple(self.shape)}")
    if buffer.device != self.device:
        raise Decline("tensors on several devices")
    if is_expanded(grad_output) and not self.is_contiguous():
        raise Decline("an expanded gradient with an input that is not contiguous")
    # The buffer is empty on a GPU.
    return grad_output, self, buffer if aten.on_cpu() else None


@pointwise(
    "log_sigmoid_backward",
    accepts=FLOATS,
    one_dtype=True,
    prepare=_log_sigmoid_arguments,
)
def log_sigmoid_backward(grad_output, self, buffer):
    if buffer is None:
        decay = libdevice.exp(-tl.abs(self))
    else:
        decay = buffer
    fraction = true_divide(decay, 1.0 + decay)
    return grad_output * tl.where(self < 0, 1.0 - fraction, fraction)


def _check_expanded(self, weight):
    if is_expanded(self):
        raise Decline("an expanded input")
    return self, weight


@pointwise("_prelu_kernel", accepts=FLOATS, one_dtype=True, prepare=_check_expanded)
def _prelu_kernel(self, weight):
    return tl.where(self > 0, self, weight * self)


@pointwise(
    "_prelu_kernel_backward",
    accepts=FLOATS,
    one_dtype=True,
    output_dtypes=(None, None),
    prepare=lambda grad_output, self, weight: (self, weight, grad_output),
)
def _prelu_kernel_backward(self, weight, grad_output):
    positive = self > 0
    return (
        tl.where(positive, grad_output, weight * grad_output),
        tl.where(positive, tl.zeros_like(grad_output), self * grad_output),
    )


def _split_in_two(self, dim):
    if not self.dim() or not -self.dim() <= dim < self.dim() or self.shape[dim] % 2:
        raise Decline(f"shape {tuple(self.shape)} does not split in two along dimension {dim}")
    half = self.shape[dim] // 2
    return self.narrow(dim, 0, half), self.narrow(dim, half, half)


@scalar_kernel(accepts=FLOATS)
def _gate(a, b):
    return a * sigmoid(b)


@operator("glu", kernels=(_gate,))
def glu(self, dim, outs=()):
    return _gate.run(_split_in_two(self, dim), outs)


# ATen has the tangent in 16-bit floats on GPUs alone.
_TANGENT_DTYPES = (torch.float32, torch.float64) if ON_CPU else FLOATS


@scalar_kernel(accepts=_TANGENT_DTYPES, one_dtype=True)
def _glu_tangent(glu, b, da, db):
    gate = sigmoid(b)
    return da * gate + glu * (db - gate * db)


@operator("glu_jvp", accepts=_TANGENT_DTYPES, kernels=(_glu_tangent,))
def glu_jvp(glu, x, dx, dim, outs=()):
    """Return the tangent of glu from its result, its input and the input's tangent."""
    _, gate = _split_in_two(x, dim)
    if dx.shape != x.shape or glu.shape != gate.shape:
        raise Decline(f"shapes {tuple(glu.shape)} and {tuple(dx.shape)} for an input of shape {tuple(x.shape)}")
    if is_expanded(glu):
        raise Decline(f"an expanded result of glu, of strides {glu.stride()}")
    return _glu_tangent.run((glu, gate, *_split_in_two(dx, dim)), outs)


@scalar_kernel(accepts=FLOATS, output_dtypes=(None, None), one_dtype=True)
def _glu_gradients(grad_output, a, b):
    gate = sigmoid(b)
    # ATen multiplies in this order: a gate of 0 or 1 makes the product 0 before a large gradient can overflow it.
    return grad_output * gate, (1.0 - gate) * gate * a * grad_output


@operator("glu_backward", kernels=(_glu_gradients,))
def glu_backward(grad_output, self, dim, outs=()):
    """Write the gradients by the value and by the gate into the two parts of one tensor."""
    value, gate = _split_in_two(self, dim)
    if grad_output.shape != value.shape:
        raise Decline(f"gradient of shape {tuple(grad_output.shape)}, not {tuple(value.shape)}")
    if grad_output.dtype is not self.dtype:
        raise Decline(f"gradient of dtype {grad_output.dtype} for an input of dtype {self.dtype}")
    outs = outputs((grad_output, self), [self.shape], [self.dtype], outs)
    _glu_gradients.run((grad_output, value, gate), _split_in_two(outs[0], dim))
    return outs
