"""Jacobi's methods: sizes, several programs, repeated values, scales, failures, layouts, gradients."""

import pytest
import torch
from conftest import served
from test_linalg import DTYPES, check, matrices

import tritonite
from tritonite.engine import iteration
from tritonite.engine.linalg import table
from tritonite.errors import Decline


def symmetric(*shape, dtype=torch.float64):
    x = matrices(*shape, dtype=dtype)
    return x + x.mT


@DTYPES
@pytest.mark.parametrize("n", [0, 1, 2, 5, 10])
def test_sizes_of_eigenproblems(n, dtype):
    """The triangle that is not named is not read; even and odd numbers of columns meet in pairs."""
    x = matrices(3, n, n, dtype=dtype)
    for uplo, unread in (("L", torch.ones(n, n).triu(1)), ("u", torch.ones(n, n).tril(-1))):
        hidden = x.masked_fill(unread.bool().to(x.device), torch.nan)
        check("_linalg_eigh", hidden, uplo)
        check("_linalg_eigh", hidden, uplo, compute_v=False)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (4, 4), (7, 4), (4, 7), (5, 1), (1, 5), (0, 3), (3, 0), (0, 0)], ids=str)
def test_shapes_of_singular_values(shape, full):
    x = matrices(2, *shape)
    check("_linalg_svd", x, full)
    check("_linalg_svd", x.mT.contiguous().mT.float(), full)
    check("_linalg_svd", x, full, compute_uv=False)
    check("_linalg_svd", x[:0], full)
    check("_linalg_svd", x[0], full)


def test_matrices_without_full_rank():
    """The left vectors of values that are 0, or roundoff, are orthogonal to others."""
    x = matrices(2, 9, 2) @ matrices(2, 2, 6)
    hilbert = 1 / (1.0 + torch.arange(8)[:, None] + torch.arange(8)).to(x)
    columns = torch.cat([x, x], -1)
    for given in (x, columns, torch.zeros_like(x), torch.ones_like(x), hilbert, x * 1e-8 + torch.eye(9, 6).to(x)):
        for dtype in (torch.float32, torch.float64):
            check("_linalg_svd", given.to(dtype), True)


def test_layouts(monkeypatch):
    """A warp holds few matrices, so that a batch has several programs; offsets are wide."""
    monkeypatch.setattr(iteration, "INT32_LIMIT", 1)
    monkeypatch.setattr(table, "linalg_table", lambda: table.LinalgTable(rotated_bytes=256))
    x = matrices(3, 4, 2, 4)
    check("_linalg_eigh", x.transpose(1, 2))
    check("_linalg_eigh", x.permute(0, 2, 3, 1))
    check("_linalg_eigh", x[:, :, 0].expand(5, 3, 4, 4))
    check("_linalg_eigh", x[0, :, 1])
    check("_linalg_svd", x.transpose(1, 2)[..., :3])
    check("_linalg_svd", x[:, :2, 0].expand(5, 3, 2, 4), True)


def test_repeated_eigenvalues():
    """Multiples of the identity, projections, and matrices of few values have any orthogonal vectors."""
    q, _ = torch.linalg.qr(matrices(2, 9, 9))
    values = torch.tensor([1.0, 1, 1, -1, -1, 0, 0, 0, 2], dtype=torch.float64, device=q.device)
    some = [torch.zeros_like(q), torch.eye(9, dtype=q.dtype, device=q.device).expand(2, 9, 9), torch.ones_like(q)]
    signs = torch.ones_like(values).where(torch.arange(9, device=q.device) % 2 == 0, -1.0)
    for x in (*some, (q * values) @ q.mT, (q * signs) @ q.mT):
        for dtype in (torch.float32, torch.float64):
            check("_linalg_eigh", x.to(dtype))


def test_norms_of_vectors_do_not_grow():
    """Hundreds of rotations change a column; their roundoff has no preferred sign."""
    _, vectors = tritonite.overloads()["_linalg_eigh"](symmetric(4, 32, 32))
    norms = vectors.square().sum(-2)
    assert (norms - 1).mean().abs() < 2 * torch.finfo(norms.dtype).eps


@pytest.mark.parametrize("batch", [(), (5,)], ids=str)
@pytest.mark.parametrize("shape", [(3, 3), (4, 3), (3, 2), (16, 16)], ids=str)
def test_vectors_of_nearly_equal_values_are_orthonormal(shape, batch):
    """Both columns of a pair turn by the same angle, which roundoff of their norms and product decides."""
    rows, columns = shape
    left, right = (torch.linalg.qr(matrices(*batch, n, columns))[0] for n in (rows, columns))
    x = (left * torch.linspace(1, 1.001, columns).to(left) @ right.mT).float()
    u, s, vh = (each.double() for each in tritonite.overloads()["_linalg_svd"](x))
    one = torch.eye(columns, dtype=torch.float64, device=x.device)
    for difference in (u.mT @ u - one, vh @ vh.mT - one, u * s.unsqueeze(-2) @ vh - x):
        assert difference.abs().max() < 16 * torch.finfo(torch.float32).eps


def test_results_do_not_depend_on_the_batch():
    x = torch.stack([symmetric(5, 5), torch.eye(5, dtype=torch.float64, device=tritonite.device)])
    with tritonite.use_gems(faster_only=False, invariant=True):
        for together, alone in zip(torch.linalg.eigh(x), torch.linalg.eigh(x[1:]), strict=True):
            assert torch.equal(together[1:], alone)
        for together, alone in zip(torch.linalg.svd(x), torch.linalg.svd(x[1:]), strict=True):
            assert torch.equal(together[1:], alone)


def test_large_and_small_numbers():
    ops, x = tritonite.overloads(), symmetric(2, 6, 6, dtype=torch.float32)
    expected = torch.linalg.eigvalsh(x.double())
    for scale in (2.0**-120, 2.0**120):
        values, vectors = ops["_linalg_eigh"](x * scale)
        torch.testing.assert_close(values.double() / scale, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(vectors @ vectors.mT, torch.eye(6, device=x.device).expand(2, 6, 6))
        left, values, right = ops["_linalg_svd"](x[..., :4] * scale)
        torch.testing.assert_close(left * (values / scale)[:, None] @ right, x[..., :4], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["_linalg_eigh", "_linalg_svd"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_matrices_that_are_not_finite(name, bad):
    x = symmetric(3, 4, 4)
    x[1, 2, 2] = bad
    with pytest.raises(Decline, match="not finite"):
        tritonite.overloads()[name](x)


def test_failures_leave_outputs_alone():
    x = torch.full((2, 3, 3), torch.nan, dtype=torch.float64, device=tritonite.device)
    values, vectors = x.new_zeros(2, 3), torch.zeros_like(x)
    with pytest.raises(Decline, match="not finite"):
        tritonite.overloads()["_linalg_eigh.eigenvalues"](x, eigenvalues=values, eigenvectors=vectors)
    assert not values.any() and not vectors.any()


def test_more_columns_than_a_program_rotates():
    n = table.linalg_table().most_rotated + 1
    check("_linalg_eigh", matrices(n, n, dtype=torch.float32))
    check("_linalg_svd", matrices(n, n + 1))


def test_what_is_not_rotated():
    ops = tritonite.overloads()
    with pytest.raises(Decline, match="driver"):
        ops["_linalg_svd"](matrices(2, 2), driver="gesvd")
    with pytest.raises(Decline, match="UPLO"):
        ops["_linalg_eigh"](matrices(2, 2), "X")


FUNCTIONS = {
    "eigh": lambda a: torch.linalg.eigh(a)[1].square(),
    "eigvalsh": lambda a: torch.linalg.eigvalsh(a),
    "svd": lambda a: torch.linalg.svd(a[:, :3], full_matrices=False)[2].square(),
    "svdvals": lambda a: torch.linalg.svdvals(a[..., :3]),
    "pinv": lambda a: torch.linalg.pinv(a[..., :2]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients(name):
    """Gradients are ATen's formulas over these operators, of functions that do not depend on the signs of vectors."""

    def gradient(a):
        given = a.detach().requires_grad_()
        return torch.autograd.grad(FUNCTIONS[name](given).square().sum(), given)

    for x in (symmetric(2, 4, 4), symmetric(2, 4, 4).mT):
        expected = gradient(x)
        with tritonite.use_gems(include=["*linalg*"], faster_only=False):
            torch.testing.assert_close(gradient(x), expected)


def test_functions_of_linalg_are_served():
    x = symmetric(2, 4, 4)
    with tritonite.use_gems(faster_only=False):
        torch.linalg.eigh(x)
        torch.linalg.svd(x)
        torch.linalg.matrix_norm(x, "nuc")
        torch.linalg.matrix_rank(x)
        torch.linalg.cond(x)
        torch.linalg.pinv(x, hermitian=True)
        assert served("_linalg_eigh") and served("_linalg_svd")
        with pytest.raises(torch.linalg.LinAlgError):
            torch.linalg.eigh(x * torch.nan)
