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
_LU = ("linalg_lu_factor_ex", "linalg_lu", "linalg_inv_ex", "_linalg_det", "_linalg_slogdet")
_BY_LU = ("lu_unpack", "linalg_lu_solve", "_linalg_solve_ex")
_QR = ("linalg_qr", "geqrf", "linalg_householder_product", "ormqr")
_PACKETS = (*_CHOLESKY, *_TRIANGULAR, *_LU, *_BY_LU, *_QR)
_MODES = ("reduced", "complete", "r")
facts.ZERO_SIGN_OF_ROUNDOFF.update(_PACKETS)
facts.may_decline(
    ("linalg.cholesky", "linalg.det", "linalg.lu_factor", "linalg.slogdet", "linalg.solve"),
    ("out=",),
    "*output has another shape or dtype",
    "ATen's function passes empty outputs for the results that it does not return, and resizes them itself",
)


@facts.layouts(*_PACKETS)
def batches(op: Op, make: facts.Make) -> Iterator[tuple[str, facts.Tensors]]:
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


def finite(tensors: facts.Tensors) -> torch.Tensor | None:
    """Return the first tensor if it has finite matrices in a dtype that ATen serves, and None otherwise."""
    x = tensors[0]
    return x if x.dtype in FULL_FLOATS and x.dim() >= 2 and bool(x.isfinite().all()) else None


def square(x: torch.Tensor) -> torch.Tensor:
    """Return the leading square block of matrices, a view."""
    n = min(x.shape[-2:])
    return x[..., :n, :n]


def _positive(x: torch.Tensor) -> torch.Tensor:
    """Return positive definite matrices of the size of the leading square blocks, with strides as theirs."""
    x = square(x)
    made = x @ x.mT / 4 + torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    return torch.empty_like(x).copy_(made)


def _factor(x: torch.Tensor) -> torch.Tensor:
    """Return lower factors whose diagonals are at least 1; the upper triangle has other numbers."""
    own = square(x)
    return own / 4 + torch.diag_embed(1 + own.diagonal(dim1=-2, dim2=-1).abs())


@facts.arguments("linalg_cholesky_ex")
def _definite(tensors: facts.Tensors) -> dict[str, Any] | None:
    x = finite(tensors)
    return None if x is None else {"self": _positive(x), "check_errors": False}


@facts.arguments("_cholesky_solve_helper")
def _solved_by_cholesky(tensors: facts.Tensors) -> dict[str, Any] | None:
    x = finite(tensors)
    return None if x is None else {"self": x[..., : min(x.shape[-2:]), :], "A": _factor(x)}


@facts.arguments("cholesky_inverse")
def _inverted(tensors: facts.Tensors) -> dict[str, Any] | None:
    x = finite(tensors)
    return None if x is None else {"self": _factor(x)}


@facts.arguments("linalg_solve_triangular")
def _triangles(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return triangles, and right-hand sides, which fit on either side where there are as many columns as rows."""
    x = finite(tensors)
    return None if x is None else {"self": _factor(x), "B": x[..., : min(x.shape[-2:]), :]}


@facts.arguments("triangular_solve")
def _right_of_triangles(tensors: facts.Tensors) -> dict[str, Any] | None:
    x = finite(tensors)
    return None if x is None else {"self": x[..., : min(x.shape[-2:]), :], "A": _factor(x)}


@facts.arguments("linalg_lu_factor_ex", "linalg_lu")
def _any_matrices(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return matrices of any shape; without pivoting ATen raises on a CPU."""
    x = finite(tensors)
    return None if x is None else {"A": x, "pivot": True, "check_errors": False}


@facts.arguments("linalg_inv_ex", "_linalg_det", "_linalg_slogdet")
def _square_matrices(tensors: facts.Tensors) -> dict[str, Any] | None:
    x = finite(tensors)
    return None if x is None else {"A": square(x), "check_errors": False}


@facts.arguments("_linalg_solve_ex")
def _equations(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return square matrices, and right-hand sides, which fit on either side if there are as many columns as rows."""
    x = finite(tensors)
    return None if x is None else {"A": square(x), "B": x[..., : min(x.shape[-2:]), :], "check_errors": False}


@facts.arguments("lu_unpack")
def _packed(tensors: facts.Tensors) -> dict[str, Any] | None:
    x = finite(tensors)
    if x is None:
        return None
    factors, pivots, _ = torch.linalg.lu_factor_ex(x)
    return {"LU_data": torch.empty_like(x).copy_(factors), "LU_pivots": pivots}


@facts.arguments("linalg_lu_solve")
def _solved_by_lu(tensors: facts.Tensors) -> dict[str, Any] | None:
    x = finite(tensors)
    if x is None:
        return None
    factors, pivots, _ = torch.linalg.lu_factor_ex(square(x))
    return {"LU": factors, "pivots": pivots, "B": x[..., : min(x.shape[-2:]), :]}


@facts.drawn("lu_unpack", "linalg_lu_solve")
def _existing_rows(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return pivots that name existing rows, beyond which ATen reads."""
    name = "LU_pivots" if "LU_pivots" in arguments else "pivots"
    matrices, pivots = arguments["LU_data" if "LU_data" in arguments else "LU"], arguments[name]
    rows = matrices.shape[-2] if isinstance(matrices, torch.Tensor) and matrices.dim() > 1 else 0
    return arguments | {name: facts.within(pivots, 1, max(1, rows))}


@facts.arguments("linalg_qr")
def _factored_by_qr(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return matrices of any shape, in a mode that differs between layouts."""
    x = finite(tensors)
    return None if x is None else {"A": x, "mode": _MODES[(x.dim() + x.shape[-1]) % 3]}


@facts.arguments("geqrf")
def _packed_by_qr(tensors: facts.Tensors) -> dict[str, Any] | None:
    x = finite(tensors)
    return None if x is None else {"self": x}


@facts.arguments("linalg_householder_product")
def _reflectors(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return the reflectors of tall matrices."""
    x = finite(tensors)
    if x is None:
        return None
    packed, taus = torch.geqrf(x if x.shape[-2] >= x.shape[-1] else x.mT)
    return {"input": packed, "tau": taus}


@facts.arguments("ormqr")
def _rotated(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return reflectors, and matrices which fit on either side if they are square."""
    x = finite(tensors)
    if x is None:
        return None
    packed, taus = torch.geqrf(x)
    return {"self": packed, "input2": taus, "input3": x}


def norm(x: torch.Tensor) -> torch.Tensor:
    """Return the Frobenius norms of matrices, of which no element's square overflows or underflows."""
    if not x.numel():
        return x.new_zeros(x.shape[:-2]).double()
    largest = x.double().abs().amax((-2, -1), keepdim=True)
    scale = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
    return (x.double() / scale).norm(dim=(-2, -1)) * scale[..., 0, 0]


def units(error: torch.Tensor, scale: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the norm of errors in units of n * eps * scale, in the dtype's eps of results `like`."""
    unit = max(1, *like.shape[-2:]) * torch.finfo(like.dtype).eps * scale
    return torch.where(norm(error) == 0, 0.0, norm(error) / unit)


def _equal(error: torch.Tensor) -> torch.Tensor:
    """Return 0 for matrices of zeros alone, and infinity for others."""
    return torch.where((error == 0).flatten(-2).all(-1), 0.0, torch.inf)


def _must(condition: torch.Tensor) -> torch.Tensor:
    """Return 0 for matrices that meet a condition, and infinity for others."""
    return torch.where(condition, 0.0, torch.inf)


def _condition(x: torch.Tensor) -> torch.Tensor:
    """Return the condition of matrices in float64, infinite for those with an infinite or nan element."""
    finite = x.isfinite().flatten(-2).all(-1)
    wide = torch.where(finite[..., None, None], x.double(), 0.0)
    return torch.where(finite, torch.linalg.cond(wide).nan_to_num(torch.inf), torch.inf)


def _justified(info: Sequence[torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    """Return a residual of codes, if there are any: only matrices close to singular ones may have failed."""
    if not info:
        return []
    passed = info[0] == 0
    if x.numel() and not bool(passed.all()):
        passed |= _condition(x) * torch.finfo(x.dtype).eps > 1e-3
    return [_must(passed)]


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
    found = [units(product - given, norm(given), factor), _equal(lower.triu(1))]
    found = _unless_failed(found, info)
    if not info:
        return found
    passed = info[0] == 0
    if not bool(passed.all()):
        # The smallest eigenvalue of a matrix that failed is negative, or roundoff.
        finite = given.isfinite().flatten(-2).all(-1)
        least = torch.linalg.eigvalsh(torch.where(finite[..., None, None], given, 0.0)).amin(-1)
        roundoff = 30 * given.shape[-1] * torch.finfo(factor.dtype).eps * norm(given)
        passed |= (least <= roundoff) | ~finite
    return [*found, _must(passed)]


@facts.residuals("_cholesky_solve_helper")
def _of_cholesky_solve(
    self: torch.Tensor, A: torch.Tensor, upper: bool = False, *, results: facts.Tensors
) -> list[torch.Tensor]:
    (x,) = results
    lower = (A.mT if upper else A).double().tril()
    return [units(lower @ (lower.mT @ x.double()) - self, norm(lower) ** 2 * norm(x), x)]


@facts.residuals("cholesky_inverse")
def _of_cholesky_inverse(self: torch.Tensor, upper: bool = False, *, results: facts.Tensors) -> list[torch.Tensor]:
    (x,) = results
    lower = (self.mT if upper else self).double().tril()
    one = torch.eye(x.shape[-1], dtype=torch.float64, device=x.device)
    return [units(lower @ (lower.mT @ x.double()) - one, norm(lower) ** 2 * norm(x), x), _equal(x - x.mT)]


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
    return [units((triangle @ wide if left else wide @ triangle) - B, norm(triangle) * norm(x), x)]


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
    return [units(triangle @ x.double() - self, norm(triangle) * norm(x), x), _equal(copy - A)]


def _product(factors: torch.Tensor, pivots: torch.Tensor) -> torch.Tensor:
    """Return P L U in float64."""
    order, lower, upper = torch.lu_unpack(factors.double(), pivots)
    return order @ lower @ upper


def _of_factors(factors: torch.Tensor, pivots: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    """Return residuals of P L U = A, and of the pivots, which are largest if no element of L exceeds 1."""
    lower = factors.tril(-1)[..., : min(factors.shape[-2:])]
    largest = 1 + 8 * torch.finfo(factors.dtype).eps
    return [
        units(_product(factors, pivots) - x, norm(x), factors),
        _must((lower.abs() <= largest).flatten(-2).all(-1)),
    ]


@facts.residuals("linalg_lu_factor_ex")
def _of_lu_factor(A: torch.Tensor, *settings: Any, results: facts.Tensors, **named: Any) -> list[torch.Tensor]:
    factors, pivots, *info = results
    found = _of_factors(factors, pivots, A)
    if info:
        zero = factors.diagonal(dim1=-2, dim2=-1) == 0
        first = torch.where(zero.any(-1), 1 + zero.int().argmax(-1), 0) if zero.shape[-1] else info[0]
        found.append(_must(info[0] == first))
    return found


@facts.residuals("linalg_lu")
def _of_lu(A: torch.Tensor, *settings: Any, results: facts.Tensors, **named: Any) -> list[torch.Tensor]:
    order, lower, upper = (x.double() for x in results)
    order = order if order.dim() > 1 else torch.eye(A.shape[-2], dtype=torch.float64, device=A.device)
    found = [units(order @ lower @ upper - A, norm(A), results[1]), _equal(upper.tril(-1)), _equal(lower.triu(1))]
    return [*found, _equal(lower.diagonal(dim1=-2, dim2=-1)[..., None] - 1)]


@facts.residuals("linalg_lu_solve")
def _of_lu_solve(
    LU: torch.Tensor,
    pivots: torch.Tensor,
    B: torch.Tensor,
    *,
    left: bool = True,
    adjoint: bool = False,
    results: facts.Tensors,
) -> list[torch.Tensor]:
    (x,) = results
    wide, matrices = x.double(), _product(LU, pivots)
    matrices = matrices.mT if adjoint else matrices
    size = norm(LU.double().tril(-1)) + LU.shape[-1] ** 0.5
    scale = size * norm(LU.double().triu()) * norm(x)
    return [units((matrices @ wide if left else wide @ matrices) - B, scale, x)]


@facts.residuals("linalg_inv_ex")
def _of_inverse(A: torch.Tensor, *settings: Any, results: facts.Tensors, **named: Any) -> list[torch.Tensor]:
    x, *info = results
    one = torch.eye(A.shape[-1], dtype=torch.float64, device=A.device)
    found = _unless_failed([units(A.double() @ x.double() - one, norm(A) * norm(x), x)], info)
    return [*found, *_justified(info, A)]


@facts.residuals("_linalg_solve_ex")
def _of_solve(
    A: torch.Tensor,
    B: torch.Tensor,
    *,
    left: bool = True,
    check_errors: bool = False,
    results: facts.Tensors,
) -> list[torch.Tensor]:
    x, *others = results
    vector = B.dim() == 1 or (A.dim() - 1 == B.dim() and B.shape == A.shape[:-1])
    x, right = (x[..., None], B[..., None]) if vector else (x, B)
    wide, matrices = x.double(), A.double()
    found = [units((matrices @ wide if left else wide @ matrices) - right, norm(A) * norm(x), x)]
    if not others:
        return found
    factors, pivots, info = others
    # A matrix may have several right-hand sides.
    found = [torch.where(info == 0, residual, 0.0) for residual in found]
    return [*found, *_of_factors(factors, pivots, A), *_justified([info], A)]


def _determinants(factors: torch.Tensor, pivots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the signs and the logarithms of the sizes of determinants, in float64."""
    diagonal = factors.double().diagonal(dim1=-2, dim2=-1)
    odd = (pivots != torch.arange(1, pivots.shape[-1] + 1, device=pivots.device)).sum(-1) % 2
    return diagonal.sgn().prod(-1) * (1 - 2 * odd), diagonal.abs().log().sum(-1)


def _of_determinant(A: torch.Tensor, sign: torch.Tensor, size: torch.Tensor, others: facts.Tensors) -> facts.Tensors:
    """Return residuals of signs, of logarithms of sizes, and of factors.

    Without factors the matrix is factored anew, and its condition is the factor of the error.
    """
    eps, condition = torch.finfo(A.dtype).eps, torch.ones_like(size, dtype=torch.float64)
    if others:
        factors, pivots = others
        given = A.mT if A.is_contiguous() else A
        found = _of_factors(factors, pivots, given)
    else:
        factors, pivots, _ = torch.linalg.lu_factor_ex(A.double())
        found, condition = [], _condition(A) if A.numel() else condition
    signs, sizes = _determinants(factors, pivots)
    scale = max(1, A.shape[-1]) * eps * condition * (1 + sizes.abs())
    # A sign is sure only for a matrix far from singular ones.
    wrong = torch.where((sign != signs) & (condition * eps < 1e-2), torch.inf, 0.0)
    return [*found, torch.where(size == sizes, 0.0, (size - sizes).abs() / scale), wrong]


@facts.residuals("_linalg_det")
def _of_det(A: torch.Tensor, *, results: facts.Tensors) -> list[torch.Tensor]:
    value, *others = results
    return _of_determinant(A, value.sgn(), value.double().abs().log(), others)


@facts.residuals("_linalg_slogdet")
def _of_slogdet(A: torch.Tensor, *, results: facts.Tensors) -> list[torch.Tensor]:
    sign, size, *others = results
    return _of_determinant(A, sign, size.double(), others)


@facts.residuals("linalg_qr")
def _of_qr(A: torch.Tensor, mode: str = "reduced", *, results: facts.Tensors) -> list[torch.Tensor]:
    q, r = (x.double() for x in results)
    if mode == "r":
        # R^T R = A^T A, in which errors are relative to the square of the norm.
        return [units(r.mT @ r - A.double().mT @ A.double(), norm(A) ** 2, results[1]), _equal(r.tril(-1))]
    one = torch.eye(q.shape[-1], dtype=torch.float64, device=A.device)
    orthogonal = units(q.mT @ q - one, torch.ones_like(norm(A)), results[0])
    return [units(q @ r - A, norm(A), results[0]), orthogonal, _equal(r.tril(-1))]


@facts.residuals("geqrf")
def _of_geqrf(self: torch.Tensor, *, results: facts.Tensors) -> list[torch.Tensor]:
    packed, taus = (x.double() for x in results)
    columns = packed.shape[-2]
    square = torch.nn.functional.pad(packed, (0, max(0, columns - packed.shape[-1])))[..., :columns]
    q = torch.linalg.householder_product(square, taus)
    return [units(q @ packed.triu() - self, norm(self), results[0])]


def _growth(packed: torch.Tensor, taus: torch.Tensor) -> torch.Tensor:
    """Return by how much reflectors may enlarge a matrix: about 1 for those of a factorisation."""
    v = packed.double().tril(-1)[..., : taus.shape[-1]]
    return (1 + taus.double().abs() * (1 + (v * v).sum(-2))).prod(-1) / 3.0 ** min(taus.shape[-1], 60)


def _of_product(x: torch.Tensor, exact: torch.Tensor, growth: torch.Tensor) -> list[torch.Tensor]:
    return [units(x - exact, norm(exact) * growth.clamp_min(1), x)]


@facts.residuals("linalg_householder_product")
def _of_householder_product(input: torch.Tensor, tau: torch.Tensor, *, results: facts.Tensors) -> list[torch.Tensor]:
    exact = torch.linalg.householder_product(input.double(), tau.double())
    return _of_product(results[0], exact, _growth(input, tau))


@facts.residuals("ormqr")
def _of_ormqr(
    self: torch.Tensor,
    input2: torch.Tensor,
    input3: torch.Tensor,
    left: bool = True,
    transpose: bool = False,
    *,
    results: facts.Tensors,
) -> list[torch.Tensor]:
    exact = torch.ormqr(self.double(), input2.double(), input3.double(), left, transpose)
    return _of_product(results[0], exact, _growth(self, input2))
