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


facts.may_decline(
    ("binary_cross_entropy", "binary_cross_entropy.out"),
    ("broadcast *",),
    "a target of another shape",
    "torch.nn.functional refuses it; what ATen's kernels make of it differs by device",
)
facts.may_decline(
    ("binary_cross_entropy.out",),
    ("* 2", "zero_dim 1"),
    "an output that ATen wants in the shape of the input, and makes 0-d",
    "ATen puts the losses of elements in the output before it reduces them, and resizes it",
)
