"""Compositions of preference losses and of clipped policy gradients, as the papers write them.

A head is (hidden states, weight, bias or None); a reference is a head, or its log-probabilities of sequences.
"""

from __future__ import annotations

import torch

IGNORED = -100


def log_probabilities(head, target, temperature=1.0):
    """Return log pi of each target, 0 for ignored ones."""
    hidden, weight, bias = head
    logits = hidden @ weight.mT + (0 if bias is None else bias)
    own = (logits / temperature).log_softmax(-1).gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(target == IGNORED, 0.0, own)


def lengths(target):
    """Return the number of targets of each sequence, at least 1."""
    return (target != IGNORED).sum(-1).clamp(min=1)


def log_sigmoid(x):
    return torch.nn.functional.logsigmoid(x)


def halves(x):
    return x[: len(x) // 2], x[len(x) // 2 :]


def mean(losses):
    """Return the mean, 0 of no losses."""
    return losses.sum() / max(1, losses.numel())


def likelihood(own, target):
    """Return the mean of -log pi over the targets of chosen completions."""
    return -halves(own)[0].sum() / (halves(target)[0] != IGNORED).sum().clamp(min=1)


def _smoothed(h, label_smoothing):
    return mean(-(1 - label_smoothing) * log_sigmoid(h) - label_smoothing * log_sigmoid(-h))


def _of_reference(reference, target, average):
    if isinstance(reference, torch.Tensor):
        return reference
    own = log_probabilities(reference, target).sum(1)
    return own / lengths(target) if average else own


def dpo(head, target, reference, beta=0.1, label_smoothing=0.0, loss_type="sigmoid", average=False):
    own = log_probabilities(head, target).sum(1)
    own = own / lengths(target) if average else own
    chosen, rejected = halves(own - _of_reference(reference, target, average))
    h = chosen - rejected
    if loss_type == "ipo":
        return mean((h - 1 / (2 * beta)) ** 2)
    if loss_type == "hinge":
        return mean(torch.relu(1 - beta * h))
    return _smoothed(beta * h, label_smoothing)


def orpo(head, target, beta=0.1):
    own = log_probabilities(head, target)
    probability = torch.exp(own.sum(1) / lengths(target))
    chosen, rejected = halves(probability / (1 - probability))
    return likelihood(own, target) - beta * mean(log_sigmoid(torch.log(chosen / rejected)))


def cpo(head, target, beta=0.1, alpha=1.0, label_smoothing=0.0):
    own = log_probabilities(head, target)
    chosen, rejected = halves(own.sum(1))
    return _smoothed(beta * (chosen - rejected), label_smoothing) + alpha * likelihood(own, target)


def simpo(head, target, beta=2.0, gamma=1.0, label_smoothing=0.0):
    chosen, rejected = halves(log_probabilities(head, target).sum(1) / lengths(target))
    return _smoothed(beta * chosen - beta * rejected - gamma, label_smoothing)


def kto(head, target, desirable, reference, kl=0.0, beta=0.1, loss_weights=(1.0, 1.0)):
    ratio = log_probabilities(head, target).sum(1) - _of_reference(reference, target, False)
    baseline = torch.as_tensor(kl, dtype=ratio.dtype, device=ratio.device).reshape(()).clamp(min=0)
    value = torch.sigmoid(beta * torch.where(desirable, ratio - baseline, baseline - ratio))
    good, bad = loss_weights
    return mean(torch.where(desirable, good * (1 - value), bad * (1 - value)))


def grpo(head, target, advantages, mask, old, reference, beta, epsilon, temperature, loss_type):
    target = target if mask is None else torch.where(mask != 0, target, IGNORED)
    counts = target != IGNORED
    own = log_probabilities(head, target, temperature)
    advantages = advantages if advantages.dim() == 2 else advantages.unsqueeze(1)
    ratio = torch.exp(own - torch.where(counts, own.detach() if old is None else old, 0.0))
    low, high = epsilon
    losses = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if reference is not None and beta:
        is_known = isinstance(reference, torch.Tensor)
        other = reference if is_known else log_probabilities(reference, target, temperature)
        difference = torch.where(counts, other, 0.0) - own
        losses = losses + beta * (torch.exp(difference) - difference - 1)
    losses = torch.where(counts, losses, 0.0)
    if loss_type == "grpo":
        return mean(losses.sum(-1) / lengths(target))
    return losses.sum() / (max(1, target.numel()) if loss_type == "dr_grpo" else counts.sum().clamp(min=1))
