"""Products of floats and a weight of 8-bit integers."""

from __future__ import annotations

from typing import Any

import torch

from tritonite.registry import Op
from tritonite.testing.samples import facts

_PACKET = "_weight_int8pack_mm"
facts.ZERO_SIGN_OF_ROUNDOFF.add(_PACKET)
# ATen's kernels for CPUs read whole vectors of 16 elements along K.
_K = 32


def _operands(x: torch.Tensor, rows: int) -> facts.Tensors:
    """Return `rows` rows of K elements of x, and an integer and a scale for each of 7 columns."""
    values = x.flatten().nan_to_num(1, 2, -2).clamp(-3, 3)
    values = values.repeat(-(-8 * _K // max(1, values.numel())))[: 8 * _K]
    weight = (values[: 7 * _K].float() * 40).to(torch.int8).view(7, _K)
    return [values.view(8, _K)[:rows], weight, values[:7].abs() + 0.5]


@facts.operands(_PACKET)
def _matrices(op: Op, tensors: facts.Tensors, choice: Any) -> facts.Tensors | None:
    """Return matrices that fit each other."""
    x = tensors[0]
    return _operands(x, min(8, x.shape[0] if x.dim() else 1)) if x.is_floating_point() and x.numel() else None


@facts.terms(_PACKET)
def _terms(sums: facts.Sums) -> float:
    """Return the number of terms of an element, each times the square of its largest possible value."""
    own = [x.double() for x in sums.tensors]
    largest = [float(x.abs().max().nan_to_num(1, 1)) for x in own]
    return max(1.0, own[0].shape[-1] * float(torch.tensor(largest).prod()) ** 2)


def _product(self: torch.Tensor, mat2: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return self.double() @ mat2.double().T * scales.double()


facts.REFERENCES[_PACKET] = _product


@facts.drawn(_PACKET)
def _fitting(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return matrices that fit each other: ATen reads beyond the memory of others."""
    x = arguments["self"]
    if not isinstance(x, torch.Tensor) or x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return arguments
    if not x.numel():
        return arguments | {"self": x.new_empty(0, 3, 3)}
    return arguments | dict(zip(("self", "mat2", "scales"), _operands(x, min(8, x.numel())), strict=True))
