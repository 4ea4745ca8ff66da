"""Factorisations of symmetric matrices with blocks of two rows, and solves by them."""

from __future__ import annotations

from typing import Any

import torch

from tritonite.testing.samples import facts
from tritonite.testing.samples.linalg import batches, finite, norm, square, units

_FACTOR, _SOLVE = "linalg_ldl_factor_ex", "linalg_ldl_solve"
facts.ZERO_SIGN_OF_ROUNDOFF.update((_FACTOR, _SOLVE))
facts.layouts(_FACTOR, _SOLVE)(batches)


@facts.arguments(_FACTOR)
def _symmetric(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return matrices whose upper triangle has other numbers."""
    x = finite(tensors)
    return None if x is None else {"self": square(x), "check_errors": False}


@facts.arguments(_SOLVE)
def _factored(tensors: facts.Tensors) -> dict[str, Any] | None:
    x = finite(tensors)
    if x is None:
        return None
    factors, pivots, _ = torch.linalg.ldl_factor_ex(square(x))
    return {"LD": factors, "pivots": pivots, "B": x[..., : min(x.shape[-2:]), :]}


@facts.drawn(_SOLVE)
def _with_pivots(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return factors and pivots of one factorisation: for others ATen reads beyond the matrices."""
    x = arguments["LD"]
    if not isinstance(x, torch.Tensor) or x.dim() < 2 or x.dtype not in (torch.float32, torch.float64):
        x = torch.ones(2, 3, 3)
    factors, pivots, _ = torch.linalg.ldl_factor_ex(square(x.nan_to_num(1, 2, -2).clamp(-3, 3)))
    right = arguments["B"]
    fits = isinstance(right, torch.Tensor) and right.dim() > 1 and right.shape[-2] == factors.shape[-1]
    if not fits or right.dtype is not factors.dtype:
        right = torch.ones_like(factors)
    return arguments | {"LD": factors, "pivots": pivots, "B": right}


def _product(factors: torch.Tensor, pivots: torch.Tensor) -> torch.Tensor:
    """Return the symmetric matrices of factors in float64, by undoing the steps of their factorisations.

    All matrices of the batch take a step at once, because a batch has thousands of them.
    """
    n = factors.shape[-1]
    if not factors.numel():
        return factors.double()
    wide, swaps = factors.double().reshape(-1, n, n), pivots.reshape(-1, n).long()
    # Whether a block begins at each row, and whether it has two rows.
    begins, pairs = torch.ones_like(swaps, dtype=torch.bool), torch.zeros_like(swaps, dtype=torch.bool)
    for k in range(n):
        begins[:, k] = ~pairs[:, k - 1] if k else True
        pairs[:, k] = begins[:, k] & (swaps[:, k] < 0)
    line, one = torch.arange(n, device=wide.device), torch.eye(n, dtype=wide.dtype, device=wide.device)
    row, column = line[:, None], line
    diagonal = wide.tril() + wide.tril(-1).mT
    whole = torch.zeros_like(wide)
    for k in reversed(range(n)):
        end = (k + 1 + pairs[:, k].long())[:, None, None]
        own = begins[:, k, None, None] & (column >= k) & (column < end)
        whole = torch.where(own & (row >= k) & (row < end), diagonal, whole)
        left = torch.where(own & (row >= end), wide, one)
        whole = left @ whole @ left.mT
        last, swap = end[:, :, 0] - 1, (swaps[:, k].abs() - 1)[:, None]
        order = torch.where(line == last, swap, torch.where(line == swap, last, line))
        order = torch.where(begins[:, k, None], order, line)
        whole = whole.take_along_dim(order[:, :, None], 1).take_along_dim(order[:, None, :], 2)
    return whole.view(factors.shape)


@facts.residuals(_FACTOR)
def _of_factor(self: torch.Tensor, *settings: Any, results: facts.Tensors, **named: Any) -> list[torch.Tensor]:
    factors, pivots, info = results
    given = self.double().tril() + self.double().tril(-1).mT
    found = units(_product(factors, pivots) - given, norm(given), factors)
    # The blocked algorithm of LAPACK, and that of a single matrix, may leave a block of roundoff where the other has 0.
    return [torch.where(info == 0, found, 0.0)]


@facts.residuals(_SOLVE)
def _of_solve(
    LD: torch.Tensor, pivots: torch.Tensor, B: torch.Tensor, *, hermitian: bool = False, results: facts.Tensors
) -> list[torch.Tensor]:
    (x,) = results
    matrices = _product(LD, pivots)
    n = LD.shape[-1]
    lower = torch.eye(n, dtype=torch.float64, device=LD.device) + LD.double().tril(-1).abs()
    size = norm(lower) ** 2 * norm(LD.double().tril()) * norm(x)
    error = norm(matrices @ x.double() - B)
    unit = max(1, n) * torch.finfo(x.dtype).eps * size
    return [torch.where(error == 0, 0.0, error / unit)]
