"""cuDNN's affine grids."""

from __future__ import annotations

from typing import Any

import torch

from tritonite.testing.samples import facts

_FORWARD, _BACKWARD = "cudnn_affine_grid_generator", "cudnn_affine_grid_generator_backward"
# Positions, and sums of gradients, may cancel.
facts.ZERO_SIGN_OF_ROUNDOFF |= {_FORWARD, _BACKWARD}
_SIZES = {"N": 2, "C": 3, "H": 5, "W": 4}


@facts.arguments(_FORWARD)
def _matrices(tensors: facts.Tensors) -> dict[str, Any] | None:
    x = tensors[0].flatten()
    return {"theta": x.repeat(12)[:12].view(2, 2, 3)} | _SIZES if x.numel() else None


@facts.arguments(_BACKWARD)
def _gradients(tensors: facts.Tensors) -> dict[str, Any] | None:
    x = tensors[0].flatten()
    return {"grad": x.repeat(80)[:80].view(2, 4, 5, 2).transpose(1, 2)} | _SIZES if x.numel() else None


def _grid(theta: torch.Tensor, N: int, C: int, H: int, W: int) -> torch.Tensor:
    return torch.ops.aten.affine_grid_generator(theta.double(), [N, C, H, W], True)


def _gradient(grad: torch.Tensor, N: int, C: int, H: int, W: int) -> torch.Tensor:
    return torch.ops.aten.affine_grid_generator_backward(grad.double(), [N, C, H, W], True)


facts.REFERENCES[_FORWARD] = _grid
facts.REFERENCES[_BACKWARD] = _gradient


@facts.terms(_FORWARD, _BACKWARD)
def _terms(sums: facts.Sums) -> float:
    """Return the number of terms of an element, times the square of the largest of them."""
    largest = float(sums.tensors[0].double().abs().max().nan_to_num(1, 1))
    return max(3.0, sums.per_element() * largest**2)
