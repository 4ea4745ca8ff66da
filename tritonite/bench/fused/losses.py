"""Pairs of losses: cross entropy of logits, and over a linear head, forward and with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tritonite import fused
from tritonite.bench.fused.pair import Make, Pair, Shape

functional = torch.nn.functional
aten, library = torch.ops.aten, torch.ops.tritonite
_NUMBERS: tuple[Any, ...] = (-100, "mean", 0.0, None, 0.0)

# (tokens, classes).
_LOGITS = ((8192, 32_000), (4096, 128_256), (65_536, 1000)), (16, 64), (5, 40)
# (tokens, features, classes).
_HEADS = ((4096, 2048, 32_000), (8192, 4096, 128_256)), (16, 64, 64), (5, 8, 40)


def _classes(make: Make, tokens: int, classes: int) -> torch.Tensor:
    """Return a target for each token, different ones."""
    return torch.arange(tokens, device=make(1).device) * 7919 % classes


def _logits(make: Make, shape: Shape) -> Sequence[torch.Tensor]:
    return [make(*shape), _classes(make, *shape)]


def _aten_loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    # The fused loss is float32.
    return functional.cross_entropy(x, target).float()


def _saved(make: Make, shape: Shape) -> Sequence[torch.Tensor]:
    """Return logits, targets, their log-probabilities' log-sum, the total weight and the loss's gradient."""
    x, target = _logits(make, shape)
    rows = torch.logsumexp(x.to(torch.promote_types(x.dtype, torch.float32)), -1)
    return [x, target, rows, torch.full((1,), float(shape[0]), dtype=rows.dtype, device=x.device)]


def _aten_backward(x: torch.Tensor, target: torch.Tensor, lse: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    logs = functional.log_softmax(x, -1)
    grad = aten.nll_loss_backward(total.new_ones((), dtype=x.dtype), logs, target, None, 1, -100, total[0].to(x.dtype))
    return aten._log_softmax_backward_data(grad, logs, -1, x.dtype)


def _fused_backward(x: torch.Tensor, target: torch.Tensor, lse: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    grad = total.new_ones(())
    result: torch.Tensor = library.cross_entropy_backward(grad, x, target, None, None, lse, total, None, *_NUMBERS)
    return result


def _head(make: Make, shape: Shape) -> Sequence[torch.Tensor]:
    tokens, size, classes = shape
    return [make(tokens, size), make(classes, size) * size**-0.5, _classes(make, tokens, classes)]


def _aten_head(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> Any:
    """Return the loss over a linear head, and the gradients by input and weight."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    with torch.enable_grad():
        loss = functional.cross_entropy(x @ weight.mT, target)
        return (loss.detach().float(), *torch.autograd.grad(loss, (x, weight)))


def _fused_head(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> Any:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    with torch.enable_grad():
        loss: Any = fused.linear_cross_entropy(x, weight, target)
        return (loss.detach(), *torch.autograd.grad(loss, (x, weight)))


PAIRS: dict[str, Pair] = {
    "cross_entropy": Pair(_aten_loss, fused.cross_entropy, _logits, _LOGITS),
    "cross_entropy_backward": Pair(_aten_backward, _fused_backward, _saved, _LOGITS),
    "linear_cross_entropy": Pair(_aten_head, _fused_head, _head, _HEADS),
}
