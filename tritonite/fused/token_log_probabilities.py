"""Log-probabilities of targets through a linear head."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tritonite.dtypes import FLOATS
from tritonite.errors import Unsupported
from tritonite.fused.linear_cross_entropy import linear_cross_entropy

IGNORED = -100


class LinearHead(NamedTuple):
    """A linear head and its input: logits are input @ weight.T + bias.

    Attributes:
        input: hidden states (..., H).
        weight: (V, H) of input's dtype.
        bias: (V,) or None.
    """

    input: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None


def token_log_probabilities(
    name: str, head: LinearHead, target: torch.Tensor, ignore_index: int, temperature: float = 1.0
) -> torch.Tensor:
    """Return log p(target) of logits over the temperature, in float32 or float64; 0 for targets to ignore.

    Raises errors.Unsupported in the name of the operator `name` for shapes that do not fit.
    """
    hidden, weight, bias = head
    for reason, wrong in (
        (f"input is {hidden.dtype}: it may be float16, bfloat16, float32 or float64", hidden.dtype not in FLOATS),
        (f"target is {target.dtype}: it must be torch.int64", target.dtype is not torch.int64),
        (
            f"target has the shape {tuple(target.shape)}: it must be that of input, {tuple(hidden.shape)}, without "
            "its last dimension",
            target.shape != hidden.shape[:-1],
        ),
    ):
        if wrong:
            raise Unsupported(name=f"tritonite::{name}", reason=reason)
    if temperature != 1:
        hidden, bias = hidden / temperature, None if bias is None else bias / temperature
    losses = linear_cross_entropy(hidden, weight, target, bias, ignore_index=ignore_index, reduction="none")
    assert isinstance(losses, torch.Tensor)
    return -losses
