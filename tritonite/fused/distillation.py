"""Divergences between the predictions of a student and a teacher, from rows of logits.

The student has the probabilities q, the teacher p, both softmaxes of logits over a temperature. With a divergence's
derivatives d by log q, the gradient by the student's logits is (d - q sum(d)) / temperature. The forward pass keeps the
two log-sum-exps and sum(d) of each row. The teacher has no gradient.
"""

from __future__ import annotations

import math

import torch

from tritonite.dtypes import FLOATS
from tritonite.engine.divergence.launch import Divergence, Rows, backward, compute_dtype, forward
from tritonite.engine.divergence.meta import FORWARD, JSD, KINDS, LOG_TARGET, REVERSE, TARGET, TV
from tritonite.engine.iteration import as_matrix
from tritonite.errors import Decline, Unsupported
from tritonite.fused.check import check_device, check_floats, check_shape
from tritonite.fused.reduction import check_reduction, counted_rows, reduced
from tritonite.registry import library_operator
from tritonite.runtime.contract import empty, zeros


def jsd(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    labels: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """Return the generalized Jensen-Shannon divergence between rows of logits.

    With m = beta p + (1 - beta) q, a row's divergence is beta KL(p || m) + (1 - beta) KL(q || m). As in distillation,
    beta = 0 is the forward divergence KL(p || q), and beta = 1 the reverse one, KL(q || p). fp16 and bf16 are computed
    in float32. Neither probabilities nor mixtures are stored; the gradient is one more pass over the logits.

    Args:
        student_logits: (..., V) of float16, bfloat16, float32 or float64, of any strides.
        teacher_logits: the same shape, of any of these dtypes; without a gradient.
        beta: a number in [0, 1].
        temperature: the positive divisor of both tensors of logits.
        labels: None, or integers of the shape (...); rows whose label is `ignore_index` have no loss and no gradient,
            and are not read.
        ignore_index: see `labels`.
        reduction: "none" for a loss a row, "sum", or "mean" over the rows that count; 0 if no row does.

    Returns a tensor of float32, or float64 for float64 logits: (...) without a reduction, else one number.

    Raises errors.Unsupported for other arguments, for tensors on several devices, and for a teacher that requires a
    gradient.

    Source: Agarwal et al. 2024, "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes".
    """
    check_beta("jsd", beta)
    kind = FORWARD if beta == 0 else REVERSE if beta == 1 else JSD
    divergence = Divergence(kind, float(beta), float(temperature))
    return _between(student_logits, teacher_logits, divergence, labels, ignore_index, reduction)


def kl_divergence(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    reverse: bool = False,
    labels: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """Return the Kullback-Leibler divergence between rows of logits.

    It is KL(p || q) = sum(p (log p - log q)), with `reverse` KL(q || p). fp16 and bf16 are computed in float32, and no
    log-probabilities are stored. No factor temperature^2 is applied.

    Args:
        student_logits: (..., V) of float16, bfloat16, float32 or float64, of any strides.
        teacher_logits: the same shape, of any of these dtypes; without a gradient.
        temperature: the positive divisor of both tensors of logits.
        reverse: whether to return KL(q || p).
        labels: None, or integers of the shape (...); rows whose label is `ignore_index` have no loss and no gradient,
            and are not read.
        ignore_index: see `labels`.
        reduction: "none" for a loss a row, "sum", or "mean" over the rows that count; 0 if no row does.

    Returns a tensor of float32, or float64 for float64 logits: (...) without a reduction, else one number.

    Raises errors.Unsupported for other arguments, for tensors on several devices, and for a teacher that requires a
    gradient.

    Source: Hinton, Vinyals, Dean 2015, "Distilling the Knowledge in a Neural Network"; the reverse divergence: Gu et
    al. 2024, "MiniLLM: Knowledge Distillation of Large Language Models".
    """
    divergence = Divergence(REVERSE if reverse else FORWARD, temperature=float(temperature))
    return _between(student_logits, teacher_logits, divergence, labels, ignore_index, reduction)


def tv_distance(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    labels: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """Return the total variation distance between rows of logits, sum(|p - q|) / 2.

    The gradient takes the slope 0 where p = q. fp16 and bf16 are computed in float32, and no probabilities are stored.

    Args:
        student_logits: (..., V) of float16, bfloat16, float32 or float64, of any strides.
        teacher_logits: the same shape, of any of these dtypes; without a gradient.
        temperature: the positive divisor of both tensors of logits.
        labels: None, or integers of the shape (...); rows whose label is `ignore_index` have no loss and no gradient,
            and are not read.
        ignore_index: see `labels`.
        reduction: "none" for a loss a row, "sum", or "mean" over the rows that count; 0 if no row does.

    Returns a tensor of float32, or float64 for float64 logits: (...) without a reduction, else one number.

    Raises errors.Unsupported for other arguments, for tensors on several devices, and for a teacher that requires a
    gradient.

    Source: Wen et al. 2023, "f-Divergence Minimization for Sequence-Level Knowledge Distillation".
    """
    return _between(
        *(student_logits, teacher_logits, Divergence(TV, temperature=float(temperature))),
        *(labels, ignore_index, reduction),
    )


def kl_div(
    input: torch.Tensor, target: torch.Tensor, *, log_target: bool = False, reduction: str = "batchmean"
) -> torch.Tensor:
    """Return the Kullback-Leibler divergence sum(p (log p - input)) of rows of log-probabilities.

    It is torch.nn.functional.kl_div summed over each row, in one pass. fp16 and bf16 are computed in float32. Elements
    with p = 0 contribute 0.

    Args:
        input: log-probabilities, (..., V) of float16, bfloat16, float32 or float64, of any strides.
        target: probabilities p, or with `log_target` log p; the same shape, of any of these dtypes; without a gradient.
        log_target: whether `target` has log-probabilities.
        reduction: "none" for a loss a row, "sum", "batchmean" for the sum over the first dimension's size, or "mean"
            over all elements, as in torch.nn.functional.kl_div.

    Returns a tensor of float32, or float64 for float64 input: (...) without a reduction, else one number.

    Raises errors.Unsupported for other arguments, for tensors on several devices, and for a target that requires a
    gradient.

    Source: Kullback and Leibler 1951, "On Information and Sufficiency".
    """
    check_reduction("kl_div", reduction, ("none", "sum", "mean", "batchmean"))
    _refuse_gradient("kl_div", "target", target)
    kind = LOG_TARGET if log_target else TARGET
    losses, _ = torch.ops.tritonite.divergence(input, target, None, kind, 0.5, 1.0)
    if reduction == "none":
        return losses
    total = losses.sum()
    count = 1 if reduction == "sum" else input.numel() if reduction == "mean" else input.shape[0]
    result: torch.Tensor = total if reduction == "sum" else total / count if count else total * math.nan
    return result


def check_beta(name: str, beta: float) -> None:
    """Refuse a weight of the teacher that is no fraction."""
    if not 0 <= beta <= 1:
        raise Unsupported(name=f"tritonite::{name}", reason=f"beta is {beta}: it must be between 0 and 1")


def _refuse_gradient(function: str, name: str, tensor: torch.Tensor) -> None:
    if tensor.requires_grad:
        raise Unsupported(name=f"tritonite::{function}", reason=f"{name} has no gradient: detach it")


def _between(
    student: torch.Tensor,
    teacher: torch.Tensor,
    divergence: Divergence,
    labels: torch.Tensor | None,
    ignore_index: int,
    reduction: str,
) -> torch.Tensor:
    """Return the losses of rows, reduced."""
    check_reduction("divergence", reduction)
    _refuse_gradient("divergence", "teacher_logits", teacher)
    mask = None if labels is None else labels != ignore_index
    losses, _ = torch.ops.tritonite.divergence(student, teacher, mask, *divergence)
    return reduced(losses, reduction, lambda: counted_rows(losses, mask))


# ---- The operator ----------------------------------------------------------------------------------------------------


def check_divergence(kind: str, beta: float, temperature: float) -> None:
    """Decline a divergence that the kernels do not compute."""
    if kind not in KINDS:
        raise Decline(f"kind is {kind!r}: it may be one of {', '.join(KINDS)}")
    if not 0 <= beta <= 1:
        raise Decline(f"beta is {beta}: it must be between 0 and 1")
    if not 0 < temperature < math.inf:
        raise Decline(f"temperature is {temperature}: it must be positive and finite")
    if kind in (TARGET, LOG_TARGET) and temperature != 1:
        raise Decline(f"temperature is {temperature}: log-probabilities have the temperature 1")


def _check(
    student: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor | None, kind: str, beta: float, temperature: float
) -> None:
    check_floats(student=student, teacher=teacher)
    if not student.dim():
        raise Decline("student has no dimension: it needs a dimension that rows lie along")
    check_shape("teacher", teacher, student.shape, "the shape of student")
    check_device("teacher", teacher, "student", student)
    if mask is not None:
        check_shape("labels", mask, student.shape[:-1], "that of student without its last dimension")
        check_device("labels", mask, "student", student)
        if mask.dtype is not torch.bool:
            raise Decline(f"mask is {mask.dtype}: it must be torch.bool")
    check_divergence(kind, beta, temperature)


def _fake(student, teacher, mask, kind, beta, temperature):
    _check(student, teacher, mask, kind, beta, temperature)
    rows, dtype = student.shape[:-1], compute_dtype(student, teacher)
    return student.new_empty(rows, dtype=dtype), student.new_empty((*rows, 3), dtype=dtype)


def _save(ctx, inputs, output):
    student, teacher, _, *ctx.divergence = inputs
    ctx.masked = inputs[2] is not None
    ctx.save_for_backward(student, teacher, output[1], *(inputs[2:3] if ctx.masked else ()))
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradient(ctx, grad, grad_statistics):
    by_student = None
    if grad is not None:
        student, teacher, statistics, *mask = ctx.saved_tensors
        grad = grad * mask[0] if mask else grad
        by_student = torch.ops.tritonite.divergence_backward(grad, student, teacher, statistics, *ctx.divergence)
    return by_student, None, None, None, None, None


@library_operator(
    "divergence(Tensor student, Tensor teacher, Tensor? mask, str kind, float beta, float temperature)"
    " -> (Tensor, Tensor)",
    fake=_fake,
    accepts=FLOATS,
    save=_save,
    gradient=_gradient,
    leading=("student", "teacher", "mask"),
    pin=("beta", "temperature"),
)
def divergence_host(student, teacher, mask, kind, beta, temperature):
    """Return a divergence of each row of logits, and the rows' statistics: Agarwal et al. 2024."""
    _check(student, teacher, mask, kind, beta, temperature)
    rows, dtype = student.shape[:-1], compute_dtype(student, teacher)
    make = empty if student.numel() else zeros
    losses, statistics = make(rows, dtype, student.device), make((*rows, 3), dtype, student.device)
    if student.numel():
        scales = () if mask is None else (mask.contiguous().view(-1),)
        given = Rows(as_matrix(student), as_matrix(teacher), scales)
        forward(given, (losses.view(-1),), statistics.view(-1, 3), Divergence(kind, beta, temperature))
    return losses, statistics


def _check_backward(grad, student, teacher, statistics, kind, beta, temperature):
    _check(student, teacher, None, kind, beta, temperature)
    check_shape("grad", grad, student.shape[:-1], "that of student without its last dimension")
    check_shape("statistics", statistics, (*student.shape[:-1], 3), "three numbers a row")
    if statistics.dtype is not compute_dtype(student, teacher):
        raise Decline(f"statistics are {statistics.dtype}: they must be {compute_dtype(student, teacher)}")
    check_device("grad", grad, "student", student)
    check_device("statistics", statistics, "student", student)


def _fake_backward(grad, student, teacher, statistics, kind, beta, temperature):
    _check_backward(grad, student, teacher, statistics, kind, beta, temperature)
    return student.new_empty(student.shape)


@library_operator(
    "divergence_backward(Tensor grad, Tensor student, Tensor teacher, Tensor statistics, str kind, float beta,"
    " float temperature) -> Tensor",
    fake=_fake_backward,
    accepts=FLOATS,
    leading=("grad", "student", "teacher", "statistics"),
    pin=("beta", "temperature"),
)
def divergence_backward_host(grad, student, teacher, statistics, kind, beta, temperature):
    """Return the gradient of divergence by the student's logits."""
    _check_backward(grad, student, teacher, statistics, kind, beta, temperature)
    gradient = empty(student.shape, student.dtype, student.device)
    if student.numel():
        given = Rows(as_matrix(student), as_matrix(teacher), (grad.contiguous().view(-1),))
        statistics = statistics.contiguous().view(-1, 3)
        backward(given, as_matrix(gradient), statistics, Divergence(kind, beta, temperature))
    return (gradient,)
