"""Negative log likelihood."""

from __future__ import annotations

from typing import Any

import torch

from tritonite import devices
from tritonite.registry import Op
from tritonite.testing.samples import facts

facts.INTEGERS["ignore_index"] = 1


@facts.operands("nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward")
def _classes(op: Op, tensors: facts.Tensors, reduction: Any) -> facts.Tensors | None:
    """Return a class for every row, and a weight for every class."""
    if op.packet == "nll_loss2d_forward" and reduction == 0 and devices.current.aten == "cuda":
        # Without a reduction ATen leaves the total weight uninitialised.
        return None
    x = tensors[0] if tensors[0].dim() else tensors[0][None]
    if "2d" in op.packet and x.dim() == 2:
        x = x[None, :, :, None]
    dim = 1 if x.dim() > 1 else 0
    classes, rows = x.shape[dim], x.select(dim, 0) if x.shape[dim] else x.flatten()
    target = (torch.arange(rows.numel(), device=x.device) * 7 % max(classes, 1)).reshape(rows.shape)
    found = {"self": x, "target": target, "weight": tensors[3].flatten()[:classes]}
    found["grad_output"] = rows if reduction == 0 else tensors[1].flatten()[:1].sum()
    found["total_weight"] = tensors[2].flatten()[:1].sum()
    return [found[name] for name in op.names if name in found]


@facts.drawn("nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward")
def _labels(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return labels of existing classes: ATen stops the program for others."""
    target, x = arguments["target"], arguments["self"]
    if not facts.real(target) or not isinstance(x, torch.Tensor):
        return arguments
    classes = x.shape[1 if x.dim() > 1 else 0] if x.dim() else 1
    return arguments | {"target": target.clamp(0, max(0, classes - 1))}
