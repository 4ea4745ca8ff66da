"""What samples are too small for: several blocks of a sort, sums over several programs, and indices out of range."""

import pytest
import torch
from conftest import calls_through

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
    assert (
        tritonite.stats()["embedding_dense_backward"].launched + tritonite.stats()["embedding_dense_backward"].replayed
    )
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128], ids=str)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_mask_selects_rows_or_elements(dims, dtype, device, path):
    x = torch.randn(6, 7, 5, device=device).to(dtype)
    mask = torch.rand(x.shape[:dims], device=device) > 0.5
    for chosen in (mask, torch.zeros_like(mask), torch.ones_like(mask)):
        expected = x[chosen]
        with tritonite.use_gems(include=["index.Tensor"]):
            for _ in range(2):
                result = x[chosen]
                assert torch.equal(result, expected) and result.stride() == expected.stride()
    counts = tritonite.stats()["index.Tensor"]
    assert not counts.declined and not counts.unrecordable and counts.launched + counts.replayed == 6


def test_one_value_is_put_under_a_mask(device):
    x = torch.randn(6, 7, 5, device=device)
    for mask in (x > 0, x[..., 0] > 0):
        for value in (torch.tensor([2.0], device=device), torch.tensor(3.0)):
            expected = x.index_put((mask,), value)
            with tritonite.use_gems():
                assert torch.equal(x.index_put((mask,), value), expected)
    assert tritonite.stats()["index_put"].launched == 4


@pytest.mark.skipif(tritonite.device == "cuda", reason="an assertion ends a GPU's context")
@pytest.mark.parametrize("place", [5, -6, 2**40])
def test_what_is_out_of_range_raises_what_aten_raises(place, path):
    x, index = torch.randn(5, 3), torch.tensor([0, place])
    calls = {
        "index.Tensor": lambda: x[index],
        "embedding": lambda: torch.embedding(x, index),
        "index_select": lambda: x.index_select(0, index),
        "gather": lambda: x.gather(0, index[:, None]),
        "scatter_.value": lambda: x.clone().scatter_(0, index[:, None], 1.0),
        "index_put_": lambda: x.clone().index_put_((index,), x[0]),
        "index_add_": lambda: x.clone().index_add_(0, index, x[:2]),
    }
    for name, call in calls.items():
        raised = []
        for chosen in ([], [name]):
            with tritonite.use_gems(include=chosen), pytest.raises((IndexError, RuntimeError)) as error:
                call()
            raised.append(error.type)
        assert raised[0] is raised[1], name


@pytest.mark.parametrize("number", [2, True])
def test_a_number_becomes_a_flag(number, device):
    x, index = torch.zeros(2, 4, dtype=torch.bool, device=device), torch.tensor([[1, 1], [0, 3]], device=device)
    with tritonite.use_gems():
        results = x.scatter(1, index, number), torch.ops.aten.scatter.value_reduce(x, 1, index, number, reduce="add")
    for result in results:
        assert torch.equal(result.view(torch.uint8), x.scatter(1, index, True).view(torch.uint8))
    assert {"scatter.value", "scatter.value_reduce"} <= tritonite.stats().keys()


@pytest.mark.parametrize("path", ["native", "python"])
def test_a_negative_number_of_repeats_raises(path, device):
    """Recorded and replayed, on a GPU as well; what comes next is served."""
    good, bad = torch.tensor([2, 0, 1], device=device), torch.tensor([2, -1, 1], device=device)
    with calls_through(path), tritonite.use_gems(include=["repeat_interleave*"]):
        for repeats in (bad, good, bad, good, bad):
            if repeats is bad:
                with pytest.raises(RuntimeError):
                    torch.repeat_interleave(repeats)
            else:
                assert torch.repeat_interleave(repeats).tolist() == [0, 0, 2]
    assert path == "python" or tritonite.stats()["repeat_interleave.Tensor"].replayed


@pytest.mark.parametrize("name", ["scatter_add", "scatter", "scatter_reduce"])
def test_an_index_into_no_elements_is_atens(name, device):
    """On a GPU, where ATen answers, the process would end."""
    x, index, source = (torch.zeros(7, n, device=device) for n in (0, 5, 5))
    more = ("sum",) if name == "scatter_reduce" else ()
    outcomes = []
    for scope in (tritonite.use_gems(include=()), tritonite.use_gems()):
        with scope:
            try:
                outcomes.append(getattr(x, name)(1, index.long(), source, *more).shape)
            except RuntimeError as error:
                outcomes.append(type(error))
    assert outcomes[0] == outcomes[1]


def test_a_source_too_small_for_its_mask_raises_as_atens(device):
    """Of a gradient, where a kernel would end the process; what comes next is served."""
    grad, mask = torch.ones(4, 5, device=device), torch.ones(4, 5, dtype=torch.bool, device=device)
    with tritonite.use_gems(include=["masked_scatter_backward"]):
        with pytest.raises(RuntimeError):
            torch.ops.aten.masked_scatter_backward(grad, mask, [5])
        assert torch.equal(torch.ops.aten.masked_scatter_backward(grad, mask, [20]), torch.ones(20, device=device))
