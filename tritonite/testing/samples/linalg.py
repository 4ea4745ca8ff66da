"""Factorisations and solves: matrices that have them, and the residuals by which results are judged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tritonite.dtypes import FULL_FLOATS
from tritonite.registry import Op
from tritonite.testing.samples import facts

_CHOLESKY = ("linalg_cholesky_ex", "_cholesky_solve_helper", "cholesky_inverse")
_TRIANGULAR = ("linalg_solve_triangular", "triangular_solve")
_PACKETS = (*_CHOLESKY, *_TRIANGULAR)
facts.ZERO_SIGN_OF_ROUNDOFF.update(_PACKETS)


@facts.layouts(*_PACKETS)
def _batches(op: Op, make: facts.Make) -> Iterator[tuple[str, facts.Tensors]]:
    """Yield batches of matrices, tall, wide, by columns, of one element, and without any."""
    for label, shape in {
        "batch": (2, 3, 4, 4),
        "tall batch": (3, 7, 4),
        "wide batch": (3, 4, 7),
        "one element": (2, 1, 1),
        "empty batch": (0, 3, 3),
        "empty matrices": (2, 0, 0),
        "no columns": (2, 3, 0),
    }.items():
        yield label, [make(*shape) for _ in range(4)]
    yield "columns", [make(5, 5, 2).permute(2, 1, 0) for _ in range(4)]
    yield "batch in between", [make(4, 3, 4).transpose(0, 1) for _ in range(4)]


def _finite(tensors: facts.Tensors) -> torch.Tensor | None:
    """Return the first tensor if it has finite matrices in a dtype that ATen serves, and None otherwise."""
    x = tensors[0]
    return x if x.dtype in FULL_FLOATS and x.dim() >= 2 and bool(x.isfinite().all()) else None


def _square(x: torch.Tensor) -> torch.Tensor:
    """Return the leading square block of matrices, a view."""
    n = min(x.shape[-2:])
    return x[..., :n, :n]


def _positive(x: torch.Tensor) -> torch.Tensor:
    """Return positive definite matrices of the size of the leading square blocks, with strides as theirs."""
    x = _square(x)
    made = x @ x.mT / 4 + torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    return torch.empty_like(x).copy_(made)


def _factor(x: torch.Tensor) -> torch.Tensor:
    """Return lower factors whose diagonals are at least 1; the upper triangle has other numbers."""
    own = _square(x)
    return own / 4 + torch.diag_embed(1 + own.diagonal(dim1=-2, dim2=-1).abs())


@facts.arguments("linalg_cholesky_ex")
def _definite(tensors: facts.Tensors) -> dict[str, Any] | None:
    x = _finite(tensors)
    return None if x is None else {"self": _positive(x), "check_errors": False}


@facts.arguments("_cholesky_solve_helper")
def _solved_by_cholesky(tensors: facts.Tensors) -> dict[str, Any] | None:
    x = _finite(tensors)
    return None if x is None else {"self": x[..., : min(x.shape[-2:]), :], "A": _factor(x)}


@facts.arguments("cholesky_inverse")
def _inverted(tensors: facts.Tensors) -> dict[str, Any] | None:
    x = _finite(tensors)
    return None if x is None else {"self": _factor(x)}


@facts.arguments("linalg_solve_triangular")
def _triangles(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return triangles, and right-hand sides, which fit on either side where there are as many columns as rows."""
    x = _finite(tensors)
    return None if x is None else {"self": _factor(x), "B": x[..., : min(x.shape[-2:]), :]}


@facts.arguments("triangular_solve")
def _right_of_triangles(tensors: facts.Tensors) -> dict[str, Any] | None:
    x = _finite(tensors)
    return None if x is None else {"self": x[..., : min(x.shape[-2:]), :], "A": _factor(x)}


def _norm(x: torch.Tensor) -> torch.Tensor:
    return x.double().norm(dim=(-2, -1)) if x.numel() else x.new_zeros(x.shape[:-2]).double()


def _units(error: torch.Tensor, scale: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the norm of errors in units of n * eps * scale, in the dtype's eps of results `like`."""
    unit = max(1, *like.shape[-2:]) * torch.finfo(like.dtype).eps * scale
    return torch.where(_norm(error) == 0, 0.0, _norm(error) / unit)


def _equal(error: torch.Tensor) -> torch.Tensor:
    """Return 0 for matrices of zeros alone, and infinity for others."""
    return torch.where((error == 0).flatten(-2).all(-1), 0.0, torch.inf)


def _unless_failed(residuals: list[torch.Tensor], info: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return residuals without those of matrices that have no factorisation."""
    return [torch.where(info[0] == 0, x, 0.0) for x in residuals] if info else residuals


@facts.residuals("linalg_cholesky_ex")
def _of_cholesky(
    self: torch.Tensor, upper: bool = False, check_errors: bool = False, *, results: facts.Tensors
) -> list[torch.Tensor]:
    factor, *info = results
    lower, given = (factor.mT, self.mT) if upper else (factor, self)
    given = given.double().tril() + given.double().tril(-1).mT
    product = lower.double() @ lower.double().mT
    found = [_units(product - given, _norm(given), factor), _equal(lower.triu(1))]
    return _unless_failed(found, info)


@facts.residuals("_cholesky_solve_helper")
def _of_cholesky_solve(
    self: torch.Tensor, A: torch.Tensor, upper: bool = False, *, results: facts.Tensors
) -> list[torch.Tensor]:
    (x,) = results
    lower = (A.mT if upper else A).double().tril()
    return [_units(lower @ (lower.mT @ x.double()) - self, _norm(lower) ** 2 * _norm(x), x)]


@facts.residuals("cholesky_inverse")
def _of_cholesky_inverse(self: torch.Tensor, upper: bool = False, *, results: facts.Tensors) -> list[torch.Tensor]:
    (x,) = results
    lower = (self.mT if upper else self).double().tril()
    one = torch.eye(x.shape[-1], dtype=torch.float64, device=x.device)
    return [_units(lower @ (lower.mT @ x.double()) - one, _norm(lower) ** 2 * _norm(x), x), _equal(x - x.mT)]


def _triangle(x: torch.Tensor, upper: bool, unit: bool) -> torch.Tensor:
    x = x.double().triu() if upper else x.double().tril()
    return x - torch.diag_embed(x.diagonal(dim1=-2, dim2=-1) - 1) if unit else x


@facts.residuals("linalg_solve_triangular")
def _of_solve_triangular(
    self: torch.Tensor,
    B: torch.Tensor,
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
    results: facts.Tensors,
) -> list[torch.Tensor]:
    (x,) = results
    triangle, wide = _triangle(self, upper, unitriangular), x.double()
    return [_units((triangle @ wide if left else wide @ triangle) - B, _norm(triangle) * _norm(x), x)]


@facts.residuals("triangular_solve")
def _of_triangular_solve(
    self: torch.Tensor,
    A: torch.Tensor,
    upper: bool = True,
    transpose: bool = False,
    unitriangular: bool = False,
    *,
    results: facts.Tensors,
) -> list[torch.Tensor]:
    x, copy = results
    triangle = _triangle(A, upper, unitriangular)
    triangle = triangle.mT if transpose else triangle
    return [_units(triangle @ x.double() - self, _norm(triangle) * _norm(x), x), _equal(copy - A)]
