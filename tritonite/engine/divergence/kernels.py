"""The kernels of divergences: row sums, and the gradient by the student's logits."""

from __future__ import annotations

import triton
import triton.language as tl

from tritonite.engine.divergence.meta import FORWARD, JSD, LOG_TARGET, REVERSE, TARGET
from tritonite.language import libdevice
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry

_FORWARD, _REVERSE, _JSD, _TARGET, _LOG_TARGET = (
    tl.constexpr(kind) for kind in (FORWARD, REVERSE, JSD, TARGET, LOG_TARGET)
)
# Values of a row that the forward pass keeps: the log-sum-exps of student and teacher, and the sum of derivatives.
# A fourth is the student's log-sum-exp without a temperature, where a cross entropy needs it.
_STUDENT, _TEACHER, _DERIVATIVES, _UNTEMPERED = (tl.constexpr(i) for i in range(4))


@triton.jit
def _terms(student, teacher, beta, META: tl.constexpr):
    """Return the terms f(log q, log p) of a divergence, and their derivatives by log q.

    `student` is log q and `teacher` log p. Terms whose probability is 0 are 0.
    """
    q, p = libdevice.exp(student), libdevice.exp(teacher)
    if META.kind == _REVERSE:
        term = tl.where(q > 0.0, q * (student - teacher), 0.0)
        # The derivative's addend q drops out of d - q sum(d).
        derivative = term
    elif META.kind == _JSD:
        # log(beta p + (1 - beta) q), relative to the larger of log p and log q, so that nothing overflows.
        larger = tl.maximum(student, teacher)
        rest = libdevice.exp(-tl.abs(student - teacher))
        mixed = tl.where(student >= teacher, (1.0 - beta) + beta * rest, beta + (1.0 - beta) * rest)
        mixture = libdevice.log(mixed)
        derivative = (1.0 - beta) * tl.where(q > 0.0, q * (student - larger - mixture), 0.0)
        term = derivative + beta * tl.where(p > 0.0, p * (teacher - larger - mixture), 0.0)
    elif META.kind == _FORWARD or META.normalized:
        term = tl.where(p > 0.0, p * (teacher - student), 0.0)
        derivative = -p
    else:
        term = 0.5 * tl.abs(p - q)
        derivative = tl.where(q > p, 0.5, tl.where(q < p, -0.5, 0.0)) * q
    return term, derivative


@triton.jit
def _add_exponential(largest, total, x):
    """Return the maxima of `largest` and x, and the sums of exponentials relative to them, with exp(x) added."""
    difference = tl.where(x == largest, 0.0, x - largest)
    rest = libdevice.exp(-tl.abs(difference))
    total = tl.where(difference > 0.0, total * rest + 1.0, total + rest)
    return tl.maximum(largest, x), total


@triton.jit
def _log_sum_exp(largest, total):
    """Return log(sum(total * exp(largest))) of each row, as a column."""
    top = tl.max(largest, 1)[:, None]
    difference = tl.where(largest == top, 0.0, largest - top)
    return top + libdevice.log(tl.sum(total * libdevice.exp(difference), 1)[:, None])


@triton.jit
def _load(operand, rows, column, column_stride, mask, META: tl.constexpr):
    """Load a block in the compute dtype. Elements outside the mask are -inf."""
    pointers = operand + rows + column[None, :] * column_stride
    return tl.load(pointers, mask=mask, other=-float("inf")).to(META.compute)


@triton.jit
def _teacher_of(block, factor, META: tl.constexpr):
    """Return logits divided by the temperature, or log-probabilities."""
    if META.kind == _TARGET:
        # Elements outside the mask are -inf.
        block = libdevice.log(tl.maximum(block, 0.0))
    elif META.kind != _LOG_TARGET:
        block = block * factor
    return block


@triton.jit
def _wanted_rows(scales, row, row_mask):
    """Return which rows have a scale that is not 0; all rows without scales."""
    wanted = row_mask
    if len(scales) > 0:
        wanted = tl.load(scales[0] + row, mask=row_mask, other=0) != 0
        if len(scales) > 1:
            wanted = wanted | (tl.load(scales[1] + row, mask=row_mask, other=0) != 0)
        wanted = wanted & row_mask
    return wanted


@libentry()
@triton.jit
def divergence_forward(
    student,
    teacher,
    labels,
    scales,
    losses,
    statistics,
    row_strides,
    column_strides,
    n_rows,
    n_columns,
    beta: tl.float64,
    factor: tl.float64,
    META: tl.constexpr,
):
    """Compute the divergence of META.rows rows, and with labels also the student's cross entropy.

    `losses` has a vector for each, with 0 for rows whose scale is 0. `statistics` is (rows, 3 or 4). Rows whose scales
    are all 0 are not read, and have statistics of 0. `factor` is 1 / temperature. The second pass over a long row goes
    backwards, because caches hold the row's end.
    """
    wait_for_previous_launch()
    INDEX: tl.constexpr = META.index
    COMPUTE: tl.constexpr = META.compute
    ROWS: tl.constexpr = META.rows
    COLUMNS: tl.constexpr = META.columns
    KEPT: tl.constexpr = 4 if META.tempered and len(labels) > 0 else 3
    row = tl.full((ROWS,), tl.program_id(0), INDEX) * ROWS + tl.arange(0, ROWS)
    row_mask = row < n_rows
    wanted = _wanted_rows(scales, row, row_mask)
    factor = tl.full((1, 1), factor, tl.float64).to(COMPUTE)
    beta = tl.full((1, 1), beta, tl.float64).to(COMPUTE)
    students, teachers = row[:, None] * row_strides[0], row[:, None] * row_strides[1]
    first = tl.arange(0, COLUMNS).to(INDEX)
    untempered = tl.zeros((ROWS, 1), COMPUTE)
    if META.held:
        both = wanted[:, None] & (first < n_columns)[None, :]
        raw = _load(student, students, first, column_strides[0], both, META)
        x = raw * factor
        y = _teacher_of(_load(teacher, teachers, first, column_strides[1], both, META), factor, META)
        student_sum, teacher_sum = tl.zeros((ROWS, 1), COMPUTE), tl.zeros((ROWS, 1), COMPUTE)
        if not META.normalized:
            student_sum, teacher_sum = _log_sum_exp(x, 1.0), _log_sum_exp(y, 1.0)
        if KEPT == 4:
            untempered = _log_sum_exp(raw, 1.0)
        terms, derivatives = _terms(x - student_sum, y - teacher_sum, beta, META)
        terms, derivatives = tl.where(both, terms, 0.0), tl.where(both, derivatives, 0.0)
    else:
        # A program whose rows are all unwanted reads nothing.
        blocks = tl.cdiv(n_columns, COLUMNS) * tl.max(wanted.to(tl.int32), 0)
        student_sum, teacher_sum = tl.zeros((ROWS, 1), COMPUTE), tl.zeros((ROWS, 1), COMPUTE)
        if not META.normalized:
            student_top = tl.full((ROWS, COLUMNS), -float("inf"), COMPUTE)
            student_total = tl.zeros((ROWS, COLUMNS), COMPUTE)
            teacher_top, teacher_total = student_top, student_total
            raw_top, raw_total = student_top, student_total
            for block in range(blocks):
                column = block * COLUMNS + first
                both = wanted[:, None] & (column < n_columns)[None, :]
                raw = _load(student, students, column, column_strides[0], both, META)
                y = _load(teacher, teachers, column, column_strides[1], both, META) * factor
                student_top, student_total = _add_exponential(student_top, student_total, raw * factor)
                teacher_top, teacher_total = _add_exponential(teacher_top, teacher_total, y)
                if KEPT == 4:
                    raw_top, raw_total = _add_exponential(raw_top, raw_total, raw)
            student_sum, teacher_sum = (
                _log_sum_exp(student_top, student_total),
                _log_sum_exp(teacher_top, teacher_total),
            )
            if KEPT == 4:
                untempered = _log_sum_exp(raw_top, raw_total)
        terms, derivatives = tl.zeros((ROWS, COLUMNS), COMPUTE), tl.zeros((ROWS, COLUMNS), COMPUTE)
        for block in range(blocks):
            column = (blocks - 1 - block) * COLUMNS + first
            both = wanted[:, None] & (column < n_columns)[None, :]
            x = _load(student, students, column, column_strides[0], both, META) * factor
            y = _teacher_of(_load(teacher, teachers, column, column_strides[1], both, META), factor, META)
            term, derivative = _terms(x - student_sum, y - teacher_sum, beta, META)
            terms += tl.where(both, term, 0.0)
            derivatives += tl.where(both, derivative, 0.0)
    kept = statistics + row * KEPT
    soft = wanted
    if len(scales) > 1:
        soft = wanted & (tl.load(scales[0] + row, mask=row_mask, other=0) != 0)
    loss = tl.where(soft, tl.sum(terms, 1), 0.0)
    tl.store(losses[0] + row, loss, mask=row_mask)
    slope = tl.sum(derivatives, 1)
    if META.normalized:
        slope = tl.zeros((ROWS,), COMPUTE)
    student_sum, teacher_sum = tl.reshape(student_sum, (ROWS,)), tl.reshape(teacher_sum, (ROWS,))
    tl.store(kept + _STUDENT, tl.where(wanted, student_sum, 0.0), mask=row_mask)
    tl.store(kept + _TEACHER, tl.where(wanted, teacher_sum, 0.0), mask=row_mask)
    tl.store(kept + _DERIVATIVES, tl.where(wanted, slope, 0.0), mask=row_mask)
    if len(labels) > 0:
        sums = student_sum
        if KEPT == 4:
            sums = tl.reshape(untempered, (ROWS,))
            tl.store(kept + _UNTEMPERED, tl.where(wanted, sums, 0.0), mask=row_mask)
        hard = wanted & (tl.load(scales[1] + row, mask=row_mask, other=0) != 0)
        label = tl.load(labels[0] + row, mask=hard, other=0).to(tl.int64)
        exists = hard & (label >= 0) & (label < n_columns)
        pointers = student + row * row_strides[0] + label * column_strides[0]
        loss = sums - tl.load(pointers, mask=exists, other=0).to(COMPUTE)
        loss = tl.where(exists, loss, tl.where(hard, float("nan"), 0.0))
        tl.store(losses[1] + row, loss, mask=row_mask)


@libentry()
@triton.jit
def divergence_backward(
    gradient,
    student,
    teacher,
    labels,
    scales,
    statistics,
    row_strides,
    column_strides,
    n_rows,
    n_columns,
    beta: tl.float64,
    factor: tl.float64,
    META: tl.constexpr,
):
    """Write a block of the gradient by the student's logits, of the losses times `scales`.

    The gradient may be the student's tensor itself. Rows whose scales are all 0 are not read, and have the gradient 0.
    The strides are those of the student, the teacher and the gradient. `factor` is 1 / temperature.
    """
    wait_for_previous_launch()
    INDEX: tl.constexpr = META.index
    COMPUTE: tl.constexpr = META.compute
    ROWS: tl.constexpr = META.rows
    COLUMNS: tl.constexpr = META.columns
    KEPT: tl.constexpr = 4 if META.tempered and len(labels) > 0 else 3
    blocks = tl.cdiv(n_columns, COLUMNS)
    program = tl.program_id(0)
    row = tl.full((ROWS,), program // blocks, INDEX) * ROWS + tl.arange(0, ROWS)
    column = tl.full((COLUMNS,), program % blocks, INDEX) * COLUMNS + tl.arange(0, COLUMNS)
    row_mask = row < n_rows
    wanted = _wanted_rows(scales, row, row_mask)
    inside = (column < n_columns)[None, :]
    both = wanted[:, None] & inside
    factor = tl.full((1, 1), factor, tl.float64).to(COMPUTE)
    beta = tl.full((1, 1), beta, tl.float64).to(COMPUTE)
    kept = statistics + row * KEPT
    student_sum = tl.load(kept + _STUDENT, mask=wanted, other=0)[:, None]
    teacher_sum = tl.load(kept + _TEACHER, mask=wanted, other=0)[:, None]
    slope = tl.load(kept + _DERIVATIVES, mask=wanted, other=0)[:, None]
    raw = _load(student, row[:, None] * row_strides[0], column, column_strides[0], both, META)
    y = _load(teacher, row[:, None] * row_strides[1], column, column_strides[1], both, META)
    x = raw * factor - student_sum
    _, derivative = _terms(x, _teacher_of(y, factor, META) - teacher_sum, beta, META)
    scale = tl.load(scales[0] + row, mask=wanted, other=0).to(COMPUTE)[:, None] * factor
    result = derivative - libdevice.exp(x) * slope
    # An infinite divergence must not reach rows that have only the cross entropy.
    result = tl.where(scale != 0.0, scale * result, 0.0)
    if len(labels) > 0:
        hard_scale = tl.load(scales[1] + row, mask=wanted, other=0).to(COMPUTE)
        label = tl.load(labels[0] + row, mask=wanted, other=0).to(tl.int64)
        if KEPT == 4:
            x = raw - tl.load(kept + _UNTEMPERED, mask=wanted, other=0)[:, None]
        own = tl.where(column[None, :] == label[:, None], 1.0, 0.0)
        hard = hard_scale[:, None] * (libdevice.exp(x) - own)
        valid = (label >= 0) & (label < n_columns)
        hard = tl.where(valid[:, None], hard, float("nan"))
        result += tl.where((hard_scale != 0.0)[:, None], hard, 0.0)
    result = tl.where(both, result, 0.0).to(gradient.dtype.element_ty)
    pointers = gradient + row[:, None] * row_strides[2] + column[None, :] * column_strides[2]
    tl.store(pointers, result, mask=row_mask[:, None] & inside)
