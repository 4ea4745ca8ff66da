"""A mixture of experts: a router, and gated feed-forward layers of which each token passes through k."""

from __future__ import annotations

from typing import Any

import torch

from tritonite import fused


class _Router(torch.nn.Module):
    """The router's matrix, (experts, hidden size)."""

    def __init__(self, num_experts: int, hidden_size: int, **kept: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(num_experts, hidden_size, **kept))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight)


class _Experts(torch.nn.Module):
    """The weights of all experts: gates and ups (E, 2 I, H), downs (E, H, I)."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int, **kept: Any) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size, **kept))
        self.down_proj = torch.nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size, **kept))


class MoE(torch.nn.Module):
    """Send each token through k of E gated layers, and add up their results by the router's weights: `fused.moe`.

    The state dict holds `gate.weight`, `experts.gate_up_proj` and `experts.down_proj`, as that of a block of Mixtral's
    or Qwen3-MoE's does in transformers 5.

    Args:
        hidden_size: the size H of the last dimension of the input and the output.
        intermediate_size: the size I of an expert's gated dimension.
        num_experts: the number E of experts.
        k: the number of experts of a token.
        activation: "silu", "gelu" or "gelu_tanh".
        renormalize: whether a token's weights add up to 1.
        device: the device of the parameters.
        dtype: the dtype of the parameters.

    Source: Shazeer et al. 2017, "Outrageously Large Neural Networks"; Jiang et al. 2024, "Mixtral of Experts".
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        k: int,
        activation: str = "silu",
        renormalize: bool = True,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.k, self.activation, self.renormalize = k, activation, renormalize
        self.gate = _Router(num_experts, hidden_size, device=device, dtype=dtype)
        self.experts = _Experts(num_experts, hidden_size, intermediate_size, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights as torch.nn.Linear does, uniformly within 1 / sqrt(inputs)."""
        for weight in self.parameters():
            bound = weight.shape[-1] ** -0.5 if weight.shape[-1] else 0.0
            torch.nn.init.uniform_(weight, -bound, bound)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's experts, of the shape (..., H) of x."""
        return fused.moe(
            x,
            self.gate(x),
            self.experts.gate_up_proj,
            self.experts.down_proj,
            self.k,
            activation=self.activation,
            renormalize=self.renormalize,
        )

    def extra_repr(self) -> str:
        return f"k={self.k}, activation={self.activation!r}, renormalize={self.renormalize}"
