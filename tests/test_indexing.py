"""What samples are too small for: several blocks of a sort, sums over several programs, and indices out of range."""

import pytest
import torch

import tritonite
from tritonite.engine.indexing import segments


@pytest.fixture
def small_sorts(monkeypatch):
    """Blocks so small that a few hundred rows take two rounds of merging."""
    monkeypatch.setattr(segments, "_SORTED", 128)
    monkeypatch.setattr(segments, "_RUNS", 2)


@pytest.mark.parametrize("different", [1, 3, 40, 10_000], ids="{} rows".format)
@pytest.mark.parametrize("n", [17, 500])
def test_gradients_of_an_embedding_are_added_up_in_order(different, n, device, small_sorts):
    grad = torch.randn(n, 20, device=device)
    ids = torch.randint(0, min(different, 700), (n,), device=device)
    exact = torch.zeros(700, 20, dtype=torch.float64, device=device).index_add_(0, ids, grad.double())
    with tritonite.use_gems():
        result = torch.ops.aten.embedding_dense_backward(grad, ids, 700, -1, False)
        again = torch.ops.aten.embedding_dense_backward(grad, ids, 700, -1, False)
    assert tritonite.stats()["embedding_dense_backward"].launched
    torch.testing.assert_close(result, exact.float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(result, again)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int64, torch.float64], ids=str)
def test_elements_of_few_places_are_added_up(dtype, device, small_sorts):
    x = torch.zeros(5, 6, dtype=dtype, device=device)
    first, second = torch.randint(-5, 5, (300,), device=device), torch.randint(0, 6, (300,), device=device)
    values = torch.randint(0, 2, (300,), device=device).to(dtype)
    expected = x.index_put((first, second), values, accumulate=True)
    with tritonite.use_gems():
        assert torch.equal(x.index_put((first, second), values, accumulate=True), expected)
    assert tritonite.stats()["index_put"].launched
