"""Sequences of different lengths."""

from __future__ import annotations

from typing import Any

import torch

from tritonite.testing.samples import facts


@facts.arguments("_jagged_to_padded_dense_forward")
def _sequences(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Two of all rows, one empty, and one that is cut off."""
    x = tensors[0].contiguous()
    if not x.dim() or not x.numel():
        return None
    ends = torch.tensor([0, len(x) // 3, len(x) // 3, len(x)], device=x.device)
    return {"values": x, "offsets": [ends], "max_lengths": [max(1, len(x) // 2)], "padding_value": 0.5}
