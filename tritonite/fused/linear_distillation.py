"""Distillation through linear heads, without the logits of all tokens in memory.

Tokens are cut into chunks. A chunk's logits are two products, of which the row kernel makes losses and the gradient by
the student's logits. Two more products take the gradient to the hidden states and, added up in float32 over chunks, to
the weight. Only the factors of rows must be known before: those of a sum or a mean are, and losses without a reduction
are computed once more in the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from tritonite.dtypes import FLOATS, opmath
from tritonite.engine.cross_entropy.head import Gradients, Head, propagate, tokens_of_a_chunk
from tritonite.engine.cross_entropy.launch import buffer_for_logits
from tritonite.engine.divergence.launch import Divergence, Rows, backward, forward, statistics_of
from tritonite.engine.divergence.meta import FORWARD, JSD, REVERSE
from tritonite.engine.rows.declare import Reduction
from tritonite.engine.rows.formulas import add_states
from tritonite.errors import Decline, Unsupported
from tritonite.fused.check import check_device, check_floats, check_shape
from tritonite.fused.distillation import check_beta, check_divergence
from tritonite.fused.reduction import check_reduction
from tritonite.ops.matmul import precision_of
from tritonite.ops.reduction.sums import added_to_zero
from tritonite.registry import library_operator
from tritonite.runtime.contract import empty, zeros


def linear_jsd(
    student: torch.Tensor,
    student_weight: torch.Tensor,
    teacher: torch.Tensor,
    teacher_weight: torch.Tensor,
    *,
    student_bias: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
    loss_weights: tuple[float, float] = (0.0, 1.0),
    beta: float = 0.5,
    temperature: float = 1.0,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """Return a distillation loss of two linear heads, from the hidden states of student and teacher.

    The logits are student @ student_weight.T + student_bias, and the same for the teacher. With loss_weights
    (hard, soft), a token's loss is hard * cross_entropy(logits, label) + soft * jsd(logits, teacher's logits), where
    `jsd` is `fused.jsd` and only it has the temperature. Logits exist for a chunk of tokens at a time, in float32 for
    fp16 and bf16. The gradient by the weight is added up in float32.

    Args:
        student: (..., H) of float16, bfloat16, float32 or float64.
        student_weight: (V, H) of student's dtype.
        teacher: (..., G) with student's leading dimensions and dtype; without a gradient, as the next two.
        teacher_weight: (V, G) of student's dtype.
        student_bias: (V,) of student's dtype or float32, or None.
        teacher_bias: the same.
        labels: integers of student's leading dimensions; may be None if the hard weight is 0. Tokens whose label is
            `ignore_index` have no loss and no gradient.
        loss_weights: the factors of the cross entropy and of the divergence.
        beta: the teacher's weight in the mixture, in [0, 1]: 0 for KL(teacher || student), 1 for the reverse.
        temperature: the positive divisor of both tensors of logits in the divergence.
        ignore_index: see `labels`.
        reduction: "none" for a loss a token, "sum", or "mean" over the tokens that count; 0 if no token does.

    Returns a tensor of float32, or float64 for float64: of student's leading dimensions without a reduction, else one
    number. Losses without a reduction take two products more in the backward pass.

    Raises errors.Unsupported for other arguments, for tensors on several devices, and for a teacher that requires a
    gradient.

    Source: Agarwal et al. 2024, "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes";
    Hinton, Vinyals, Dean 2015, "Distilling the Knowledge in a Neural Network".
    """
    check_reduction("linear_jsd", reduction)
    check_beta("linear_jsd", beta)
    hard, soft = loss_weights
    if hard and labels is None:
        raise Unsupported(name="tritonite::linear_jsd", reason="a hard loss needs labels: give them")
    for name, each in (("teacher", teacher), ("teacher_weight", teacher_weight), ("teacher_bias", teacher_bias)):
        if each is not None and each.requires_grad:
            raise Unsupported(name="tritonite::linear_jsd", reason=f"{name} has no gradient: detach it")
    leading, compute = student.shape[:-1], opmath(student.dtype)
    mask = student.new_ones(leading, dtype=torch.bool) if labels is None else labels != ignore_index
    factors = mask.reshape(1, -1).to(compute)
    if hard:
        # The divergence may have no part in the loss.
        factors = torch.cat((factors * soft, factors * hard))
    elif soft != 1:
        factors = factors * soft
    operands = (student, student_weight, student_bias)
    wanted = [
        reduction != "none" and torch.is_grad_enabled() and each is not None and each.requires_grad for each in operands
    ]
    kind = FORWARD if beta == 0 else REVERSE if beta == 1 else JSD
    total, losses, *_ = torch.ops.tritonite.linear_divergence(
        *(student.flatten(0, -2) if student.dim() > 1 else student[None], student_weight, student_bias),
        *(teacher.flatten(0, -2) if teacher.dim() > 1 else teacher[None], teacher_weight, teacher_bias),
        *(labels.reshape(-1) if hard and labels is not None else None, factors),
        *(kind, float(beta), float(temperature), *wanted),
    )
    if reduction == "none":
        return (losses * factors).sum(0).view(leading)
    # Divided here, not in `factors`: in float16 the gradients of a chunk would underflow.
    result: torch.Tensor = total if reduction == "sum" else total / mask.sum().clamp(min=1)
    return result


# ---- The operator ----------------------------------------------------------------------------------------------------


def _check_head(
    name: str, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tokens: int, classes: int
) -> None:
    """Decline hidden states other than (tokens, H), a weight other than (classes, H), or a bias that does not fit."""
    check_floats(**{name: hidden})
    if hidden.dim() != 2 or hidden.shape[0] != tokens:
        raise Decline(f"{name} has the shape {tuple(hidden.shape)}: it must be ({tokens}, hidden size)")
    check_shape(f"{name}_weight", weight, (classes, hidden.shape[1]), "that of (classes, hidden size)")
    if weight.dtype is not hidden.dtype:
        raise Decline(f"{name}_weight is {weight.dtype} and {name} {hidden.dtype}: give both one dtype")
    check_device(f"{name}_weight", weight, name, hidden)
    if bias is not None:
        check_shape(f"{name}_bias", bias, (classes,), "that of the classes")
        if bias.dtype not in (weight.dtype, torch.float32):
            raise Decline(f"{name}_bias is {bias.dtype}: it may be {weight.dtype}, as {name} is, or torch.float32")
        check_device(f"{name}_bias", bias, name, hidden)


@triton.jit
def _scaled(loss, scale):
    return loss * scale


_SCALED_SUM = Reduction((0.0,), _scaled, add_states, added_to_zero)


def _check(student, student_weight, student_bias, teacher, teacher_weight, teacher_bias, labels, scales):
    if student_weight.dim() != 2:
        raise Decline(f"student_weight has the shape {tuple(student_weight.shape)}: it must be (classes, hidden size)")
    tokens, classes = student.shape[0] if student.dim() else 0, student_weight.shape[0]
    _check_head("student", student, student_weight, student_bias, tokens, classes)
    _check_head("teacher", teacher, teacher_weight, teacher_bias, tokens, classes)
    if teacher.dtype is not student.dtype:
        raise Decline(f"teacher is {teacher.dtype} and student {student.dtype}: give both one dtype")
    check_device("teacher", teacher, "student", student)
    if labels is not None:
        check_shape("labels", labels, (tokens,), "one for each token")
        if labels.dtype not in (torch.int32, torch.int64):
            raise Decline(f"labels are {labels.dtype}: they may be torch.int32 or torch.int64")
        check_device("labels", labels, "student", student)
    check_shape("scales", scales, (1 if labels is None else 2, tokens), "a vector of tokens for each loss")
    if scales.dtype is not opmath(student.dtype):
        raise Decline(f"scales are {scales.dtype}: they must be {opmath(student.dtype)}")
    check_device("scales", scales, "student", student)


def _fake(*arguments):
    operands, divergence, (student_wanted, weight_wanted, bias_wanted) = arguments[:8], arguments[8:11], arguments[11:]
    student, student_weight, student_bias, *_, scales = operands
    _check(*operands)
    check_divergence(*divergence)
    return (
        scales.new_empty(()),
        scales.new_empty(scales.shape),
        student.new_empty(student.shape) if student_wanted else None,
        student.new_empty(student_weight.shape, dtype=_gradient_dtype(student_weight)) if weight_wanted else None,
        student.new_empty(student_bias.shape, dtype=_gradient_dtype(student_bias))
        if bias_wanted and student_bias is not None
        else None,
    )


def _gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of a gradient of a sum over all tokens, which float16 may be too narrow for."""
    return torch.float32 if parameter.dtype is torch.float16 else parameter.dtype


def _save(ctx, inputs, output):
    _, losses, *gradients = output
    ctx.dtypes = [None if each is None else each.dtype for each in inputs[:3]]
    ctx.divergence = inputs[8:11]
    ctx.kept = [each is not None for each in gradients]
    ctx.given = [each is not None for each in inputs[:8]]
    ctx.set_materialize_grads(False)
    if any(ctx.kept):
        ctx.mark_non_differentiable(losses, *[each for each in gradients if each is not None])
        ctx.save_for_backward(*[each for each in gradients if each is not None])
    else:
        ctx.save_for_backward(*[each for each in inputs[:8] if each is not None])


def _gradient(ctx, grad_total, grad_losses, *_):
    saved = iter(ctx.saved_tensors)
    rest = (None,) * 11
    if grad_total is None and grad_losses is None:
        return (None, None, None, *rest)
    if any(ctx.kept):
        scaled = [next(saved) * grad_total if kept else None for kept in ctx.kept]
        return (*map(_in_dtype, scaled, ctx.dtypes), *rest)
    *operands, scales = [next(saved) if given else None for given in ctx.given]
    factors = 0 if grad_total is None else scales * grad_total
    if grad_losses is not None:
        factors = (factors + grad_losses) * (scales != 0)
    wanted = ctx.needs_input_grad[:3]
    _, _, *gradients = torch.ops.tritonite.linear_divergence(*operands, factors, *ctx.divergence, *wanted)
    return (*map(_in_dtype, gradients, ctx.dtypes), *rest)


@library_operator(
    "linear_divergence(Tensor student, Tensor student_weight, Tensor? student_bias, Tensor teacher,"
    " Tensor teacher_weight, Tensor? teacher_bias, Tensor? labels, Tensor scales, str kind, float beta,"
    " float temperature, bool student_wanted, bool weight_wanted, bool bias_wanted)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake,
    accepts=FLOATS,
    save=_save,
    gradient=_gradient,
    pin=("beta", "temperature", "student_wanted", "weight_wanted", "bias_wanted"),
)
def linear_divergence_host(
    student, student_weight, student_bias, teacher, teacher_weight, teacher_bias, labels, scales, kind, beta,
    temperature, student_wanted, weight_wanted, bias_wanted,
):  # fmt: skip
    """Return the scaled sum of linear heads' divergences, each token's losses, and the sum's gradients by the student.

    `scales` has the factor of each token's divergence and, with labels, of its cross entropy.
    """
    _check(student, student_weight, student_bias, teacher, teacher_weight, teacher_bias, labels, scales)
    check_divergence(kind, beta, temperature)
    tokens, classes, compute, device = student.shape[0], student_weight.shape[0], scales.dtype, student.device
    make = empty if tokens and classes else zeros
    total, losses = make((), compute, device), make(scales.shape, compute, device)
    gradients = Gradients(
        make(student.shape, student.dtype, device) if student_wanted else None,
        make(student_weight.shape, compute, device) if weight_wanted else None,
        make((classes,), compute, device) if bias_wanted and student_bias is not None else None,
    )
    if tokens and classes:
        step, precision = tokens_of_a_chunk(tokens), precision_of(student.dtype)
        heads = [
            Head(*each, precision, step)
            for each in ((student, student_weight, student_bias), (teacher, teacher_weight, teacher_bias))
        ]
        _read_heads(heads, labels, scales, losses, Divergence(kind, beta, temperature), gradients)
        _SCALED_SUM.run((losses, scales), (0, 1), (total,), compute)
    by_bias = None if gradients.bias is None else gradients.bias.to(_gradient_dtype(student_bias))
    return total, losses, gradients.input, _in_dtype(gradients.weight, _gradient_dtype(student)), by_bias


def _read_heads(
    heads: Sequence[Head],
    labels: torch.Tensor | None,
    scales: torch.Tensor,
    losses: torch.Tensor,
    divergence: Divergence,
    gradients: Gradients,
) -> None:
    """Fill the losses of all tokens, and the gradients of their scaled sum, chunk by chunk; the student is first."""
    own = heads[0]
    tokens, classes, compute, device = own.input.shape[0], own.weight.shape[0], scales.dtype, scales.device
    logits = [buffer_for_logits(own.chunk, classes, compute, device) for _ in heads]
    trained = any(each is not None for each in gradients)
    gradient = logits[0]
    if own.input.dtype is not compute and trained:
        gradient = buffer_for_logits(own.chunk, classes, own.input.dtype, device)
    kept = empty((own.chunk, statistics_of(divergence, labels is not None)), compute, device)
    scales, labels = scales.contiguous(), None if labels is None else labels.contiguous()
    for first in range(0, tokens, own.chunk):
        span = slice(first, min(first + own.chunk, tokens))
        student, teacher = (each[: span.stop - first] for each in logits)
        for head, written in zip(heads, (student, teacher), strict=True):
            head.logits(span, written)
        rows = Rows(student, teacher, tuple([each[span] for each in scales]), None if labels is None else labels[span])
        forward(rows, tuple([each[span] for each in losses]), kept, divergence)
        if trained:
            slopes = gradient[: span.stop - first]
            backward(rows, slopes, kept, divergence)
            propagate(own, first, slopes, gradients)


def _in_dtype(tensor: torch.Tensor | None, dtype: torch.dtype | None) -> torch.Tensor | None:
    return tensor if tensor is None else tensor.to(dtype)
