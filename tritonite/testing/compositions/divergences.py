"""Compositions of divergences between rows of logits, and of distillation through linear heads."""

from __future__ import annotations

import torch

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
        entropies = functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), reduction="none")
        losses = losses + hard * entropies.view_as(losses)
    losses = torch.where(counts, losses, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum().clamp(min=1)
