"""Fake quantisation."""

from __future__ import annotations

from typing import Any

import torch

from tritonite.testing.samples import facts

_CHANNELS = (
    "fake_quantize_per_channel_affine_cachemask",
    "_fake_quantize_learnable_per_channel_affine",
    "_fake_quantize_learnable_per_channel_affine_backward",
)
_TENSORS = (
    "fake_quantize_per_tensor_affine_cachemask",
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
    "_fake_quantize_learnable_per_tensor_affine",
    "_fake_quantize_learnable_per_tensor_affine_backward",
)
facts.ZERO_SIGN_OF_ROUNDOFF |= {*_CHANNELS, *_TENSORS}
_RANGE = {"quant_min": -8, "quant_max": 7, "grad_factor": 0.5}


def _numbers(tensors: facts.Tensors, scale: Any, zero_point: Any, **others: Any) -> dict[str, Any]:
    return _RANGE | {"self": tensors[0], "grad": tensors[-1], "scale": scale, "zero_point": zero_point} | others


@facts.arguments("fake_quantize_per_tensor_affine_cachemask")
def _per_tensor(tensors: facts.Tensors) -> dict[str, Any]:
    return _numbers(tensors, 0.3, 2)


@facts.arguments("_fake_quantize_per_tensor_affine_cachemask_tensor_qparams")
def _per_tensor_on_device(tensors: facts.Tensors) -> dict[str, Any]:
    """Return a scale and a zero point on the device; for an odd last size, quantisation is disabled."""
    x = tensors[0]
    enabled = torch.tensor([not (x.dim() and x.shape[-1] % 2)], dtype=torch.int64, device=x.device)
    scale, zero_point = torch.tensor(0.3, device=x.device), torch.tensor([-3], dtype=torch.int32, device=x.device)
    return _numbers(tensors, scale, zero_point, fake_quant_enabled=enabled)


@facts.arguments("_fake_quantize_learnable_per_tensor_affine", "_fake_quantize_learnable_per_tensor_affine_backward")
def _learnable(tensors: facts.Tensors) -> dict[str, Any] | None:
    x = tensors[0]
    given = _numbers(tensors, *(torch.tensor([number], device=x.device) for number in (0.3, 1.5)))
    return given | {"grad": tensors[-1].expand(x.shape)}


@facts.arguments(*_CHANNELS)
def _per_channel(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return numbers of channels along the first or, of an odd size, the last dimension."""
    x = tensors[0]
    if not x.dim():
        return None
    axis = x.dim() - 1 if x.shape[-1] % 2 else 0
    steps = torch.arange(x.shape[axis], device=x.device, dtype=torch.float32)
    return _numbers([x, tensors[1].expand(x.shape)], 0.2 + steps / 16, steps % 5 - 1.25, axis=axis)


def _gradients(
    grad: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    quant_min: int,
    quant_max: int,
    grad_factor: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of each element in float64. Elements are rounded in float32, as ATen rounds them."""
    # nan and infinity become the least integer.
    q = (x.float() * (1 / scale.float())).round() + zero_point.float()
    q = q.double().nan_to_num(-(2.0**63), -(2.0**63), -(2.0**63))
    inside = (q >= quant_min) & (q <= quant_max)
    rounding = ((q.clamp(quant_min, quant_max) - zero_point) * scale - x) / scale
    outside = torch.where(q < quant_min, quant_min - zero_point, quant_max - zero_point)
    by_scale = grad * torch.where(inside, rounding, outside) * grad_factor
    return grad * inside, by_scale, torch.where(inside, 0.0, -grad * scale * grad_factor)


def _tensor_reference(grad: Any, x: Any, scale: Any, zero_point: Any, low: int, high: int, grad_factor: float) -> Any:
    zero_point = (zero_point + 0.5).clamp(low, high).trunc()
    gradient, *others = _gradients(grad, x, scale, zero_point, low, high, grad_factor)
    return gradient, *(other.sum().unsqueeze(0) for other in others)


def _channel_reference(
    grad: Any, x: Any, scale: Any, zero_point: Any, axis: int, low: int, high: int, grad_factor: float
) -> Any:
    shape = [-1 if d == axis else 1 for d in range(x.dim())]
    zero_point = zero_point.round().clamp(low, high).view(shape)
    gradient, *others = _gradients(grad, x, scale.view(shape), zero_point, low, high, grad_factor)
    dims = [d for d in range(x.dim()) if d != axis]
    return gradient, *(other.sum(dims) for other in others)


facts.may_decline(
    ("_fake_quantize_learnable_*_backward",),
    ("empty*",),
    "gradient of * with elements is served",
    "ATen returns its arguments",
)
facts.REFERENCES["_fake_quantize_learnable_per_tensor_affine_backward"] = _tensor_reference
facts.REFERENCES["_fake_quantize_learnable_per_channel_affine_backward"] = _channel_reference
