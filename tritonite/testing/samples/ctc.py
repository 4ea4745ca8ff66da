"""Connectionist temporal classification."""

from __future__ import annotations

from typing import Any

import torch

from tritonite.dtypes import FULL_FLOATS
from tritonite.registry import Op
from tritonite.testing.samples import facts

_PACKETS = ("_ctc_loss", "_ctc_loss_backward")
facts.ZERO_SIGN_OF_ROUNDOFF.update(_PACKETS)


@facts.arguments(*_PACKETS)
def _finite(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Take layouts of finite numbers in the dtypes that ATen serves."""
    x = tensors[0]
    return {} if x.dtype in FULL_FLOATS and x.dim() and x.numel() and bool(x.isfinite().all()) else None


@facts.lists("ctc")
def _sequences(op: Op, label: str, tensors: facts.Tensors) -> dict[str, Any]:
    """Return sequences of different lengths, of up to a third as many labels as steps; the last one has none."""
    x = tensors[0]
    log_probs = (x.reshape(1, 1, -1) if x.dim() < 2 else x[:, None] if x.dim() == 2 else x.flatten(2)).log_softmax(-1)
    steps, sequences, classes = log_probs.shape
    order = torch.arange(sequences * (1 + steps // 3), device=x.device)
    targets = (1 + order * 7 % max(1, classes - 1)).view(sequences, -1).clamp_max(classes - 1)
    input_lengths = [max(1, steps - i % 3) for i in range(sequences)]
    target_lengths = [0 if i == sequences - 1 else max(0, steps // 3 - i % 2) for i in range(sequences)]
    if sequences == 1:
        target_lengths = [steps // 3]
    given: dict[str, Any] = {"log_probs": log_probs, "targets": targets, "blank": 0}
    lengths = {"input_lengths": input_lengths, "target_lengths": target_lengths}
    if "backward" in op.overload:
        losses, log_alpha = torch.ops.aten._ctc_loss(log_probs, targets, input_lengths, target_lengths)
        given |= {"neg_log_likelihood": losses, "log_alpha": log_alpha, "grad": losses / 8}
    return given | lengths


@facts.drawn(*_PACKETS)
def _existing(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return labels of existing classes, beyond which ATen reads, and none that is the blank.

    A blank is no label: ATen writes the gradient of the last step for the label over that for the blank. Its gradient
    also writes beyond memory for a blank that is no class, which the forward function refuses.
    """
    targets, x = arguments["targets"], arguments["log_probs"]
    if not facts.real(targets) or not isinstance(x, torch.Tensor) or not x.dim():
        return arguments
    classes, blank = max(1, x.shape[-1]), arguments.get("blank", 0)
    if "grad" in arguments:
        blank = min(max(int(blank), 0), classes - 1)
    targets = targets.clamp(0, classes - 1)
    targets = torch.where(targets == blank, (targets + 1) % classes, targets)
    return arguments | {"targets": targets} | ({"blank": blank} if "blank" in arguments else {})
