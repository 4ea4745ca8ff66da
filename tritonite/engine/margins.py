"""Kernels of margin losses: rows of scores, of which those of the labels should exceed all others by a margin.

`class_losses` and `class_gradients` have one label a row, `label_losses` and `label_gradients` any number: the classes
of a row of targets before the first negative one. Nothing is written by one thread and read by another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.dtypes import TRITON_DTYPES, opmath
from tritonite.engine.iteration import offset_type, power_of_2
from tritonite.language.math import true_divide
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.launch import ASSERTING
from tritonite.runtime.libentry import libentry


@dataclass(frozen=True)
class MarginMeta:
    """Compile-time facts of the kernels.

    rows: rows of a program.
    classes: classes of a block.
    squared: whether a margin's violation counts squared.
    reduced: whether a program stores the sum of its rows' losses, not each.
    checks_all: whether targets after the first negative one have to be classes or -1.
    compute: the type of sums.
    index: the type of offsets.
    """

    rows: int
    classes: int
    squared: bool
    reduced: bool
    checks_all: bool
    compute: tl.dtype
    index: tl.dtype


@triton.jit
def _violation(margin, own, other):
    """Return margin - own + other where it is positive, else 0."""
    value = margin - own.to(margin.dtype) + other.to(margin.dtype)
    return tl.where(value > 0, value, 0.0)


@triton.jit
def _violations(x, x_strides, row, column, own_class, exists, score, margin, n_classes):
    """Return the violations of a block of other classes, and which elements of the block are other classes."""
    others = exists[:, None] & (column < n_classes)[None, :] & (column[None, :] != own_class[:, None])
    pointers = x + ((row * x_strides[0])[:, None] + (column * x_strides[1])[None, :])
    return _violation(margin, score[:, None], tl.load(pointers, mask=others, other=0)), others


@triton.jit
def _class_of(target, target_stride, x, x_strides, weight, weight_stride, row, n_rows, n_classes, META: tl.constexpr):
    """Return of each row: its class, whether it exists, the score and the weight of its class."""
    meta: tl.constexpr = META
    mask = row < n_rows
    own_class = tl.load(target + row * target_stride, mask=mask, other=0).to(tl.int64)
    exists = mask & (own_class >= 0) & (own_class < n_classes)
    tl.device_assert(exists | (mask == 0), "target index is out of bounds")
    score = tl.load(x + row * x_strides[0] + own_class * x_strides[1], mask=exists, other=0)
    own_weight = tl.full((meta.rows,), 1.0, meta.compute)
    if weight is not None:
        own_weight = tl.load(weight + own_class * weight_stride, mask=exists, other=0).to(meta.compute)
    return own_class, exists, score, own_weight


@libentry()
@triton.jit(do_not_specialize=["n_rows", "n_classes", "count", "margin", "target_stride", "weight_stride"])
def _class_losses(
    losses,
    x,
    target,
    weight,
    x_strides,
    target_stride,
    weight_stride,
    margin: tl.float64,
    count,
    n_rows,
    n_classes,
    META: tl.constexpr,
):
    """Write the losses of some rows, or their sum, divided by `count`."""
    wait_for_previous_launch()
    meta: tl.constexpr = META
    ROWS: tl.constexpr = meta.rows
    row = tl.program_id(0).to(meta.index) * ROWS + tl.arange(0, ROWS)
    own_class, exists, score, own_weight = _class_of(
        target, target_stride, x, x_strides, weight, weight_stride, row, n_rows, n_classes, META
    )
    margin = tl.full((), margin, tl.float64).to(meta.compute)
    total = tl.zeros((ROWS,), meta.compute)
    for begin in range(0, n_classes, meta.classes):
        column = begin + tl.arange(0, meta.classes).to(meta.index)
        violation, others = _violations(x, x_strides, row, column, own_class, exists, score, margin, n_classes)
        loss = violation
        if meta.squared:
            loss = loss * loss
        # Not 0 times a weight, which may be infinite.
        total += tl.sum(tl.where(others & (violation > 0), loss * own_weight[:, None], 0.0), axis=1)
    total = true_divide(total, tl.full((ROWS,), count, tl.int64).to(meta.compute))
    if meta.reduced:
        tl.store(losses + tl.program_id(0), tl.sum(total, axis=0).to(losses.dtype.element_ty))
    else:
        tl.store(losses + row, total.to(losses.dtype.element_ty), mask=row < n_rows)


@libentry()
@triton.jit(do_not_specialize=["n_rows", "n_classes", "count", "margin", "target_stride", "weight_stride"])
def _class_gradients(
    gradient,
    grad_output,
    x,
    target,
    weight,
    x_strides,
    grad_stride,
    target_stride,
    weight_stride,
    margin: tl.float64,
    count,
    n_rows,
    n_classes,
    META: tl.constexpr,
):
    """Write rows of a contiguous gradient. The gradient of a row's own class is minus the sum of all others."""
    wait_for_previous_launch()
    meta: tl.constexpr = META
    ROWS: tl.constexpr = meta.rows
    row = tl.program_id(0).to(meta.index) * ROWS + tl.arange(0, ROWS)
    own_class, exists, score, own_weight = _class_of(
        target, target_stride, x, x_strides, weight, weight_stride, row, n_rows, n_classes, META
    )
    grad = tl.load(grad_output + row * grad_stride, mask=row < n_rows, other=0).to(meta.compute)
    margin = tl.full((), margin, tl.float64).to(meta.compute)
    share = true_divide(tl.full((ROWS,), 1.0, meta.compute), tl.full((ROWS,), count, tl.int64).to(meta.compute))
    total = tl.zeros((ROWS,), meta.compute)
    for begin in range(0, n_classes, meta.classes):
        column = begin + tl.arange(0, meta.classes).to(meta.index)
        violation, others = _violations(x, x_strides, row, column, own_class, exists, score, margin, n_classes)
        if meta.squared:
            slope = 2.0 * share[:, None] * violation
        else:
            slope = tl.broadcast_to(share[:, None], violation.shape)
        slope = tl.where(others & (violation > 0), slope * own_weight[:, None], 0.0)
        total += tl.sum(slope, axis=1)
        result = (slope * grad[:, None]).to(gradient.dtype.element_ty)
        tl.store(gradient + ((row * n_classes)[:, None] + column[None, :]), result, mask=others)
    result = (-total * grad).to(gradient.dtype.element_ty)
    tl.store(gradient + row * n_classes + own_class, result, mask=exists)


@triton.jit
def _labels(target, stride, n_classes, META: tl.constexpr):
    """Return the number of labels of a row: targets before the first negative one."""
    meta: tl.constexpr = META
    count = n_classes.to(tl.int32)
    for begin in range(0, n_classes, meta.classes):
        position = begin + tl.arange(0, meta.classes)
        value = tl.load(target + position.to(meta.index) * stride, mask=position < n_classes, other=0)
        count = tl.minimum(count, tl.min(tl.where(value < 0, position, n_classes), axis=0))
        valid = value < n_classes
        if meta.checks_all:
            valid = valid & (value >= -1)
        else:
            valid = valid | (position >= count)
        tl.device_assert(valid, "target is out of range")
    return count


@libentry()
@triton.jit(do_not_specialize=["n_rows", "n_classes"])
def _label_losses(
    losses,
    is_target,
    x,
    target,
    x_strides,
    target_strides,
    n_rows,
    n_classes,
    MEAN: tl.constexpr,
    META: tl.constexpr,
):
    """Write the loss of a row, and which classes are labels, to a contiguous `is_target`."""
    wait_for_previous_launch()
    meta: tl.constexpr = META
    CLASSES: tl.constexpr = meta.classes
    row = tl.program_id(0).to(meta.index)
    scores, targets = x + row * x_strides[0], target + row * target_strides[0]
    score_stride = tl.full((), x_strides[1], meta.index)
    target_stride = tl.full((), target_strides[1], meta.index)
    labels = _labels(targets, target_stride, n_classes, META)
    total = tl.zeros((CLASSES,), meta.compute)
    margin = tl.full((), 1.0, meta.compute)
    for begin in range(0, n_classes, meta.classes):
        column = begin + tl.arange(0, meta.classes).to(meta.index)
        mask = column < n_classes
        other = tl.load(scores + column * score_stride, mask=mask, other=0)
        is_label = column < 0
        for i in range(labels):
            is_label = is_label | (column == tl.load(targets + i * target_stride))
        for i in range(labels):
            own = tl.load(scores + tl.load(targets + i * target_stride) * score_stride)
            total += tl.where(mask & (is_label == 0), _violation(margin, own, other), 0.0)
        tl.store(is_target + row * n_classes + column, is_label.to(is_target.dtype.element_ty), mask=mask)
    loss = true_divide(tl.sum(total, axis=0), n_classes.to(meta.compute))
    if MEAN:
        loss = true_divide(loss, n_rows.to(meta.compute))
    tl.store(losses + row, loss.to(losses.dtype.element_ty))


@libentry()
@triton.jit(do_not_specialize=["n_rows", "n_classes", "count"])
def _label_gradients(
    gradient,
    grad_output,
    x,
    target,
    is_target,
    x_strides,
    grad_stride,
    target_strides,
    is_target_strides,
    count,
    n_classes,
    META: tl.constexpr,
):
    """Write a block of classes of a row of a contiguous gradient.

    A violation adds 1 / count to the gradient of a class without a label, and subtracts it from that of the label.
    """
    wait_for_previous_launch()
    meta: tl.constexpr = META
    CLASSES: tl.constexpr = meta.classes
    blocks = tl.cdiv(n_classes, CLASSES)
    row = (tl.program_id(0) // blocks).to(meta.index)
    first = (tl.program_id(0) % blocks) * CLASSES
    scores, targets = x + row * x_strides[0], target + row * target_strides[0]
    marks = is_target + row * is_target_strides[0]
    score_stride = tl.full((), x_strides[1], meta.index)
    target_stride = tl.full((), target_strides[1], meta.index)
    labels = _labels(targets, target_stride, n_classes, META)
    mark_stride = tl.full((), is_target_strides[1], meta.index)
    lane = tl.arange(0, CLASSES).to(meta.index)
    column = first + lane
    mask = column < n_classes
    other = tl.load(scores + column * score_stride, mask=mask, other=0)
    unmarked = mask & (tl.load(marks + column * mark_stride, mask=mask, other=0).to(tl.int32) == 0)
    margin = tl.full((), 1.0, meta.compute)
    violations = tl.zeros((CLASSES,), tl.int32)
    for i in range(labels):
        label = tl.load(targets + i * target_stride)
        own = tl.load(scores + label * score_stride)
        violations += (unmarked & (_violation(margin, own, other) > 0)).to(tl.int32)
        if (label >= first) & (label < first + CLASSES):
            for begin in range(0, n_classes, CLASSES):
                every = begin + lane
                inside = every < n_classes
                score = tl.load(scores + every * score_stride, mask=inside, other=0)
                inside = inside & (tl.load(marks + every * mark_stride, mask=inside, other=0).to(tl.int32) == 0)
                found = tl.sum((inside & (_violation(margin, own, score) > 0)).to(tl.int32), axis=0)
                violations -= tl.where(column == label, found, 0)
    share = true_divide(tl.full((CLASSES,), 1.0, meta.compute), tl.full((CLASSES,), count, tl.int64).to(meta.compute))
    grad = tl.load(grad_output + row * grad_stride).to(meta.compute)
    result = violations.to(meta.compute) * share * grad
    tl.store(gradient + row * n_classes + column, result.to(gradient.dtype.element_ty), mask=mask)


def _class_meta(x: torch.Tensor, squared: bool, reduced: bool, index: tl.dtype) -> MarginMeta:
    elements = devices.current.row_elements
    classes = min(power_of_2(x.shape[1]), max(1, elements // 4))
    rows = min(power_of_2(x.shape[0]), max(1, elements // classes))
    return MarginMeta(rows, classes, squared, reduced, False, TRITON_DTYPES[opmath(x.dtype)], index)


def programs(x: torch.Tensor) -> int:
    """Return the number of programs of `class_losses`, each of which stores one sum if losses are reduced."""
    return -(-x.shape[0] // _class_meta(x, False, False, tl.int32).rows)


def class_losses(
    losses: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    squared: bool,
    margin: float,
    count: int,
    reduced: bool,
) -> None:
    """Write the losses of rows of x, (rows, classes), over `count`; if `reduced` their sum for each program."""
    meta = _class_meta(x, squared, reduced, offset_type(x, target))
    _class_losses[(programs(x),)](
        *(losses, x, target, weight, x.stride(), target.stride(0), weight.stride(0) if weight is not None else 0),
        *(margin, count, *x.shape),
        META=meta,
        **ASSERTING,
    )


def class_gradients(
    gradient: torch.Tensor,
    grad_output: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    squared: bool,
    margin: float,
    count: int,
) -> None:
    """Write the contiguous gradient of `class_losses`, given that of each row's loss."""
    meta = _class_meta(x, squared, False, offset_type(x, target, gradient))
    _class_gradients[(programs(x),)](
        *(gradient, grad_output, x, target, weight, x.stride(), grad_output.stride(0), target.stride(0)),
        *(weight.stride(0) if weight is not None else 0, margin, count, *x.shape),
        META=meta,
        **ASSERTING,
    )


def _label_meta(x: torch.Tensor, checks_all: bool, index: tl.dtype) -> tuple[MarginMeta, int]:
    """Return (facts, warps) of a program a row."""
    classes = min(power_of_2(x.shape[1]), max(1, devices.current.row_elements // 4))
    meta = MarginMeta(1, classes, False, False, checks_all, TRITON_DTYPES[opmath(x.dtype)], index)
    return meta, min(4, devices.warps(classes // 4))


def label_losses(
    losses: torch.Tensor, is_target: torch.Tensor, x: torch.Tensor, target: torch.Tensor, mean: bool, checks_all: bool
) -> None:
    """Write the loss of each row of x, over the number of rows for a `mean`, and the contiguous `is_target`.

    A label out of range fails an assertion; with `checks_all` so does any target that is neither a class nor -1.
    """
    meta, warps = _label_meta(x, checks_all, offset_type(x, target, is_target))
    _label_losses[(len(x),)](
        *(losses, is_target, x, target, x.stride(), target.stride(), *x.shape),
        MEAN=mean,
        META=meta,
        num_warps=warps,
        **ASSERTING,
    )


def label_gradients(
    gradient: torch.Tensor,
    grad_output: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    is_target: torch.Tensor,
    count: int,
    checks_all: bool,
) -> None:
    """Write the contiguous gradient of `label_losses` over `count`, given that of each row's loss."""
    meta, warps = _label_meta(x, checks_all, offset_type(x, target, is_target, gradient))
    _label_gradients[(len(x) * -(-x.shape[1] // meta.classes),)](
        *(gradient, grad_output, x, target, is_target, x.stride(), grad_output.stride(0), target.stride()),
        *(is_target.stride(), count, x.shape[1]),
        META=meta,
        num_warps=warps,
        **ASSERTING,
    )
