"""Selection of elements by a mask or by being nonzero; about half of the elements are."""

from __future__ import annotations

from typing import Any

import torch

from tritonite import devices
from tritonite.testing.samples import facts


@facts.arguments("nonzero", "nonzero_static")
def _some_zeros(tensors: facts.Tensors) -> dict[str, Any]:
    """Set about half of the elements to zeros of both signs, in place to keep the layout."""
    x = tensors[0]
    if x.is_floating_point() and x.numel():
        x[x > 0.5] = 0.0
        x[x < -0.5] = -0.0
    return {"self": x, "size": 20, "fill_value": -3}


def _mask(x: torch.Tensor) -> torch.Tensor:
    return x.nan_to_num() > 0 if x.is_floating_point() else x.real > 0 if x.is_complex() else x > 0


@facts.arguments("masked_select", "masked_scatter", "masked_scatter_backward")
def _masked(tensors: facts.Tensors) -> dict[str, Any]:
    """Return a mask that broadcasts, and a source with enough elements."""
    x, other = tensors[0], tensors[1]
    mask = _mask(other)
    count = max(1, x.numel())
    source = other.flatten().repeat(-(-count // max(1, other.numel())) + 1) if other.numel() else other
    return {"self": x, "mask": mask, "source": source, "grad_output": x, "sizes": [count]}


@facts.arguments("repeat_interleave")
def _repeats(tensors: facts.Tensors) -> dict[str, Any] | None:
    x = tensors[0].flatten()
    if x.is_floating_point() or x.dtype.itemsize < 4 or not x.numel():
        return None
    return {"repeats": x.abs(), "output_size": None}


@facts.drawn("nonzero_static")
def _limited(arguments: dict[str, Any]) -> dict[str, Any]:
    """Limit the size to what fits in memory."""
    return arguments | {"size": min(arguments["size"], 5000)}


@facts.drawn("repeat_interleave")
def _consistent_size(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return valid repeats, with the size that they add up to: on a GPU ATen stops the program for others."""
    repeats = arguments["repeats"]
    if not facts.is_index(repeats):
        return arguments
    repeats = facts.within(repeats, -1 if devices.current.aten == "cpu" else 0, 1000)
    sized = devices.current.aten != "cpu" and arguments.get("output_size") is not None
    return arguments | {"repeats": repeats} | ({"output_size": int(repeats.sum())} if sized else {})
