"""Softmax and its gradients."""

from __future__ import annotations

from typing import Any

import torch

from tritonite.testing.samples import facts

# The gradient is to ATen a difference of products on GPUs, a product with a difference on CPUs.
facts.ZERO_SIGN_OF_ROUNDOFF |= {"_masked_softmax_backward", "_softmax_backward_data"}
# ATen's sums start from 0 on a GPU, and on a CPU from the first element.
facts.ZERO_SIGN_UNDEFINED.add("_log_softmax_backward_data")


def _softmax(function: Any) -> Any:
    """A gradient that differs along a row, and a result that does: with equal ones ATen's own is but roundoff."""

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
    """A mask of all elements: its type is 2. ATen reads all operands as contiguous whatever they are."""
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
    "a number is no row",
)
facts.may_decline(
    ("log_softmax.with_dtype", "softmax.with_dtype"),
    ("out=",),
    "*int_out: conversion from *",
    "ATen converts the input first, and asks for softmax of what it has made",
)


@facts.drawn("_log_softmax_backward_data", "_softmax_backward_data", "_masked_softmax_backward")
def _finite_output(arguments: dict[str, Any]) -> dict[str, Any]:
    """What softmax never gives is to ATen on a GPU a difference of products, and a product with one on a CPU."""
    output = arguments["output"]
    if not (facts.real(output) and output.is_floating_point()):
        return arguments
    return arguments | {"output": output.nan_to_num(0.5, 0.5, 0.5)}
