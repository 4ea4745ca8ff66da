"""Selection between elements: where, masked fill, clamp."""

from __future__ import annotations

import torch

from tritonite.testing.samples import facts

facts.ZERO_SIGN_UNDEFINED |= {"clamp", "clamp_max", "clamp_min"}


def _positive(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.nan_to_num() > 0 if tensor.is_floating_point() else tensor > 0


def _two(tensor: torch.Tensor) -> torch.Tensor:
    return torch.tensor(2, dtype=tensor.dtype, device=tensor.device)


facts.TENSORS |= {"mask": _positive, "condition": _positive, "value": _two}
