"""Eigenvalues and singular values: the residuals by which they are judged."""

from __future__ import annotations

from typing import Any

import torch

from tritonite.testing.samples import facts
from tritonite.testing.samples.linalg import batches, finite, norm, square, units

_PACKETS = ("_linalg_eigh", "_linalg_svd")
facts.ZERO_SIGN_OF_ROUNDOFF.update(_PACKETS)
facts.layouts(*_PACKETS)(batches)


@facts.arguments("_linalg_eigh")
def _symmetric(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return square matrices, of which one triangle is read."""
    x = finite(tensors)
    return None if x is None else {"A": square(x), "UPLO": "LU"[x.dim() % 2]}


def _orthogonal(x: torch.Tensor) -> torch.Tensor:
    """Return the residual of X^T X = 1."""
    one = torch.eye(x.shape[-1], dtype=torch.float64, device=x.device)
    return units(x.double().mT @ x.double() - one, torch.ones_like(norm(x)), x)


def _close(values: torch.Tensor, exact: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the largest error of values in units of n * eps * scale."""
    unit = max(1, values.shape[-1]) * torch.finfo(values.dtype).eps * scale
    error = (values - exact).abs().amax(-1) if values.shape[-1] else torch.zeros_like(scale)
    return torch.where(error == 0, 0.0, error / unit)


@facts.residuals("_linalg_eigh")
def _of_eigh(A: torch.Tensor, UPLO: str = "L", compute_v: bool = True, *, results: facts.Tensors) -> list[torch.Tensor]:
    values, *others = results
    lower = (A.mT if UPLO.upper() == "U" else A).double()
    given = lower.tril() + lower.tril(-1).mT
    ordinary = torch.where(given.isfinite().flatten(-2).all(-1)[..., None, None], given, 0.0)
    found = [_close(values, torch.linalg.eigvalsh(ordinary), norm(ordinary))]
    if not compute_v or not others:
        return found
    (vectors,) = others
    wide = vectors.double()
    return [*found, units(given @ wide - wide * values[..., None, :], norm(given), vectors), _orthogonal(vectors)]


@facts.arguments("_linalg_svd")
def _any_matrices(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return matrices of any shape, and whether all vectors are wanted, which differs between layouts."""
    x = finite(tensors)
    return None if x is None else {"A": x, "full_matrices": bool(x.shape[-1] % 2), "driver": None}


@facts.residuals("_linalg_svd")
def _of_svd(
    A: torch.Tensor,
    full_matrices: bool = False,
    compute_uv: bool = True,
    *,
    driver: str | None = None,
    results: facts.Tensors,
) -> list[torch.Tensor]:
    wide = torch.where(A.isfinite().flatten(-2).all(-1)[..., None, None], A.double(), 0.0)
    if len(results) == 1 or not compute_uv:
        values = results[len(results) // 2]
        return [_close(values, torch.linalg.svdvals(wide), norm(wide))]
    u, values, vh = results
    inner = values.shape[-1]
    product = (u.double()[..., :inner] * values[..., None, :]) @ vh.double()[..., :inner, :]
    found = [_close(values, torch.linalg.svdvals(wide), norm(wide)), units(product - wide, norm(wide), A)]
    return [*found, _orthogonal(u), _orthogonal(vh.mT)]
