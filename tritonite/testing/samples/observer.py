"""Observers of quantisation-aware training."""

from __future__ import annotations

from typing import Any

import torch

from tritonite.testing.samples import facts

_PACKETS = ("_fused_moving_avg_obs_fq_helper", "_fused_moving_avg_obs_fq_helper_functional")
facts.ZERO_SIGN_OF_ROUNDOFF.update(_PACKETS)


def _states(size: int, fresh: bool, device: torch.device) -> dict[str, Any]:
    steps = torch.arange(size, device=device, dtype=torch.float32)
    low, high = -0.5 - steps / 8, 1.0 + steps / 16
    if fresh:
        low, high = torch.full_like(low, torch.inf), torch.full_like(high, -torch.inf)
    zero_point = torch.zeros(size, device=device, dtype=torch.int32)
    return {"running_min": low, "running_max": high, "scale": 0.2 + steps / 32, "zero_point": zero_point}


@facts.arguments(*_PACKETS)
def _observed(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return states of a tensor or of its rows, which are fresh, or whose observer or quantisation is off."""
    x = tensors[0]
    if not x.dim() or not x.numel() or x.dtype is not torch.float32 or not bool(x.isfinite().all()):
        return None
    kind = x.shape[-1] % 4
    switches = [torch.tensor([flag], device=x.device) for flag in (int(kind != 1), int(kind != 2))]
    given = dict(zip(("observer_on", "fake_quant_on"), switches, strict=True))
    given |= {"averaging_const": 0.25, "quant_min": -8, "quant_max": 7, "ch_axis": 0}
    per_row = x.dim() > 1 and x.shape[0] > 1
    return (
        given | {"self": x, "per_row_fake_quant": per_row} | _states(x.shape[0] if per_row else 1, kind == 3, x.device)
    )


@facts.drawn(*_PACKETS)
def _fitting(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return states of the right size, beyond which ATen reads."""
    x = arguments["self"]
    if not isinstance(x, torch.Tensor) or _observed([x]) is None:
        x = torch.linspace(-2, 3, 24).view(4, 6)
    given = _observed([x]) or {}
    return arguments | {name: value for name, value in given.items() if name in arguments}
