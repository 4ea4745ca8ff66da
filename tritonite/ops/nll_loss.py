"""The negative log likelihood of one class a row, and its gradient; an image has a row for each of its pixels.

A class that there is not stops the program, as it does in ATen's kernels, and is never read.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.dtypes import FLOATS, TRITON_DTYPES, opmath
from tritonite.engine.iteration import collapse, contiguous_strides, offset_type, output_strides, power_of_2
from tritonite.engine.outputs import outputs
from tritonite.engine.rows.declare import Reduction
from tritonite.engine.rows.formulas import add_pairs
from tritonite.engine.rows.kernels import strided_offset
from tritonite.errors import Decline
from tritonite.language.math import true_divide
from tritonite.language.order import wait_for_previous_launch
from tritonite.ops.loss import MEAN, NONE, SUM
from tritonite.ops.reduction import both
from tritonite.registry import operator
from tritonite.runtime.contract import empty
from tritonite.runtime.launch import ASSERTING, libentry

_ON_CPU = devices.current.type == "cpu"


@triton.jit
def _weight_of(target, weight, weight_stride, n_classes, ignore_index, mask, COMPUTE: tl.constexpr):
    """(the weight of each row's class, 0 where it is ignored and nan where it does not exist; whether to read it)."""
    counts = mask & (target != ignore_index)
    exists = counts & (target >= 0) & (target < n_classes)
    # ATen's assertion, in its words.
    tl.device_assert(exists | (counts == 0), "t >= 0 && t < n_classes")
    value = tl.where(counts, 1.0, 0.0).to(COMPUTE)
    if weight is not None:
        value = tl.load(weight + target * weight_stride, mask=exists, other=0).to(COMPUTE)
    return tl.where(counts & (exists == 0), float("nan"), value), exists


@libentry()
@triton.jit(do_not_specialize=["n_rows", "n_classes", "ignore_index", "weight_stride"])
def gather_losses(
    x,
    target,
    weight,
    losses,
    weights,
    shape,
    x_strides,
    target_strides,
    class_stride,
    weight_stride,
    n_rows,
    n_classes,
    ignore_index: tl.int64,
    REDUCED: tl.constexpr,
    MEAN: tl.constexpr,
    NOTHING_IS_ZERO: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A program takes ROWS rows: the loss of each of them and, of all, weight 0, or their sums; a mean if it has all.

    With NOTHING_IS_ZERO the mean of none is not nan.
    """
    wait_for_previous_launch()
    program = tl.program_id(0)
    row = program.to(INDEX) * ROWS + tl.arange(0, ROWS)
    mask = row < n_rows
    wanted = tl.load(target + strided_offset(row, shape, target_strides), mask=mask, other=0).to(tl.int64)
    own_weight, exists = _weight_of(wanted, weight, weight_stride, n_classes, ignore_index, mask, COMPUTE)
    pointers = x + strided_offset(row, shape, x_strides) + wanted * class_stride
    value = tl.load(pointers, mask=exists, other=0).to(COMPUTE)
    if REDUCED:
        # Of one value a row there are few enough for float64, in which losses of different sign may cancel.
        own_weight, value = own_weight.to(tl.float64), value.to(tl.float64)
    loss = tl.where(mask & (wanted != ignore_index), -1.0 * own_weight * value, 0.0)
    if REDUCED:
        total = tl.sum(own_weight, axis=0)
        result = tl.sum(loss, axis=0)
        if MEAN:
            result = true_divide(result, total)
        if NOTHING_IS_ZERO:
            result = tl.where(tl.sum(exists.to(tl.int32), axis=0) == 0, 0.0, result)
        tl.store(losses + program, result.to(COMPUTE).to(losses.dtype.element_ty))
        tl.store(weights + program, total.to(COMPUTE).to(weights.dtype.element_ty))
    else:
        tl.store(losses + row, loss.to(losses.dtype.element_ty), mask=mask)
        if program == 0:
            tl.store(weights, tl.zeros((), weights.dtype.element_ty))


@triton.jit
def _gradient_of(
    grad_output,
    wanted,
    weight,
    total_weight,
    weight_stride,
    n_classes,
    ignore_index,
    mask,
    MEAN: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """(the gradient of each row's own class, whether it has one); `grad_output` are pointers, one for each row."""
    own_weight, exists = _weight_of(wanted, weight, weight_stride, n_classes, ignore_index, mask, COMPUTE)
    factor = tl.load(grad_output, mask=mask, other=0).to(COMPUTE)
    if MEAN:
        factor = true_divide(factor, tl.broadcast_to(tl.load(total_weight).to(COMPUTE), factor.shape))
    return -1.0 * own_weight * factor, exists


@libentry()
@triton.jit(do_not_specialize=["ignore_index", "weight_stride"])
def scatter_gradients(
    gradient,
    grad_output,
    target,
    weight,
    total_weight,
    shape,
    gradient_strides,
    grad_output_strides,
    target_strides,
    class_stride,
    weight_stride,
    n_rows,
    n_classes,
    ignore_index: tl.int64,
    MEAN: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    ROWS: tl.constexpr,
    CLASSES: tl.constexpr,
):
    """A program writes CLASSES classes of ROWS rows, 0 but for the rows' own class."""
    wait_for_previous_launch()
    blocks = tl.cdiv(n_classes, CLASSES)
    program = tl.program_id(0)
    row = (program // blocks).to(INDEX) * ROWS + tl.arange(0, ROWS)
    classes = (program % blocks).to(INDEX) * CLASSES + tl.arange(0, CLASSES)
    mask = row < n_rows
    wanted = tl.load(target + strided_offset(row, shape, target_strides), mask=mask, other=0).to(tl.int64)
    pointers = grad_output + strided_offset(row, shape, grad_output_strides)
    value, exists = _gradient_of(
        pointers, wanted, weight, total_weight, weight_stride, n_classes, ignore_index, mask, MEAN, COMPUTE
    )
    value = value.to(gradient.dtype.element_ty)
    # Without a class of its own a row has no gradient; compared in the narrow type that classes are counted in.
    place = tl.where(exists, wanted, -1).to(INDEX)
    block = tl.where(place[:, None] == classes[None, :], value[:, None], tl.zeros((1, 1), value.dtype))
    pointers = gradient + (strided_offset(row, shape, gradient_strides)[:, None] + classes[None, :] * class_stride)
    tl.store(pointers, block, mask=mask[:, None] & (classes < n_classes)[None, :])


@libentry()
@triton.jit(do_not_specialize=["ignore_index", "weight_stride"])
def scatter_gradients_in_order(
    gradient,
    grad_output,
    target,
    weight,
    total_weight,
    grad_output_stride,
    target_stride,
    weight_stride,
    n_rows,
    n_classes,
    n,
    ignore_index: tl.int64,
    MEAN: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program writes BLOCK of all n elements, side by side: zeros, then the gradients of the at most ROWS rows there.

    Zeros are in vectors, wherever rows begin, and wait for no class.
    """
    wait_for_previous_launch()
    start = tl.program_id(0).to(INDEX) * BLOCK
    place = tl.arange(0, BLOCK)
    zeros = tl.zeros((BLOCK,), gradient.dtype.element_ty)
    if start + BLOCK <= n:
        tl.store(gradient + start + place, zeros)
    else:
        tl.store(gradient + start + place, zeros, mask=start + place < n)
    row = start // n_classes + tl.arange(0, ROWS)
    mask = row < n_rows
    wanted = tl.load(target + row * target_stride, mask=mask, other=0).to(tl.int64)
    pointers = grad_output + row * grad_output_stride
    value, exists = _gradient_of(
        pointers, wanted, weight, total_weight, weight_stride, n_classes, ignore_index, mask, MEAN, COMPUTE
    )
    own = row.to(tl.int64) * n_classes + wanted
    # All threads' zeros are written.
    tl.debug_barrier()
    tl.store(gradient + own, value.to(zeros.dtype), mask=exists & (own >= start) & (own < start + BLOCK))


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
    """The dimension of the classes; declines what ATen refuses."""
    if reduction not in (NONE, MEAN, SUM):
        raise Decline("no such reduction")
    if self.dtype not in FLOATS or any(other.dtype is not self.dtype for other in others):
        raise Decline("operands of other dtypes, or of several")
    dim = 1 if self.dim() > 1 else 0
    rows = (*self.shape[:dim], *self.shape[dim + 1 :])
    if tuple(target.shape) != rows or not self.shape[dim]:
        raise Decline("a target of another shape, or no classes")
    if weight is not None and (weight.dtype is not self.dtype or tuple(weight.shape) != (self.shape[dim],)):
        raise Decline("weights of another shape or dtype")
    return dim


def _forward(self, target, weight, reduction, ignore_index, outs):
    dim = _class_dim(self, target, weight, reduction, ())
    dtype, shape = self.dtype, tuple(target.shape)
    unreduced = reduction == NONE and self.dim() > 1
    operands = (self, target) if weight is None else (self, target, weight)
    outs = outputs(operands, [shape if unreduced else (), ()], (dtype, dtype), outs)
    if unreduced and outs[0].stride() != contiguous_strides(shape) and outs[0].numel():
        raise Decline("output that is not contiguous")
    x = self.select(dim, 0)
    sizes, strides = collapse(shape, [x.stride(), target.stride(), contiguous_strides(shape)])
    n_rows = math.prod(shape)
    rows = min(power_of_2(n_rows), devices.current.row_elements // 4)
    programs = max(1, -(-n_rows // rows))
    whole = unreduced or programs == 1
    found = outs
    if not whole:
        found = tuple([empty((programs,), opmath(dtype), self.device) for _ in range(2)])
    mean = whole and not unreduced and reduction == MEAN
    gather_losses[(programs,)](
        *(self, target, weight, *found, tuple(sizes[:-1]), tuple(strides[0]), tuple(strides[1])),
        *(self.stride(dim), weight.stride(0) if weight is not None else 0, n_rows, self.shape[dim], ignore_index),
        REDUCED=not unreduced,
        MEAN=mean,
        NOTHING_IS_ZERO=mean and self.dim() == 1 and not _ON_CPU,
        COMPUTE=TRITON_DTYPES[opmath(dtype)],
        INDEX=offset_type(self, target),
        ROWS=rows,
        **ASSERTING,
    )
    if not whole:
        _REDUCTIONS[reduction].run(found, (0,), outs, opmath(dtype))
    return outs


def _backward(grad_output, self, target, weight, reduction, ignore_index, total_weight, outs):
    dim = _class_dim(self, target, weight, reduction, (grad_output, total_weight))
    dtype, shape = self.dtype, tuple(target.shape)
    if total_weight.numel() != 1:
        raise Decline("total weight of another shape")
    if reduction == NONE and self.dim() > 1:
        if tuple(grad_output.shape) != shape:
            raise Decline("gradient of another shape")
        grad_strides = grad_output.stride()
    else:
        if grad_output.dim() > 1 or grad_output.numel() != 1:
            raise Decline("gradient of another shape")
        grad_strides = (0,) * len(shape)
    operands = (grad_output, self, target, total_weight, *(() if weight is None else (weight,)))
    if any(not out.is_contiguous() for out in outs):
        raise Decline("a gradient that is not contiguous")
    (gradient,) = outs = outputs(operands, [self.shape], [dtype], outs)
    n_rows, n_classes = math.prod(shape), self.shape[dim]
    if not n_rows:
        return outs
    row_strides = gradient.select(dim, 0).stride()
    sizes, strides = collapse(shape, [row_strides, grad_strides, target.stride()])
    tile = devices.current.row_elements
    facts = {
        "MEAN": reduction == MEAN,
        "COMPUTE": TRITON_DTYPES[opmath(dtype)],
        "INDEX": offset_type(gradient, grad_output, target),
    }
    n = n_rows * n_classes
    block = tile if n > 64 * tile else tile // 4
    if gradient.dim() == dim + 1:
        scatter_gradients_in_order[(-(-n // block),)](
            *(gradient, grad_output, target, weight, total_weight, strides[1][0], strides[2][0]),
            *(weight.stride(0) if weight is not None else 0, n_rows, n_classes, n, ignore_index),
            ROWS=power_of_2(2 + (block - 2) // n_classes),
            BLOCK=block,
            **facts,
            **ASSERTING,
        )
        return outs
    if gradient.stride(dim) == 1:
        classes = min(power_of_2(n_classes), tile)
        rows = min(power_of_2(n_rows), max(1, tile // classes))
    else:
        rows = min(power_of_2(n_rows), max(1, tile // 16))
        classes = min(power_of_2(n_classes), max(1, tile // rows))
    scatter_gradients[(-(-n_rows // rows) * -(-n_classes // classes),)](
        *(gradient, grad_output, target, weight, total_weight, tuple(sizes[:-1]), *map(tuple, strides)),
        *(gradient.stride(dim), weight.stride(0) if weight is not None else 0, n_rows, n_classes, ignore_index),
        ROWS=rows,
        CLASSES=classes,
        **facts,
        **ASSERTING,
    )
    return outs


def _check_rows(self, target):
    if self.dim() not in (1, 2) or target.dtype not in (torch.int64, torch.uint8):
        raise Decline("neither one row nor a matrix, or a target of another dtype")


def _check_images(self, target):
    if self.dim() != 4 or target.dtype is not torch.int64:
        raise Decline("no images, or a target of another dtype")


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
        raise Decline("a gradient that is not contiguous, which ATen refuses")
    return _backward(grad_output, self, target, weight, reduction, ignore_index, total_weight, outs)
