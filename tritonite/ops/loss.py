"""Gradients of losses that act element by element, and of dropout.

`reduction` becomes a factor: the gradient of a mean is divided by the number of elements.
"""

import triton.language as tl

from tritonite.catalog import pointwise
from tritonite.dtypes import FLOATS
from tritonite.language import libdevice
from tritonite.language.math import true_divide

_MEAN = 1


def _mean_factor(tensor, reduction):
    return 1.0 / tensor.numel() if reduction == _MEAN and tensor.numel() else 1.0


@pointwise(
    "mse_loss_backward",
    accepts=FLOATS,
    contiguous=True,
    prepare=lambda grad_output, self, target, reduction: (
        grad_output,
        self,
        target,
        2.0 * _mean_factor(self, reduction),
    ),
)
def mse_loss_backward(grad_output, self, target, factor):
    return factor * (self - target) * grad_output


@pointwise(
    "smooth_l1_loss_backward",
    accepts=FLOATS,
    contiguous=True,
    prepare=lambda grad_output, self, target, reduction, beta: (
        grad_output,
        self,
        target,
        _mean_factor(self, reduction),
        beta,
    ),
)
def smooth_l1_loss_backward(grad_output, self, target, factor, beta):
    x = self - target
    inner = true_divide(factor * x * grad_output, beta)
    outer = tl.where(x <= -1.0 * beta, -1.0 * factor, factor) * grad_output
    return tl.where((x <= -1.0 * beta) | (x >= beta), outer, inner)


@pointwise(
    "huber_loss_backward",
    accepts=FLOATS,
    contiguous=True,
    prepare=lambda grad_output, self, target, reduction, delta: (
        grad_output,
        self,
        target,
        _mean_factor(self, reduction),
        delta,
    ),
)
def huber_loss_backward(grad_output, self, target, factor, delta):
    x = self - target
    outer = tl.where(x <= -1.0 * delta, -1.0 * factor, factor) * grad_output * delta
    return tl.where((x <= -1.0 * delta) | (x >= delta), outer, factor * x * grad_output)


@pointwise(
    "soft_margin_loss_backward",
    accepts=FLOATS,
    prepare=lambda grad_output, self, target, reduction: (
        grad_output,
        self,
        target,
        _mean_factor(self, reduction),
    ),
)
def soft_margin_loss_backward(grad_output, self, target, factor):
    decay = libdevice.exp(-1.0 * target * self)
    return -1.0 * factor * target * true_divide(decay, decay + 1.0) * grad_output


@pointwise(
    "binary_cross_entropy_backward",
    accepts=FLOATS,
    prepare=lambda grad_output, self, target, weight, reduction: (
        self,
        target,
        grad_output,
        weight,
        _mean_factor(self, reduction),
    ),
)
def binary_cross_entropy_backward(self, target, grad_output, weight, factor):
    variance = (1.0 - self) * self
    gradient = grad_output * true_divide(self - target, tl.maximum(variance, 1e-12))
    if weight is not None:
        gradient = gradient * weight
    return gradient * factor


@pointwise("native_dropout_backward", accepts=FLOATS, own=("mask",))
def native_dropout_backward(grad_output, mask, scale):
    return grad_output * mask.to(grad_output.dtype) * scale
