"""Distillation through linear heads, without the logits of all tokens in memory.

Tokens are cut into chunks. A chunk's logits are two products, of which the row kernel makes losses and the gradient by
the student's logits. Two more products take the gradient to the hidden states and, added up in float32 over chunks, to
the weight. Only the factors of rows must be known before: those of a sum or a mean are, and losses without a reduction
are computed once more in the backward pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from tritonite.dtypes import FLOATS, opmath
from tritonite.engine.cross_entropy.head import tokens_of_a_chunk
from tritonite.engine.divergence.launch import Divergence, Rows, backward, forward, statistics_of
from tritonite.engine.divergence.meta import FORWARD, JSD, REVERSE
from tritonite.engine.gemm.product import product
from tritonite.engine.gemm.work import NO_EPILOGUE, Epilogue, Sums
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


class _Head(NamedTuple):
    """A linear head: hidden states (tokens, H), weight (V, H) and bias (V,)."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None

    def check(self, name: str, tokens: int, classes: int) -> None:
        weight, bias = self.weight, self.bias
        check_floats(**{name: self.hidden})
        if self.hidden.dim() != 2 or self.hidden.shape[0] != tokens:
            raise Decline(f"{name} has the shape {tuple(self.hidden.shape)}: it must be ({tokens}, hidden size)")
        check_shape(f"{name}_weight", weight, (classes, self.hidden.shape[1]), "that of (classes, hidden size)")
        if weight.dtype is not self.hidden.dtype:
            raise Decline(f"{name}_weight is {weight.dtype} and {name} {self.hidden.dtype}: give both one dtype")
        check_device(f"{name}_weight", weight, name, self.hidden)
        if bias is not None:
            check_shape(f"{name}_bias", bias, (classes,), "that of the classes")
            if bias.dtype not in (weight.dtype, torch.float32):
                raise Decline(f"{name}_bias is {bias.dtype}: it may be {weight.dtype}, as {name} is, or torch.float32")
            check_device(f"{name}_bias", bias, name, self.hidden)

    def logits(self, first: int, out: torch.Tensor) -> None:
        """Write the logits of the tokens from `first` on into `out`, (tokens, V)."""
        hidden = self.hidden[first : first + len(out)]
        epilogue = NO_EPILOGUE if self.bias is None else Epilogue(self.bias, beta=1)
        _multiply(hidden, self.weight.mT, out, epilogue)


def _multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, epilogue: Epilogue = NO_EPILOGUE) -> None:
    product(a[None], b[None], out[None], epilogue, Sums(precision_of(a.dtype)))


def _buffer(tokens: int, classes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate logits whose rows start at multiples of 16 bytes, as TMA needs."""
    multiple = 16 // dtype.itemsize
    return empty((tokens, -(-classes // multiple) * multiple), dtype, device)[:, :classes]


@triton.jit
def _same(x):
    return x


@triton.jit
def _scaled(loss, scale):
    return loss * scale


_SUM = Reduction((0.0,), _same, add_states, added_to_zero)
_SCALED_SUM = Reduction((0.0,), _scaled, add_states, added_to_zero)


def _check(student: _Head, teacher: _Head, labels: torch.Tensor | None, scales: torch.Tensor) -> None:
    if student.weight.dim() != 2:
        raise Decline(f"student_weight has the shape {tuple(student.weight.shape)}: it must be (classes, hidden size)")
    tokens, classes = student.hidden.shape[0] if student.hidden.dim() else 0, student.weight.shape[0]
    student.check("student", tokens, classes)
    teacher.check("teacher", tokens, classes)
    if teacher.hidden.dtype is not student.hidden.dtype:
        raise Decline(f"teacher is {teacher.hidden.dtype} and student {student.hidden.dtype}: give both one dtype")
    check_device("teacher", teacher.hidden, "student", student.hidden)
    if labels is not None:
        check_shape("labels", labels, (tokens,), "one for each token")
        if labels.dtype not in (torch.int32, torch.int64):
            raise Decline(f"labels are {labels.dtype}: they may be torch.int32 or torch.int64")
        check_device("labels", labels, "student", student.hidden)
    check_shape("scales", scales, (1 if labels is None else 2, tokens), "a vector of tokens for each loss")
    if scales.dtype is not opmath(student.hidden.dtype):
        raise Decline(f"scales are {scales.dtype}: they must be {opmath(student.hidden.dtype)}")
    check_device("scales", scales, "student", student.hidden)


def _fake(*arguments):
    student, student_weight, student_bias, *others = arguments
    teacher, teacher_weight, teacher_bias, labels, scales, *divergence = others[:8]
    student_wanted, weight_wanted, bias_wanted = others[8:]
    _check(_Head(student, student_weight, student_bias), _Head(teacher, teacher_weight, teacher_bias), labels, scales)
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
    own, other = _Head(student, student_weight, student_bias), _Head(teacher, teacher_weight, teacher_bias)
    _check(own, other, labels, scales)
    check_divergence(kind, beta, temperature)
    (tokens, hidden), (classes, _), compute, device = student.shape, student_weight.shape, scales.dtype, student.device
    none = not tokens * classes
    make = zeros if none else empty
    total, losses = make((), compute, device), make(scales.shape, compute, device)
    by_student = make(student.shape, student.dtype, device) if student_wanted else None
    by_weight = make((classes, hidden), compute, device) if weight_wanted else None
    biased = bias_wanted and student_bias is not None
    if none:
        by_bias = zeros((classes,), _gradient_dtype(student_bias), device) if biased else None
        return total, losses, by_student, _in_dtype(by_weight, _gradient_dtype(student)), by_bias
    step = tokens_of_a_chunk(tokens)
    by_biases = empty((-(-tokens // step), classes), compute, device) if biased else None
    divergence = Divergence(kind, beta, temperature)
    logits, others = [_buffer(step, classes, compute, device) for _ in range(2)]
    gradient = logits
    if student.dtype is not compute and (student_wanted or weight_wanted or biased):
        gradient = _buffer(step, classes, student.dtype, device)
    kept = empty((step, statistics_of(divergence, labels is not None)), compute, device)
    scales, labels = scales.contiguous(), None if labels is None else labels.contiguous()
    for first in range(0, tokens, step):
        count = min(step, tokens - first)
        span = slice(first, first + count)
        own.logits(first, logits[:count])
        other.logits(first, others[:count])
        rows = Rows(
            *(logits[:count], others[:count], tuple([each[span] for each in scales])),
            labels=None if labels is None else labels[span],
        )
        forward(rows, tuple([each[span] for each in losses]), kept, divergence)
        if not (student_wanted or weight_wanted or biased):
            continue
        slopes = gradient[:count]
        backward(rows, slopes, kept, divergence)
        if by_student is not None:
            _multiply(slopes, student_weight, by_student[span])
        if by_weight is not None:
            _multiply(slopes.mT, student[span], by_weight, Epilogue(by_weight, beta=1) if first else NO_EPILOGUE)
        if by_biases is not None:
            _SUM.run((slopes,), (0,), (by_biases[first // step],), compute)
    _SCALED_SUM.run((losses, scales), (0, 1), (total,), compute)
    by_bias = None
    if by_biases is not None:
        by_bias = empty((classes,), _gradient_dtype(student_bias), device)
        _SUM.run((by_biases,), (0,), (by_bias,), compute)
    return total, losses, by_student, _in_dtype(by_weight, _gradient_dtype(student)), by_bias


def _in_dtype(tensor: torch.Tensor | None, dtype: torch.dtype | None) -> torch.Tensor | None:
    return tensor if tensor is None else tensor.to(dtype)
