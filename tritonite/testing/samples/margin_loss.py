"""Margin losses."""

from __future__ import annotations

from typing import Any

import torch

from tritonite.registry import Op
from tritonite.testing.samples import facts

_CLASSES = ("multi_margin_loss", "multi_margin_loss_backward")
_LABELS = ("multilabel_margin_loss_forward", "multilabel_margin_loss_backward")
# Gradients are sums of equal terms that cancel.
facts.ZERO_SIGN_OF_ROUNDOFF |= {*_CLASSES, *_LABELS}


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, -2) if x.dim() > 2 else x


@facts.arguments(*_CLASSES)
def _norm_and_margin(tensors: facts.Tensors) -> dict[str, Any]:
    """Return a norm and a margin that depend on the number of rows."""
    return {"p": 1 + len(tensors[0]) % 2 if tensors[0].dim() else 2, "margin": 0.75}


@facts.operands(*_CLASSES, *_LABELS)
def _targets(op: Op, tensors: facts.Tensors, reduction: Any) -> facts.Tensors | None:
    """Return a class for every row, or labels that end with a negative one in most rows."""
    x = _rows(tensors[0])
    if not x.numel():
        # ATen leaves the loss uninitialised.
        return None
    rows, classes = (x if x.dim() > 1 else x.reshape(1, -1)).shape
    order = torch.arange(rows * classes, device=x.device)
    labels = (order * 7 % (classes + 3) - 1).clamp_max(classes - 1).view(rows, classes)
    if op.packet in _CLASSES:
        target = order[:rows] * 7 % classes if x.dim() else order[0]
    else:
        target = labels.view(x.shape)
    found = {"self": x, "target": target, "weight": tensors[-1].flatten()[:1].expand(classes).contiguous()}
    found["is_target"] = (order % 3 == 0).to(x.dtype).view(x.shape)
    each = reduction == 0 and (x.dim() > 1 if op.packet in _LABELS else x.dim() > 0)
    grad = tensors[-1].flatten()[:1]
    found["grad_output"] = grad.expand(rows) if each else grad.sum()
    return [found[name] for name in op.names if name in found]


@facts.drawn(*_CLASSES, *_LABELS)
def _existing(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return labels of existing classes: ATen stops the program for others."""
    target, x = arguments["target"], arguments["self"]
    if not facts.real(target) or not isinstance(x, torch.Tensor):
        return arguments
    classes = x.shape[-1] if x.dim() else 1
    least = -1 if "is_target" in arguments or "p" not in arguments else 0
    return arguments | {"target": target.clamp(least, max(0, classes - 1))}
