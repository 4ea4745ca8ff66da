"""Experts of a mixture, whose weights are two tensors of three dimensions, recognised by what they compute.

The router stays a module of the model: it chooses experts and weights, and models read its logits for auxiliary losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tritonite import devices, fused
from tritonite.patching.mlps import activations_of
from tritonite.patching.report import KeepError
from tritonite.patching.samples import RESOLUTION, check_alike, normal, required_arguments
from tritonite.runtime.sharding import is_sharded

_TOKENS, _CHOSEN = 5, 2
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


class Experts(NamedTuple):
    """The activation of experts, and the attributes that hold their weights."""

    gate_up: str
    down: str
    activation: str

    @property
    def operator(self) -> str:
        """Return the call as a report shows it."""
        return f"fused.moe_experts, activation={self.activation!r}"

    def __call__(self, module: Any, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's experts."""
        gate_up, down = getattr(module, self.gate_up), getattr(module, self.down)
        return fused.moe_experts(x, weights, experts, gate_up, down, activation=self.activation)


def looks_like_experts(module: torch.nn.Module) -> bool:
    """Return whether a module's own parameters are weights (E, 2 I, H) and (E, H, I), and it takes three arguments."""
    return _weights(module) is not None and required_arguments(module.forward) in (1, 3)


def _weights(module: torch.nn.Module) -> tuple[str, str] | None:
    """Return the names of the gates' and ups' weights and of the downs' weights, or None."""
    own = dict(module.named_parameters(recurse=False))
    if len(own) != 2 or any(each.dim() != 3 for each in own.values()):
        return None
    for first, second in (tuple(own), tuple(own)[::-1]):
        experts, twice, hidden = own[first].shape
        if own[second].shape == (experts, hidden, twice // 2) and not twice % 2:
            return first, second
    return None


def recognise_experts(module: torch.nn.Module) -> Experts:
    """Return the formula of experts; raise KeepError if its activation has no operator."""
    names = _weights(module)
    assert names is not None
    activations = [name for name in activations_of(module, {}) if name in _ACTIVATIONS]
    if len(activations) != 1:
        raise KeepError(f"its activation is none of {', '.join(_ACTIVATIONS)}, or no part of it")
    return Experts(*names, activations[0])


def check_experts(module: torch.nn.Module, formula: Experts, with_gradients: bool) -> None:
    """Raise KeepError unless a formula has the module's results and gradients for tokens, experts and weights."""
    weight = getattr(module, formula.down)
    like = weight.dtype, weight.device
    x, weights = normal((_TOKENS, weight.shape[1]), like), normal((_TOKENS, _CHOSEN), like)
    experts = torch.stack([torch.randperm(weight.shape[0])[:_CHOSEN] for _ in range(_TOKENS)]).to(weight.device)
    operands = [x, weights, getattr(module, formula.gate_up), weight]
    check_alike(
        lambda: formula(module, x, experts, weights), lambda: module(x, experts, weights), operands, with_gradients
    )


def experts_forward(formula: Experts) -> Callable[..., Any]:
    """Return a forward that computes a formula, or calls the class's forward for what the formula does not serve."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        if len(values) != 3 or not _serves(getattr(self, formula.down), *values):
            return type(self).forward(self, *args, **kwargs)
        names = dict(zip(("hidden_states", "top_k_index", "top_k_weights"), args, strict=False)) | kwargs
        try:
            given = [names[name] for name in ("hidden_states", "top_k_index", "top_k_weights")]
        except KeyError:
            return type(self).forward(self, *args, **kwargs)
        return formula(self, *given)

    return forward


def _serves(weight: torch.Tensor, *tensors: Any) -> bool:
    """Return whether the operator serves a call. Under autocast the class's forward casts the weights."""
    if not all(isinstance(each, torch.Tensor) for each in tensors) or any(map(is_sharded, (weight, *tensors))):
        return False
    x = tensors[0]
    fits = x.device.type == devices.current.type and x.dtype is weight.dtype and x.dtype in RESOLUTION
    return fits and x.dtype is not torch.float64 and not torch.is_autocast_enabled(x.device.type)
