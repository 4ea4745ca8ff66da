"""DTensors, which kernels cannot take as they are."""

from __future__ import annotations

import sys

import torch


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor, without importing DTensor's module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
