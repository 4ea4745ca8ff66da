"""The randomised leaky ReLU, and its gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonite.dtypes import FLOATS
from tritonite.engine.iteration import may_overlap
from tritonite.engine.movement import move, result, strides_like
from tritonite.engine.random import draw_elementwise, elementwise
from tritonite.errors import Decline
from tritonite.language.math import multiply_add
from tritonite.ops import aten
from tritonite.ops.activation import leaky_relu_backward
from tritonite.ops.arithmetic import mul
from tritonite.ops.random.draws import operator, row_major, written_to
from tritonite.ops.random.transforms import UNIFORM
from tritonite.registry import scalar_kernel
from tritonite.runtime.contract import empty
from tritonite.runtime.symbols import number_type


@triton.jit
def _leaky(value, inputs, first, second, low, span, DTYPE: tl.constexpr):
    """Return (result, noise) of rrelu: elements at or below 0 times a slope between `first` and `second`."""
    x, wide = inputs[0], value.to(DTYPE).to(tl.float64)
    begin, width = tl.broadcast_to(first, wide.shape), tl.broadcast_to(second - first, wide.shape)
    slope = multiply_add(wide, width, begin)
    if tl.float64 != DTYPE:
        slope = slope.to(tl.float32)
    slope = slope.to(DTYPE).to(value.dtype)
    x = x.to(value.dtype)
    below = x <= 0
    return tl.where(below, x * slope, x), tl.where(below, slope, 1.0)


_LEAKY = UNIFORM._replace(transform=_leaky)


@scalar_kernel(accepts=FLOATS, exact=("lower", "upper"))
def _slope_of_both(self, lower, upper):
    return tl.where(self > 0, self, self * ((lower + upper) / 2).to(self.dtype))


def _check_slopes(*slopes):
    if any(number_type(slope) not in (int, float) for slope in slopes):
        raise Decline("slopes that are neither int nor float")


def _leaked(self, noise, lower, upper, training, generator, outs, strides=None):
    """Multiply elements at or below 0 by random slopes, and write all slopes to the noise (1 above 0)."""
    if self.dtype not in FLOATS or noise.dtype is not self.dtype or noise.shape != self.shape:
        raise Decline(f"noise of {noise.dtype} and shape {tuple(noise.shape)} for {self.dtype} and {tuple(self.shape)}")
    if noise.device != self.device:
        raise Decline(f"noise on {noise.device}, not on {self.device}")
    if aten.on_cpu() and training and self.dtype is torch.float16:
        raise Decline(f"dtype {self.dtype}, which ATen does not serve on CPUs")
    _check_slopes(lower, upper)
    inplace, strides = bool(outs) and outs[0] is self, row_major(self) if strides is None else strides
    if not training:
        out = result(() if inplace else (self,), self.shape, self.dtype, outs, strides)
        return _slope_of_both.run((self, lower, upper), (out,))
    out = result((noise,) if inplace else (self, noise), self.shape, self.dtype, outs, strides)
    if may_overlap(noise, self):
        raise Decline("noise that overlaps the input")
    drawn = out if out.is_contiguous() else empty(out.shape, out.dtype, out.device)
    wide = out.dtype is torch.float64
    # Like ATen, do not write to noise that is not contiguous.
    noise = noise if noise.is_contiguous() else empty(noise.shape, noise.dtype, noise.device)
    if out.numel():
        order = elementwise(out.numel(), 2 if wide else 4, out.device)
        draw_elementwise(_LEAKY, order, (self.contiguous(),), (drawn, noise), (lower, upper), generator, wide=wide)
    return written_to(out, drawn)


@operator("rrelu_with_noise", accepts=FLOATS)
def rrelu_with_noise(self, noise, lower, upper, training, generator=None, outs=()):
    return _leaked(self, noise, lower, upper, training, generator, outs)


@operator("rrelu_with_noise_functional", accepts=FLOATS)
def rrelu_with_noise_functional(self, noise, lower, upper, training, generator=None, outs=()):
    copied = result((noise,), noise.shape, noise.dtype, (), strides_like(noise, None))
    if not (training and noise.is_contiguous()):
        move(noise, copied)
    return *_leaked(self, copied, lower, upper, training, generator, (), strides_like(self, None)), copied


@operator("rrelu_with_noise_backward", accepts=FLOATS, pin=("lower", "upper"))
def rrelu_with_noise_backward(grad_output, self, noise, lower, upper, training, self_is_result, outs=()):
    if grad_output.dtype not in FLOATS:
        raise Decline(f"dtype {grad_output.dtype}")
    _check_slopes(lower, upper)
    if training:
        return mul.run((noise, grad_output), outs)
    slope = (float(lower) + float(upper)) / 2
    if self_is_result and not slope >= 0:
        raise Decline(f"slope {slope}, which is negative, with the result in place of the input")
    return leaky_relu_backward.run((self, grad_output, slope), outs)
