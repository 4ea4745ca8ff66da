"""Kernels of cross entropy, its gradient by the logits, and the scaling of gradients.

With logits x, perhaps capped to c tanh(x / c), class weights w, label smoothing e over V classes and a z-loss factor z,
the loss of a row with target t is

    (1 - e) w_t (lse - x_t) + e / V sum_j w_j (lse - x_j) + z lse^2,    lse = log sum_j exp(x_j)

and its gradient by x_j, with p = exp(x - lse) and W = sum_j w_j, is

    p_j ((1 - e) w_t + e W / V + 2 z lse) - (1 - e) w_t [j = t] - e w_j / V

times 1 - (x_j / c)^2 where x is capped. Both are multiplied by the row's token scale.
"""
# Over 500 lines: losses and gradients, of whole rows and of slices, share the device functions of logits and weights.

from __future__ import annotations

import triton
import triton.language as tl

from tritonite.language import libdevice
from tritonite.language.indices import aligned_to, strided_offset
from tritonite.language.math import true_divide
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry


@triton.jit
def _number(value, META: tl.constexpr):
    """Return a float64 argument as a block of one element in the compute dtype."""
    return tl.full((1,), value, tl.float64).to(META.compute)


@triton.jit
def _capped(x, softcap, META: tl.constexpr):
    """Return loaded logits in the compute dtype, capped if the loss has a cap."""
    x = x.to(META.compute)
    if META.softcap:
        cap = _number(softcap, META)[None, :]
        x = cap * libdevice.tanh(true_divide(x, cap))
    return x


@triton.jit
def _in_memory(column, n_columns, META: tl.constexpr):
    """Return the mask of columns that a row has memory for."""
    if META.padded:
        column_mask = column < aligned_to(n_columns + 15, 16)
    else:
        column_mask = column < n_columns
    return column_mask


@triton.jit
def _weights_of_targets(targets, row, mask, n_classes, ignore_index, META: tl.constexpr):
    """Return each row's target, its class weight, and whether the row counts.

    The weight is 0 for an ignored row, and nan for a target that is no class.
    """
    target = tl.load(targets.target + row, mask=mask, other=0)
    counts = mask & (target != ignore_index)
    exists = counts & (target >= 0) & (target < n_classes)
    weight = tl.where(exists, 1.0, 0.0).to(META.compute)
    if targets.weight is not None:
        weight = tl.load(targets.weight + target, mask=exists, other=0).to(META.compute)
    return target, tl.where(counts & (exists == 0), float("nan"), weight), counts


@triton.jit
def _statistics_of_columns(
    x, offset, row_mask, rows, classes, begin, end, weight, statistics, softcap, META: tl.constexpr
):
    """Return the statistics of the columns from `begin`, a multiple of a block, to `end`.

    These are the sum of exponentials less the largest logit, the weighted sum of logits, the sum of class weights, the
    column of the largest logit, and the largest logit. The sum of exponentials is kept per column of the block and
    rescaled when a row's maximum rises (Milakov and Gimelshein 2018), so that a block needs one reduction. Results that
    `statistics` has not are meaningless.
    """
    maximum = tl.full((META.rows,), float("-inf"), META.compute)
    best = tl.full((META.rows,), 0, tl.int64)
    sums = tl.full((META.rows, META.columns), 0.0, META.compute)
    smooth = tl.full((META.rows, META.columns), 0.0, META.compute)
    weights = tl.full((META.columns,), 0.0, META.compute)
    COLUMNS: tl.constexpr = META.columns
    for start in range(begin, end, COLUMNS):
        column = start + tl.arange(0, META.columns)
        column_mask = column < classes.own
        mask = row_mask[:, None] & column_mask[None, :]
        pointers = x + (offset[:, None] + column.to(META.index)[None, :] * rows.column_stride)
        readable = row_mask[:, None] & _in_memory(column, classes.own, META)[None, :]
        value = _capped(tl.load(pointers, mask=readable, other=0), softcap, META)
        if META.smoothing:
            if weight is not None:
                class_weight = tl.load(weight + classes.first + column, mask=column_mask, other=0).to(META.compute)
                weights += class_weight
                smooth += tl.where(mask, value * class_weight[None, :], 0.0)
            else:
                smooth += tl.where(mask, value, 0.0)
        value = tl.where(mask, value, float("-inf"))
        if statistics.best is not None:
            largest, index = tl.max(value, 1, return_indices=True)
            best = tl.where(largest > maximum, start + index.to(tl.int64), best)
        else:
            largest = tl.max(value, 1)
        largest = tl.maximum(maximum, largest)
        # Rows of -inf so far are not shifted: -inf - -inf would be nan.
        shift = tl.where(largest == float("-inf"), 0.0, largest)
        sums = sums * libdevice.exp(maximum - shift)[:, None] + libdevice.exp(value - shift[:, None])
        maximum = largest
    return tl.sum(sums, 1), tl.sum(smooth, 1), tl.sum(weights, 0), best, maximum


@triton.jit
def _statistics_of_rows(x, offset, row_mask, rows, classes, weight, statistics, softcap, META: tl.constexpr):
    """Return what `_store_statistics` stores of whole rows."""
    total, smooth, weights, best, maximum = _statistics_of_columns(
        x, offset, row_mask, rows, classes, 0, classes.own, weight, statistics, softcap, META
    )
    return maximum + libdevice.log(total), smooth, weights, best + classes.first, maximum


@triton.jit
def _store_statistics(statistics, row, row_mask, found, logit):
    """Store lse, weighted sum of logits, sum of class weights, class of the largest logit, and the largest logit."""
    lse, smooth, weights, best, maximum = found
    tl.store(statistics.lse + row, lse, mask=row_mask)
    tl.store(statistics.target_logit + row, logit, mask=row_mask)
    if statistics.smooth is not None:
        tl.store(statistics.smooth + row, smooth, mask=row_mask)
    if statistics.weight_sum is not None:
        # Every program has the same sum.
        tl.store(statistics.weight_sum, weights, mask=tl.program_id(0) == 0)
    if statistics.best is not None:
        tl.store(statistics.best + row, best, mask=row_mask)
    if statistics.maximum is not None:
        tl.store(statistics.maximum + row, maximum, mask=row_mask)


@triton.jit
def _target_logits(x, offset, target, counts, rows, classes, softcap, META: tl.constexpr):
    """Return the logit of each row's target: 0 for a class of another shard, nan for a target that is no class."""
    own = target - classes.first
    exists = counts & (own >= 0) & (own < classes.own)
    pointers = x + (offset + own.to(META.index) * rows.column_stride)
    logit = _capped(tl.load(pointers, mask=exists, other=0)[None, :], softcap, META)
    logit = tl.reshape(logit, (META.rows,))
    logit = tl.where(exists, logit, 0.0)
    return tl.where(counts & ((target < 0) | (target >= classes.every)), float("nan"), logit)


@triton.jit
def _rows_of_program(n_rows, META: tl.constexpr):
    """Return the META.rows rows of a program, and which of them exist."""
    row = tl.program_id(0).to(META.index) * META.rows + tl.arange(0, META.rows)
    return row, row < n_rows


@libentry()
@triton.jit(do_not_specialize=["n_rows", "ignore_index"])
def read_rows(
    x,
    targets,
    statistics,
    rows,
    classes,
    n_rows,
    ignore_index: tl.int64,
    softcap: tl.float64,
    META: tl.constexpr,
):
    """Store the statistics of META.rows rows of logits, which are read once."""
    wait_for_previous_launch()
    row, row_mask = _rows_of_program(n_rows, META)
    offset = strided_offset(row, rows.shape, rows.strides)
    found = _statistics_of_rows(x, offset, row_mask, rows, classes, targets.weight, statistics, softcap, META)
    target, _, counts = _weights_of_targets(targets, row, row_mask, classes.every, ignore_index, META)
    logit = _target_logits(x, offset, target, counts, rows, classes, softcap, META)
    _store_statistics(statistics, row, row_mask, found, logit)


@libentry()
@triton.jit(do_not_specialize=["n_rows", "slice_columns"])
def read_slices(
    x,
    weight,
    partial,
    rows,
    classes,
    n_rows,
    slice_columns,
    softcap: tl.float64,
    META: tl.constexpr,
):
    """Store the statistics of a slice of META.rows rows of logits: `slice_columns` columns, a multiple of a block."""
    wait_for_previous_launch()
    row, row_mask = _rows_of_program(n_rows, META)
    offset = strided_offset(row, rows.shape, rows.strides)
    begin = tl.program_id(1) * slice_columns
    end = tl.minimum(begin + slice_columns, classes.own)
    total, smooth, weights, best, maximum = _statistics_of_columns(
        x, offset, row_mask, rows, classes, begin, end, weight, partial, softcap, META
    )
    index = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(partial.maximum + index, maximum, mask=row_mask)
    tl.store(partial.total + index, total, mask=row_mask)
    if partial.smooth is not None:
        tl.store(partial.smooth + index, smooth, mask=row_mask)
    if partial.best is not None:
        tl.store(partial.best + index, best, mask=row_mask)
    if partial.weight_sum is not None:
        # Programs of all rows have the same sum.
        tl.store(partial.weight_sum + tl.program_id(1), weights, mask=tl.program_id(0) == 0)


@libentry()
@triton.jit(do_not_specialize=["n_rows", "n_slices", "ignore_index"])
def combine_slices(
    x,
    targets,
    partial,
    statistics,
    rows,
    classes,
    n_rows,
    n_slices,
    ignore_index: tl.int64,
    softcap: tl.float64,
    META: tl.constexpr,
):
    """Store the statistics of META.rows rows of logits from those of their slices, at most META.columns."""
    wait_for_previous_launch()
    row, row_mask = _rows_of_program(n_rows, META)
    piece = tl.arange(0, META.columns)
    mask = row_mask[:, None] & (piece < n_slices)[None, :]
    index = row[:, None] * n_slices + piece[None, :]
    each = tl.load(partial.maximum + index, mask=mask, other=float("-inf"))
    total = tl.load(partial.total + index, mask=mask, other=0)
    maximum = tl.max(each, 1)
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    lse = maximum + libdevice.log(tl.sum(total * libdevice.exp(each - shift[:, None]), 1))
    smooth, weights, best = lse, lse, row
    if partial.smooth is not None:
        smooth = tl.sum(tl.load(partial.smooth + index, mask=mask, other=0), 1)
    if partial.weight_sum is not None:
        weights = tl.sum(tl.load(partial.weight_sum + piece, mask=piece < n_slices, other=0), 0)
    if partial.best is not None:
        # Slices ascend, so the first of equal logits has the least column.
        own = tl.load(partial.best + index, mask=mask, other=0)
        best = tl.min(tl.where(mask & (each == maximum[:, None]), own, classes.own), 1) + classes.first
    target, _, counts = _weights_of_targets(targets, row, row_mask, classes.every, ignore_index, META)
    offset = strided_offset(row, rows.shape, rows.strides)
    logit = _target_logits(x, offset, target, counts, rows, classes, softcap, META)
    _store_statistics(statistics, row, row_mask, (lse, smooth, weights, best, maximum), logit)


@triton.jit
def _token_scales(targets, row, row_mask, META: tl.constexpr):
    if targets.token_scale is not None:
        scale = tl.load(targets.token_scale + row, mask=row_mask, other=0).to(META.compute)
    else:
        scale = tl.full((META.rows,), 1.0, META.compute)
    return scale


@triton.jit
def _gradient_block(
    raw,
    column,
    column_mask,
    own_target,
    weight,
    scale,
    lse,
    class_weight,
    weight_sum,
    classes,
    label_smoothing,
    softcap,
    z_loss,
    META: tl.constexpr,
):
    """Return the gradient by a block of logits `raw`, times the rows' `scale`.

    `own_target` is the column of each row's target and `weight` its class weight, `class_weight` the tensor of all.
    """
    logit = _capped(raw, softcap, META)
    factor, share = weight, weight
    if META.smoothing:
        smoothing = _number(label_smoothing, META)
        each = true_divide(smoothing, tl.full((1,), classes.every, META.compute))
        share = weight * (1.0 - smoothing)
        factor = share + each * weight_sum
    if META.z_loss:
        factor = factor + 2.0 * _number(z_loss, META) * lse
    gradient = libdevice.exp(logit - lse[:, None]) * factor[:, None]
    if META.smoothing:
        if class_weight is not None:
            other = tl.load(class_weight + classes.first + column, mask=column_mask, other=0).to(META.compute)
            gradient -= (each * other)[None, :]
        else:
            gradient -= each[None, :]
    gradient = tl.where(column[None, :] == own_target[:, None], gradient - share[:, None], gradient)
    if META.softcap:
        ratio = true_divide(logit, _number(softcap, META)[None, :])
        gradient *= 1.0 - ratio * ratio
    return gradient * scale[:, None]


@triton.jit
def _sum_of_weights(weight_sum, weight, classes, META: tl.constexpr):
    """Return the sum of all class weights, which is the number of classes without weights."""
    total = tl.full((1,), classes.every, META.compute)
    if META.smoothing and weight is not None:
        total = tl.load(weight_sum + tl.arange(0, 1))
    return total


@libentry()
@triton.jit(do_not_specialize=["n_rows", "ignore_index"])
def replace_by_gradient(
    x,
    targets,
    statistics,
    rows,
    classes,
    n_rows,
    ignore_index: tl.int64,
    label_smoothing: tl.float64,
    softcap: tl.float64,
    z_loss: tl.float64,
    META: tl.constexpr,
):
    """Store the statistics of META.rows rows of logits, and the gradient of their losses' sum over the logits."""
    wait_for_previous_launch()
    row, row_mask = _rows_of_program(n_rows, META)
    offset = strided_offset(row, rows.shape, rows.strides)
    target, weight, counts = _weights_of_targets(targets, row, row_mask, classes.every, ignore_index, META)
    logit = _target_logits(x, offset, target, counts, rows, classes, softcap, META)
    found = _statistics_of_rows(x, offset, row_mask, rows, classes, targets.weight, statistics, softcap, META)
    _store_statistics(statistics, row, row_mask, found, logit)
    scale = _token_scales(targets, row, row_mask, META)
    weight_sum = tl.full((1,), classes.every, META.compute)
    if targets.weight is not None:
        weight_sum = tl.full((1,), found[2], META.compute)
    own_target = tl.where(counts, target - classes.first, -1).to(tl.int32)
    # The logits of targets are loaded before another thread overwrites them.
    tl.debug_barrier()
    COLUMNS: tl.constexpr = META.columns
    for start in range(0, classes.own, COLUMNS):
        column = start + tl.arange(0, META.columns)
        column_mask = column < classes.own
        mask = row_mask[:, None] & _in_memory(column, classes.own, META)[None, :]
        pointers = x + (offset[:, None] + column.to(META.index)[None, :] * rows.column_stride)
        raw = tl.load(pointers, mask=mask, other=0)
        gradient = _gradient_block(
            *(raw, column, column_mask, own_target, weight, scale, found[0], targets.weight, weight_sum, classes),
            *(label_smoothing, softcap, z_loss, META),
        )
        gradient = tl.where(counts[:, None], gradient, 0.0)
        tl.store(pointers, gradient.to(x.dtype.element_ty), mask=mask)


@libentry()
@triton.jit(do_not_specialize=["n_rows", "ignore_index"])
def write_gradient(
    grad,
    x,
    out,
    targets,
    lse,
    weight_sum,
    total,
    rows,
    out_rows,
    classes,
    n_rows,
    grad_stride,
    ignore_index: tl.int64,
    label_smoothing: tl.float64,
    softcap: tl.float64,
    z_loss: tl.float64,
    META: tl.constexpr,
):
    """Write the gradient by a block of META.rows by META.columns logits to `out`, which may be `x` itself.

    `grad` has an element per row, or one element and the stride 0, or is None for 1. With META.mean it is divided by
    `total`.
    """
    wait_for_previous_launch()
    row, row_mask = _rows_of_program(n_rows, META)
    column = tl.program_id(1) * META.columns + tl.arange(0, META.columns)
    column_mask = column < classes.own
    mask = row_mask[:, None] & _in_memory(column, classes.own, META)[None, :]
    offset = strided_offset(row, rows.shape, rows.strides)
    raw = tl.load(x + (offset[:, None] + column.to(META.index)[None, :] * rows.column_stride), mask=mask, other=0)
    target, weight, counts = _weights_of_targets(targets, row, row_mask, classes.every, ignore_index, META)
    if grad is None:
        scale = tl.full((META.rows,), 1.0, META.compute)
    else:
        scale = tl.load(grad + row * grad_stride, mask=row_mask, other=0).to(META.compute)
    if META.mean:
        scale = true_divide(scale, tl.broadcast_to(tl.load(total + tl.arange(0, 1)), (META.rows,)))
    scale *= _token_scales(targets, row, row_mask, META)
    gradient = _gradient_block(
        *(raw, column, column_mask, tl.where(counts, target - classes.first, -1), weight, scale),
        *(tl.load(lse + row, mask=row_mask, other=0), targets.weight),
        *(_sum_of_weights(weight_sum, targets.weight, classes, META), classes),
        *(label_smoothing, softcap, z_loss, META),
    )
    gradient = tl.where(counts[:, None], gradient, 0.0)
    offset = strided_offset(row, out_rows.shape, out_rows.strides)
    pointers = out + (offset[:, None] + column.to(META.index)[None, :] * out_rows.column_stride)
    tl.store(pointers, gradient.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _losses_of_rows(
    row, mask, targets, statistics, n_classes, ignore_index, label_smoothing, z_loss, META: tl.constexpr
):
    """Return each row's loss, z-loss, weight of its target, and whether it counts."""
    target, weight, counts = _weights_of_targets(targets, row, mask, n_classes, ignore_index, META)
    lse = tl.load(statistics.lse + row, mask=mask, other=0)
    loss = weight * (lse - tl.load(statistics.target_logit + row, mask=mask, other=0))
    if META.smoothing:
        smoothing = _number(label_smoothing, META)
        count = tl.full((1,), n_classes, META.compute)
        weights = count
        if statistics.weight_sum is not None:
            weights = tl.load(statistics.weight_sum + tl.arange(0, 1))
        smooth = weights * lse - tl.load(statistics.smooth + row, mask=mask, other=0)
        loss = loss * (1.0 - smoothing) + true_divide(smoothing, count) * smooth
    z = tl.full((META.rows,), 0.0, META.compute)
    if META.z_loss:
        z = _number(z_loss, META) * lse * lse
        loss += z
    scale = _token_scales(targets, row, mask, META)
    return tl.where(counts, loss * scale, 0.0), tl.where(counts, z * scale, 0.0), weight, target, counts


@libentry()
@triton.jit(do_not_specialize=["n_rows", "ignore_index"])
def finish_losses(
    targets,
    statistics,
    results,
    n_rows,
    n_classes,
    ignore_index: tl.int64,
    label_smoothing: tl.float64,
    z_loss: tl.float64,
    META: tl.constexpr,
):
    """Store losses, z-losses and whether the largest logit is the target's, for rows or if META.reduced, for all.

    The only program of a reduction adds up float64. A mean is divided by the total weight of the targets, which is
    stored in `results.total`: 0 if no row counts, nan if the weights of the rows that count add up to 0. The accuracy
    is divided by the number of rows that count.
    """
    wait_for_previous_launch()
    if META.reduced:
        losses = tl.full((META.rows,), 0.0, tl.float64)
        zs = tl.full((META.rows,), 0.0, tl.float64)
        weights = tl.full((META.rows,), 0.0, tl.float64)
        hits = tl.full((META.rows,), 0.0, tl.float64)
        counted = tl.full((META.rows,), 0.0, tl.float64)
        ROWS: tl.constexpr = META.rows
        for start in range(0, n_rows, ROWS):
            row = start + tl.arange(0, META.rows)
            loss, z, weight, target, counts = _losses_of_rows(
                row, row < n_rows, targets, statistics, n_classes, ignore_index, label_smoothing, z_loss, META
            )
            losses += loss.to(tl.float64)
            zs += z.to(tl.float64)
            weights += weight.to(tl.float64)
            counted += tl.where(counts, 1.0, 0.0).to(tl.float64)
            if results.accuracy is not None:
                hit = counts & (tl.load(statistics.best + row, mask=row < n_rows, other=-1) == target)
                hits += tl.where(hit, 1.0, 0.0).to(tl.float64)
        total = tl.sum(weights, 0)
        if META.mean:
            # ATen divides a loss of 0 by 0, so that the mean and the gradients of the rows that count are nan.
            total = tl.where((total == 0) & (tl.sum(counted, 0) > 0), float("nan"), total)
        divisor = total if META.mean else tl.full((), 1.0, tl.float64)
        tl.store(results.loss, (tl.sum(losses, 0) / divisor).to(META.compute))
        if results.total is not None:
            tl.store(results.total, total.to(META.compute))
        if results.z_loss is not None:
            tl.store(results.z_loss, (tl.sum(zs, 0) / divisor).to(META.compute))
        if results.accuracy is not None:
            tl.store(results.accuracy, (tl.sum(hits, 0) / tl.sum(counted, 0)).to(META.compute))
    else:
        row = tl.program_id(0) * META.rows + tl.arange(0, META.rows)
        mask = row < n_rows
        loss, z, _, target, counts = _losses_of_rows(
            row, mask, targets, statistics, n_classes, ignore_index, label_smoothing, z_loss, META
        )
        tl.store(results.loss + row, loss, mask=mask)
        if results.z_loss is not None:
            tl.store(results.z_loss + row, z, mask=mask)
        if results.accuracy is not None:
            hit = counts & (tl.load(statistics.best + row, mask=mask, other=-1) == target)
            tl.store(results.accuracy + row, tl.where(hit, 1.0, 0.0).to(META.compute), mask=mask)


@libentry()
@triton.jit(do_not_specialize=["n", "size", "ignore_index"])
def scale_gradient(x, out, grad, total, target, n, size, ignore_index: tl.int64, META: tl.constexpr):
    """Write x times the loss's gradient, with META.mean over the total weight, for META.columns of n elements.

    `target` is that of the rows of x, which have `size` elements, or None where x is no gradient by rows.
    """
    wait_for_previous_launch()
    index = tl.program_id(0).to(META.index) * META.columns + tl.arange(0, META.columns)
    factor = tl.load(grad + tl.arange(0, 1)).to(META.compute)
    if META.mean:
        divisor = tl.load(total)
        # Without a row that counts, every gradient is 0.
        factor = tl.where(divisor == 0, 0.0, true_divide(factor, tl.broadcast_to(divisor, (1,))))
        if target is not None:
            factor = tl.broadcast_to(factor, (META.columns,))
            if divisor != divisor:
                # Ignored rows have a gradient of 0 where others have nan.
                own = tl.load(target + index // size, mask=index < n, other=0)
                factor = tl.where(own == ignore_index, 0.0, factor)
    value = tl.load(x + index, mask=index < n, other=0).to(META.compute) * factor
    tl.store(out + index, value.to(out.dtype.element_ty), mask=index < n)


@libentry()
@triton.jit(do_not_specialize=["n_rows"])
def add_columns(x, out, row_stride, n_rows, n_columns, ACCUMULATE: tl.constexpr, META: tl.constexpr):
    """Write the sums of META.columns columns of a matrix to `out`, or with ACCUMULATE add them to it."""
    wait_for_previous_launch()
    column = tl.program_id(0) * META.columns + tl.arange(0, META.columns)
    column_mask = column < n_columns
    sums = tl.full((META.rows, META.columns), 0.0, META.compute)
    ROWS: tl.constexpr = META.rows
    for start in range(0, n_rows, ROWS):
        row = start + tl.arange(0, META.rows)
        pointers = x + (row.to(META.index)[:, None] * row_stride + column[None, :])
        sums += tl.load(pointers, mask=(row < n_rows)[:, None] & column_mask[None, :], other=0).to(META.compute)
    total = tl.sum(sums, 0)
    if ACCUMULATE:
        total += tl.load(out + column, mask=column_mask, other=0).to(META.compute)
    tl.store(out + column, total.to(out.dtype.element_ty), mask=column_mask)
