"""Embeddings."""

from __future__ import annotations

from typing import Any

import torch

from tritonite import devices
from tritonite.testing.samples import facts
from tritonite.testing.samples.indexing import matrix, spread


@facts.arguments("embedding")
def _embedding(tensors: facts.Tensors) -> dict[str, Any] | None:
    weight = matrix(tensors[0])
    return {"weight": weight, "indices": spread((2, 3), len(weight), weight), "padding_idx": 1} if len(weight) else None


@facts.arguments("embedding_dense_backward")
def _gradient(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return a gradient for a table of 5 rows, one of which is padding and one of which is not used."""
    grad = tensors[0] if tensors[0].dim() > 1 else matrix(tensors[0])
    if not grad.numel():
        return None
    indices = spread(tuple(grad.shape[:-1]), 4, grad, 3)
    return {"grad_output": grad, "indices": indices, "num_weights": 5, "padding_idx": 2}


@facts.drawn("embedding_dense_backward")
def _valid_rows(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return indices of rows of the table: ATen writes beyond the table for others."""
    indices, rows = arguments["indices"], max(1, min(arguments["num_weights"], 64))
    return arguments | {
        "num_weights": rows,
        "indices": indices.clamp(0, rows - 1) if facts.real(indices) else indices,
    }


@facts.arguments("embedding_renorm")
def _renormalized(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return indices of rows, one of which occurs twice."""
    weight = matrix(tensors[0])
    if not weight.numel():
        return None
    return {"self": weight, "indices": spread((3,), min(2, len(weight)), weight, 1), "max_norm": 1.5, "norm_type": 2.0}


facts.may_decline(
    ("embedding_renorm_",),
    ("sliced", "channels_last"),
    "rows that are not contiguous*",
    "ATen's kernel for GPUs uses the stride of rows as their length, and reads elements between rows",
    device="cuda",
)


@facts.drawn("embedding_renorm")
def _rows_to_scale(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return indices of rows of the table: on a GPU ATen reads and writes beyond the table for others."""
    indices, weight = arguments["indices"], arguments["self"]
    if not facts.real(indices) or indices.device.type == "cpu" or not (weight.dim() and weight.shape[0]):
        return arguments
    return arguments | {"indices": indices.clamp(0, weight.shape[0] - 1)}


@facts.drawn("embedding")
def _rows_to_read(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return indices of rows of the table: on a GPU ATen stops the program for others."""
    weight, indices = arguments["weight"], arguments["indices"]
    if devices.current.aten == "cpu" or not (isinstance(weight, torch.Tensor) and weight.dim()):
        return arguments
    return arguments | {"indices": facts.within(indices, 0, weight.shape[0] - 1)}
