"""Factorisations and solves: sizes of tiles, several programs, layouts, failures, 64-bit offsets, gradients."""

import itertools

import pytest
import torch
from conftest import served

import tritonite
from tritonite import devices
from tritonite.engine import iteration
from tritonite.engine.linalg import table
from tritonite.errors import Decline
from tritonite.ops.linalg import lu
from tritonite.testing.judge import comparable, judge_residuals

aten = torch.ops.aten
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def matrices(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, device=tritonite.device)


def definite(*shape, dtype=torch.float64):
    x = matrices(*shape, dtype=dtype)
    return x @ x.mT + torch.eye(shape[-1], dtype=dtype, device=x.device)


def check(name, *arguments, **named):
    """Compare a direct call of an operator, so that a decline raises, with ATen by residuals, and return its results.

    Integers must be equal.
    """
    found, expected = tritonite.overloads()[name](*arguments, **named), getattr(aten, name)(*arguments, **named)
    if isinstance(found, torch.Tensor):
        found, expected = (found,), (expected,)
    for own, theirs in zip(comparable(name, found), comparable(name, expected), strict=True):
        assert own.kind == theirs.kind
        if own.extent == "values" or not own.value.is_floating_point():
            assert torch.equal(own.value, theirs.value)
    assert judge_residuals(name, (arguments, named), found, expected) is None
    return found


@DTYPES
@pytest.mark.parametrize("n", [1, 2, 5, 17])
def test_sizes_of_tiles(n, dtype):
    x, spd, right = matrices(3, n, n, dtype=dtype), definite(3, n, n, dtype=dtype), matrices(3, n, 2, dtype=dtype)
    check("linalg_cholesky_ex", spd, upper=True)
    check("_linalg_solve_ex", x, right)
    check("linalg_inv_ex", x)
    check("linalg_qr", x)
    check("_linalg_slogdet", x)


@DTYPES
@pytest.mark.parametrize("upper", [False, True])
def test_inverses_by_factors(dtype, upper):
    factor = torch.linalg.cholesky(definite(3, 5, 5, dtype=dtype), upper=upper)
    check("cholesky_inverse", factor, upper)


@pytest.mark.declines("0 on the diagonal")
def test_inverses_by_singular_factors_are_atens_on_a_cpu():
    """ATen raises on a CPU for a diagonal with 0, and on a GPU for no factor."""
    if tritonite.backend.aten != "cpu":
        pytest.skip("ATen's GPU kernels raise for no factor")
    factor = torch.linalg.cholesky(definite(2, 5, 5))
    with tritonite.use_gems(include=["cholesky_inverse"], faster_only=False):
        for value in (torch.nan, 0.0, 1.0, 0.0):
            factor[1, 3, 3] = value
            if value == 0:
                with pytest.raises(torch.linalg.LinAlgError, match="singular"):
                    torch.cholesky_inverse(factor)
            else:
                assert torch.cholesky_inverse(factor)[0].isfinite().all()
    own = tritonite.stats()["cholesky_inverse"]
    assert own.launched + own.replayed == 2 and sum(own.declined.values()) == 2


@DTYPES
def test_several_programs(dtype, monkeypatch):
    """A warp holds few matrices, and a block few right-hand sides, so that each has several programs."""
    small = table.LinalgTable(warp_bytes=256, right_hand_sides=4)
    monkeypatch.setattr(table, "linalg_table", lambda: small)
    x, right = matrices(7, 3, 3, dtype=dtype), matrices(7, 3, 11, dtype=dtype)
    factors, pivots, _ = check("linalg_lu_factor_ex", x)
    check("linalg_lu_solve", factors, pivots, right)
    check("linalg_lu_solve", factors, pivots, right.mT, left=False, adjoint=True)
    check("_cholesky_solve_helper", right, torch.linalg.cholesky(definite(7, 3, 3, dtype=dtype)), False)
    packed, taus = check("geqrf", matrices(7, 3, 2, dtype=dtype))
    check("ormqr", packed, taus, right, True, True)
    check("linalg_qr", matrices(7, 5, 9, dtype=dtype), "complete")


@pytest.mark.parametrize("mode", ["reduced", "complete", "r"])
@pytest.mark.parametrize("shape", [(7, 4), (4, 7), (5, 1), (1, 5), (0, 3), (3, 0), (0, 0)], ids=str)
def test_shapes_of_qr(shape, mode):
    x = matrices(2, *shape)
    check("linalg_qr", x, mode)
    check("linalg_qr", x.mT.contiguous().mT, mode)
    check("geqrf", x)


@pytest.mark.parametrize("shape", [(7, 4), (4, 7), (5, 1), (1, 5), (0, 3), (3, 0)], ids=str)
def test_shapes_of_lu(shape):
    x = matrices(2, *shape)
    factors, pivots, _ = check("linalg_lu_factor_ex", x)
    check("linalg_lu", x.transpose(0, 1).contiguous().transpose(0, 1))
    for data, order in itertools.product((False, True), repeat=2):
        check("lu_unpack", factors, pivots, data, order)


@pytest.mark.parametrize("flags", list(itertools.product((False, True), repeat=3)), ids=str)
def test_triangles(flags):
    """Both sides, both triangles, with and without a diagonal; the other triangle and a unit diagonal are not read."""
    upper, left, unit = flags
    own = definite(2, 3, 4, 4)
    unread = torch.ones_like(own).tril(-1 + unit) if upper else torch.ones_like(own).triu(1 - unit)
    triangle = own.masked_fill(unread.bool(), torch.nan)
    right = matrices(2, 3, 4, 5) if left else matrices(2, 3, 5, 4)
    settings = {"upper": upper, "left": left, "unitriangular": unit}
    found = tritonite.overloads()["linalg_solve_triangular"](triangle, right, **settings)
    torch.testing.assert_close(found, torch.linalg.solve_triangular(own, right, **settings))
    assert found.stride() == torch.linalg.solve_triangular(own, right, **settings).stride()


def test_batches_broadcast():
    x, right = matrices(3, 1, 4, 4), matrices(2, 4, 5)
    check("linalg_solve_triangular", definite(3, 1, 4, 4), right, upper=True)
    check("triangular_solve", right, definite(3, 1, 4, 4))
    factors, pivots, _ = torch.linalg.lu_factor_ex(x)
    check("linalg_lu_solve", factors, pivots, right)
    check("_linalg_solve_ex", x, right)
    check("_linalg_solve_ex", x[:, 0], matrices(3, 4))
    check("_linalg_solve_ex", x[:, 0], matrices(4))
    check("_linalg_solve_ex", x, matrices(5, 4), left=False)


def test_matrices_without_a_factorisation():
    """Codes and pivots are ATen's, also among good matrices, for a nan and for equal candidates of a pivot."""
    nan = torch.tensor([[1.0, 2, 3], [torch.nan, 1, 4], [3, 4, 5]], device=tritonite.device)
    some = torch.stack([nan, nan.mT, torch.ones_like(nan), torch.zeros_like(nan), nan.nan_to_num(-3), definite(3, 3)])
    for x in (some, some.mT, some.double()):
        ops = tritonite.overloads()
        found, expected = ops["linalg_lu_factor_ex"](x), torch.linalg.lu_factor_ex(x)
        torch.testing.assert_close(found, tuple(expected), equal_nan=True)
        torch.testing.assert_close(ops["_linalg_det"](x), aten._linalg_det(x), equal_nan=True)
        torch.testing.assert_close(ops["_linalg_slogdet"](x), aten._linalg_slogdet(x), equal_nan=True)
        assert torch.equal(ops["linalg_inv_ex"](x)[1], torch.linalg.inv_ex(x)[1])
        # For a batch cuSOLVER overlooks the nan that it reports for a matrix alone.
        codes = torch.stack([torch.linalg.cholesky_ex(each)[1] for each in x])
        assert torch.equal(ops["linalg_cholesky_ex"](x)[1], codes)


def test_lu_without_exchanges(monkeypatch):
    """Rows keep their positions, which ATen serves on GPUs alone."""
    monkeypatch.setattr(lu, "_check_pivot", lambda pivot: None)
    x = matrices(2, 4, 4) + 9 * torch.eye(4, dtype=torch.float64, device=tritonite.device)
    ops = tritonite.overloads()
    factors, pivots, info = ops["linalg_lu_factor_ex"](x, pivot=False)
    order, lower, upper = ops["linalg_lu"](x, pivot=False)
    assert order.shape == (0,) and not info.any() and pivots.tolist() == [[1, 2, 3, 4]] * 2
    torch.testing.assert_close(lower @ upper, x)
    torch.testing.assert_close(factors, lower.tril(-1) + upper)


def test_tiles_in_invariant_mode():
    with tritonite.use_gems(faster_only=False, invariant=True):
        few, many = (table.right_hand_sides(4, count, count, torch.float32) for count in (1, 100))
    assert few == many
    assert table.right_hand_sides(4, 1, 1, torch.float32) != few


def test_reflectors_of_large_and_small_numbers():
    for scale in (1e-30, 1e30):
        x = matrices(2, 6, 3, dtype=torch.float32) * scale
        q, r = tritonite.overloads()["linalg_qr"](x)
        torch.testing.assert_close(q @ (r / scale), x / scale)
    q, _ = tritonite.overloads()["linalg_qr"](matrices(2, 6, 3, dtype=torch.float32) * 1e-42)
    torch.testing.assert_close(q.mT @ q, torch.eye(3, device=q.device).expand(2, 3, 3))


def test_reflectors_of_subnormal_columns_are_orthogonal():
    """Each step on a matrix of rank 1 leaves roundoff of roundoff, which ends below the smallest normal number."""
    rows = torch.randn(4, 1, 36, device=tritonite.device).expand(4, 20, 36)
    for a in (rows, rows[..., :3] * 1e-41):
        with tritonite.use_gems(include="linalg_qr", faster_only=False):
            q, r = torch.linalg.qr(a)
        torch.testing.assert_close(q.mT @ q, torch.eye(q.shape[-1]).expand(4, -1, -1).to(q), rtol=0, atol=2e-5)
        torch.testing.assert_close(q @ r, a.contiguous(), rtol=0, atol=float(a.abs().max()) * 1e-5 + 20 * 2.0**-149)
    assert served("linalg_qr")


def test_a_factor_replaces_its_matrix():
    spd = definite(2, 4, 4)
    expected, info = torch.linalg.cholesky(spd), torch.empty(2, dtype=torch.int32, device=spd.device)
    tritonite.overloads()["linalg_cholesky_ex.L"](spd, L=spd, info=info)
    torch.testing.assert_close(spd, expected)


def test_wide_offsets(monkeypatch):
    monkeypatch.setattr(iteration, "INT32_LIMIT", 1)
    x = matrices(3, 4, 4)
    factors, pivots, _ = check("linalg_lu_factor_ex", x)
    check("linalg_lu_solve", factors, pivots, x)
    check("linalg_lu", x)
    check("linalg_qr", x)
    check("linalg_cholesky_ex", definite(3, 4, 4))


def test_what_declines():
    ops = tritonite.overloads()
    with pytest.raises(Decline, match="up to 2048 rows are factored by panels"):
        ops["geqrf"](matrices(9000, 2))
    with pytest.raises(Decline, match="check_errors=True"):
        ops["linalg_inv_ex"](matrices(2, 2), check_errors=True)
    with pytest.raises(Decline, match="float32 or float64"):
        ops["linalg_lu_factor_ex"](matrices(2, 2).to(torch.complex64))


@pytest.mark.parametrize(
    ("method", "side", "count", "dtype", "slower"),
    [
        *(("qr", 8, 20, torch.float32, False), ("qr", 8, 19, torch.float32, True), ("qr", 3, 20, torch.float32, True)),
        *(("qr", 33, 20, torch.float32, True), ("qr", 8, 20, torch.float64, True)),
        *(
            ("eigh", 8, 1, torch.float64, False),
            ("lu", 8, 1000, torch.float32, True),
            ("lu", 8, 0, torch.float32, False),
        ),
    ],
)
def test_batches_that_were_measured_faster(method, side, count, dtype, slower, monkeypatch):
    faster = ("qr", table.Faster(4, 32, 20)), ("eigh", table.Faster(1, 64, 1, double=True))
    monkeypatch.setitem(table.LINALG, devices.current.kind, table.LinalgTable(faster=faster))
    assert table.aten_is_faster(method, side, count, dtype) is slower


FUNCTIONS = {
    "solve": lambda a, b: torch.linalg.solve(a, b),
    "inv": lambda a, b: torch.linalg.inv(a) @ b,
    "det": lambda a, b: torch.linalg.det(a),
    "slogdet": lambda a, b: torch.linalg.slogdet(a)[1],
    "cholesky": lambda a, b: torch.linalg.cholesky(a @ a.mT + 1),
    "cholesky_solve": lambda a, b: torch.cholesky_solve(b, torch.linalg.cholesky(a @ a.mT + 1)),
    "triangular": lambda a, b: torch.linalg.solve_triangular(a, b, upper=True),
    "qr": lambda a, b: torch.linalg.qr(a)[0],
    "lu": lambda a, b: torch.linalg.lu(a)[1],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients(name):
    """Gradients are ATen's formulas over these operators, which read factors in the layout that ATen gives them."""

    def gradients(a):
        given = a.detach().requires_grad_(), b.detach().requires_grad_()
        return torch.autograd.grad(FUNCTIONS[name](*given).square().sum(), given, allow_unused=True)

    x, b = matrices(2, 3, 3), matrices(2, 3, 2)
    for a in (x, x.mT.contiguous().mT):
        expected = gradients(a)
        with tritonite.use_gems(include=["*linalg*", "*cholesky*", "lu_unpack"], faster_only=False):
            found = gradients(a)
        for own, theirs in zip(found, expected, strict=True):
            assert (own is None) == (theirs is None)
            if own is not None:
                torch.testing.assert_close(own, theirs)


def test_functions_of_linalg_are_served():
    x, right = definite(2, 4, 4), matrices(2, 4, 3)
    with tritonite.use_gems(faster_only=False):
        torch.linalg.cholesky(x)
        torch.linalg.solve(x, right)
        with pytest.raises(torch.linalg.LinAlgError):
            torch.linalg.cholesky(-x)
    assert served("linalg_cholesky_ex") and served("_linalg_solve_ex")
