"""Sequences of different lengths."""

from __future__ import annotations

from typing import Any

import torch

from tritonite.testing.samples import facts


@facts.arguments("_jagged_to_padded_dense_forward")
def _sequences(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return three sequences: a third of the rows, none, and the rest, which is longer than the padded length."""
    x = tensors[0].contiguous()
    if not x.dim() or not x.numel():
        return None
    ends = torch.tensor([0, len(x) // 3, len(x) // 3, len(x)], device=x.device)
    return {"values": x, "offsets": [ends], "max_lengths": [max(1, len(x) // 2)], "padding_value": 0.5}


@facts.drawn("_jagged_to_padded_dense_forward")
def _inside(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return offsets in order and within the values, past which ATen reads on a GPU."""
    values, offsets = arguments["values"], arguments["offsets"]
    if not (facts.real(values) and values.dim()):
        return arguments
    inside = [x.clamp(0, len(values)).sort(-1).values if facts.real(x) and x.dim() else x for x in offsets]
    return arguments | {"offsets": inside}


@facts.arguments("_padded_dense_to_jagged_forward")
def _padded(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return padded sequences, one of which is empty and one of which has the full length."""
    x = tensors[0]
    if x.dim() < 2 or not x.numel():
        return None
    dense = x[None] if x.dim() == 2 else x.flatten(3).flatten(2) if x.dim() > 3 else x
    longest = dense.shape[1]
    lengths = torch.tensor([0, longest, longest // 2, longest // 3])[torch.arange(1, len(dense) + 1) % 4]
    ends = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).to(x.device)
    return {"dense": dense, "offsets": [ends], "total_L": int(lengths.sum())}


@facts.drawn("_padded_dense_to_jagged_forward")
def _in_order(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return offsets that ATen accepts on a CPU; on a GPU any offsets of which the first is 0, limited to 100."""
    offsets, dense = arguments["offsets"], arguments["dense"]
    if len(offsets) == 1 and isinstance(offsets[0], torch.Tensor) and isinstance(dense, torch.Tensor):
        ends = offsets[0]
        if facts.real(ends) and not ends.is_floating_point() and ends.dim() == 1 and len(ends) and dense.dim() > 1:
            if dense.device.type != "cpu":
                ends = ends.clamp(0, 100)
                ends[0] = 0
                return arguments | {"offsets": [ends], "total_L": int(ends.max())}
            ends = ends.clamp(0, dense.shape[1]).cumsum(0)
            ends = (ends - ends[0]).to(offsets[0].dtype)
            return arguments | {"offsets": [ends], "total_L": int(ends[-1])}
    return arguments
