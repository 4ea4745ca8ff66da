"""Losses of elements."""

from __future__ import annotations

from typing import Any

from tritonite.catalog import Op
from tritonite.testing.samples import facts

facts.CHOICES["reduction"] = (1, 2, 0)


@facts.operands("binary_cross_entropy")
def _probabilities(op: Op, tensors: facts.Tensors, reduction: Any) -> facts.Tensors:
    """In place, for the layout's sake."""
    if not tensors[0].is_floating_point():
        return tensors
    return [*(x.nan_to_num_().clamp_(0, 1) for x in tensors[:2]), *tensors[2:]]
