"""Exponentials, logarithms, trigonometry, and those gradients for which ATen has kernels."""

import triton.language as tl

from tritonite.dtypes import FLOATS, Promotion
from tritonite.errors import Decline
from tritonite.language import libdevice
from tritonite.language.math import (
    hyperbolic_sine,
    inverse_hyperbolic_cosine,
    inverse_hyperbolic_sine,
    multiply_add,
    square_root,
    true_divide,
)
from tritonite.language.math import sigmoid as _sigmoid
from tritonite.registry import pointwise

INT_TO_FLOAT = Promotion.INT_TO_FLOAT


@pointwise("exp", promote=INT_TO_FLOAT)
def exp(self):
    return libdevice.exp(self)


@pointwise("exp2", promote=INT_TO_FLOAT)
def exp2(self):
    return libdevice.exp2(self)


@pointwise("expm1", promote=INT_TO_FLOAT)
def expm1(self):
    return libdevice.expm1(self)


@pointwise("log", promote=INT_TO_FLOAT)
def log(self):
    return libdevice.log(self)


@pointwise("log2", promote=INT_TO_FLOAT)
def log2(self):
    return libdevice.log2(self)


@pointwise("log10", promote=INT_TO_FLOAT)
def log10(self):
    return libdevice.log10(self)


@pointwise("log1p", promote=INT_TO_FLOAT)
def log1p(self):
    return libdevice.log1p(self)


@pointwise("sqrt", promote=INT_TO_FLOAT)
def sqrt(self):
    return square_root(self)


@pointwise("rsqrt", promote=INT_TO_FLOAT)
def rsqrt(self):
    return libdevice.rsqrt(self)


@pointwise("sin", promote=INT_TO_FLOAT)
def sin(self):
    return libdevice.sin(self)


@pointwise("cos", promote=INT_TO_FLOAT)
def cos(self):
    return libdevice.cos(self)


@pointwise("tan", promote=INT_TO_FLOAT)
def tan(self):
    return libdevice.tan(self)


@pointwise("asin", promote=INT_TO_FLOAT)
def asin(self):
    return libdevice.asin(self)


@pointwise("acos", promote=INT_TO_FLOAT)
def acos(self):
    return libdevice.acos(self)


@pointwise("atan", promote=INT_TO_FLOAT)
def atan(self):
    return libdevice.atan(self)


@pointwise("sinh", promote=INT_TO_FLOAT)
def sinh(self):
    return hyperbolic_sine(self)


@pointwise("cosh", promote=INT_TO_FLOAT)
def cosh(self):
    return libdevice.cosh(self)


@pointwise("tanh", promote=INT_TO_FLOAT)
def tanh(self):
    return libdevice.tanh(self)


@pointwise("asinh", promote=INT_TO_FLOAT)
def asinh(self):
    return inverse_hyperbolic_sine(self)


@pointwise("acosh", promote=INT_TO_FLOAT)
def acosh(self):
    return inverse_hyperbolic_cosine(self)


@pointwise("atanh", promote=INT_TO_FLOAT)
def atanh(self):
    return libdevice.atanh(self)


@pointwise("sinc", promote=INT_TO_FLOAT)
def sinc(self):
    """sin(pi x) / (pi x); 1 at 0."""
    angle = self * 3.141592653589793
    return tl.where(self == 0, tl.full(self.shape, 1.0, self.dtype), true_divide(libdevice.sin(angle), angle))


@pointwise("deg2rad", promote=INT_TO_FLOAT)
def deg2rad(self):
    return self * 0.017453292519943295


@pointwise("rad2deg", promote=INT_TO_FLOAT)
def rad2deg(self):
    return self * 57.29577951308232


@pointwise("erf", promote=INT_TO_FLOAT)
def erf(self):
    return libdevice.erf(self)


@pointwise("erfc", promote=INT_TO_FLOAT)
def erfc(self):
    return libdevice.erfc(self)


@pointwise("erfinv", promote=INT_TO_FLOAT)
def erfinv(self):
    return libdevice.erfinv(self)


@pointwise("sigmoid", promote=INT_TO_FLOAT)
def sigmoid(self):
    return _sigmoid(self)


def _check_eps(self, eps):
    if isinstance(eps, complex) or eps != eps:
        raise Decline(f"eps is {eps}; it has to be real and not nan")
    return self, eps


@pointwise("logit", promote=INT_TO_FLOAT, prepare=_check_eps, pin=("eps",))
def logit(self, eps):
    """log(x / (1 - x)), with x clamped to [eps, 1 - eps] if eps is given."""
    if eps is not None:
        self = tl.where(self < eps, eps, tl.where(self > 1.0 - eps, 1.0 - eps, self))
    return libdevice.log(true_divide(self, 1.0 - self))


@pointwise("tanh_backward", accepts=FLOATS)
def tanh_backward(grad_output, output):
    # One rounding: 1 - y * y would cancel where tanh saturates.
    return grad_output * multiply_add(-output, output, tl.full(output.shape, 1.0, output.dtype))


@pointwise("sigmoid_backward", accepts=FLOATS)
def sigmoid_backward(grad_output, output):
    return grad_output * (1.0 - output) * output


def _negative_is_none(grad_output, self, eps):
    return grad_output, self, None if eps is not None and eps < 0 else eps


@pointwise("logit_backward", accepts=FLOATS, prepare=_negative_is_none, pin=("eps",))
def logit_backward(grad_output, self, eps):
    """Gradient of `logit`: 0 where eps clamps. Without eps, or with a negative one, nan outside [0, 1].

    Triton's float32 division is within two units in the last place. It takes half the instructions of the correctly
    rounded one, which would bound the kernel for fp16 and bf16. regressions: logit_backward_division
    """
    gradient = grad_output / (self * (1.0 - self))
    if eps is None:
        outside = (self < 0) | (self > 1)
        result = tl.where(outside, tl.full(gradient.shape, float("nan"), gradient.dtype), gradient)
    else:
        outside = (self < eps) | (self > 1.0 - eps)
        result = tl.where(outside, tl.zeros_like(gradient), gradient)
    return result
