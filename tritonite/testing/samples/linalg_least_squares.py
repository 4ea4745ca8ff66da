"""Least squares: matrices of full rank, and the residuals of their normal equations."""

from __future__ import annotations

from typing import Any

import torch

from tritonite.testing.samples import facts
from tritonite.testing.samples.linalg import batches, finite, norm

_PACKET = "linalg_lstsq"
facts.ZERO_SIGN_OF_ROUNDOFF.add(_PACKET)
facts.layouts(_PACKET)(batches)


def _full_rank(x: torch.Tensor) -> torch.Tensor:
    one = torch.eye(*x.shape[-2:], dtype=x.dtype, device=x.device)
    return torch.empty_like(x).copy_(x / (4 * max(1.0, float(x.abs().max()))) + one)


@facts.arguments(_PACKET)
def _fitted(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return matrices close to the identity, and right-hand sides, which are vectors for matrices of three columns."""
    x = finite(tensors)
    if x is None or not x.numel():
        return None
    right = x.flip(-1)[..., 0] if x.dim() > 2 and x.shape[-1] == 3 else x.flip(-1)
    return {"self": _full_rank(x), "b": right, "rcond": None, "driver": "gels"}


@facts.drawn(_PACKET)
def _finite_sides(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return finite right-hand sides: LAPACK refuses others as if an argument were wrong."""
    right = arguments["b"]
    return arguments | ({"b": right.nan_to_num(0.5, 2, -2)} if facts.real(right) else {})


@facts.residuals(_PACKET)
def _of_least_squares(
    self: torch.Tensor, b: torch.Tensor, *settings: Any, results: facts.Tensors, **named: Any
) -> list[torch.Tensor]:
    x, squares = results[0].double(), results[1]
    vector = b.dim() == self.dim() - 1
    x, right, a = x.unsqueeze(-1) if vector else x, b.unsqueeze(-1) if vector else b, self.double()
    rest = a @ x - right
    unit = max(1, *a.shape[-2:]) * torch.finfo(self.dtype).eps
    size = norm(a) * norm(x) + norm(right)
    if a.shape[-2] < a.shape[-1]:
        # The shortest solution is a combination of rows.
        outside = x - a.mT @ torch.linalg.lstsq(a.mT, x).solution
        return [norm(rest) / (unit * size).clamp_min(1e-300), norm(outside) / (unit * norm(x)).clamp_min(1e-300)]
    found = [norm(a.mT @ rest) / (unit * norm(a) * size).clamp_min(1e-300)]
    if squares.numel():
        error = (squares.double() - rest.square().sum(-2)).abs().amax(-1)
        found.append(error / (unit * size**2).clamp_min(1e-300))
    return found
