"""Rotary position embedding with its own table of frequencies."""

from __future__ import annotations

from typing import Any

import torch

from tritonite import fused


class RotaryEmbedding(torch.nn.Module):
    """Rotate pairs of elements of query and key by angles that grow with the position: `fused.rotary_embedding`.

    Pair i of R has the angle position * base ** (-i / R). The frequencies are a buffer that the state dict leaves out.

    Args:
        dim: the number of rotated elements of a head, 2 R; elements beyond pass through.
        base: the base of the frequencies.
        interleaved: whether the elements of a pair are contiguous (as in GPT-J) or have a stride of R (as in Llama).
        device: the device of the frequencies.

    Source: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding".
    """

    inv_freq: torch.Tensor

    def __init__(self, dim: int, base: float = 10000.0, interleaved: bool = False, *, device: Any = None) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"dim is {dim}: it must be even, because elements are rotated in pairs")
        self.dim, self.base, self.interleaved = dim, base, interleaved
        exponents = torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim
        self.register_buffer("inv_freq", base**-exponents, persistent=False)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor | None = None, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return query and key rotated to their positions.

        Args:
            query: (..., sequence, heads, head size).
            key: query's shape except the number of heads; or None.
            positions: (sequence,), or (..., sequence) with leading dimensions that broadcast to those of query; None
                for 0, 1, 2, ....
        """
        if positions is None:
            positions = torch.arange(query.shape[-3], device=query.device)
        angles = positions.unsqueeze(-1).float() * self.inv_freq.float()
        return fused.rotary_embedding(query, key, angles.cos(), angles.sin(), self.interleaved)

    def extra_repr(self) -> str:
        return f"{self.dim}, base={self.base}, interleaved={self.interleaved}"
