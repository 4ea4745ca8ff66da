"""Losses of elements."""

from __future__ import annotations

from typing import Any

from tritonite import devices
from tritonite.registry import Op
from tritonite.testing.samples import facts

facts.CHOICES["reduction"] = (1, 2, 0)


@facts.operands("binary_cross_entropy")
def _probabilities(op: Op, tensors: facts.Tensors, reduction: Any) -> facts.Tensors | None:
    """Return probabilities and targets from 0 to 1, changed in place to keep the layout."""
    if op.overload == "binary_cross_entropy.out" and reduction == 2 and not tensors[0].numel():
        # ATen resizes the output and leaves it uninitialised.
        return None
    if not tensors[0].is_floating_point():
        return tensors
    return [*(x.nan_to_num_().clamp_(0, 1) for x in tensors[:2]), *tensors[2:]]


facts.may_decline(
    ("binary_cross_entropy.out",),
    ("* 2", "zero_dim 1"),
    "an output for a reduced loss, which ATen first uses in the input's shape",
    "ATen stores the unreduced losses in the output, and then resizes it",
)
facts.may_decline(
    ("soft_margin_loss_backward*",),
    ("transposed *", "sliced *", "channels_last *"),
    "operands that are not contiguous*",
    "each of ATen's steps chooses the layout of its result",
)
facts.may_decline(
    ("huber_loss_backward*", "mse_loss_backward*", "smooth_l1_loss_backward*"),
    ("broadcast *",),
    "operands that do not broadcast*",
    "a gradient that broadcasts the input, which no loss has",
)


@facts.drawn("binary_cross_entropy")
def _drawn_probabilities(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return probabilities from 0 to 1: on a GPU ATen stops the program for other numbers."""
    if devices.current.aten == "cpu":
        return arguments
    return arguments | {
        name: arguments[name].nan_to_num(0.5).clamp(0, 1)
        for name in ("self", "target")
        if facts.real(arguments[name]) and arguments[name].is_floating_point()
    }
