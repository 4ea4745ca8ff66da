"""The head of a language model and its loss, without the logits in memory."""

from __future__ import annotations

from typing import Any

import torch

from tritonite import fused


class LinearCrossEntropy(torch.nn.Linear):
    """Return the cross entropy of a linear layer's logits, which are never stored: `fused.linear_cross_entropy`.

    The state dict holds `weight`, and `bias` if there is one, as that of torch.nn.Linear does.

    Args:
        in_features: the size of a hidden state.
        num_classes: the number of classes, such as the size of the vocabulary.
        bias: whether logits have a bias.
        ignore_index: the target that adds nothing to the loss.
        reduction: "mean", "sum" or "none".
        label_smoothing: the probability that is spread over all classes.
        softcap: None, or the bound c of logits z, which become c tanh(z / c).
        device: the device of the parameters.
        dtype: the dtype of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = False,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, num_classes, bias, device, dtype)
        self.ignore_index, self.reduction = ignore_index, reduction
        self.label_smoothing, self.softcap = label_smoothing, softcap

    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return the loss of hidden states (..., in_features) for targets (...) of int64."""
        loss: Any = fused.linear_cross_entropy(
            hidden.reshape(-1, self.in_features),
            self.weight,
            target.reshape(-1),
            self.bias,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            softcap=self.softcap,
        )
        result: torch.Tensor = loss.view(target.shape) if self.reduction == "none" else loss
        return result

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, reduction={self.reduction!r}, softcap={self.softcap}"
