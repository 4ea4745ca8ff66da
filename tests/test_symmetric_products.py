"""Symmetric products X X^T of batches: values, exact symmetry, layouts, addends, sizes of 0, and the operator."""

import pytest
import torch
from products import normal

import tritonite
from tritonite import devices
from tritonite.engine.gemm import symmetric
from tritonite.engine.gemm.problem import Problem
from tritonite.engine.gemm.symmetric import symmetric_product
from tritonite.engine.gemm.table import Config
from tritonite.errors import Unsupported
from tritonite.optim import muon
from tritonite.testing.judge import assert_close, terms

LAYOUTS = {
    "rows": lambda x: x.contiguous(),
    "columns": lambda x: x.mT.contiguous().mT,
    "every other": lambda x: torch.stack((x, x), -1)[..., 0],
    "pitched": lambda x: torch.cat((x, x), -1)[..., : x.shape[2]],
    "between batches": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "one matrix for all": lambda x: x[:1].expand_as(x),
}


def symmetric_normal(batches, n, dtype):
    x = normal(batches, n, n)
    return (x + x.mT).to(dtype)


def check(x, addend=None, alpha=1.0, beta=0.0, out=None):
    """Compute a product into `out`, poisoned, compare it with ATen's and float64's, and return it."""
    shape = (x.shape[0], x.shape[1], x.shape[1])
    out = x.new_empty(shape) if out is None else out
    out.fill_(torch.nan)
    symmetric_product(x, out, addend, alpha, beta)
    given = x.new_zeros(shape) if addend is None else addend.expand(shape)
    expected, exact = [
        torch.baddbmm(added, each, each.mT, beta=beta, alpha=alpha)
        for added, each in ((given, x), (given.double(), x.double()))
    ]
    assert_close(out.contiguous(), expected, exact, terms=terms("baddbmm", (given, x, x.mT), expected, exact, alpha))
    if x.dtype.itemsize == 2:
        assert torch.equal(out, out.mT)
    return out


@pytest.fixture
def small_tiles(change_tables):
    change_tables(gemm={"symmetric": (Config(16, 16, 16),), "symmetric_cost": 0.0})


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
# One tile, an odd and an even number of tiles a side, with and without a partial one.
@pytest.mark.parametrize(("batches", "n", "k"), [(2, 1, 1), (1, 7, 40), (2, 33, 5), (3, 48, 32), (1, 50, 17)])
def test_the_product_is_symmetric_in_every_bit(batches, n, k, dtype, small_tiles):
    x = normal(batches, n, k, dtype=dtype)
    check(x)
    check(x, symmetric_normal(batches, n, dtype), 0.5, -2.0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout, small_tiles):
    dtype = torch.bfloat16
    x, addend = normal(2, 37, 21, dtype=dtype), symmetric_normal(2, 37, dtype)
    check(
        LAYOUTS[layout](x), LAYOUTS[layout](addend), 1.5, 0.5, LAYOUTS[layout](normal(2, 37, 37, dtype=dtype)).clone()
    )
    check(x, addend[0], beta=1.0)


@pytest.mark.parametrize("layout", ["columns", "every other", "between batches"])
def test_a_result_of_any_strides(layout, small_tiles):
    x = normal(2, 37, 21, dtype=torch.bfloat16)
    check(x, out=LAYOUTS[layout](x.new_empty(2, 37, 37)))


def test_tiles_of_the_tables(change_tables):
    change_tables(gemm={"symmetric_cost": 0.0})
    for n in (20, 130):
        check(normal(1, n, 70, dtype=torch.float16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_are_ordinary_products(dtype):
    check(normal(2, 9, 5, dtype=dtype), symmetric_normal(2, 9, dtype), 0.5, 2.0)


def test_a_table_without_tiles_gives_ordinary_products(change_tables):
    change_tables(gemm={"symmetric": ()})
    check(normal(2, 9, 5, dtype=torch.bfloat16))


def test_an_addend_times_0_is_not_read(small_tiles):
    x = normal(2, 20, 8, dtype=torch.bfloat16)
    out, plain = x.new_empty(2, 20, 20), check(x)
    symmetric_product(x, out, torch.full_like(out, torch.nan), beta=0.0)
    assert torch.equal(out, plain)


def test_the_lower_triangle_of_the_addend_counts(small_tiles):
    x, addend = normal(1, 20, 8, dtype=torch.bfloat16), symmetric_normal(1, 20, torch.bfloat16)
    out, plain = torch.empty_like(addend), check(x, addend, beta=1.0)
    addend[0][torch.ones_like(addend[0], dtype=torch.bool).triu(1)] = torch.nan
    symmetric_product(x, out, addend, beta=1.0)
    assert torch.equal(out, plain)


@pytest.mark.parametrize(("batches", "n", "k"), [(0, 4, 4), (2, 0, 4), (2, 5, 0), (0, 0, 0)])
def test_sizes_of_0(batches, n, k):
    x = normal(batches, n, k, dtype=torch.float16)
    check(x)
    check(x, symmetric_normal(batches, n, torch.float16), 1.0, 0.5)


def test_a_factor_of_0_gives_the_addend():
    addend = symmetric_normal(2, 6, torch.float16)
    out = torch.empty_like(addend)
    symmetric_product(torch.full((2, 6, 3), torch.nan).to(addend), out, addend, alpha=0.0, beta=1.0)
    assert torch.equal(out, addend)


def chosen(batches, n):
    x = torch.empty(batches, n, 8, dtype=torch.bfloat16)
    return symmetric.choose(Problem.of(x, x.mT, x.new_empty(batches, n, n)), x.device)


def test_few_tiles_are_an_ordinary_product(monkeypatch):
    monkeypatch.setattr(devices, "multiprocessors", lambda device: 100)
    # Fourteen tiles of 128 rows a side: 105 of one triangle take two rounds, and so do all 196.
    assert chosen(1, 1665) is None and chosen(1, 5) is None
    assert chosen(4, 1665).BLOCK_M == chosen(16, 1665).BLOCK_M == 128


def test_tiles_shrink_until_they_fill_the_device(monkeypatch, change_tables):
    monkeypatch.setattr(devices, "multiprocessors", lambda device: 100)
    change_tables(gemm={"symmetric_cost": 0.0})

    def rows(batches, n):
        return chosen(batches, n).BLOCK_M

    # Fourteen and thirteen tiles of 128 rows a side make 105 and 91 tiles.
    assert [rows(1, 1665), rows(1, 1664), rows(100, 65), rows(100, 64), rows(1, 5)] == [128, 64, 128, 64, 32]
    with tritonite.use_gems(include=(), invariant=True):
        assert rows(100, 65) == 32


def test_the_operator(path):
    x, addend = normal(2, 9, 5, dtype=torch.bfloat16), symmetric_normal(2, 9, torch.bfloat16)
    out = torch.empty_like(addend)
    for alpha, beta in ((1.0, 0.0), (0.5, 2.0)):
        symmetric_product(x, out, addend, alpha, beta)
        for _ in range(2):
            assert torch.equal(torch.ops.tritonite.symmetric_product(x, addend, beta, alpha), out)
    meta = torch.ops.tritonite.symmetric_product(x.to("meta"))
    assert (meta.shape, meta.dtype) == (addend.shape, x.dtype)


@pytest.mark.parametrize("shape", [(2, 9, 5), (1, 5, 9)])
def test_newton_schulz_iterations_are_symmetric_products(shape):
    x = normal(*shape, dtype=torch.bfloat16)
    tritonite.reset_stats()
    found = muon.orthogonalized(x.clone(), (3.4445, -4.7750, 2.0315), 2, 1e-7)
    counts = tritonite.stats()["tritonite::symmetric_product"]
    assert counts.launched + counts.replayed == 4 and not counts.unrecordable
    expected = x.double() / torch.linalg.matrix_norm(x.double(), keepdim=True)
    for _ in range(2):
        gram = expected @ expected.mT
        expected = 3.4445 * expected + (-4.7750 * gram + 2.0315 * gram @ gram) @ expected
    torch.testing.assert_close(found.double(), expected, rtol=0.05, atol=0.05)


@pytest.mark.declines("batches of matrices of one dtype are served")
def test_operands_that_are_refused():
    x = normal(2, 9, 5, dtype=torch.bfloat16)
    for arguments in ((x[0],), (x.int(),), (x, x), (x, normal(2, 9, 9))):
        with pytest.raises(Unsupported):
            torch.ops.tritonite.symmetric_product(*arguments)
