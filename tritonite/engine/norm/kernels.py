"""The norm kernels whose rows registers hold, or of which a program takes a slice.

Let h = x + residual, h' = (h - mean) * rstd, and a the output's gradient g times the weight. The gradient by h is
rstd * (a - mean(a) - h' * mean(a h')) (Ba, Kiros, Hinton 2016), and the new residual's gradient is added. A root mean
square norm has no mean (Zhang and Sennrich 2019). The gradients by weight and bias are the sums over rows of g h' and
of g.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tritonite.engine.rows.formulas import add_states, gradient_of_normalized, normalized_by
from tritonite.engine.rows.load import inside
from tritonite.language.math import inverse, square_root, true_divide
from tritonite.language.order import wait_for_previous_launch
from tritonite.language.quantize import BLOCK, block_maxima, inverse_scale, quantized, scale_of
from tritonite.language.reduce import reduce_rows_in_order
from tritonite.runtime.libentry import libentry


@triton.jit
def _keep_packed(value, PACKED: tl.constexpr):
    """Return the value; with PACKED two 16-bit floats stay in one register until here, not each as float32."""
    if PACKED and value.dtype.primitive_bitwidth == 16:
        value = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], dtype=value.dtype, is_pure=False, pack=2)
    return value


@triton.jit
def _sum_of_rows(values, IN_ORDER: tl.constexpr):
    """Return the sum of each row as a column, with IN_ORDER added up independently of the layout."""
    if IN_ORDER:
        total = reduce_rows_in_order((values,), add_states)[0]
    else:
        total = tl.sum(values, 1)
    return total[:, None]


@triton.jit
def _offset_weight(weight, META: tl.constexpr):
    """Return a chunk of the weight as a row in the compute dtype, with the offset."""
    weight = _keep_packed(weight, META.packed).to(META.compute)[None, :]
    if META.offset != 0.0:
        weight += META.offset
    return weight


@triton.jit
def _scaled(value, scales, META: tl.constexpr, ELEMENT: tl.constexpr):
    """Return normalised values times the weight and plus the bias, in the compute dtype.

    If META.round_normalized, the values are rounded to ELEMENT first, and the weight with its offset to its dtype.
    """
    ROUNDED: tl.constexpr = META.round_normalized
    if ROUNDED:
        value = value.to(ELEMENT).to(META.compute)
    if META.weight:
        if ROUNDED:
            weight = _keep_packed(scales[0], META.packed).to(META.compute)[None, :]
            if META.offset != 0.0:
                weight = (weight + META.offset).to(scales[0].dtype).to(META.compute)
        else:
            weight = _offset_weight(scales[0], META)
        value *= weight
    if META.bias:
        value += _keep_packed(scales[len(scales) - 1], META.packed).to(META.compute)[None, :]
    return value


@libentry()
@triton.jit
def norm_forward(
    operands,
    parameters,
    outs,
    scales_of_rows,
    statistics,
    row_strides,
    column_strides,
    n_rows,
    n_columns,
    eps: tl.float64,
    META: tl.constexpr,
):
    """Normalise the sum of the `operands` in a persistent program, META.rows rows at a time.

    `outs` are the normalised sum and, of two operands, the sum. `statistics` are rstd and, for layer norm, the mean.
    They are stored if given, or loaded if META.given, where several programs take slices of a row. `parameters` are a
    weight and a bias, or one of them. `scales_of_rows` has the quantised values' scales. A second pass over the
    registers computes the variance and corrects the mean (Chan, Golub, LeVeque 1983).
    """
    wait_for_previous_launch()
    INDEX: tl.constexpr = META.index
    COMPUTE: tl.constexpr = META.compute
    ROWS: tl.constexpr = META.rows
    COLUMNS: tl.constexpr = META.columns
    CHUNKS: tl.constexpr = META.chunks
    WHOLE: tl.constexpr = META.whole
    first = tl.program_id(1) * (CHUNKS * COLUMNS)
    LAYER: tl.constexpr = META.layer
    ELEMENT: tl.constexpr = operands[0].dtype.element_ty
    OUT: tl.constexpr = outs[0].dtype.element_ty
    N_BLOCKS: tl.constexpr = max(1, COLUMNS // BLOCK)
    scales = ()
    if META.granularity == "tensor":
        fixed = inverse_scale(tl.load(scales_of_rows[0]))
    for chunk in tl.static_range(CHUNKS):
        column = first + chunk * COLUMNS + tl.arange(0, COLUMNS)
        mask = inside(column, n_columns, chunk < WHOLE)
        for i in tl.static_range(len(parameters)):
            scales = scales + (tl.load(parameters[i] + column, mask=mask, other=0),)
    for block in tl.range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0), num_stages=META.stages):
        row = tl.full((ROWS,), block, INDEX) * ROWS + tl.arange(0, ROWS)
        row_mask = inside(row, n_rows, ROWS == 1)
        values = ()
        sums = tl.zeros((ROWS, COLUMNS), COMPUTE)
        for chunk in tl.static_range(CHUNKS):
            index = (first + chunk * COLUMNS + tl.arange(0, COLUMNS)).to(INDEX)
            both = row_mask[:, None] & inside(index, n_columns, chunk < WHOLE)[None, :]
            offset = row[:, None] * row_strides[0] + index[None, :] * column_strides[0]
            value = tl.load(operands[0] + offset, mask=both, other=0).to(COMPUTE)
            if len(operands) > 1:
                offset = row[:, None] * row_strides[1] + index[None, :] * column_strides[1]
                value += tl.load(operands[1] + offset, mask=both, other=0).to(COMPUTE)
                if not META.in_place:
                    offset = row[:, None] * n_columns + index[None, :]
                rounded = value.to(ELEMENT)
                tl.store(outs[1] + offset, rounded, mask=both)
                if META.round_total:
                    value = rounded.to(COMPUTE)
            values = values + (value,)
            if LAYER:
                sums += value
            else:
                sums += value * value
        if META.given:
            rstd = tl.load(statistics[0] + row, mask=row_mask, other=0)[:, None]
            if LAYER:
                mean = tl.load(statistics[1] + row, mask=row_mask, other=0)[:, None]
        else:
            count = tl.full((ROWS, 1), n_columns, COMPUTE)
            square = true_divide(_sum_of_rows(sums, META.in_order), count)
            if LAYER:
                estimate = square
                errors = tl.zeros((ROWS, COLUMNS), COMPUTE)
                squares = tl.zeros((ROWS, COLUMNS), COMPUTE)
                for chunk in tl.static_range(CHUNKS):
                    index = first + chunk * COLUMNS + tl.arange(0, COLUMNS)
                    error = values[chunk] - estimate
                    error = tl.where(inside(index, n_columns, chunk < WHOLE)[None, :], error, 0.0)
                    errors += error
                    squares += error * error
                error = true_divide(_sum_of_rows(errors, META.in_order), count)
                mean = estimate + error
                square = tl.maximum(true_divide(_sum_of_rows(squares, META.in_order), count) - error * error, 0.0)
                if len(statistics) > 0:
                    tl.store(statistics[1] + row, tl.reshape(mean, (ROWS,)), mask=row_mask)
            rstd = inverse(square_root(square + tl.full((ROWS, 1), eps, tl.float64).to(COMPUTE)))
            if len(statistics) > 0:
                tl.store(statistics[0] + row, tl.reshape(rstd, (ROWS,)), mask=row_mask)
        results = ()
        maxima = tl.zeros((ROWS, COLUMNS), tl.float32)
        for chunk in tl.static_range(CHUNKS):
            index = (first + chunk * COLUMNS + tl.arange(0, COLUMNS)).to(INDEX)
            both = row_mask[:, None] & inside(index, n_columns, chunk < WHOLE)[None, :]
            value = values[chunk]
            if LAYER:
                value = value - mean
            own = scales[chunk * len(parameters) : (chunk + 1) * len(parameters)]
            value = _scaled(value * rstd, own, META, ELEMENT)
            if META.in_place:
                offset = row[:, None] * row_strides[0] + index[None, :] * column_strides[0]
            else:
                offset = row[:, None] * n_columns + index[None, :]
            if META.granularity == "":
                tl.store(outs[0] + offset, value.to(OUT), mask=both)
            else:
                # Rounded as if it had been stored, so that a quantisation of the stored norm gives the same.
                value = tl.where(both, value.to(ELEMENT).to(tl.float32), 0.0)
                if META.granularity == "token":
                    results = results + (value,)
                    maxima = tl.maximum(maxima, tl.abs(value))
                elif META.granularity == "block":
                    scale = scale_of(block_maxima(value, N_BLOCKS), META.most)
                    block_index = (first + chunk * COLUMNS) // BLOCK + tl.arange(0, N_BLOCKS).to(INDEX)
                    n_blocks = tl.cdiv(n_columns, BLOCK)
                    pointers = scales_of_rows[0] + row[:, None] * n_blocks + block_index[None, :]
                    tl.store(pointers, scale, mask=row_mask[:, None] & (block_index < n_blocks)[None, :])
                    value = tl.reshape(value, (ROWS, N_BLOCKS, COLUMNS // N_BLOCKS)) * inverse_scale(scale)[:, :, None]
                    value = tl.reshape(value, (ROWS, COLUMNS))
                    tl.store(outs[0] + offset, quantized(value, META.most, OUT), mask=both)
                else:
                    tl.store(outs[0] + offset, quantized(value * fixed, META.most, OUT), mask=both)
        if META.granularity == "token":
            scale = scale_of(tl.max(maxima, 1), META.most)
            tl.store(scales_of_rows[0] + row, scale, mask=row_mask)
            factor = inverse_scale(scale)[:, None]
            for chunk in tl.static_range(CHUNKS):
                index = (first + chunk * COLUMNS + tl.arange(0, COLUMNS)).to(INDEX)
                both = row_mask[:, None] & inside(index, n_columns, chunk < WHOLE)[None, :]
                pointers = outs[0] + row[:, None] * n_columns + index[None, :]
                tl.store(pointers, quantized(results[chunk] * factor, META.most, OUT), mask=both)


@libentry()
@triton.jit
def norm_backward(
    grads,
    total,
    statistics,
    weight,
    means,
    grad_input,
    partials,
    row_strides,
    column_strides,
    n_rows,
    n_columns,
    META: tl.constexpr,
):
    """Compute the gradient by the sum in a persistent program, META.rows rows at a time.

    `grads` are the gradients of the normalised sum and, optionally, of the sum. `statistics` are rstd and, for layer
    norm, the mean. The program's sums over rows, for the gradients by weight and bias, are stored in `partials`. Where
    several programs take slices of a row, `means` are given: of `weighted` (layer norm only) and of its product with
    h'.
    """
    wait_for_previous_launch()
    INDEX: tl.constexpr = META.index
    COMPUTE: tl.constexpr = META.compute
    ROWS: tl.constexpr = META.rows
    COLUMNS: tl.constexpr = META.columns
    CHUNKS: tl.constexpr = META.chunks
    WHOLE: tl.constexpr = META.whole
    SUMS: tl.constexpr = META.weight + META.bias
    program, programs = tl.program_id(0), tl.num_programs(0)
    first = tl.program_id(1) * (CHUNKS * COLUMNS)
    LAYER: tl.constexpr = len(statistics) > 1
    weights = ()
    sums = ()
    for chunk in tl.static_range(CHUNKS):
        column = first + chunk * COLUMNS + tl.arange(0, COLUMNS)
        mask = inside(column, n_columns, chunk < WHOLE)
        if len(weight) > 0:
            weights = weights + (tl.load(weight[0] + column, mask=mask, other=0),)
        for _ in tl.static_range(SUMS):
            sums = sums + (tl.zeros((ROWS, COLUMNS), COMPUTE),)
    for block in tl.range(program, tl.cdiv(n_rows, ROWS), programs, num_stages=META.stages):
        row = tl.full((ROWS,), block, INDEX) * ROWS + tl.arange(0, ROWS)
        row_mask = inside(row, n_rows, ROWS == 1)
        rstd = tl.load(statistics[0] + row, mask=row_mask, other=0).to(COMPUTE)[:, None]
        mean, mean_weighted = 0.0, 0.0
        if LAYER:
            mean = tl.load(statistics[1] + row, mask=row_mask, other=0).to(COMPUTE)[:, None]
        values = ()
        products = tl.zeros((ROWS, COLUMNS), COMPUTE)
        weighted_sums = tl.zeros((ROWS, COLUMNS), COMPUTE)
        for chunk in tl.static_range(CHUNKS):
            index = (first + chunk * COLUMNS + tl.arange(0, COLUMNS)).to(INDEX)
            both = row_mask[:, None] & inside(index, n_columns, chunk < WHOLE)[None, :]
            offset = row[:, None] * row_strides[0] + index[None, :] * column_strides[0]
            grad = tl.load(grads[0] + offset, mask=both, other=0)
            h = tl.load(total + row[:, None] * n_columns + index[None, :], mask=both, other=0)
            values = values + (grad, h)
            if len(means) == 0:
                weighted = grad.to(COMPUTE)
                if len(weight) > 0:
                    weighted *= _offset_weight(weights[chunk], META)
                products += weighted * normalized_by(h.to(COMPUTE), mean, rstd)
                if LAYER:
                    weighted_sums += weighted
        if len(means) > 0:
            mean_product = tl.load(means[len(means) - 1] + row, mask=row_mask, other=0)[:, None]
            if LAYER:
                mean_weighted = tl.load(means[0] + row, mask=row_mask, other=0)[:, None]
        else:
            count = tl.full((ROWS, 1), n_columns, COMPUTE)
            mean_product = true_divide(_sum_of_rows(products, META.in_order), count)
            if LAYER:
                mean_weighted = true_divide(_sum_of_rows(weighted_sums, META.in_order), count)
        added = ()
        for chunk in tl.static_range(CHUNKS):
            index = (first + chunk * COLUMNS + tl.arange(0, COLUMNS)).to(INDEX)
            both = row_mask[:, None] & inside(index, n_columns, chunk < WHOLE)[None, :]
            grad = _keep_packed(values[2 * chunk], META.packed).to(COMPUTE)
            h = normalized_by(_keep_packed(values[2 * chunk + 1], META.packed).to(COMPUTE), mean, rstd)
            if META.weight:
                added = added + (sums[len(added)] + grad * h,)
            if META.bias:
                added = added + (sums[len(added)] + grad,)
            if len(weight) > 0:
                grad *= _offset_weight(weights[chunk], META)
            grad = gradient_of_normalized(grad, h, mean_weighted, mean_product, rstd)
            if len(grads) > 1:
                offset = row[:, None] * row_strides[1] + index[None, :] * column_strides[1]
                grad += tl.load(grads[1] + offset, mask=both, other=0).to(COMPUTE)
            pointers = grad_input + row[:, None] * n_columns + index[None, :]
            tl.store(pointers, grad.to(grad_input.dtype.element_ty), mask=both)
        sums = added
    for chunk in tl.static_range(CHUNKS):
        column = first + chunk * COLUMNS + tl.arange(0, COLUMNS)
        mask = inside(column, n_columns, chunk < WHOLE)
        for i in tl.static_range(SUMS):
            pointers = partials + (i * programs + program).to(INDEX) * n_columns + column
            tl.store(pointers, tl.sum(sums[chunk * SUMS + i], 0), mask=mask)


@libentry()
@triton.jit
def add_partials(partials, outs, n_programs, n_columns, PROGRAMS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add up the partial sums of all programs, in their order. The grid's second dimension is the output."""
    wait_for_previous_launch()
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    program = tl.arange(0, PROGRAMS)[:, None]
    mask = column < n_columns
    for i in tl.static_range(len(outs)):
        if tl.program_id(1) == i:
            pointers = partials + (i * n_programs + program).to(tl.int64) * n_columns + column[None, :]
            values = tl.load(pointers, mask=(program < n_programs) & mask[None, :], other=0)
            tl.store(outs[i] + column, tl.sum(values, 0).to(outs[i].dtype.element_ty), mask=mask)
