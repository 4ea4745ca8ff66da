"""Copies, conversions, and rearrangements of elements."""

from __future__ import annotations

from typing import Any

import torch

from tritonite.testing.samples import facts

facts.CHOICES["memory_format"] = (None, torch.preserve_format, torch.contiguous_format, torch.channels_last)


@facts.arguments("cat", "stack", "_stack")
def _lists(tensors: facts.Tensors) -> dict[str, Any]:
    """Three tensors of one shape."""
    first = tensors[0]
    return {"tensors": [first, *(x if x.shape == first.shape else first.flip(0) for x in tensors[1:3])]}


facts.CHOICES["dim"] = (0, -1)
