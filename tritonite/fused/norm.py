"""Normalisation of a sum: the residual connection and the norm after it, forward and backward.

With h = x + residual and h' = (h - mean) * rstd, the gradient by h is rstd * (a - mean of a - h' * mean of a h'), where
a is the output's gradient g times the weight (Ba, Kiros, Hinton 2016), and the new residual's gradient is added to it;
a root mean square has no mean (Zhang and Sennrich 2019). Those by weight and bias are sums of g h' and of g over rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.dtypes import FLOATS, TRITON_DTYPES, opmath
from tritonite.engine.iteration import offset_type, power_of_2
from tritonite.engine.rows.declare import Reduction
from tritonite.engine.rows.kernels import inside
from tritonite.fused.check import check_alike, check_parameters, check_shape
from tritonite.fused.norm_ring import norm_backward_by_ring
from tritonite.language.math import inverse, square_root, true_divide
from tritonite.language.order import wait_for_previous_launch
from tritonite.language.reduce import reduce_rows_in_order
from tritonite.ops.normalization import BACKWARD, RMS_BACKWARD, gradient_of_normalized, mean_and_rstd, normalized_by
from tritonite.ops.reduction import add_states, combine_moments, moment_leaf, over_count
from tritonite.registry import library_operator
from tritonite.runtime.contract import empty, fusion, settings, zeros
from tritonite.runtime.libentry import libentry


def skip_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Layer normalisation of x + residual over the last dimension, and the sum itself, which is the next residual.

    The sum is normalised as it is computed, in float32 of half types, and rounded only where it is a result. Each
    tensor is read and written once, forward and backward, but those of rows too long for a program's registers.

    Args:
        x: (..., N) of float16, bfloat16, float32 or float64, of any strides.
        residual: the same shape and dtype.
        weight: (N,) of x's dtype or float32, or None for none.
        bias: likewise.
        eps: what is added to the variance.

    Returns the normalised sum and the sum, both contiguous, of x's shape and dtype.

    Raises errors.Unsupported for other shapes or dtypes, and for tensors on several devices.

    Source: Ba, Kiros, Hinton 2016, "Layer Normalization".
    """
    normalized, total, _, _ = torch.ops.tritonite.skip_layer_norm(x, residual, weight, bias, eps)
    return normalized, total


def skip_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None = None, eps: float | None = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """Root mean square normalisation of x + residual over the last dimension, and the sum, which is the next residual.

    The sum is normalised as it is computed, in float32 of half types, and rounded only where it is a result. Each
    tensor is read and written once, forward and backward, but those of rows too long for a program's registers.

    Args:
        x: (..., N) of float16, bfloat16, float32 or float64, of any strides.
        residual: the same shape and dtype.
        weight: (N,) of x's dtype or float32, or None for none.
        eps: what is added to the mean of squares; None for the resolution of the dtype computed in, as of
            torch.nn.functional.rms_norm.

    Returns the normalised sum and the sum, both contiguous, of x's shape and dtype.

    Raises errors.Unsupported for other shapes or dtypes, and for tensors on several devices.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
    """
    normalized, total, _ = torch.ops.tritonite.skip_rms_norm(x, residual, weight, eps)
    return normalized, total


# ---- How rows are cut ------------------------------------------------------------------------------------------------


class _Blocks(NamedTuple):
    """How rows are cut: `programs` take turns at them; of longer rows each takes one of so many parts, the `splits`.

    The `constants` are the kernels': ROWS rows at a time in CHUNKS of COLUMNS, the first WHOLE of which are known to be
    before a row's end; the STAGES of what is loaded before it is wanted; whether halves stay PACKED in registers; and
    whether rows are added up IN_ORDER, so that how many there are does not matter.
    """

    programs: int
    splits: int
    constants: dict[str, Any]


def _blocks(total: torch.Tensor, loaded: int, parameters: int, sums: int) -> _Blocks:
    """For rows as those of `total`, of so many tensors that are `loaded` beside `parameters` of columns.

    A program adds up `sums` of its columns, or none.
    """
    device, size = devices.current, total.dtype.itemsize
    n_rows, n_columns = total.shape
    tile = device.row_elements
    columns = min(power_of_2(n_columns), tile // 4 if n_columns <= tile // 2 else tile // 2)
    # Registers hold a row's elements, the parameters and what is added up: of float32 with two sums half as many.
    held = 4 * tile // max(1, size // 4) // (2 if sums > 1 and size == 4 else 1)
    chunks, most = -(-n_columns // columns), held // columns
    splits = 1 if chunks <= most else -(-chunks // 4)
    chunks = chunks if splits == 1 else 4
    elements = columns * chunks
    rows = max(1, min(tile // 2 // elements, power_of_2(n_rows)))
    # As many programs as a multiprocessor has registers for, and shared memory for a block of rows that is on its way
    # while one is computed with, or two; and what each adds up has to be written and read, too.
    crowded = elements > tile if sums else parameters > 1 and elements > 2 * tile
    each = 4 if rows * elements <= tile // 2 else 1 if crowded else 2
    room = (devices.shared_memory(total.device) - 2**12) // (loaded * rows * elements * size)
    # Two blocks on their way are worth more than two programs: rows of 8,192 halves took 53 us, and take 37.
    each = max(1, min(each, room // 2))
    # All take the same number of turns: a last one of a few programs would leave memory idle.
    turns = -(-n_rows // rows)
    programs = max(1, min(each * devices.multiprocessors(total.device) // splits, turns))
    programs = -(-turns // -(-turns // programs))
    whole = n_columns % (columns if splits == 1 else elements) == 0
    constants = {
        "ROWS": rows,
        "COLUMNS": columns,
        "CHUNKS": chunks,
        "WHOLE": chunks if whole else chunks - 1 if splits == 1 else 0,
        "STAGES": 1 + max(1, min(2, room // each)),
        "PACKED": device.ptx and size == 2 and elements > 2 * tile,
        "IN_ORDER": settings().invariant,
        "num_warps": 4 if rows * elements <= tile // 2 else 8,
    }
    return _Blocks(programs, splits, constants | device.options | fusion())


# A program of so many warps has a multiprocessor for itself, and a late ring of so many chunks.
_RING_WARPS, _LATE = 16, 4


def _ring(grads: tuple[torch.Tensor, ...], total: torch.Tensor, parameters: int, sums: int) -> _Blocks | None:
    """How rows stream through a ring in shared memory, with the `constants` of `norm_backward_by_ring`, or None.

    They do on NVIDIA's GPUs that have room for a row and a few chunks more, where rows lie at 16 bytes and there are
    enough of them for all multiprocessors. What is added up takes half of the registers at most.
    """
    device, size, (n_rows, n_columns) = devices.current, total.dtype.itemsize, total.shape
    programs, columns = devices.multiprocessors(total.device), _RING_WARPS * 32 * 16 // size
    chunks, late = -(-n_columns // columns), _LATE * (len(grads) - 1)
    # Reductions take some shared memory, too.
    ring = ((devices.shared_memory(total.device) - 2**11) // (columns * size) - late) // 2
    aligned = all(each.data_ptr() % 16 == 0 and each.stride(0) * size % 16 == 0 for each in (*grads, total))
    if not (device.ptx and size <= 4 and aligned and all(each.stride(1) == 1 for each in grads)):
        return None
    if n_rows < programs or sums * chunks * columns > device.registers // 2 or ring < chunks + _LATE // 2:
        return None
    # Two thirds of the registers hold the sums and as much of the weight.
    held = (2 * device.registers // 3 - sums * chunks * columns) // columns
    constants = {
        "CHUNKS": chunks,
        "WHOLE": n_columns // columns,
        "RING": ring,
        "LATE": late,
        "HELD": min(held, chunks) * parameters,
        "num_warps": _RING_WARPS,
    }
    return _Blocks(-(-n_rows // -(-n_rows // programs)), 1, constants)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as rows along its last dimension, where no one stride leads from each to the next a copy of it."""
    try:
        return tensor.view(-1, tensor.shape[-1])
    except RuntimeError:
        return tensor.contiguous().view(-1, tensor.shape[-1])


# ---- Forward ---------------------------------------------------------------------------------------------------------


@triton.jit
def _kept(value, PACKED: tl.constexpr):
    """The value; where it is PACKED, two halves stay in a register of their own until here, not each as float32."""
    if PACKED and value.dtype.primitive_bitwidth == 16:
        value = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], dtype=value.dtype, is_pure=False, pack=2)
    return value


@triton.jit
def _sum_of_rows(values, IN_ORDER: tl.constexpr):
    if IN_ORDER:
        total = reduce_rows_in_order((values,), add_states)[0]
    else:
        total = tl.sum(values, 1)
    return total[:, None]


@libentry()
@triton.jit
def norm_forward(
    operands,
    parameters,
    normalized,
    total,
    statistics,
    row_strides,
    column_strides,
    n_rows,
    n_columns,
    eps: tl.float64,
    INDEX: tl.constexpr,
    COMPUTE: tl.constexpr,
    GIVEN: tl.constexpr,
    AFFINE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
    PACKED: tl.constexpr,
    IN_ORDER: tl.constexpr,
):
    """A program takes ROWS rows at a time, as many as there are for it, in CHUNKS of COLUMNS that stay in registers.

    The `operands` are added up. `statistics` are rstd and, where rows have one, their mean: what it finds, or, of rows
    that are longer, parts of which are taken by several programs, what is GIVEN. AFFINE says whether the `parameters`
    are a weight and a bias, or one of them. The variance is found in two passes, the second of which corrects the mean
    (Chan, Golub, LeVeque 1983).
    """
    wait_for_previous_launch()
    first = tl.program_id(1) * (CHUNKS * COLUMNS)
    LAYER: tl.constexpr = len(statistics) > 1
    scales = ()
    for chunk in tl.static_range(CHUNKS):
        column = first + chunk * COLUMNS + tl.arange(0, COLUMNS)
        mask = inside(column, n_columns, chunk < WHOLE)
        for i in tl.static_range(len(parameters)):
            scales = scales + (tl.load(parameters[i] + column, mask=mask, other=0),)
    for block in tl.range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tl.full((ROWS,), block, INDEX) * ROWS + tl.arange(0, ROWS)
        row_mask = inside(row, n_rows, ROWS == 1)
        values = ()
        sums = tl.zeros((ROWS, COLUMNS), COMPUTE)
        for chunk in tl.static_range(CHUNKS):
            index = (first + chunk * COLUMNS + tl.arange(0, COLUMNS)).to(INDEX)
            both = row_mask[:, None] & inside(index, n_columns, chunk < WHOLE)[None, :]
            offset = row[:, None] * row_strides[0] + index[None, :] * column_strides[0]
            value = tl.load(operands[0] + offset, mask=both, other=0).to(COMPUTE)
            offset = row[:, None] * row_strides[1] + index[None, :] * column_strides[1]
            value += tl.load(operands[1] + offset, mask=both, other=0).to(COMPUTE)
            pointers = total + row[:, None] * n_columns + index[None, :]
            tl.store(pointers, value.to(total.dtype.element_ty), mask=both)
            values = values + (value,)
            if LAYER:
                sums += value
            else:
                sums += value * value
        if GIVEN:
            rstd = tl.load(statistics[0] + row, mask=row_mask, other=0)[:, None]
            if LAYER:
                mean = tl.load(statistics[1] + row, mask=row_mask, other=0)[:, None]
        else:
            count = tl.full((ROWS, 1), n_columns, COMPUTE)
            square = true_divide(_sum_of_rows(sums, IN_ORDER), count)
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
                error = true_divide(_sum_of_rows(errors, IN_ORDER), count)
                mean = estimate + error
                square = tl.maximum(true_divide(_sum_of_rows(squares, IN_ORDER), count) - error * error, 0.0)
                tl.store(statistics[1] + row, tl.reshape(mean, (ROWS,)), mask=row_mask)
            rstd = inverse(square_root(square + tl.full((ROWS, 1), eps, tl.float64).to(COMPUTE)))
            tl.store(statistics[0] + row, tl.reshape(rstd, (ROWS,)), mask=row_mask)
        for chunk in tl.static_range(CHUNKS):
            index = (first + chunk * COLUMNS + tl.arange(0, COLUMNS)).to(INDEX)
            both = row_mask[:, None] & inside(index, n_columns, chunk < WHOLE)[None, :]
            value = values[chunk]
            if LAYER:
                value = value - mean
            value = value * rstd
            if AFFINE[0]:
                value *= _kept(scales[chunk * len(parameters)], PACKED).to(COMPUTE)[None, :]
            if AFFINE[1]:
                value += _kept(scales[chunk * len(parameters) + AFFINE[0]], PACKED).to(COMPUTE)[None, :]
            pointers = normalized + row[:, None] * n_columns + index[None, :]
            tl.store(pointers, value.to(normalized.dtype.element_ty), mask=both)


@triton.jit
def _moment_leaf(x, residual):
    return moment_leaf(x + residual)


@triton.jit
def _square(x, residual):
    return (x + residual) * (x + residual)


@triton.jit
def _inverse_root_mean_square(squares, count, eps):
    return inverse(square_root(over_count(squares, count) + eps.to(squares.dtype)))


# Of rows that no program holds, by the number of their statistics.
_LONG_ROWS = {
    1: Reduction((0.0,), _square, add_states, _inverse_root_mean_square),
    2: Reduction((0.0, 0.0, 0.0), _moment_leaf, combine_moments, mean_and_rstd, (None,) * 3, 2),
}


def _forward(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: Any,
    layer: bool,
) -> list[torch.Tensor]:
    """The normalised sum, the sum, and the rows' rstd and, of `layer` norm, mean; those of no elements are 0."""
    compute, n_columns = opmath(x.dtype), x.shape[-1]
    make = empty if x.numel() else zeros
    statistics = tuple([make(x.shape[:-1], compute, x.device) for _ in range(1 + layer)])
    outs = [empty(x.shape, x.dtype, x.device), empty(x.shape, x.dtype, x.device)]
    if not x.numel():
        return [*outs, *statistics]
    operands = (_rows(x), _rows(residual))
    flat = tuple([each.view(-1) for each in statistics])
    normalized, total = [_rows(out) for out in outs]
    parameters = tuple([each.contiguous() for each in (weight, bias) if each is not None])
    blocks = _blocks(total, 2, len(parameters), 0)
    if blocks.splits > 1:
        _LONG_ROWS[len(flat)].run(operands, (1,), flat[::-1], compute, (eps,))
    norm_forward[(blocks.programs, blocks.splits)](
        *(operands, parameters, normalized, total, flat),
        *(tuple([each.stride(0) for each in operands]), tuple([each.stride(1) for each in operands])),
        *(len(total), n_columns, eps),
        INDEX=offset_type(*operands, total),
        COMPUTE=TRITON_DTYPES[compute],
        GIVEN=blocks.splits > 1,
        AFFINE=(int(weight is not None), int(bias is not None)),
        **blocks.constants,
    )
    return [*outs, *statistics]


def _fake_outputs(x: torch.Tensor, statistics: int) -> tuple[torch.Tensor, ...]:
    rows = [x.new_empty(x.shape[:-1], dtype=opmath(x.dtype)) for _ in range(statistics)]
    return (x.new_empty(x.shape), x.new_empty(x.shape), *rows)


def _check(x: torch.Tensor, residual: torch.Tensor, **parameters: torch.Tensor | None) -> None:
    check_alike(x=x, residual=residual)
    check_parameters(x, x.shape[-1], **parameters)


def _wanted(ctx: Any, argument: int) -> bool:
    """Whether a gradient is wanted by an argument; the dispatcher leaves out those that have their default."""
    return argument < len(ctx.needs_input_grad) and ctx.needs_input_grad[argument]


def _fake_layer_norm(x, residual, weight=None, bias=None, eps=1e-5):
    _check(x, residual, weight=weight, bias=bias)
    return _fake_outputs(x, 2)


def _save_layer_norm(ctx, inputs, output):
    _, total, mean, rstd = output
    ctx.save_for_backward(total, mean, rstd, inputs[2], inputs[3])
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _layer_norm_gradient(ctx, grad, grad_total, grad_mean, grad_rstd):
    if grad is None:
        return grad_total, grad_total, None, None, None
    own, by_weight, by_bias = torch.ops.tritonite.skip_layer_norm_backward(
        grad, grad_total, *ctx.saved_tensors, _wanted(ctx, 2), _wanted(ctx, 3)
    )
    return own, own, by_weight, by_bias, None


@library_operator(
    "skip_layer_norm(Tensor x, Tensor residual, Tensor? weight=None, Tensor? bias=None, float eps=1e-05)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_layer_norm,
    accepts=FLOATS,
    save=_save_layer_norm,
    gradient=_layer_norm_gradient,
    leading=("x", "residual"),
)
def skip_layer_norm_host(x, residual, weight=None, bias=None, eps=1e-5):
    """Layer normalisation of x + residual, the sum, and the rows' mean and rstd: Ba, Kiros, Hinton 2016."""
    _check(x, residual, weight=weight, bias=bias)
    outs = _forward(x, residual, weight, bias, eps, True)
    return [*outs[:2], *outs[:1:-1]]


def _fake_rms_norm(x, residual, weight=None, eps=1e-6):
    _check(x, residual, weight=weight)
    return _fake_outputs(x, 1)


def _save_rms_norm(ctx, inputs, output):
    _, total, rstd = output
    ctx.save_for_backward(total, rstd, inputs[2])
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)


def _rms_norm_gradient(ctx, grad, grad_total, grad_rstd):
    if grad is None:
        return grad_total, grad_total, None, None
    own, by_weight = torch.ops.tritonite.skip_rms_norm_backward(grad, grad_total, *ctx.saved_tensors, _wanted(ctx, 2))
    return own, own, by_weight, None


@library_operator(
    "skip_rms_norm(Tensor x, Tensor residual, Tensor? weight=None, float? eps=1e-06) -> (Tensor, Tensor, Tensor)",
    fake=_fake_rms_norm,
    accepts=FLOATS,
    save=_save_rms_norm,
    gradient=_rms_norm_gradient,
    leading=("x", "residual"),
)
def skip_rms_norm_host(x, residual, weight=None, eps=1e-6):
    """(x + residual) / sqrt(mean of squares + eps), the sum, and what it is multiplied by: Zhang and Sennrich 2019."""
    _check(x, residual, weight=weight)
    eps = torch.finfo(opmath(x.dtype)).eps if eps is None else eps
    return _forward(x, residual, weight, None, eps, False)


# ---- Backward --------------------------------------------------------------------------------------------------------


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
    INDEX: tl.constexpr,
    COMPUTE: tl.constexpr,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
    PACKED: tl.constexpr,
    IN_ORDER: tl.constexpr,
):
    """A program takes ROWS rows at a time, as many as there are for it, in CHUNKS of COLUMNS that stay in registers.

    `grads` are the gradients of the normalised sum and, if any, of the sum; `statistics` are rstd and, if any, the mean
    of the rows. What it adds up of the columns, for a weight and for a bias by SUMS, it leaves in `partials`. Of rows
    that are longer, parts of which are taken by several programs, the `means` are given.
    """
    wait_for_previous_launch()
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
        for _ in tl.static_range(SUMS[0] + SUMS[1]):
            sums = sums + (tl.zeros((ROWS, COLUMNS), COMPUTE),)
    for block in tl.range(program, tl.cdiv(n_rows, ROWS), programs, num_stages=STAGES):
        row = tl.full((ROWS,), block, INDEX) * ROWS + tl.arange(0, ROWS)
        row_mask = inside(row, n_rows, ROWS == 1)
        rstd = tl.load(statistics[0] + row, mask=row_mask, other=0).to(COMPUTE)[:, None]
        mean, share = 0.0, 0.0
        if LAYER:
            mean = tl.load(statistics[1] + row, mask=row_mask, other=0).to(COMPUTE)[:, None]
        values = ()
        products = tl.zeros((ROWS, COLUMNS), COMPUTE)
        shares = tl.zeros((ROWS, COLUMNS), COMPUTE)
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
                    weighted *= _kept(weights[chunk], PACKED).to(COMPUTE)[None, :]
                products += weighted * normalized_by(h.to(COMPUTE), mean, rstd)
                if LAYER:
                    shares += weighted
        if len(means) > 0:
            product = tl.load(means[len(means) - 1] + row, mask=row_mask, other=0)[:, None]
            if LAYER:
                share = tl.load(means[0] + row, mask=row_mask, other=0)[:, None]
        else:
            count = tl.full((ROWS, 1), n_columns, COMPUTE)
            product = true_divide(_sum_of_rows(products, IN_ORDER), count)
            if LAYER:
                share = true_divide(_sum_of_rows(shares, IN_ORDER), count)
        added = ()
        for chunk in tl.static_range(CHUNKS):
            index = (first + chunk * COLUMNS + tl.arange(0, COLUMNS)).to(INDEX)
            both = row_mask[:, None] & inside(index, n_columns, chunk < WHOLE)[None, :]
            grad = _kept(values[2 * chunk], PACKED).to(COMPUTE)
            h = normalized_by(_kept(values[2 * chunk + 1], PACKED).to(COMPUTE), mean, rstd)
            if SUMS[0]:
                added = added + (sums[len(added)] + grad * h,)
            if SUMS[1]:
                added = added + (sums[len(added)] + grad,)
            if len(weight) > 0:
                grad *= _kept(weights[chunk], PACKED).to(COMPUTE)[None, :]
            grad = gradient_of_normalized(grad, h, share, product, rstd)
            if len(grads) > 1:
                offset = row[:, None] * row_strides[1] + index[None, :] * column_strides[1]
                grad += tl.load(grads[1] + offset, mask=both, other=0).to(COMPUTE)
            pointers = grad_input + row[:, None] * n_columns + index[None, :]
            tl.store(pointers, grad.to(grad_input.dtype.element_ty), mask=both)
        sums = added
    EACH: tl.constexpr = SUMS[0] + SUMS[1]
    for chunk in tl.static_range(CHUNKS):
        column = first + chunk * COLUMNS + tl.arange(0, COLUMNS)
        mask = inside(column, n_columns, chunk < WHOLE)
        for i in tl.static_range(EACH):
            pointers = partials + (i * programs + program).to(INDEX) * n_columns + column
            tl.store(pointers, tl.sum(sums[chunk * EACH + i], 0), mask=mask)


@libentry()
@triton.jit
def add_partials(partials, outs, n_programs, n_columns, PROGRAMS: tl.constexpr, COLUMNS: tl.constexpr):
    """Adds up what programs left, in their order: a launch's second dimension is that of the `outs`."""
    wait_for_previous_launch()
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    program = tl.arange(0, PROGRAMS)[:, None]
    mask = column < n_columns
    for i in tl.static_range(len(outs)):
        if tl.program_id(1) == i:
            pointers = partials + (i * n_programs + program).to(tl.int64) * n_columns + column[None, :]
            values = tl.load(pointers, mask=(program < n_programs) & mask[None, :], other=0)
            tl.store(outs[i] + column, tl.sum(values, 0).to(outs[i].dtype.element_ty), mask=mask)


def _backward(
    grad: torch.Tensor,
    grad_total: torch.Tensor | None,
    total: torch.Tensor,
    statistics: tuple[torch.Tensor, ...],
    weight: torch.Tensor | None,
    like: tuple[torch.Tensor | None, ...],
) -> list[torch.Tensor | None]:
    """The gradient by the sum, and those by what is not None of `like`, a weight and a bias.

    `statistics` are rstd and, if there is one, the mean.
    """
    by_total = empty(total.shape, total.dtype, total.device)
    if not total.numel():
        return [by_total, *(None if each is None else zeros(each.shape, each.dtype, each.device) for each in like)]
    compute, n_columns = opmath(total.dtype), total.shape[-1]
    grads = tuple([_rows(each) for each in (grad, grad_total) if each is not None])
    total, statistics = _rows(total.contiguous()), tuple([each.contiguous().view(-1) for each in statistics])
    outs = [None if each is None else empty(each.shape, each.dtype, each.device) for each in like]
    written = tuple([out for out in outs if out is not None])
    weights = () if weight is None else (weight.contiguous(),)
    blocks, ring = _blocks(total, len(grads) + 1, len(weights), len(written)), None
    if blocks.splits > 1 and not settings().invariant:
        ring = _ring(grads, total, len(weights), len(written))
        blocks = ring or blocks
    means: tuple[torch.Tensor, ...] = ()
    if blocks.splits > 1:
        operands = (grads[0], total, *(each[:, None].expand(total.shape) for each in reversed(statistics)))
        operands += () if weight is None else (weight.expand(total.shape),)
        transforms = BACKWARD if len(statistics) > 1 else RMS_BACKWARD
        means = tuple([empty((len(total),), compute, total.device) for _ in statistics])
        transforms[weight is not None].reduction.run(operands, (1,), means, compute)
    partials = empty((len(written), blocks.programs, n_columns), compute, total.device)
    strides = [tuple([each.stride(i) for each in grads]) for i in range(2)]
    sums = tuple([int(out is not None) for out in outs]) if len(outs) > 1 else (int(outs[0] is not None), 0)
    constants = {"INDEX": offset_type(*grads, total), "SUMS": sums, **blocks.constants}
    if ring is not None:
        norm_backward_by_ring[(ring.programs,)](
            *(grads, total, statistics, weights, by_total, partials, strides[0], len(total), n_columns), **constants
        )
    else:
        norm_backward[(blocks.programs, blocks.splits)](
            *(grads, total, statistics, weights, means, by_total, partials, *strides, len(total), n_columns),
            COMPUTE=TRITON_DTYPES[compute],
            **constants,
        )
    if written:
        # At least what memory reads at a time, 32 bytes.
        columns = min(power_of_2(n_columns), max(8, 2 * devices.current.row_elements // power_of_2(blocks.programs)))
        add_partials[(-(-n_columns // columns), len(written))](
            *(partials, written, blocks.programs, n_columns),
            PROGRAMS=power_of_2(blocks.programs),
            COLUMNS=columns,
            num_warps=8,
        )
    return [by_total, *outs]


def _check_backward(grad, grad_total, total, statistics, **parameters):
    check_alike(grad=grad, grad_total=grad_total, total=total)
    for name, each in statistics.items():
        check_shape(name, each, total.shape[:-1], "that of total without its last dimension")
    check_parameters(total, total.shape[-1], **parameters)


def _fake_gradients(total, *like):
    return (total.new_empty(total.shape), *(None if each is None else each.new_empty(each.shape) for each in like))


def _fake_layer_norm_backward(grad, grad_total, total, mean, rstd, weight, bias, weight_wanted, bias_wanted):
    _check_backward(grad, grad_total, total, {"mean": mean, "rstd": rstd}, weight=weight, bias=bias)
    return _fake_gradients(total, weight if weight_wanted else None, bias if bias_wanted else None)


@library_operator(
    "skip_layer_norm_backward(Tensor grad, Tensor? grad_total, Tensor total, Tensor mean, Tensor rstd, Tensor? weight,"
    " Tensor? bias, bool weight_wanted, bool bias_wanted) -> (Tensor, Tensor, Tensor)",
    fake=_fake_layer_norm_backward,
    accepts=FLOATS,
    pin=("weight_wanted", "bias_wanted"),
)
def skip_layer_norm_backward_host(grad, grad_total, total, mean, rstd, weight, bias, weight_wanted, bias_wanted):
    """The gradients of skip_layer_norm by the sum and, where they are wanted, by weight and bias; others are None."""
    _check_backward(grad, grad_total, total, {"mean": mean, "rstd": rstd}, weight=weight, bias=bias)
    like = (weight if weight_wanted else None, bias if bias_wanted else None)
    return _backward(grad, grad_total, total, (rstd, mean), weight, like)


def _fake_rms_norm_backward(grad, grad_total, total, rstd, weight, weight_wanted):
    _check_backward(grad, grad_total, total, {"rstd": rstd}, weight=weight)
    return _fake_gradients(total, weight if weight_wanted else None)


@library_operator(
    "skip_rms_norm_backward(Tensor grad, Tensor? grad_total, Tensor total, Tensor rstd, Tensor? weight,"
    " bool weight_wanted) -> (Tensor, Tensor)",
    fake=_fake_rms_norm_backward,
    accepts=FLOATS,
    pin=("weight_wanted",),
)
def skip_rms_norm_backward_host(grad, grad_total, total, rstd, weight, weight_wanted):
    """The gradients of skip_rms_norm by the sum and, where it is wanted, by the weight, which else is None."""
    _check_backward(grad, grad_total, total, {"rstd": rstd}, weight=weight)
    return _backward(grad, grad_total, total, (rstd,), weight, (weight if weight_wanted else None,))
