"""Matrices divided into blocks: panels, row exchanges, codes, layouts, against ATen by residuals."""

import pytest
import torch

import tritonite
from tritonite.engine.linalg import blocked, table
from tritonite.errors import Decline
from tritonite.ops.linalg import checks, triangular
from tritonite.testing.judge import judge_residuals

aten = torch.ops.aten
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


@pytest.fixture
def small(monkeypatch):
    """Have a program hold matrices of 8 rows, and panels of 4 to 8 columns."""
    own = table.LinalgTable(largest=8, tile_bytes=2**10, block=8)
    for module in (table, blocked, checks, triangular):
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


def test_large_matrices_go_to_aten_by_default(small, monkeypatch):
    monkeypatch.setattr(checks, "decline_if_slower", _decline)
    with pytest.raises(Decline, match="faster"):
        tritonite.overloads()["linalg_cholesky_ex"](torch.eye(20, device=tritonite.device))


def _decline(slower):
    if slower:
        raise Decline("ATen is faster")


def test_replays_with_batches_that_are_copied(small):
    for _ in range(3):
        x = matrices(2, 3, 12, 12).transpose(0, 1)
        spd = (x @ x.mT + torch.eye(12, dtype=x.dtype, device=x.device)).contiguous().transpose(0, 1).mT
        with tritonite.use_gems(include=["linalg_cholesky_ex", "linalg_lu_factor_ex"], faster_only=False):
            factor, factors = torch.linalg.cholesky_ex(spd)[0], torch.linalg.lu_factor_ex(x)
        torch.testing.assert_close(factor @ factor.mT, spd)
        order, lower, upper = torch.lu_unpack(*factors[:2])
        torch.testing.assert_close(order @ lower @ upper, x)
