"""Reductions of losses of rows: none, their sum, or their mean over the rows that count."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tritonite.errors import Unsupported

REDUCTIONS = ("none", "sum", "mean")


def check_reduction(name: str, reduction: str, allowed: Sequence[str] = REDUCTIONS) -> None:
    """Refuse a reduction that the function `name` does not have."""
    if reduction not in allowed:
        choices = ", ".join(map(repr, allowed))
        raise Unsupported(name=f"tritonite::{name}", reason=f"reduction is {reduction!r}: it may be one of {choices}")


def counted_rows(losses: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | int:
    """Return the number of rows that the mask marks, or of all rows; at least 1, so that a mean of no rows is 0."""
    return max(1, losses.numel()) if mask is None else mask.sum().clamp(min=1)


def reduced(losses: torch.Tensor, reduction: str, count: Callable[[], torch.Tensor | int]) -> torch.Tensor:
    """Return the losses, their sum, or their sum over `count()`."""
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / count()
