"""The gated feed-forward layer of a transformer: down(activation(gate(x)) * up(x))."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tritonite import fused

# Functions (gate, up) -> activation(gate) * up; or of a tensor whose last dimension holds gate and up, without `up`.
GATED: dict[str, Callable[..., torch.Tensor]] = {
    "silu": fused.silu_and_mul,
    "gelu": fused.gelu_and_mul,
    "gelu_tanh": functools.partial(fused.gelu_and_mul, approximate="tanh"),
    "relu": fused.reglu,
}
# The activations alone, as torch computes them.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
    "relu": torch.nn.functional.relu,
}


class GatedMLP(torch.nn.Module):
    """Compute down(activation(gate(x)) * up(x)), with one launch between the products.

    The state dict holds `gate_proj`, `up_proj` and `down_proj`, as that of Llama's MLP does. The three are ordinary
    linear modules, so adapters and quantised linears may take their place.

    Args:
        hidden_size: the size of the last dimension of the input and the output.
        intermediate_size: the size of the gated dimension.
        activation: "silu" (SwiGLU), "gelu" or "gelu_tanh" (GEGLU), or "relu" (ReGLU).
        bias: whether the linears have biases.
        device: the device of the parameters.
        dtype: the dtype of the parameters.

    Source: Shazeer 2020, "GLU Variants Improve Transformer".
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "silu",
        bias: bool = False,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in GATED:
            raise ValueError(f"activation is {activation!r}: it may be one of {', '.join(map(repr, GATED))}")
        self.activation = activation
        kept: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.gate_proj = torch.nn.Linear(hidden_size, intermediate_size, **kept)
        self.up_proj = torch.nn.Linear(hidden_size, intermediate_size, **kept)
        self.down_proj = torch.nn.Linear(intermediate_size, hidden_size, **kept)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return down(activation(gate(x)) * up(x)), of x's shape."""
        result: torch.Tensor = self.down_proj(GATED[self.activation](self.gate_proj(x), self.up_proj(x)))
        return result

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"
