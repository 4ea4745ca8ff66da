"""Clipped policy gradients through a linear head: PPO's objective, GRPO and its variants."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tritonite.errors import Unsupported
from tritonite.fused.preference import check_given
from tritonite.fused.token_log_probabilities import IGNORED, LinearHead, token_log_probabilities

_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")


class GrpoMetrics(NamedTuple):
    """Log-probabilities and statistics of the tokens of `linear_grpo`, detached.

    Attributes:
        log_probabilities: (B, T), log pi of each target, 0 where the mask is 0.
        kl: the mean over tokens of the estimated divergence from the reference; 0 without one.
        clip_fraction: the fraction of tokens whose ratio is clipped.
    """

    log_probabilities: torch.Tensor
    kl: torch.Tensor
    clip_fraction: torch.Tensor


def linear_grpo(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    advantages: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    old_log_probabilities: torch.Tensor | None = None,
    reference: LinearHead | torch.Tensor | None = None,
    beta: float = 0.0,
    epsilon: tuple[float, float] = (0.2, 0.2),
    temperature: float = 1.0,
    loss_type: str = "grpo",
) -> tuple[torch.Tensor, GrpoMetrics]:
    """Return the loss of group relative policy optimization, or of PPO with clipped ratios, and metrics.

    With the ratio r = exp(log pi - log pi_old), the advantage A and k = exp(log pi_ref - log pi) - (log pi_ref -
    log pi) - 1, a token's loss is -min(r A, clip(r, 1 - e_low, 1 + e_high) A) + beta k. The losses of tokens are
    reduced by

    - "grpo": the mean over completions of the mean over a completion's tokens
    - "bnpo" and "dapo": the mean over all tokens of the batch; with advantages of tokens, PPO's objective
    - "dr_grpo": the sum over B T, the size of `target`, whatever the mask; for another constant L in place of T, scale
      the loss by T / L

    Args:
        input: hidden states (B, T, H) of float16, bfloat16, float32 or float64.
        weight: (V, H) of the head, of input's dtype.
        target: int64, (B, T), the class that each hidden state predicts.
        advantages: (B,), or (B, T) for one a token; without a gradient.
        mask: (B, T), 0 or False for tokens that do not count; None if all do.
        bias: (V,) of the head, or None.
        old_log_probabilities: (B, T), log pi_old, without a gradient; None for log pi itself, where r is 1.
        reference: the reference model's `LinearHead`, or its log pi_ref, (B, T); needed if beta is not 0.
        beta: the factor of the divergence from the reference.
        epsilon: (e_low, e_high), how far a ratio may fall and rise.
        temperature: the positive divisor of logits, also of the reference's.
        loss_type: "grpo", "bnpo", "dr_grpo" or "dapo".

    Returns the loss, a number of float32, or float64 for float64, and `GrpoMetrics`; 0 if no token counts.

    Raises errors.Unsupported for other arguments.

    Source: Shao et al. 2024, "DeepSeekMath", for "grpo"; Schulman et al. 2017, "Proximal Policy Optimization
    Algorithms"; Yu et al. 2025, "DAPO"; Liu et al. 2025, "Understanding R1-Zero-Like Training", for "dr_grpo".
    """
    _check(target, advantages, mask, beta, reference, loss_type, temperature)
    if mask is not None:
        target = target.masked_fill(mask == 0, IGNORED)
    counts = target != IGNORED
    own = token_log_probabilities("linear_grpo", LinearHead(input, weight, bias), target, IGNORED, temperature)
    if old_log_probabilities is None:
        old = own.detach()
    else:
        check_given("linear_grpo", "old_log_probabilities", old_log_probabilities, target.shape)
        old = torch.where(counts, old_log_probabilities, 0.0)
    advantages = advantages if advantages.dim() == 2 else advantages[:, None]
    ratio, (low, high) = torch.exp(own - old), epsilon
    free, clipped = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    losses = -torch.minimum(free, clipped)
    divergence = torch.zeros_like(own)
    if beta and reference is not None:
        difference = torch.where(counts, _of_reference(reference, target, temperature), 0.0) - own
        divergence = torch.expm1(difference) - difference
        losses = losses + beta * divergence
    losses = torch.where(counts, losses, 0.0)
    tokens = counts.sum().clamp(min=1)
    kl = torch.where(counts, divergence, 0.0).detach().sum() / tokens
    is_clipped = counts & (clipped < free)
    return _reduced(losses, counts, loss_type), GrpoMetrics(own.detach(), kl, is_clipped.sum().to(own.dtype) / tokens)


def _check(
    target: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor | None,
    beta: float,
    reference: LinearHead | torch.Tensor | None,
    loss_type: str,
    temperature: float,
) -> None:
    """Refuse arguments that do not fit each other."""
    shape = tuple(target.shape)
    for reason, wrong in (
        (f"loss_type is {loss_type!r}: it may be one of {', '.join(_LOSS_TYPES)}", loss_type not in _LOSS_TYPES),
        (f"temperature is {temperature}: it must be positive", not temperature > 0),
        (f"target has the shape {shape}: it must be (completions, tokens)", len(shape) != 2),
        (
            f"advantages have the shape {tuple(advantages.shape)}: it must be {shape[:1]} or {shape}",
            tuple(advantages.shape) not in (shape[:1], shape),
        ),
        ("advantages have no gradient: detach them", advantages.requires_grad),
        ("the divergence needs a reference: give it, or beta 0", beta and reference is None),
    ):
        if wrong:
            raise Unsupported(name="tritonite::linear_grpo", reason=reason)
    if mask is not None and tuple(mask.shape) != shape:
        reason = f"mask has the shape {tuple(mask.shape)}: it must be target's, {shape}"
        raise Unsupported(name="tritonite::linear_grpo", reason=reason)


def _of_reference(reference: LinearHead | torch.Tensor, target: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the reference's log-probabilities of targets."""
    if isinstance(reference, LinearHead):
        with torch.no_grad():
            return token_log_probabilities("linear_grpo", reference, target, IGNORED, temperature)
    check_given("linear_grpo", "reference", reference, target.shape)
    return reference


def _reduced(losses: torch.Tensor, counts: torch.Tensor, loss_type: str) -> torch.Tensor:
    if loss_type == "grpo":
        means = losses.sum(-1) / counts.sum(-1).clamp(min=1)
        return means.sum() / max(1, len(means))
    size = max(1, losses.numel()) if loss_type == "dr_grpo" else counts.sum().clamp(min=1)
    return losses.sum() / size
