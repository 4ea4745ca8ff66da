"""Updates in place in compiled graphs: caches, chains, slices, fresh tensors, and what has to stay a copy."""

import pytest
import torch

from tritonite.graph.backend import backend


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def ran(function, *args):
    """Compare results and written inputs with eager mode's for several sizes. Return the last plan's operators."""
    compiled = torch.compile(function, backend="tritonite")
    for size in (6, 5, 4):
        given = [make(size) for make in args]
        with torch.no_grad():
            expected = [x.clone() for x in given]
            wanted, found = function(*expected), compiled(*given)
        for x, y in zip((found, *given), (wanted, *expected), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)
    return [note.operator for note in backend.graphs[-1].plans[-1].notes if not note.view]


@pytest.fixture
def cache(device):
    return lambda size: torch.arange(size * 24.0, device=device).view(size, 8, 3)


@pytest.fixture
def rows(device):
    return lambda size: -torch.arange(size * 6.0, device=device).view(size, 2, 3)


@pytest.fixture
def places(device):
    return lambda size: torch.tensor([5, 1], device=device)


def test_a_cache_is_written_in_place(cache, rows, places):
    operators = ran(lambda x, k, i: x.index_copy_(1, i, k).softmax(-1), cache, rows, places)
    assert "index_copy_" in operators and not {"index_copy", "copy_"} & set(operators)


@pytest.mark.parametrize(
    ("update", "operator"),
    [
        (lambda x, k, i: x.index_add_(1, i, k), "index_add_"),
        (lambda x, k, i: x.index_put_((torch.zeros_like(i), i), k[0]), "index_put_"),
        (lambda x, k, i: x.scatter_(1, i[None, :, None], k[:1, :, :1]), "scatter_.src"),
        (lambda x, k, i: x.index_fill_(1, i, 2.5), "index_fill_.int_Scalar"),
    ],
)
def test_every_kind_of_update(update, operator, cache, rows, places):
    operators = ran(lambda x, k, i: update(x, k, i) * 2, cache, rows, places)
    assert operator in operators and not {operator.replace("_.", ".").rstrip("_"), "copy_"} & set(operators)


def test_a_chain_of_updates(cache, rows, places):
    def function(x, k, i):
        x.index_copy_(1, i, k).index_add_(1, i + 1, k)
        x[:, 3:5] = k
        x[:, 7] = k[:, 0]
        return x.sum()

    operators = ran(function, cache, rows, places)
    assert {"index_copy_", "index_add_"} < set(operators)
    assert not {"index_copy", "index_add", "slice_scatter", "select_scatter"} & set(operators)


def test_updates_of_views(cache, rows, places):
    def function(x, k, i):
        x[1].index_copy_(0, i, k[0])
        x[:, 2:6, 1:].index_add_(1, i // 2, k[..., 1:].contiguous())
        return x * 2

    operators = ran(function, cache, rows, places)
    assert {"index_copy_", "index_add_"} < set(operators)
    assert not {"index_copy", "index_add", "slice_scatter", "select_scatter", "copy_"} & set(operators)


def test_memory_that_the_graph_allocated(device, rows, places):
    def function(k, i):
        zeros = torch.zeros(len(k), 8, 3, device=device)
        return zeros.index_add(1, i, k).index_copy(1, i + 1, k).exp()

    operators = ran(function, rows, places)
    assert {"index_add_", "index_copy_"} < set(operators)


def test_old_elements_that_are_read_later_stay(cache, rows, places):
    def later(x, k, i):
        y = x.index_add(1, i, k)
        z = x.exp() - 1
        x.copy_(y)
        return z

    assert "index_add" in ran(later, cache, rows, places)

    def through_a_view(x, k, i):
        view = x[:, 1:]
        y = x.index_add(1, i, k)
        z = view.sin()
        x.copy_(y)
        return z

    assert "index_add" in ran(through_a_view, cache, rows, places)
    # Of a chain, the second update makes what is read between.
    operators = ran(lambda k, i: (y := k.relu()).index_add(0, i[1:], y[:1]) + y, rows, places)
    assert "index_add" in operators


def test_a_returned_value_has_memory_of_its_own(cache, rows, places):
    def function(x, k, i):
        y = x.index_copy(1, i, k)
        x.copy_(y)
        return y

    assert "index_copy" in ran(function, cache, rows, places)
    compiled = torch.compile(function, backend="tritonite")
    with torch.no_grad():
        given = [make(4) for make in (cache, rows, places)]
        result = compiled(*given)
        before = result.clone()
        given[0].zero_()
        assert torch.equal(result, before)


def test_an_update_from_the_tensor_itself(cache, places):
    operators = ran(lambda x, i: x.index_copy_(1, i, x[:, 1:3]) + 1, cache, places)
    assert "index_copy_" not in operators


def test_inputs_that_share_memory(device, rows, places):
    def function(x, y, k, i):
        z = x.index_copy(1, i, k)
        w = y.exp()
        x.copy_(z)
        return w

    compiled = torch.compile(function, backend="tritonite")
    base, other = (torch.arange(48.0, device=device).view(2, 8, 3) / 48 for _ in range(2))
    with torch.no_grad():
        for _ in range(2):
            k, i = rows(2), places(2)
            found, wanted = compiled(base, base[:1], k, i), function(other, other[:1], k, i)
            torch.testing.assert_close(found, wanted)
            assert torch.equal(base, other)


def test_rows_that_share_memory(device, places):
    def function(i):
        expanded = torch.ones(3, device=device).expand(8, 3)
        return expanded.index_fill(0, i, 2.0)

    ran(function, places)


def test_a_training_step(device, rows, places):
    weight = torch.randn(3, 3, device=device, requires_grad=True)
    buffer = torch.zeros(4, 8, 3, device=device)

    def function(buffer, k, i):
        return buffer.index_copy_(1, i, k @ weight).square().sum() + buffer.exp().mean()

    compiled = torch.compile(function, backend="tritonite")
    results = []
    for each in (function, compiled):
        loss = each(own := buffer.clone(), rows(4) / 10, places(4))
        loss.backward()
        results.append((loss.detach(), own.detach(), weight.grad))
        weight.grad = None
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
