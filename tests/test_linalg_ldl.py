"""Factorisations with blocks of two rows: LAPACK's pivots, sizes of tiles, several programs, layouts, singular ones."""

import pytest
import torch

import tritonite
from tritonite.engine import iteration
from tritonite.engine.linalg import launch, ldl_in_memory, table
from tritonite.errors import Decline
from tritonite.ops.linalg import checks
from tritonite.testing.judge import judge_residuals

aten = torch.ops.aten
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
FACTOR, SOLVE = "linalg_ldl_factor_ex", "linalg_ldl_solve"


def check(name, *arguments):
    """Judge a direct call of an operator by residuals, and return its results and ATen's."""
    found, expected = tritonite.overloads()[name](*arguments), getattr(aten, name)(*arguments)
    own, theirs = [(each,) if isinstance(each, torch.Tensor) else each for each in (found, expected)]
    for result, other in zip(own, theirs, strict=True):
        assert result.dtype is other.dtype and result.stride() == other.stride()
    assert judge_residuals(name, (arguments, {}), own, theirs) is None
    return own, theirs


def matrices(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, device=tritonite.device)


@DTYPES
@pytest.mark.parametrize("shape", [(3, 1, 1), (2, 2, 2), (2, 3, 5, 5), (4, 17, 17), (33, 33)])
def test_pivots_are_lapacks(shape, dtype):
    (_, pivots, info), (factors, expected, code) = check(FACTOR, matrices(*shape, dtype=dtype))
    assert torch.equal(pivots, expected) and torch.equal(info, code)
    check(SOLVE, factors, expected, matrices(*shape[:-1], 3, dtype=dtype))


def test_blocks_of_two_rows():
    x = torch.tensor([[[0.0, 1, 0], [1, 0, 0], [0, 0, 2]], [[0, 0, 3], [0, 1, 0], [3, 0, 0]]], device=tritonite.device)
    (factors, pivots, info), (_, expected, _) = check(FACTOR, x)
    assert torch.equal(pivots, expected) and (pivots < 0).any() and not info.any()
    check(SOLVE, factors, pivots, matrices(2, 3, 2, dtype=torch.float32))


def test_codes_of_singular_matrices():
    x = torch.zeros(2, 3, 3, device=tritonite.device)
    x[1, 0, 0] = 1
    (_, pivots, info), (_, expected, code) = check(FACTOR, x)
    assert torch.equal(pivots, expected) and info.tolist() == [1, 2]
    # Of several zeros on the diagonal LAPACK names the first, cuSOLVER another.
    assert torch.equal(info, code) if x.is_cpu else bool((code > 0).all())


def test_several_programs_and_64_bit_offsets(monkeypatch):
    small = table.LinalgTable(warp_bytes=256, right_hand_sides=4)
    monkeypatch.setattr(table, "linalg_table", lambda: small)
    monkeypatch.setattr(iteration, "INT32_LIMIT", 8)
    (factors, pivots, _), _ = check(FACTOR, matrices(9, 6, 6))
    check(SOLVE, factors, pivots, matrices(9, 6, 11))


def test_layouts_and_broadcast_batches():
    x = matrices(5, 5, 2, 3).permute(2, 3, 0, 1)
    (factors, pivots, _), _ = check(FACTOR, x.mT)
    check(SOLVE, factors, pivots, matrices(3, 4, 5).mT)
    check(SOLVE, factors[0, 0], pivots[0, 0], matrices(4, 5, 2))


@pytest.fixture
def in_memory(monkeypatch):
    """Have no tile hold a matrix, and programs read few rows at a time."""
    small = table.LinalgTable(tile_bytes=16, largest=1)
    monkeypatch.setattr(table, "linalg_table", lambda: small)
    monkeypatch.setattr(checks, "linalg_table", lambda: small)
    monkeypatch.setattr(ldl_in_memory, "_ROWS", 4 if tritonite.backend.interpreted else 128)
    monkeypatch.setattr(launch, "ldl", None)
    monkeypatch.setattr(launch, "solve_ldl", None)


@DTYPES
@pytest.mark.parametrize("shape", [(3, 2, 2), (2, 3, 5, 5), (2, 17, 17), (21, 21)], ids=str)
def test_matrices_in_memory(in_memory, shape, dtype):
    (_, pivots, info), (factors, expected, code) = check(FACTOR, matrices(*shape, dtype=dtype))
    assert torch.equal(pivots, expected) and torch.equal(info, code)
    assert (pivots < 0).any() or shape[-1] == 2
    check(SOLVE, factors, expected, matrices(*shape[:-1], 11, dtype=dtype))


def test_singular_and_strided_matrices_in_memory(in_memory):
    test_blocks_of_two_rows()
    test_codes_of_singular_matrices()
    test_layouts_and_broadcast_batches()


@DTYPES
def test_matrices_larger_than_a_tile(dtype):
    (_, pivots, info), (factors, expected, _) = check(FACTOR, matrices(2, 150, 150, dtype=dtype))
    assert torch.equal(pivots, expected) and not info.any()
    check(SOLVE, factors, expected, matrices(2, 150, 3, dtype=dtype))


@pytest.mark.parametrize(
    ("name", "arguments", "match"),
    [
        (FACTOR, (torch.ones(2, 3),), "square"),
        (SOLVE, (torch.ones(3, 3), torch.ones(3, dtype=torch.int64), torch.ones(3, 1)), "pivots of"),
        (SOLVE, (torch.ones(3, 3), torch.ones(3, dtype=torch.int32), torch.ones(2, 1)), "right-hand sides"),
    ],
)
def test_declines(name, arguments, match):
    with pytest.raises(Decline, match=match):
        tritonite.overloads()[name](*arguments)
