"""Negative log likelihood of one class a row, and its gradient. Each pixel of an image is a row."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton

from tritonite.dtypes import FLOATS, opmath
from tritonite.engine import nll
from tritonite.engine.iteration import contiguous_strides, output_strides
from tritonite.engine.outputs import outputs
from tritonite.engine.rows.declare import Reduction
from tritonite.engine.rows.formulas import add_pairs
from tritonite.errors import Decline
from tritonite.language.math import true_divide
from tritonite.ops import aten
from tritonite.ops.loss import MEAN, NONE, SUM
from tritonite.ops.reduction.sums import both
from tritonite.registry import operator
from tritonite.runtime.contract import empty


@triton.jit
def _loss_and_weight(loss, weight):
    return loss, weight


@triton.jit
def _mean(loss, weight, count):
    return true_divide(loss, weight), weight


_REDUCTIONS = {
    MEAN: Reduction((0.0, 0.0), _loss_and_weight, add_pairs, _mean, (None, None), 2),
    SUM: Reduction((0.0, 0.0), _loss_and_weight, add_pairs, both, (None, None), 2),
}


def _class_dim(self: Any, target: Any, weight: Any, reduction: int, others: Sequence[torch.Tensor]) -> int:
    """Return the dimension of the classes. Decline operands for which ATen raises."""
    if reduction not in (NONE, MEAN, SUM):
        raise Decline(f"reduction {reduction}; 0, 1 and 2 are served")
    if self.dtype not in FLOATS or any(other.dtype is not self.dtype for other in others):
        raise Decline(f"an input of {self.dtype} with operands of {[other.dtype for other in others]}")
    dim = 1 if self.dim() > 1 else 0
    rows = (*self.shape[:dim], *self.shape[dim + 1 :])
    if tuple(target.shape) != rows or not self.shape[dim]:
        raise Decline(f"target of shape {tuple(target.shape)} for an input of shape {tuple(self.shape)}")
    if weight is not None and (weight.dtype is not self.dtype or tuple(weight.shape) != (self.shape[dim],)):
        raise Decline(f"weight of shape {tuple(weight.shape)} and {weight.dtype} for {self.shape[dim]} classes")
    return dim


def _forward(self, target, weight, reduction, ignore_index, outs):
    dim = _class_dim(self, target, weight, reduction, ())
    dtype, shape = self.dtype, tuple(target.shape)
    unreduced = reduction == NONE and self.dim() > 1
    operands = (self, target) if weight is None else (self, target, weight)
    outs = outputs(operands, [shape if unreduced else (), ()], (dtype, dtype), outs)
    if unreduced and outs[0].stride() != contiguous_strides(shape) and outs[0].numel():
        raise Decline("an output that is not contiguous")
    programs = nll.programs(math.prod(shape))
    partial = not unreduced and programs > 1
    losses, weights = outs
    if partial:
        losses, weights = (empty((programs,), opmath(dtype), self.device) for _ in range(2))
    mean = not unreduced and not partial and reduction == MEAN
    # The mean loss of one ignored row is 0 in ATen's GPU kernel, nan in its CPU kernel.
    empty_is_zero = mean and self.dim() == 1 and aten.on_gpu()
    nll.gather_losses(
        *(self, target, weight, dim, ignore_index, losses, weights),
        reduced=not unreduced,
        mean=mean,
        empty_is_zero=empty_is_zero,
    )
    if partial:
        _REDUCTIONS[reduction].run((losses, weights), (0,), outs, opmath(dtype))
    return outs


def _backward(grad_output, self, target, weight, reduction, ignore_index, total_weight, outs):
    dim = _class_dim(self, target, weight, reduction, (grad_output, total_weight))
    dtype, shape = self.dtype, tuple(target.shape)
    if total_weight.numel() != 1:
        raise Decline(f"total weight of shape {tuple(total_weight.shape)}; one element is served")
    if reduction == NONE and self.dim() > 1:
        if tuple(grad_output.shape) != shape:
            raise Decline(f"gradient of shape {tuple(grad_output.shape)}, not {shape}")
        grad_strides = grad_output.stride()
    else:
        if grad_output.dim() > 1 or grad_output.numel() != 1:
            raise Decline(f"gradient of shape {tuple(grad_output.shape)} for a reduced loss")
        grad_strides = (0,) * len(shape)
    operands = (grad_output, self, target, total_weight, *(() if weight is None else (weight,)))
    if any(not out.is_contiguous() for out in outs):
        raise Decline("a gradient that is not contiguous")
    (gradient,) = outs = outputs(operands, [self.shape], [dtype], outs)
    if target.numel():
        nll.scatter_gradients(
            *(gradient, grad_output, grad_strides, target, weight, total_weight, dim, ignore_index),
            mean=reduction == MEAN,
        )
    return outs


def _check_rows(self, target):
    if self.dim() not in (1, 2) or target.dtype not in (torch.int64, torch.uint8):
        raise Decline(f"{self.dim()} dimensions with a target of {target.dtype}; 1 or 2 with int64 or uint8 are served")


def _check_images(self, target):
    if self.dim() != 4 or target.dtype is not torch.int64:
        raise Decline(f"{self.dim()} dimensions with a target of {target.dtype}; 4 with int64 are served")


@operator("nll_loss_forward", accepts=FLOATS)
def nll_loss_forward(self, target, weight, reduction, ignore_index, outs=()):
    _check_rows(self, target)
    return _forward(self, target, weight, reduction, ignore_index, outs)


@operator("nll_loss_backward", accepts=FLOATS)
def nll_loss_backward(grad_output, self, target, weight, reduction, ignore_index, total_weight, outs=()):
    _check_rows(self, target)
    return _backward(grad_output, self, target, weight, reduction, ignore_index, total_weight, outs)


@operator("nll_loss2d_forward", accepts=FLOATS)
def nll_loss2d_forward(self, target, weight, reduction, ignore_index, outs=()):
    _check_images(self, target)
    return _forward(self, target, weight, reduction, ignore_index, outs)


@operator("nll_loss2d_backward", accepts=FLOATS)
def nll_loss2d_backward(grad_output, self, target, weight, reduction, ignore_index, total_weight, outs=()):
    _check_images(self, target)
    shape = tuple(self.shape)
    layout = outs[0].stride() if outs else output_strides(shape, [(shape, self.stride())], False)
    if layout != contiguous_strides(shape):
        raise Decline("a gradient by the input that is not contiguous, for which ATen raises")
    return _backward(grad_output, self, target, weight, reduction, ignore_index, total_weight, outs)
