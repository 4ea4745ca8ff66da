"""Matrices divided into blocks: panels, row exchanges, codes, layouts, against ATen by residuals."""

import pytest
import torch

import tritonite
from tritonite.engine import iteration
from tritonite.engine.linalg import blocked, compact_wy, table
from tritonite.errors import Decline
from tritonite.ops.linalg import checks
from tritonite.testing.judge import judge_residuals

aten = torch.ops.aten
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


@pytest.fixture
def small(monkeypatch):
    """Have a program hold matrices of 8 rows, and panels of 4 to 8 columns."""
    own = table.LinalgTable(largest=8, tile_bytes=2**10, block=8)
    for module in (table, blocked, compact_wy, checks):
        monkeypatch.setattr(module, "linalg_table", lambda: own)


def matrices(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, device=tritonite.device)


def check(name, *arguments, **named):
    """Judge a direct call of an operator by residuals, and return its results and ATen's."""
    found, expected = tritonite.overloads()[name](*arguments, **named), getattr(aten, name)(*arguments, **named)
    own, theirs = [(each,) if isinstance(each, torch.Tensor) else each for each in (found, expected)]
    assert judge_residuals(name, (arguments, named), own, theirs) is None
    return own, theirs


@DTYPES
@pytest.mark.parametrize("shape", [(20, 20), (2, 17, 17), (2, 1, 9, 9)])
@pytest.mark.parametrize("upper", [False, True])
def test_cholesky(shape, upper, dtype, small):
    x = matrices(*shape, dtype=dtype)
    (_, info), _ = check(
        "linalg_cholesky_ex", x @ x.mT + torch.eye(shape[-1], dtype=dtype, device=x.device), upper=upper
    )
    assert not info.any()


def test_first_minor_that_is_not_positive(small):
    x = torch.eye(20, dtype=torch.float64, device=tritonite.device).repeat(3, 1, 1)
    x[0, 13, 13], x[1, 2, 2], x[1, 18, 18] = -1, -1, -1
    (_, info), (_, expected) = check("linalg_cholesky_ex", x)
    assert info.tolist() == expected.tolist() == [14, 3, 0]


@DTYPES
@pytest.mark.parametrize("shape", [(20, 20), (2, 17, 11), (2, 11, 30), (3, 2, 9, 9)])
def test_lu(shape, dtype, small):
    x = matrices(*shape, dtype=dtype)
    (_, pivots, info), (_, expected, _) = check("linalg_lu_factor_ex", x.mT.contiguous().mT if x.dim() == 3 else x)
    assert torch.equal(pivots, expected) and not info.any()


def test_first_pivot_of_zero(small):
    x = matrices(2, 12, 12)
    x[1, :, 9] = 0
    (_, pivots, info), (_, expected, codes) = check("linalg_lu_factor_ex", x)
    assert torch.equal(info, codes) and info.tolist() == [0, 10]
    assert torch.equal(pivots[0], expected[0])


@DTYPES
@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("left", [False, True])
def test_triangles(upper, left, dtype, small):
    x = matrices(2, 19, 19, dtype=dtype) / 19 + torch.eye(19, dtype=dtype, device=tritonite.device)
    check(
        "linalg_solve_triangular", x, matrices(2, *((19, 5) if left else (5, 19)), dtype=dtype), upper=upper, left=left
    )
    check("triangular_solve", matrices(19, 3, dtype=dtype), x[0], upper, not left, True)


@DTYPES
@pytest.mark.parametrize("shape", [(20, 20), (2, 1, 9, 9)])
def test_solves_by_cholesky(shape, dtype, small):
    x, right = matrices(*shape, dtype=dtype), matrices(*shape[:-1], 3, dtype=dtype)
    lower = torch.linalg.cholesky(x @ x.mT + torch.eye(shape[-1], dtype=dtype, device=x.device))
    check("_cholesky_solve_helper", right, lower, False)
    check("_cholesky_solve_helper", right, lower.mT, True)
    check("cholesky_inverse", lower, False)


@DTYPES
@pytest.mark.parametrize("left", [False, True])
def test_solves_by_lu(left, dtype, small):
    x, right = matrices(3, 1, 17, 17, dtype=dtype), matrices(2, *((17, 3) if left else (3, 17)), dtype=dtype)
    (_, factors, pivots, _), (_, _, expected, _) = check("_linalg_solve_ex", x, right, left=left)
    assert torch.equal(pivots, expected)
    for adjoint in (False, True):
        check("linalg_lu_solve", factors, pivots, right, left=left, adjoint=adjoint)


@DTYPES
@pytest.mark.parametrize("shape", [(17, 17), (2, 1, 9, 9)])
def test_inverses_and_determinants(shape, dtype, small):
    x = matrices(*shape, dtype=dtype)
    check("linalg_inv_ex", x)
    check("_linalg_det", x)
    check("_linalg_slogdet", x.mT)
    check("_linalg_solve_ex", x, matrices(*shape[:-1], dtype=dtype))


def test_singular_matrices(small):
    x = matrices(2, 12, 12)
    x[1, :, 9] = 0
    assert check("linalg_inv_ex", x)[0][1].tolist() == [0, 10]
    assert check("_linalg_det", x)[0][0][1] == 0
    sign, size, *_ = check("_linalg_slogdet", x)[0]
    assert sign[1] == 0 and size[1] == -torch.inf


@pytest.mark.parametrize("shape", [(20, 20), (2, 17, 11), (2, 11, 30)])
def test_factors_apart(shape, small):
    x = matrices(*shape)
    check("linalg_lu", x)
    (factors, pivots, _), _ = check("linalg_lu_factor_ex", x)
    for order in (False, True):
        tritonite.overloads()["lu_unpack"](factors, pivots, True, order)
    found, expected = (f(factors, pivots) for f in (tritonite.overloads()["lu_unpack"], torch.lu_unpack))
    torch.testing.assert_close(tuple(found), tuple(expected), rtol=0, atol=0)


@DTYPES
@pytest.mark.parametrize(
    ("shape", "mode"),
    [((17, 10), "reduced"), ((11, 9), "complete"), ((2, 1, 9, 12), "reduced"), ((9, 20), "r")],
    ids=str,
)
def test_qr(shape, mode, dtype, small):
    x = matrices(*shape, dtype=dtype)
    check("linalg_qr", x, mode)
    check("linalg_qr", x.mT.contiguous().mT, mode)


@DTYPES
@pytest.mark.parametrize("left", [False, True])
def test_products_with_reflectors(left, dtype, small):
    x, other = matrices(2, 12, 10, dtype=dtype), matrices(2, *((12, 3) if left else (3, 12)), dtype=dtype)
    (packed, taus), _ = check("geqrf", x)
    for transposed in (False, True):
        check("ormqr", packed, taus, other, left, transposed)
    check("linalg_householder_product", packed, taus if left else taus[..., :2])


def test_products_with_many_reflectors(small):
    """They may be any vectors, with which a product grows by a factor for each."""
    packed = matrices(48, 48)
    check("linalg_householder_product", packed, packed[0])
    check("ormqr", packed, packed[0], packed)


@pytest.mark.parametrize("shape", [(15, 9), (2, 1, 9, 12), (9, 9)], ids=str)
def test_least_squares(shape, small):
    x, right = matrices(*shape), matrices(*shape[:-1], 3)
    found = tritonite.overloads()["linalg_lstsq"](x, right, None, "gels")
    for own, theirs in zip(found, aten.linalg_lstsq(x, right, None, driver="gels"), strict=True):
        torch.testing.assert_close(own, theirs)


def test_reflectors_that_change_nothing(small):
    """A column that is clear has a factor of 0."""
    x = torch.eye(12, 10, dtype=torch.float64, device=tritonite.device)
    x[:, 4:7] += matrices(12, 3)
    check("linalg_qr", x)


@pytest.mark.parametrize("shape", [(0, 20, 20), (2, 20, 0), (0, 0)])
def test_without_elements(shape, small):
    x = matrices(*shape)
    for mode in ("reduced", "complete", "r"):
        check("linalg_qr", x, mode)
    check("linalg_lu_factor_ex", x)
    if shape[-1] == shape[-2]:
        check("linalg_inv_ex", x)
        check("_linalg_solve_ex", x, x[..., :1])
        check("_linalg_slogdet", x)


def test_results_that_a_call_gives(small):
    """Results are written to given memory of any strides, which may be that of the matrices."""
    x = matrices(2, 12, 12)
    inverse, info = x.clone(), torch.empty(2, dtype=torch.int32, device=x.device)
    tritonite.overloads()["linalg_inv_ex.inverse"](inverse, inverse=inverse, info=info)
    torch.testing.assert_close(inverse, torch.linalg.inv(x))
    q, r = matrices(2, 24, 12)[:, ::2], torch.empty_like(x)
    tritonite.overloads()["linalg_qr.out"](x, Q=q, R=r)
    torch.testing.assert_close(q @ r, x)


def test_wide_offsets(small, monkeypatch):
    monkeypatch.setattr(iteration, "INT32_LIMIT", 1)
    x = matrices(9, 9)
    check("linalg_qr", x)
    check("_linalg_det", x)
    check("_linalg_solve_ex", x, x)


def test_large_matrices_go_to_aten_by_default(small, monkeypatch):
    monkeypatch.setattr(checks, "decline_if_slower", _decline)
    with pytest.raises(Decline, match="faster"):
        tritonite.overloads()["linalg_cholesky_ex"](torch.eye(20, device=tritonite.device))


def _decline(slower):
    if slower:
        raise Decline("ATen is faster")


def test_replays_with_batches_that_are_copied(small):
    for _ in range(3):
        x = matrices(2, 3, 9, 9).transpose(0, 1)
        spd = (x @ x.mT + torch.eye(9, dtype=x.dtype, device=x.device)).contiguous().transpose(0, 1).mT
        with tritonite.use_gems(include=["linalg_cholesky_ex", "linalg_lu_factor_ex"], faster_only=False):
            factor, factors = torch.linalg.cholesky_ex(spd)[0], torch.linalg.lu_factor_ex(x)
        torch.testing.assert_close(factor @ factor.mT, spd)
        order, lower, upper = torch.lu_unpack(*factors[:2])
        torch.testing.assert_close(order @ lower @ upper, x)
        with tritonite.use_gems(include=["*linalg*"], faster_only=False):
            q, r = torch.linalg.qr(x)
            solution = torch.linalg.solve(x, x.mT)
        torch.testing.assert_close(q @ r, x)
        torch.testing.assert_close(x @ solution, x.mT)
