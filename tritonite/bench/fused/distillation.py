"""Pairs of losses over a vocabulary, forward and backward: divergences of logits, and losses of linear heads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tritonite import fused
from tritonite.bench.fused.pair import Make, Pair, Shape

functional = torch.nn.functional
# (rows, classes), and (sequences, tokens, hidden size, classes) of a head.
_LOGITS: tuple[tuple[Shape, ...], Shape, Shape] = (
    ((4096, 32_000), (4096, 128_256), (2048, 151_936)),
    (64, 64),
    (4, 64),
)
_HEADS: tuple[tuple[Shape, ...], Shape, Shape] = (
    ((4, 1024, 2048, 128_256), (4, 2048, 4096, 32_000)),
    (2, 4, 16, 64),
    (2, 4, 16, 64),
)


def _with_gradients(loss: Callable[..., Any], count: int, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return a loss and its gradients by the first `count` operands."""
    with torch.enable_grad():
        leaves = [each.detach().requires_grad_() for each in operands[:count]]
        value = loss(*leaves, *operands[count:])
        return (value.detach(), *torch.autograd.grad(value, leaves))


def _jsd(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    log_q, log_p = student.float().log_softmax(-1), teacher.float().log_softmax(-1)
    log_m = torch.logaddexp(log_q, log_p) - 0.6931471805599453
    kl = functools.partial(functional.kl_div, reduction="sum", log_target=True)
    return (kl(log_m, log_p) + kl(log_m, log_q)) / (2 * len(student))


def _kl_divergence(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    log_q, log_p = student.float().log_softmax(-1), teacher.float().log_softmax(-1)
    return functional.kl_div(log_q, log_p, reduction="batchmean", log_target=True)


def _linear_jsd(
    student: torch.Tensor, weight: torch.Tensor, teacher: torch.Tensor, teacher_weight: torch.Tensor
) -> torch.Tensor:
    return _jsd((student @ weight.T).flatten(0, -2), (teacher @ teacher_weight.T).flatten(0, -2))


def _dpo(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    logits = (hidden @ weight.T).float().flatten(0, 1)
    tokens = functional.cross_entropy(logits, target.flatten(), reduction="none").view_as(target)
    chosen, rejected = (-tokens.sum(1) - reference).chunk(2)
    return -functional.logsigmoid(0.1 * (chosen - rejected)).mean()


def _fused_dpo(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, reference: torch.Tensor
) -> torch.Tensor:
    return fused.linear_dpo(hidden, weight, target, reference=reference)[0]


def _logits(make: Make, shape: Shape) -> list[torch.Tensor]:
    return [make(*shape), make(*shape)]


def _heads(make: Make, shape: Shape) -> list[torch.Tensor]:
    *rows, hidden, classes = shape
    return [make(*rows, hidden), make(classes, hidden), make(*rows, hidden), make(classes, hidden)]


def _preferences(make: Make, shape: Shape) -> list[torch.Tensor]:
    sequences, tokens, hidden, classes = shape
    states, weight = make(sequences, tokens, hidden), make(classes, hidden)
    target = torch.arange(sequences * tokens, device=states.device).remainder(classes).view(sequences, tokens)
    return [states, weight, target, make(sequences).float()]


def _pair(composition: Callable[..., Any], loss: Callable[..., Any], count: int, make: Any, shapes: Any) -> Pair:
    both = [functools.partial(_with_gradients, each, count) for each in (composition, loss)]
    return Pair(both[0], both[1], make, shapes)


PAIRS: dict[str, Pair] = {
    "jsd": _pair(_jsd, fused.jsd, 1, _logits, _LOGITS),
    "kl_divergence": _pair(_kl_divergence, fused.kl_divergence, 1, _logits, _LOGITS),
    "linear_jsd": _pair(_linear_jsd, fused.linear_jsd, 2, _heads, _HEADS),
    "linear_dpo": _pair(_dpo, _fused_dpo, 2, _preferences, _HEADS),
}
