"""Margin losses of rows of scores, with one class a row or several, and their gradients."""

import torch
import triton
import triton.language as tl

from tritonite.dtypes import FLOATS, opmath
from tritonite.engine import margins
from tritonite.engine.outputs import outputs
from tritonite.engine.rows.declare import Reduction
from tritonite.engine.rows.formulas import add_states
from tritonite.errors import Decline
from tritonite.ops import aten
from tritonite.ops.loss import MEAN, NONE, SUM
from tritonite.ops.reduction.logic import all_satisfy, refuse_unless_all
from tritonite.ops.reduction.sums import added_to_zero
from tritonite.registry import operator
from tritonite.runtime.contract import empty, limit
from tritonite.runtime.symbols import limits_of, number_type


@triton.jit
def _loss(loss):
    return loss


_SUM = Reduction((0,), _loss, add_states, added_to_zero)


def _matrix(x):
    """Return a tensor of up to 2 dimensions as rows; a vector is one row."""
    return x[None, None] if not x.dim() else x[None] if x.dim() == 1 else x


def _vector(x):
    return x[None] if not x.dim() else x


def _check(self, target, reduction, others):
    """Decline operands for which ATen raises, and rows without classes."""
    if reduction not in (NONE, MEAN, SUM):
        raise Decline(f"reduction {reduction}; 0, 1 and 2 are served")
    if self.dtype not in FLOATS or any(other.dtype is not self.dtype for other in others):
        raise Decline(f"an input of {self.dtype} with operands of {[other.dtype for other in others]}")
    if target.dtype is not torch.int64 or self.dim() > 2 or (self.dim() and not self.shape[-1]):
        raise Decline(f"input of shape {tuple(self.shape)} with a target of {target.dtype}; rows and int64 are served")


def _check_classes(self, target, p, margin, weight, reduction, others=()):
    """Return whether violations count squared. Decline operands for which ATen raises."""
    _check(self, target, reduction, (*others, *(() if weight is None else (weight,))))
    if number_type(margin) not in (int, float):
        raise Decline(f"margin is {margin}; an int or a float is served")
    limit(margin, limits_of(self.dtype))
    if isinstance(p, complex) or not abs(p) < 3 or int(p) not in (1, 2):
        raise Decline(f"p is {p}; 1 and 2 are served")
    rows, classes = _matrix(self).shape
    if target.dim() > 1 or target.numel() != rows:
        raise Decline(f"target of shape {tuple(target.shape)} for {rows} rows")
    if weight is not None and (weight.dim() > 1 or weight.numel() != classes):
        raise Decline(f"weight of shape {tuple(weight.shape)} for {classes} classes")
    return int(p) == 2


def _count(x, reduction):
    """Return the number by which losses are divided: of classes, for a mean of all elements."""
    return x.numel() if reduction == MEAN else x.shape[1]


@operator("multi_margin_loss", accepts=FLOATS, pin=("p",))
def multi_margin_loss(self, target, p=1, margin=1, weight=None, reduction=MEAN, outs=()):
    """Crammer and Singer, "On the algorithmic implementation of multiclass kernel-based vector machines"."""
    squared = _check_classes(self, target, p, margin, weight, reduction)
    x, reduced = _matrix(self), reduction != NONE or not target.dim()
    if not x.numel() and reduced:
        raise Decline("no rows, for which ATen leaves the loss uninitialised")
    operands = (self, target) if weight is None else (self, target, weight)
    (out,) = outs = outputs(operands, [() if reduced else (len(x),)], [self.dtype], outs)
    if not x.numel():
        return outs
    if not out.is_contiguous():
        raise Decline("an output that is not contiguous")
    programs = margins.programs(x)
    partial = reduced and programs > 1
    losses = empty((programs,), opmath(self.dtype), self.device) if partial else out
    margins.class_losses(
        *(losses, x, _vector(target), None if weight is None else _vector(weight)),
        squared=squared,
        margin=margin,
        count=_count(x, reduction),
        reduced=reduced,
    )
    if partial:
        _SUM.run((losses,), (0,), outs, opmath(self.dtype))
    return outs


def _row_gradient(grad_output, reduction, rows, target):
    """Return the gradient of each row's loss. Decline a shape that the loss does not have."""
    if reduction == NONE and target.dim() and rows != 1:
        if tuple(grad_output.shape) != (rows,):
            raise Decline(f"gradient of shape {tuple(grad_output.shape)} for {rows} losses")
        return grad_output
    if grad_output.numel() != 1:
        raise Decline(f"gradient of shape {tuple(grad_output.shape)} for one loss")
    return grad_output.view(1).expand(rows)


@operator("multi_margin_loss_backward", accepts=FLOATS, pin=("p",))
def multi_margin_loss_backward(grad_output, self, target, p, margin, weight=None, reduction=MEAN, outs=()):
    squared = _check_classes(self, target, p, margin, weight, reduction, (grad_output,))
    x = _matrix(self)
    operands = (grad_output, self, target, *(() if weight is None else (weight,)))
    (out,) = outs = outputs(operands, [self.shape], [self.dtype], outs)
    if not x.numel():
        return outs
    grad = _row_gradient(grad_output, reduction, len(x), target)
    if not out.is_contiguous():
        raise Decline("a gradient that is not contiguous")
    margins.class_gradients(
        *(_matrix(out), grad, x, _vector(target), None if weight is None else _vector(weight)),
        squared=squared,
        margin=margin,
        count=_count(x, reduction),
    )
    return outs


def _check_labels(self, target, reduction, others=()):
    _check(self, target, reduction, others)
    fits = tuple(target.shape) == tuple(self.shape) if self.dim() == 2 else target.dim() < 2
    if not fits or target.numel() != self.numel():
        raise Decline(f"target of shape {tuple(target.shape)} for an input of shape {tuple(self.shape)}")


@operator("multilabel_margin_loss_forward", accepts=FLOATS)
def multilabel_margin_loss_forward(self, target, reduction, outs=()):
    """Zhang and Zhou, "Multilabel neural networks with applications", without the exponential."""
    _check_labels(self, target, reduction)
    if not self.numel():
        raise Decline("no rows, for which ATen leaves the loss uninitialised")
    x, reduced = _matrix(self), reduction != NONE or self.dim() < 2
    shapes = [() if reduced else (len(x),), target.shape]
    loss, is_target = outs = outputs((self, target), shapes, [self.dtype] * 2, outs)
    if not (loss.is_contiguous() and is_target.is_contiguous()):
        raise Decline("an output that is not contiguous")
    partial = reduced and len(x) > 1
    losses = empty((len(x),), opmath(self.dtype), self.device) if partial else loss
    margins.label_losses(losses, is_target, x, _matrix(target), reduction == MEAN, aten.on_cpu())
    if partial:
        _SUM.run((losses,), (0,), (loss,), opmath(self.dtype))
    return outs


@triton.jit
def _is_fraction(x):
    return ((x >= 0) & (x <= 1)).to(tl.int32)


_ALL_FRACTIONS = all_satisfy(_is_fraction)


def _check_marks(is_target):
    """Decline, on a CPU, marks of labels outside [0, 1], for which ATen raises. Its GPU kernel reads any number."""
    if aten.on_cpu() and is_target.numel():
        refuse_unless_all(_ALL_FRACTIONS, (is_target,), opmath(is_target.dtype), "a mark of a label outside [0, 1]")


@operator("multilabel_margin_loss_backward", accepts=FLOATS)
def multilabel_margin_loss_backward(grad_output, self, target, reduction, is_target, outs=()):
    _check_labels(self, target, reduction, (grad_output, is_target))
    if tuple(is_target.shape) != tuple(target.shape):
        raise Decline(f"is_target of shape {tuple(is_target.shape)} for a target of shape {tuple(target.shape)}")
    _check_marks(is_target)
    x = _matrix(self)
    (out,) = outs = outputs((grad_output, self, target, is_target), [self.shape], [self.dtype], outs)
    if not x.numel():
        return outs
    grad = _row_gradient(grad_output, reduction, len(x), x)
    if not out.is_contiguous():
        raise Decline("a gradient that is not contiguous")
    margins.label_gradients(out, grad, x, _matrix(target), _matrix(is_target), _count(x, reduction), aten.on_cpu())
    return outs
