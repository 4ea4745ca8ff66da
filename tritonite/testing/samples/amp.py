"""Loss scaling: gradients in a list, scales and counters of one element."""

from __future__ import annotations

from typing import Any

import torch

from tritonite.testing.samples import facts


@facts.arguments("_amp_foreach_non_finite_check_and_unscale")
def _gradients(tensors: facts.Tensors) -> dict[str, Any]:
    """Return all tensors of a layout as gradients, with a scale that is no power of 2."""
    device = tensors[0].device
    return {
        "self": tensors,
        "found_inf": torch.zeros(1, device=device),
        "inv_scale": torch.tensor(0.3, device=device),
    }


@facts.arguments("_amp_update_scale")
def _scales(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return a scale that grows at this step, or that an overflow halves, by the dimensions of the layout."""
    device, rank = tensors[0].device, tensors[0].dim()
    if tensors[0].dtype is not torch.float32:
        return None
    return {
        "self": torch.full((1,) * (rank % 2), 1000.0, device=device),
        "growth_tracker": torch.full((1,), 3, dtype=torch.int32, device=device),
        "found_inf": torch.full((), float(rank == 2), device=device),
        "scale_growth_factor": 2.5,
        "scale_backoff_factor": 0.3,
        "growth_interval": 4 + rank // 4,
    }
