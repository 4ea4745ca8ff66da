"""Kernels of the negative log likelihood: gather a class from each row, scatter a gradient to it.

`gather_losses` is the forward pass, `scatter_gradients` the backward one. A row has a log-probability for each class;
the classes may lie along any dimension, with any strides. A class out of range fails an assertion, as in ATen's
kernels, and is not read.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.dtypes import TRITON_DTYPES, opmath
from tritonite.engine.iteration import collapse, contiguous_strides, offset_type, power_of_2
from tritonite.language.indices import strided_offset
from tritonite.language.math import true_divide
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.launch import ASSERTING
from tritonite.runtime.libentry import libentry


@triton.jit
def _weight_of(target, weight, weight_stride, n_classes, ignore_index, mask, COMPUTE: tl.constexpr):
    """Return the weight of each row's class, and whether the row has a class to read.

    The weight is 0 for an ignored class and nan for a class out of range.
    """
    counts = mask & (target != ignore_index)
    exists = counts & (target >= 0) & (target < n_classes)
    # The text of ATen's assertion.
    tl.device_assert(exists | (counts == 0), "t >= 0 && t < n_classes")
    value = tl.where(counts, 1.0, 0.0).to(COMPUTE)
    if weight is not None:
        value = tl.load(weight + target * weight_stride, mask=exists, other=0).to(COMPUTE)
    return tl.where(counts & (exists == 0), float("nan"), value), exists


@libentry()
@triton.jit(do_not_specialize=["n_rows", "n_classes", "ignore_index", "weight_stride"])
def _gather_losses(
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
    EMPTY_IS_ZERO: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compute the losses of ROWS rows, or if REDUCED their sum and the sum of their weights.

    With MEAN the only program divides the first sum by the second. With EMPTY_IS_ZERO a mean of no rows is 0, not nan.
    Without REDUCED the total weight is stored as 0, as ATen does.
    """
    wait_for_previous_launch()
    program = tl.program_id(0)
    row = program.to(INDEX) * ROWS + tl.arange(0, ROWS)
    mask = row < n_rows
    class_index = tl.load(target + strided_offset(row, shape, target_strides), mask=mask, other=0).to(tl.int64)
    own_weight, exists = _weight_of(class_index, weight, weight_stride, n_classes, ignore_index, mask, COMPUTE)
    pointers = x + strided_offset(row, shape, x_strides) + class_index * class_stride
    value = tl.load(pointers, mask=exists, other=0).to(COMPUTE)
    if REDUCED:
        # One value a row is few enough for float64, in which losses of different sign may cancel.
        own_weight, value = own_weight.to(tl.float64), value.to(tl.float64)
    loss = tl.where(mask & (class_index != ignore_index), -1.0 * own_weight * value, 0.0)
    if REDUCED:
        total = tl.sum(own_weight, axis=0)
        result = tl.sum(loss, axis=0)
        if MEAN:
            result = true_divide(result, total)
        if EMPTY_IS_ZERO:
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
    class_index,
    weight,
    total_weight,
    weight_stride,
    n_classes,
    ignore_index,
    mask,
    MEAN: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Return the gradient at each row's class, and whether the row has a class. `grad_output` has a pointer per row."""
    own_weight, exists = _weight_of(class_index, weight, weight_stride, n_classes, ignore_index, mask, COMPUTE)
    factor = tl.load(grad_output, mask=mask, other=0).to(COMPUTE)
    if MEAN:
        factor = true_divide(factor, tl.broadcast_to(tl.load(total_weight).to(COMPUTE), factor.shape))
    return -1.0 * own_weight * factor, exists


@libentry()
@triton.jit(do_not_specialize=["ignore_index", "weight_stride"])
def _scatter_gradients(
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
    """Write a tile of ROWS rows by CLASSES classes: the gradient at each row's own class, 0 elsewhere."""
    wait_for_previous_launch()
    blocks = tl.cdiv(n_classes, CLASSES)
    program = tl.program_id(0)
    row = (program // blocks).to(INDEX) * ROWS + tl.arange(0, ROWS)
    classes = (program % blocks).to(INDEX) * CLASSES + tl.arange(0, CLASSES)
    mask = row < n_rows
    class_index = tl.load(target + strided_offset(row, shape, target_strides), mask=mask, other=0).to(tl.int64)
    pointers = grad_output + strided_offset(row, shape, grad_output_strides)
    value, exists = _gradient_of(
        pointers, class_index, weight, total_weight, weight_stride, n_classes, ignore_index, mask, MEAN, COMPUTE
    )
    value = value.to(gradient.dtype.element_ty)
    # -1 for a row without a class. The narrow type makes the comparison of the whole tile cheap.
    own_class = tl.where(exists, class_index, -1).to(INDEX)
    block = tl.where(own_class[:, None] == classes[None, :], value[:, None], tl.zeros((1, 1), value.dtype))
    pointers = gradient + (strided_offset(row, shape, gradient_strides)[:, None] + classes[None, :] * class_stride)
    tl.store(pointers, block, mask=mask[:, None] & (classes < n_classes)[None, :])


@libentry()
@triton.jit(do_not_specialize=["ignore_index", "weight_stride"])
def _scatter_contiguous_gradients(
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
    """Write BLOCK of the n elements of a contiguous gradient: zeros, then the gradients of up to ROWS rows in it.

    Zeros are stored as full vectors, wherever rows begin, before any class is loaded.
    """
    wait_for_previous_launch()
    start = tl.program_id(0).to(INDEX) * BLOCK
    offset = tl.arange(0, BLOCK)
    zeros = tl.zeros((BLOCK,), gradient.dtype.element_ty)
    if start + BLOCK <= n:
        tl.store(gradient + start + offset, zeros)
    else:
        tl.store(gradient + start + offset, zeros, mask=start + offset < n)
    row = start // n_classes + tl.arange(0, ROWS)
    mask = row < n_rows
    class_index = tl.load(target + row * target_stride, mask=mask, other=0).to(tl.int64)
    pointers = grad_output + row * grad_output_stride
    value, exists = _gradient_of(
        pointers, class_index, weight, total_weight, weight_stride, n_classes, ignore_index, mask, MEAN, COMPUTE
    )
    own = row.to(tl.int64) * n_classes + class_index
    # The zeros of all threads come before the gradients.
    tl.debug_barrier()
    tl.store(gradient + own, value.to(zeros.dtype), mask=exists & (own >= start) & (own < start + BLOCK))


def _rows_of_a_program(n_rows: int) -> int:
    return min(power_of_2(n_rows), devices.current.row_elements // 4)


def programs(n_rows: int) -> int:
    """Return how many programs `gather_losses` launches, each of which stores one sum if losses are reduced."""
    return max(1, -(-n_rows // _rows_of_a_program(n_rows)))


def gather_losses(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    dim: int,
    ignore_index: int,
    losses: torch.Tensor,
    weights: torch.Tensor,
    *,
    reduced: bool,
    mean: bool,
    empty_is_zero: bool,
) -> None:
    """Write the losses of rows with classes along `dim` of `x`, and the total weight.

    `losses` has the shape of `target`, or if `reduced` a sum for each program, as does `weights`. With `mean`, which
    takes a single program, the loss is the sum over the total weight; `empty_is_zero` makes it 0 without rows.
    """
    shape = tuple(target.shape)
    sizes, strides = collapse(shape, [x.select(dim, 0).stride(), target.stride(), contiguous_strides(shape)])
    n_rows = math.prod(shape)
    _gather_losses[(programs(n_rows),)](
        *(x, target, weight, losses, weights, tuple(sizes[:-1]), tuple(strides[0]), tuple(strides[1])),
        *(x.stride(dim), weight.stride(0) if weight is not None else 0, n_rows, x.shape[dim], ignore_index),
        REDUCED=reduced,
        MEAN=mean,
        EMPTY_IS_ZERO=empty_is_zero,
        COMPUTE=TRITON_DTYPES[opmath(x.dtype)],
        INDEX=offset_type(x, target),
        ROWS=_rows_of_a_program(n_rows),
        **ASSERTING,
    )


def scatter_gradients(
    gradient: torch.Tensor,
    grad_output: torch.Tensor,
    grad_strides: Sequence[int],
    target: torch.Tensor,
    weight: torch.Tensor | None,
    total_weight: torch.Tensor,
    dim: int,
    ignore_index: int,
    mean: bool,
) -> None:
    """Write the whole gradient by `x`, with classes along `dim`: 0 but for each row's own class.

    `grad_strides` are the strides of `grad_output` along the dimensions of `target`, 0 for a reduced loss.
    """
    shape = tuple(target.shape)
    n_rows, n_classes = math.prod(shape), gradient.shape[dim]
    row_strides = gradient.select(dim, 0).stride()
    sizes, strides = collapse(shape, [row_strides, grad_strides, target.stride()])
    tile = devices.current.row_elements
    facts = {
        "MEAN": mean,
        "COMPUTE": TRITON_DTYPES[opmath(gradient.dtype)],
        "INDEX": offset_type(gradient, grad_output, target),
    }
    n = n_rows * n_classes
    block = tile if n > 64 * tile else tile // 4
    if gradient.dim() == dim + 1:
        _scatter_contiguous_gradients[(-(-n // block),)](
            *(gradient, grad_output, target, weight, total_weight, strides[1][0], strides[2][0]),
            *(weight.stride(0) if weight is not None else 0, n_rows, n_classes, n, ignore_index),
            ROWS=power_of_2(2 + (block - 2) // n_classes),
            BLOCK=block,
            **facts,
            **ASSERTING,
        )
        return
    if gradient.stride(dim) == 1:
        classes = min(power_of_2(n_classes), tile)
        rows = min(power_of_2(n_rows), max(1, tile // classes))
    else:
        rows = min(power_of_2(n_rows), max(1, tile // 16))
        classes = min(power_of_2(n_classes), max(1, tile // rows))
    _scatter_gradients[(-(-n_rows // rows) * -(-n_classes // classes),)](
        *(gradient, grad_output, target, weight, total_weight, tuple(sizes[:-1]), *map(tuple, strides)),
        *(gradient.stride(dim), weight.stride(0) if weight is not None else 0, n_rows, n_classes, ignore_index),
        ROWS=rows,
        CLASSES=classes,
        **facts,
        **ASSERTING,
    )
