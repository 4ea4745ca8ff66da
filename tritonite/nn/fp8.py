"""A linear layer whose products are of float8 operands."""

from __future__ import annotations

import torch

from tritonite import fused


class FP8Linear(torch.nn.Linear):
    """Multiply as torch.nn.Linear does, with input, weight and gradient in scaled float8: `fused.fp8_linear`.

    The parameters, and the state dict, are those of torch.nn.Linear in their own dtype.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight^T + bias."""
        result: torch.Tensor = fused.fp8_linear(x, self.weight, self.bias)
        return result

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear) -> FP8Linear:
        """Return a layer with the parameters of a linear layer, not copies of them."""
        made = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        made.weight, made.bias = linear.weight, linear.bias
        made.training = linear.training
        return made
