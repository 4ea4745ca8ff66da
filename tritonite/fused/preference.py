"""Losses of preferences between completions, through a linear head whose logits never exist all at once.

The log-probabilities of the targets come from a chunked operator with its own gradient. From there on a loss is a
formula on one number a token or a sequence. For a sequence y, log pi(y) is the sum of its targets' log-probabilities,
|y| their number, and sigma the logistic function.

Losses of pairs take batches whose first half are the chosen completions, and whose second half the rejected ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import torch

from tritonite.errors import Unsupported
from tritonite.fused.token_log_probabilities import IGNORED, LinearHead, token_log_probabilities

functional = torch.nn.functional


class PairMetrics(NamedTuple):
    """Log-probabilities and rewards of B pairs, detached.

    Attributes:
        chosen_log_probabilities: (B,), log pi of the chosen completions; their means over targets, where the loss
            takes means.
        rejected_log_probabilities: the same of the rejected completions.
        chosen_rewards: (B,), the loss's implicit rewards of the chosen completions.
        rejected_rewards: the same of the rejected completions.
        accuracy: the fraction of pairs whose chosen completion has the higher reward.
        nll: the mean of -log pi over the chosen completions' targets.
    """

    chosen_log_probabilities: torch.Tensor
    rejected_log_probabilities: torch.Tensor
    chosen_rewards: torch.Tensor
    rejected_rewards: torch.Tensor
    accuracy: torch.Tensor
    nll: torch.Tensor


class KtoMetrics(NamedTuple):
    """Log-probabilities and rewards of the B completions of `linear_kto`, detached.

    Attributes:
        log_probabilities: (B,), log pi.
        rewards: (B,), beta (log pi - log pi_ref).
        kl: the divergence that the rewards are compared with.
    """

    log_probabilities: torch.Tensor
    rewards: torch.Tensor
    kl: torch.Tensor


def linear_dpo(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    reference: LinearHead | torch.Tensor,
    bias: torch.Tensor | None = None,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    loss_type: str = "sigmoid",
    average: bool = False,
    ignore_index: int = IGNORED,
) -> tuple[torch.Tensor, PairMetrics]:
    """Return the loss of direct preference optimization, a mean over pairs, and metrics.

    With h = (log pi(y_c) - log pi_ref(y_c)) - (log pi(y_r) - log pi_ref(y_r)), a pair's loss is
    -(1 - s) log sigma(beta h) - s log sigma(-beta h) for "sigmoid", with the label smoothing s, (h - 1 / (2 beta))^2
    for "ipo", and max(0, 1 - beta h) for "hinge".

    Args:
        input: hidden states (2 B, T, H) of float16, bfloat16, float32 or float64; chosen completions first.
        weight: (V, H) of the head, of input's dtype.
        target: (2 B, T) integers, the class that each hidden state predicts, or `ignore_index`.
        reference: the reference model's `LinearHead`, or its log pi_ref, (2 B,), in the same order; without a gradient.
        bias: (V,) of the head, or None.
        beta: the strength of the reference.
        label_smoothing: the probability that a label is wrong, in [0, 0.5]; only for "sigmoid".
        loss_type: "sigmoid", "ipo" or "hinge".
        average: whether log pi and log pi_ref are means over targets, not sums, as implementations of IPO have it.
        ignore_index: the target of hidden states that do not count.

    Returns the loss, a number of float32, or float64 for float64, and `PairMetrics`. Rewards are
    beta (log pi - log pi_ref).

    Raises errors.Unsupported for other arguments.

    Source: Rafailov et al. 2023, "Direct Preference Optimization"; "ipo": Azar et al. 2023, "A General Theoretical
    Paradigm to Understand Learning from Human Preferences"; "hinge": Zhao et al. 2023, "SLiC-HF".
    """
    name = "linear_dpo"
    if loss_type not in ("sigmoid", "ipo", "hinge"):
        _refuse(name, f"loss_type is {loss_type!r}: it may be 'sigmoid', 'ipo' or 'hinge'")
    _check_smoothing(name, label_smoothing)
    if label_smoothing and loss_type != "sigmoid":
        _refuse(name, f"label_smoothing is {label_smoothing}: only the loss 'sigmoid' has it")
    _check_pairs(name, target)
    tokens = token_log_probabilities(name, LinearHead(input, weight, bias), target, ignore_index)
    own = _of_sequences(tokens, target, ignore_index, average)
    other = _of_reference(name, reference, target, ignore_index, average)
    rewards = beta * (own - other)
    chosen, rejected = rewards.chunk(2)
    margin = chosen - rejected
    if loss_type == "sigmoid":
        losses = _smoothed(margin, label_smoothing)
    elif loss_type == "ipo":
        losses = (margin / beta - 1 / (2 * beta)) ** 2
    else:
        losses = functional.relu(1 - margin)
    return _mean(losses), _pair_metrics(own, rewards, _nll(tokens, target, ignore_index))


def linear_orpo(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    beta: float = 0.1,
    ignore_index: int = IGNORED,
) -> tuple[torch.Tensor, PairMetrics]:
    """Return the loss of odds ratio preference optimization, and metrics.

    With P(y) = exp(log pi(y) / |y|) and odds(y) = P(y) / (1 - P(y)), the loss is
    nll - beta mean(log sigma(log(odds(y_c) / odds(y_r)))), where nll is the mean of -log pi over all targets of the
    chosen completions. The paper calls beta lambda.

    Args:
        input: hidden states (2 B, T, H) of float16, bfloat16, float32 or float64; chosen completions first.
        weight: (V, H) of the head, of input's dtype.
        target: (2 B, T) integers, the class that each hidden state predicts, or `ignore_index`.
        bias: (V,) of the head, or None.
        beta: the factor of the odds ratio's loss.
        ignore_index: the target of hidden states that do not count.

    Returns the loss, a number of float32, or float64 for float64, and `PairMetrics`. Rewards are beta log pi / |y|.

    Raises errors.Unsupported for other arguments.

    Source: Hong, Lee, Thorne 2024, "ORPO: Monolithic Preference Optimization without Reference Model".
    """
    own, nll = _policy("linear_orpo", LinearHead(input, weight, bias), target, ignore_index, True)
    chosen, rejected = _log_odds(own).chunk(2)
    loss = nll - beta * _mean(functional.logsigmoid(chosen - rejected))
    return loss, _pair_metrics(own, beta * own, nll)


def linear_cpo(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    beta: float = 0.1,
    alpha: float = 1.0,
    label_smoothing: float = 0.0,
    ignore_index: int = IGNORED,
) -> tuple[torch.Tensor, PairMetrics]:
    """Return the loss of contrastive preference optimization, and metrics.

    With h = beta (log pi(y_c) - log pi(y_r)) and the label smoothing s, the loss is
    mean(-(1 - s) log sigma(h) - s log sigma(-h)) + alpha nll, where nll is the mean of -log pi over all targets of the
    chosen completions.

    Args:
        input: hidden states (2 B, T, H) of float16, bfloat16, float32 or float64; chosen completions first.
        weight: (V, H) of the head, of input's dtype.
        target: (2 B, T) integers, the class that each hidden state predicts, or `ignore_index`.
        bias: (V,) of the head, or None.
        beta: the factor of log pi.
        alpha: the factor of nll.
        label_smoothing: the probability that a label is wrong, in [0, 0.5].
        ignore_index: the target of hidden states that do not count.

    Returns the loss, a number of float32, or float64 for float64, and `PairMetrics`. Rewards are beta log pi.

    Raises errors.Unsupported for other arguments.

    Source: Xu et al. 2024, "Contrastive Preference Optimization: Pushing the Boundaries of LLM Performance in Machine
    Translation".
    """
    _check_smoothing("linear_cpo", label_smoothing)
    own, nll = _policy("linear_cpo", LinearHead(input, weight, bias), target, ignore_index, False)
    rewards = beta * own
    chosen, rejected = rewards.chunk(2)
    loss = _mean(_smoothed(chosen - rejected, label_smoothing)) + alpha * nll
    return loss, _pair_metrics(own, rewards, nll)


def linear_simpo(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    beta: float = 2.0,
    gamma: float = 1.0,
    label_smoothing: float = 0.0,
    ignore_index: int = IGNORED,
) -> tuple[torch.Tensor, PairMetrics]:
    """Return the loss of simple preference optimization, a mean over pairs, and metrics.

    With h = beta log pi(y_c) / |y_c| - beta log pi(y_r) / |y_r| - gamma and the label smoothing s, a pair's loss is
    -(1 - s) log sigma(h) - s log sigma(-h).

    Args:
        input: hidden states (2 B, T, H) of float16, bfloat16, float32 or float64; chosen completions first.
        weight: (V, H) of the head, of input's dtype.
        target: (2 B, T) integers, the class that each hidden state predicts, or `ignore_index`.
        bias: (V,) of the head, or None.
        beta: the factor of the mean log-probabilities.
        gamma: the margin of rewards.
        label_smoothing: the probability that a label is wrong, in [0, 0.5].
        ignore_index: the target of hidden states that do not count.

    Returns the loss, a number of float32, or float64 for float64, and `PairMetrics`. Rewards are beta log pi / |y|.

    Raises errors.Unsupported for other arguments.

    Source: Meng, Xia, Chen 2024, "SimPO: Simple Preference Optimization with a Reference-Free Reward".
    """
    _check_smoothing("linear_simpo", label_smoothing)
    own, nll = _policy("linear_simpo", LinearHead(input, weight, bias), target, ignore_index, True)
    rewards = beta * own
    chosen, rejected = rewards.chunk(2)
    return _mean(_smoothed(chosen - rejected - gamma, label_smoothing)), _pair_metrics(own, rewards, nll)


def linear_kto(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    desirable: torch.Tensor,
    *,
    reference: LinearHead | torch.Tensor,
    bias: torch.Tensor | None = None,
    kl: torch.Tensor | float = 0.0,
    beta: float = 0.1,
    loss_weights: tuple[float, float] = (1.0, 1.0),
    ignore_index: int = IGNORED,
) -> tuple[torch.Tensor, KtoMetrics]:
    """Return the loss of Kahneman-Tversky optimization, a mean over completions without pairs, and metrics.

    With r = log pi(y) - log pi_ref(y) and z = max(0, kl), a desirable completion's loss is
    w_d (1 - sigma(beta (r - z))), and an undesirable one's w_u (1 - sigma(beta (z - r))).

    Args:
        input: hidden states (B, T, H) of float16, bfloat16, float32 or float64.
        weight: (V, H) of the head, of input's dtype.
        target: (B, T) integers, the class that each hidden state predicts, or `ignore_index`.
        desirable: bool, (B,).
        reference: the reference model's `LinearHead`, or its log pi_ref, (B,); without a gradient.
        bias: (V,) of the head, or None.
        kl: an estimate of KL(pi || pi_ref), a number or a tensor of one element; without a gradient.
        beta: the steepness of the value function.
        loss_weights: (w_d, w_u), the weights of desirable and undesirable completions.
        ignore_index: the target of hidden states that do not count.

    Returns the loss, a number of float32, or float64 for float64, and `KtoMetrics`.

    Raises errors.Unsupported for other arguments.

    Source: Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect Theoretic Optimization".
    """
    name = "linear_kto"
    if target.dim() != 2 or desirable.shape != target.shape[:1] or desirable.dtype is not torch.bool:
        _refuse(
            name,
            f"desirable is {desirable.dtype} of the shape {tuple(desirable.shape)}: it must be torch.bool, one for "
            f"each row of target, {tuple(target.shape)}",
        )
    if isinstance(kl, torch.Tensor) and (kl.requires_grad or kl.numel() != 1):
        _refuse(name, f"kl has {kl.numel()} elements: it must be one number without a gradient; detach it")
    tokens = token_log_probabilities(name, LinearHead(input, weight, bias), target, ignore_index)
    own = _of_sequences(tokens, target, ignore_index, False)
    ratio = own - _of_reference(name, reference, target, ignore_index, False)
    divergence = kl.to(own).reshape(()) if isinstance(kl, torch.Tensor) else own.new_full((), kl)
    baseline = divergence.clamp(min=0)
    good, bad = loss_weights
    distance = beta * torch.where(desirable, baseline - ratio, ratio - baseline)
    values = functional.sigmoid(distance)
    losses = torch.where(desirable, good * values, bad * values)
    rewards = beta * ratio.detach()
    return _mean(losses), KtoMetrics(own.detach(), rewards, baseline)


# ---- Formulas --------------------------------------------------------------------------------------------------------


def _refuse(name: str, reason: str) -> NoReturn:
    raise Unsupported(name=f"tritonite::{name}", reason=reason)


def _check_smoothing(name: str, label_smoothing: float) -> None:
    if not 0 <= label_smoothing <= 0.5:
        _refuse(name, f"label_smoothing is {label_smoothing}: it must be between 0 and 0.5")


def _check_pairs(name: str, target: torch.Tensor) -> None:
    if target.dim() != 2 or target.shape[0] % 2:
        _refuse(name, f"target has the shape {tuple(target.shape)}: it must be (2 * pairs, tokens), chosen first")


def _of_sequences(tokens: torch.Tensor, target: torch.Tensor, ignore_index: int, average: bool) -> torch.Tensor:
    """Return the sums of log-probabilities over tokens, or their means over the targets that count."""
    sums = tokens.sum(-1)
    return sums / (target != ignore_index).sum(-1).clamp(min=1) if average else sums


def _of_reference(
    name: str, reference: LinearHead | torch.Tensor, target: torch.Tensor, ignore_index: int, average: bool
) -> torch.Tensor:
    """Return the reference's log-probabilities of sequences."""
    if isinstance(reference, LinearHead):
        with torch.no_grad():
            tokens = token_log_probabilities(name, reference, target, ignore_index)
            return _of_sequences(tokens, target, ignore_index, average)
    check_given(name, "reference", reference, target.shape[:1])
    return reference


def check_given(name: str, argument: str, tensor: torch.Tensor, shape: Sequence[int]) -> None:
    """Refuse log-probabilities of another shape, or with a gradient."""
    if tuple(tensor.shape) != tuple(shape):
        _refuse(name, f"{argument} has the shape {tuple(tensor.shape)}: it must be {tuple(shape)}, or a LinearHead")
    if tensor.requires_grad:
        _refuse(name, f"{argument} has no gradient: detach it")


def _policy(
    name: str, head: LinearHead, target: torch.Tensor, ignore_index: int, average: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of sequences, and the chosen ones' negative log-likelihood."""
    _check_pairs(name, target)
    tokens = token_log_probabilities(name, head, target, ignore_index)
    return _of_sequences(tokens, target, ignore_index, average), _nll(tokens, target, ignore_index)


def _nll(tokens: torch.Tensor, target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Return the mean of -log pi over all targets of the first half of sequences; 0 without targets."""
    half = target.shape[0] // 2
    return -tokens[:half].sum() / (target[:half] != ignore_index).sum().clamp(min=1)


def _smoothed(margin: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """Return -(1 - s) log sigma(margin) - s log sigma(-margin)."""
    losses = -functional.logsigmoid(margin)
    # -log sigma(-x) is -log sigma(x) + x.
    return losses + label_smoothing * margin if label_smoothing else losses


def _log_odds(log_probability: torch.Tensor) -> torch.Tensor:
    """Return log(P / (1 - P)) from log P (Maechler 2012); P = 1 is taken for the next number below."""
    below = log_probability.clamp(max=-torch.finfo(log_probability.dtype).eps)
    near = below > -0.6931471805599453
    # Each branch sees only its own arguments, so that the other's gradient is finite.
    of_near = torch.log(-torch.expm1(torch.where(near, below, -1.0)))
    of_far = torch.log1p(-torch.exp(torch.where(near, -1.0, below)))
    return below - torch.where(near, of_near, of_far)


def _mean(losses: torch.Tensor) -> torch.Tensor:
    """Return the mean, 0 of no losses."""
    return losses.sum() / max(1, losses.numel())


def _pair_metrics(own: torch.Tensor, rewards: torch.Tensor, nll: torch.Tensor) -> PairMetrics:
    own, rewards = own.detach(), rewards.detach()
    chosen, rejected = rewards.chunk(2)
    accuracy = _mean((chosen > rejected).to(own.dtype))
    log_chosen, log_rejected = own.chunk(2)
    return PairMetrics(log_chosen, log_rejected, chosen, rejected, accuracy, nll.detach())
