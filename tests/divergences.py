"""Divergences and distillation losses as compositions of torch's operators, and operands for them."""

import torch
from compositions import normal

import tritonite
from tritonite import fused

functional = torch.nn.functional
IGNORED = -100


def kl(log_p, log_q):
    return torch.where(log_p.exp() > 0, log_p.exp() * (log_p - log_q), 0.0).sum(-1)


def of_rows(student, teacher, beta=0.5, temperature=1.0, kind="jsd"):
    """Return the divergence of each row, written as in the papers."""
    log_q, log_p = (student / temperature).log_softmax(-1), (teacher / temperature).log_softmax(-1)
    if kind == "tv":
        return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
    if kind == "kl" and beta == 0:
        return kl(log_p, log_q)
    if kind == "kl":
        return kl(log_q, log_p)
    log_m = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
    return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)


def heads(*leading, dtype=torch.float32, bias=True, hidden=6, size=5, classes=11):
    """Return student, its weight and bias, with gradients, and the teacher's."""
    own = [normal(*leading, hidden, dtype=dtype), normal(classes, hidden, dtype=dtype)]
    other = [normal(*leading, size, dtype=dtype), normal(classes, size, dtype=dtype)]
    own.append(normal(classes, dtype=dtype) if bias else None)
    other.append(normal(classes, dtype=dtype) if bias else None)
    return [each if each is None else each.requires_grad_() for each in own] + other


def linear(hidden, weight, bias):
    return hidden @ weight.T + (0 if bias is None else bias)


def distilled(*operands, labels=None, loss_weights=(0.0, 1.0), beta=0.5, temperature=1.0, reduction="mean"):
    """Return the composition of `fused.linear_jsd`, of operands in the order of `heads`."""
    logits, others = linear(*operands[:3]), linear(*operands[3:])
    hard, soft = loss_weights
    if beta in (0, 1):
        losses = soft * of_rows(logits, others, beta, temperature, "kl")
    else:
        losses = soft * of_rows(logits, others, beta, temperature)
    counts = torch.ones_like(losses, dtype=torch.bool) if labels is None else labels != IGNORED
    if hard:
        entropies = functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
        losses = losses + hard * entropies.view_as(losses)
    losses = torch.where(counts, losses, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum().clamp(min=1)


def linear_jsd(student, weight, bias, teacher, teacher_weight, teacher_bias, **options):
    return fused.linear_jsd(
        *(student, weight, teacher, teacher_weight), student_bias=bias, teacher_bias=teacher_bias, **options
    )


def labels_of(*leading, classes=11):
    labels = torch.randint(classes, leading, device=tritonite.device)
    labels.view(-1)[::4] = IGNORED
    return labels
