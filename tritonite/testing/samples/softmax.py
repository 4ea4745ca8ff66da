"""Softmax and its gradients."""

from __future__ import annotations

from typing import Any

import torch

from tritonite.testing.samples import facts

# ATen's gradient is a difference of products on GPUs, and a product with a difference on CPUs.
facts.ZERO_SIGN_OF_ROUNDOFF |= {"_masked_softmax_backward", "_softmax_backward_data"}
# ATen's sums start with 0 on a GPU, and with the first element on a CPU.
facts.ZERO_SIGN_UNDEFINED.add("_log_softmax_backward_data")
facts.CANCELLING |= {
    *("softmax", "log_softmax", "_softmax", "_log_softmax", "_safe_softmax", "_masked_softmax"),
    *("_softmax_backward_data", "_log_softmax_backward_data", "_masked_softmax_backward"),
}


def _softmax(function: Any) -> Any:
    """Return a maker of gradients and results that vary along rows: with equal ones ATen's own is mere roundoff."""

    def make(tensors: facts.Tensors) -> dict[str, Any]:
        x = tensors[0]
        if not x.is_floating_point():
            return {"grad_output": x, "output": x}
        steps = torch.arange(x.numel(), device=x.device).reshape(x.shape) % 5
        grad = tensors[1] if tensors[1].shape == x.shape else x
        return {"grad_output": grad, "output": function(torch.empty_like(x).copy_(steps), -1)}

    return make


facts.ARGUMENTS["_softmax_backward_data"] = _softmax(torch.softmax)
facts.ARGUMENTS["_log_softmax_backward_data"] = _softmax(torch.log_softmax)


@facts.arguments("_masked_softmax", "_masked_softmax_backward")
def _masked(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return a mask of the input's shape (type 2), and contiguous operands, as ATen reads all as if contiguous."""
    if not tensors[0].numel() and tensors[0].device.type != "cpu":
        # ATen's launch fails.
        return None
    x, other = (tensor.expand(tensors[0].shape).contiguous() for tensor in tensors[:2])
    mask = x.flip(0) > 0 if x.dim() else x > 0
    if x.is_floating_point() and x.dim():
        other = other.softmax(-1).masked_fill(mask, 0)
    return {"self": x, "grad_output": x, "output": other, "mask": mask, "mask_type": 2}


facts.may_decline(
    ("_masked_softmax*",),
    ("zero_dim",),
    "*or 0-d ones",
    "a tensor without dimensions has no rows",
)
facts.may_decline(
    ("log_softmax.with_dtype", "softmax.with_dtype"),
    ("out=",),
    "*int_out: conversion from *",
    "ATen converts the input first, and then calls softmax of the converted tensor",
)


@facts.drawn("_log_softmax_backward_data", "_softmax_backward_data", "_masked_softmax_backward")
def _finite_output(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a finite output, as softmax has: for others ATen's formulas on a GPU and on a CPU differ."""
    output = arguments["output"]
    if not (facts.real(output) and output.is_floating_point()):
        return arguments
    return arguments | {"output": output.nan_to_num(0.5, 0.5, 0.5)}
