"""Jacobi's methods on pairs of blocks: odd shapes, hard spectra, batches, scales, failures, layouts, by residuals."""

import pytest
import torch
from conftest import every_second
from test_linalg import check, matrices

import tritonite
from tritonite.engine import iteration
from tritonite.engine.linalg import block_jacobi
from tritonite.errors import Decline
from tritonite.ops.linalg import checks
from tritonite.runtime import contract


@pytest.fixture(autouse=True)
def small(change_tables):
    """Have a program hold matrices of 16 rows, and rotate 8 columns, which two blocks have."""
    change_tables(linalg={"largest": 16, "tile_bytes": 2**12, "block": 8, "most_rotated": 8, "rotated_block": 4})


def symmetric(*shape, dtype=torch.float64):
    x = matrices(*shape, dtype=dtype)
    return x + x.mT


@every_second(("dtype", "n"), (torch.float32, torch.float64), (9, 10, 13, 16))
def test_sizes_of_eigenproblems(n, dtype):
    """The triangle that is not named is not read; the last blocks have fewer columns, or none."""
    x = matrices(1 + n % 2, n, n, dtype=dtype)
    upper = torch.ones(n, n, device=x.device).triu(1).bool()
    check("_linalg_eigh", x.masked_fill(upper, torch.nan))
    check("_linalg_eigh", x.masked_fill(upper.mT, torch.nan), "u", compute_v=False)


def test_one_large_eigenproblem():
    check("_linalg_eigh", matrices(25, 25, dtype=torch.float32))


@every_second(("full", "shape"), (False, True), ((9, 9), (12, 9), (9, 12), (2, 1, 20, 10), (30, 3), (3, 2, 40)))
def test_shapes_of_singular_values(shape, full):
    """Tall and wide matrices are those of their R, of which a program may rotate all columns."""
    x = matrices(*shape)
    check("_linalg_svd", x, full)
    check("_linalg_svd", x.mT.contiguous().mT.float(), full)
    check("_linalg_svd", x, full, compute_uv=False)


@pytest.mark.parametrize("shape", [(0, 20, 20), (0, 20, 9), (20, 0), (2, 0, 20)], ids=str)
def test_without_elements(shape):
    check("_linalg_svd", matrices(*shape), True)
    check("_linalg_svd", matrices(*shape))
    if shape[-1] == shape[-2]:
        check("_linalg_eigh", matrices(*shape))


def hard(name):
    """Return a square matrix of a kind that has clusters of values, small values, or values of 0."""
    n, line = 11, torch.arange(11, dtype=torch.float64)
    x = torch.randn(n, n, dtype=torch.float64)
    q, _ = torch.linalg.qr(x)
    made = {
        "zeros": torch.zeros(n, n),
        "identity": torch.eye(n),
        "ones": torch.ones(n, n),
        "hilbert": 1 / (1 + line[:, None] + line),
        "rank 2": x[:, :2] @ x[:2],
        "graded columns": x * 10.0**-line,
        "graded rows": x * 10.0 ** -line[:, None],
        "nearly diagonal": torch.eye(n) + 1e-8 * x,
        "repeated": (q * torch.tensor([1.0, 1, 1, -1, -1, 0, 0, 0, 2, 2, 2])) @ q.mT,
        "reversed": torch.diag(line).flip(0, 1),
    }
    return made[name].double().to(tritonite.device)


SPECTRA = ("zeros", "identity", "ones", "hilbert", "rank 2", "graded columns", "graded rows", "nearly diagonal")
SPECTRA += ("repeated", "reversed")


@every_second(
    ("dtype", "name"),
    (torch.float32, torch.float64),
    SPECTRA,
)
def test_hard_spectra(name, dtype):
    x = hard(name)
    check("_linalg_eigh", (x + x.mT).to(dtype))
    check("_linalg_svd", x.to(dtype), True)


def test_layouts(monkeypatch):
    """Batches of several dimensions and any strides are copied; offsets are wide."""
    monkeypatch.setattr(iteration, "INT32_LIMIT", 1)
    x = matrices(9, 2, 1, 9)
    check("_linalg_eigh", x.permute(1, 2, 0, 3))
    check("_linalg_eigh", x.permute(2, 1, 3, 0)[:, 0].expand(2, 9, 9))
    check("_linalg_svd", x.permute(1, 2, 3, 0))


def test_results_that_a_call_gives():
    x, ops = symmetric(2, 9, 9), tritonite.overloads()
    values, vectors = x.new_empty(9, 2).mT, torch.empty_like(x)
    ops["_linalg_eigh.eigenvalues"](x, eigenvalues=values, eigenvectors=vectors)
    torch.testing.assert_close(vectors * values[:, None] @ vectors.mT, x)
    u, s, vh = torch.empty_like(x), x.new_empty(2, 9), x.new_empty(2, 9, 18)[..., ::2]
    ops["_linalg_svd.U"](x, U=u, S=s, Vh=vh)
    torch.testing.assert_close(u * s[:, None] @ vh, x)


def test_results_do_not_depend_on_the_batch():
    """A matrix that is settled stays as it is while others of the batch have further sweeps."""
    easy = torch.diag(torch.arange(10.0, device=tritonite.device)).double()
    x = torch.stack([symmetric(10, 10), easy + 1e-3, easy])
    with tritonite.use_gems(faster_only=False, invariant=True):
        for function in (torch.linalg.eigh, torch.linalg.svd):
            for together, alone in zip(function(x), function(x[1:2]), strict=True):
                assert torch.equal(together[1:2], alone)


def test_large_and_small_numbers():
    ops, x = tritonite.overloads(), symmetric(9, 9, dtype=torch.float32)
    expected = torch.linalg.eigvalsh(x.double())
    for scale in (2.0**-120, 2.0**120):
        values, _ = ops["_linalg_eigh"](x * scale)
        torch.testing.assert_close(values.double() / scale, expected, rtol=1e-5, atol=1e-5)
        left, values, right = ops["_linalg_svd"](x * scale)
        torch.testing.assert_close(left * (values / scale) @ right, x, rtol=1e-5, atol=1e-5)


def test_norms_that_overflow():
    """The largest elements are finite, and so are the eigenvalues, but no norm of the matrix."""
    largest = torch.finfo(torch.float32).max
    x = torch.full((9,), largest / 2, device=tritonite.device).diag()
    values, vectors = tritonite.overloads()["_linalg_eigh"](x)
    assert torch.equal(values, x.diagonal()) and torch.equal(vectors.abs().sum(0), torch.ones_like(values))
    assert torch.equal(tritonite.overloads()["_linalg_svd"](x)[1], x.diagonal())


@pytest.mark.parametrize("name", ["_linalg_eigh", "_linalg_svd"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_matrices_that_are_not_finite(name, bad):
    x = symmetric(2, 9, 9)
    x[1, 2, 2] = bad
    with pytest.raises(Decline, match="not finite"):
        tritonite.overloads()[name](x)


@pytest.mark.parametrize("name", ["_linalg_eigh", "_linalg_svd"])
def test_too_many_sweeps(name, monkeypatch):
    monkeypatch.setattr(block_jacobi, "_MOST_SWEEPS", 2)
    with pytest.raises(Decline, match="does not converge"):
        tritonite.overloads()[name](symmetric(9, 9))


def test_declines():
    with pytest.raises(Decline, match="rows are factored by panels"):
        tritonite.overloads()["_linalg_svd"](matrices(600, 2))


def test_large_matrices_go_to_aten_by_default(monkeypatch):
    def decline(slower):
        if slower:
            raise Decline("ATen is faster")

    monkeypatch.setattr(checks, "decline_if_slower", decline)
    for name in ("_linalg_eigh", "_linalg_svd"):
        with pytest.raises(Decline, match="faster"):
            tritonite.overloads()[name](matrices(9, 9))


def test_captures_decline(monkeypatch):
    monkeypatch.setattr(contract, "is_capturing", lambda: True)
    for name in ("_linalg_eigh", "_linalg_svd"):
        with pytest.raises(Decline, match="while a CUDA graph is captured"):
            tritonite.overloads()[name](matrices(9, 9))


def test_calls_with_other_elements():
    """The elements decide the number of sweeps, which no call repeats."""
    for x in (symmetric(9, 9), torch.eye(9, dtype=torch.float64, device=tritonite.device), symmetric(9, 9)):
        with tritonite.use_gems(include=["*linalg*"], faster_only=False):
            values, vectors = torch.linalg.eigh(x)
            left, sizes, right = torch.linalg.svd(x)
        torch.testing.assert_close(vectors * values @ vectors.mT, x)
        torch.testing.assert_close(left * sizes @ right, x)
