"""Checks and the layout of a linear head's operands, for the losses over it."""

from __future__ import annotations

import torch

from tritonite.engine.cross_entropy.head import Head, tokens_of_a_chunk
from tritonite.engine.iteration import as_matrix
from tritonite.errors import Decline
from tritonite.fused.check import check_device, check_shape
from tritonite.fused.cross_entropy import check_targets
from tritonite.ops.matmul import precision_of


def check_head(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    token_scale: torch.Tensor | None,
    n_classes: int,
) -> None:
    """Decline operands of a head that do not fit each other; `n_classes` are those of all shards."""
    if weight.dim() != 2 or weight.shape[1:] != input.shape[-1:]:
        size = input.shape[-1] if input.dim() else 1
        raise Decline(
            f"weight has the shape {tuple(weight.shape)}: it must be (classes, {size}), of input's last dimension"
        )
    check_targets("input", input, n_classes, target, class_weight, token_scale, "class_weight")
    if weight.dtype is not input.dtype:
        raise Decline(f"weight is {weight.dtype} and input {input.dtype}: give both one dtype")
    check_device("weight", weight, "input", input)
    if bias is not None:
        check_shape("bias", bias, weight.shape[:1], "an element for each row of weight")
        if bias.dtype not in (input.dtype, torch.float32):
            raise Decline(f"bias is {bias.dtype}: it may be {input.dtype}, as input is, or torch.float32")
        check_device("bias", bias, "input", input)


def head_of(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, chunk_tokens: int | None) -> Head:
    """Return the head of an input as a matrix, which is a copy if no view has this shape."""
    matrix = as_matrix(input)
    n_tokens = matrix.shape[0]
    chunk = tokens_of_a_chunk(n_tokens) if chunk_tokens is None else max(1, min(chunk_tokens, n_tokens))
    return Head(matrix, weight, bias, precision_of(input.dtype), chunk)
