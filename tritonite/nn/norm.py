"""Norms over the last dimension: root mean square norm and layer norm."""

from __future__ import annotations

from typing import Any

import torch

from tritonite import fused


class RMSNorm(torch.nn.Module):
    """Divide rows by their root mean square, and multiply by `weight + offset`: `fused.rms_norm`.

    The state dict holds `weight`, as that of torch.nn.RMSNorm and of Llama's and Gemma's norms does.

    Args:
        normalized_shape: the size of the last dimension.
        eps: the addend of the mean of squares; None for the epsilon of the compute dtype.
        elementwise_affine: whether there is a weight.
        offset: added to the weight: 0, or 1 as in Gemma. The weight starts at 1 - offset.
        casting: the dtype of the product with the weight, as in `fused.rms_norm`.
        device: the device of the weight.
        dtype: the dtype of the weight.
    """

    def __init__(
        self,
        normalized_shape: int,
        eps: float | None = 1e-6,
        elementwise_affine: bool = True,
        *,
        offset: float = 0.0,
        casting: str = "llama",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.normalized_shape, self.eps = normalized_shape, eps
        self.offset, self.casting = offset, casting
        weight = torch.empty(normalized_shape, device=device, dtype=dtype) if elementwise_affine else None
        self.weight = None if weight is None else torch.nn.Parameter(weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Make the weight and the offset add up to 1."""
        if self.weight is not None:
            torch.nn.init.constant_(self.weight, 1.0 - self.offset)

    @property
    def variance_epsilon(self) -> float | None:
        """Return `eps` by the name that Llama's norm gives it."""
        return self.eps

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """Return the norm of x, or with a residual, the norm of x + residual and the sum."""
        return fused.rms_norm(x, self.weight, self.eps, residual=residual, offset=self.offset, casting=self.casting)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, offset={self.offset}, casting={self.casting!r}"


class LayerNorm(torch.nn.Module):
    """Give rows a mean of 0 and a variance of 1, then multiply by `weight` and add `bias`: `fused.layer_norm`.

    The state dict holds `weight` and `bias`, as that of torch.nn.LayerNorm does.

    Args:
        normalized_shape: the size of the last dimension.
        eps: the addend of the variance.
        elementwise_affine: whether there are a weight and a bias.
        bias: whether there is a bias beside the weight.
        device: the device of the parameters.
        dtype: the dtype of the parameters.
    """

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.normalized_shape, self.eps = normalized_shape, eps
        there = {"weight": elementwise_affine, "bias": elementwise_affine and bias}
        for name, wanted in there.items():
            parameter = torch.empty(normalized_shape, device=device, dtype=dtype) if wanted else None
            setattr(self, name, None if parameter is None else torch.nn.Parameter(parameter))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the weight with 1 and the bias with 0."""
        for parameter, value in ((self.weight, 1.0), (self.bias, 0.0)):
            if parameter is not None:
                torch.nn.init.constant_(parameter, value)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """Return the norm of x, or with a residual, the norm of x + residual and the sum."""
        return fused.layer_norm(x, self.weight, self.bias, self.eps, residual=residual)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, bias={self.bias is not None}"
