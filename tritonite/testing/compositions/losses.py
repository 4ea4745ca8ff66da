"""Compositions of cross entropy, of logits and over a linear head."""

from __future__ import annotations

import torch

functional = torch.nn.functional


def cross_entropy(
    x,
    target,
    weight=None,
    *,
    ignore_index=-100,
    reduction="mean",
    label_smoothing=0.0,
    softcap=None,
    z_loss=0.0,
    token_scale=None,
):
    """Return the loss and its z-loss."""
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    weight = None if weight is None else weight.to(x.dtype)
    scale = torch.ones_like(target, dtype=x.dtype) if token_scale is None else token_scale.to(x.dtype)
    flat = x.reshape(-1, x.shape[-1]), target.reshape(-1), weight
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    losses = functional.cross_entropy(*flat, reduction="none", **options).view(target.shape)
    z = torch.where(target == ignore_index, 0.0, z_loss * torch.logsumexp(x, -1) ** 2) * scale
    losses = losses * scale + z
    if reduction == "none":
        return losses, z
    weights = x.new_ones(x.shape[-1]) if weight is None else weight
    own = torch.where(target == ignore_index, 0.0, weights[target.clamp(0)])
    total = own.sum() if reduction == "mean" else 1
    return losses.sum() / total, z.sum() / total


def accuracy(x, target, ignore_index=-100):
    """Return the share of tokens whose target has the first of the largest logits."""
    counts = target != ignore_index
    return ((x.argmax(-1) == target) & counts).sum() / counts.sum()


def linear_cross_entropy(input, weight, target, bias=None, *, class_weight=None, **options):
    """Return the cross entropy of the logits of a linear head, and its z-loss."""
    logits = input @ weight.mT
    return cross_entropy(logits if bias is None else logits + bias, target, class_weight, **options)
