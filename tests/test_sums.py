"""Sums and products of 16-bit floats at one index, and extrema of many updates an element."""

import dataclasses
import itertools

import pytest
import torch
from conftest import some

import tritonite
from tritonite import devices
from tritonite.engine.indexing import write

SIXTEEN_BITS = [torch.float16, torch.bfloat16]
# A term that is added 298 times. A sum in the dtype would stop growing, or round at every step.
TERM = {torch.float16: 9.0, torch.bfloat16: 1.0}


def _updates(dtype, device, columns):
    """Return a tensor, row indices (row 2 twice, and row 0 in all others), and the terms."""
    n = 300
    rows = torch.zeros(n, dtype=torch.int64, device=device)
    rows[0], rows[1] = 2, 2
    shape = (3, columns) if columns else (3,)
    x = torch.full(shape, 1.0, dtype=dtype, device=device)
    return x, rows, torch.full((n, *shape[1:]), TERM[dtype], dtype=dtype, device=device)


CALLS = {
    "scatter_add": lambda x, rows, index, one: x.scatter_add(0, index, one),
    "scatter_add_": lambda x, rows, index, one: x.clone().scatter_add_(0, index, one),
    "scatter.reduce": lambda x, rows, index, one: torch.ops.aten.scatter.reduce(x, 0, index, one, reduce="add"),
    "scatter.value_reduce": lambda x, rows, index, one: torch.ops.aten.scatter.value_reduce(
        x, 0, index, TERM[x.dtype], reduce="add"
    ),
    "scatter_reduce.two": lambda x, rows, index, one: x.scatter_reduce(0, index, one, "sum"),
    "index_add": lambda x, rows, index, one: x.index_add(0, rows, one),
    "index_add_": lambda x, rows, index, one: x.clone().index_add_(0, rows, one, alpha=2),
    "index_put": lambda x, rows, index, one: x.index_put((rows,), one, accumulate=True),
    "index_put_": lambda x, rows, index, one: x.clone().index_put_((rows,), one, accumulate=True),
    "_index_put_impl_": lambda x, rows, index, one: torch.ops.aten._index_put_impl_(x.clone(), [rows], one, True),
    "put": lambda x, rows, index, one: x.put(index * max(1, x[0].numel()), one, accumulate=True),
    "embedding_dense_backward": lambda x, rows, index, one: torch.ops.aten.embedding_dense_backward(
        one.view(len(one), -1), rows, 3, -1, False
    ).view(x.shape),
    "_embedding_bag_dense_backward": lambda x, rows, index, one: torch.ops.aten._embedding_bag_dense_backward(
        one.view(len(one), -1), rows, torch.arange(len(rows)).to(rows), torch.ones_like(rows), rows, 3, False, 0, None
    ).view(x.shape),
}
MEANS = {
    "scatter_reduce.two": lambda x, rows, index, one, own: x.scatter_reduce(0, index, one, "mean", include_self=own),
    "index_reduce": lambda x, rows, index, one, own: x.index_reduce(0, rows, one, "mean", include_self=own),
}


def _served(name):
    counts = tritonite.stats()[name]
    assert not counts.declined and not counts.unrecordable, counts
    return counts.launched + counts.replayed


@pytest.mark.parametrize("dtype, columns", [(torch.float16, 0), (torch.bfloat16, 2)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_terms_at_one_index_are_added_up(name, columns, dtype, device):
    x, rows, one = _updates(dtype, device, columns)
    index = rows.view(-1, *[1] * (x.dim() - 1)).expand(one.shape)
    with tritonite.use_gems(include=[name]):
        result = CALLS[name](x, rows, index, one)
    first = x.double() * 0 if "backward" in name else x.double()
    if name == "put":
        # All columns' updates come to the first column.
        expected = x.double()
        expected.view(-1).index_add_(
            0, rows * max(1, columns), torch.full((len(rows),), TERM[dtype] * max(1, columns)).to(expected)
        )
    else:
        alpha = 2 if name == "index_add_" else 1
        expected = first.index_add(0, rows, one.double(), alpha=alpha)
    assert torch.equal(result, expected.to(dtype)), result
    assert _served(name) == 1


@pytest.mark.parametrize("first", [0.0, -0.0])
@pytest.mark.parametrize("name", [name for name in CALLS if name != "scatter.value_reduce"])
def test_sums_of_negative_zeros_have_atens_sign(name, first, device):
    x, rows, one = _updates(torch.float16, device, 2)
    x, one = torch.full_like(x, first), torch.full_like(one, -0.0)
    index = rows[:, None].expand(one.shape)
    # ATen's atomics for pairs of 16-bit floats on a GPU add 0 to the neighbour of an element, which makes 0 of -0.
    expected = CALLS[name](x.cpu(), rows.cpu(), index.cpu(), one.cpu())
    with tritonite.use_gems(include=[name], faster_only=False):
        result = CALLS[name](x, rows, index, one)
    assert torch.equal(result.cpu(), expected)
    # Sums of sorted indices start from 0 or from the element on a GPU, in ATen and here, and have either sign.
    if "index_put" not in name or tritonite.backend.interpreted:
        assert torch.equal(result.signbit().cpu(), expected.signbit())
    assert _served(name) == 1


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
@pytest.mark.parametrize("name, own", list(itertools.product(MEANS, [True, False])))
def test_a_mean_divides_a_sum_of_full_precision(name, own, dtype, device, path):
    x, rows, one = _updates(dtype, device, 2)
    one[::2] += 4
    index = rows[:, None].expand(one.shape)
    expected = MEANS[name](x.double(), rows, index, one.double(), own).to(dtype)
    with tritonite.use_gems(include=[name]):
        for _ in range(2):
            assert torch.equal(MEANS[name](x, rows, index, one, own), expected)
    assert _served(name) == 2


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_a_product_is_rounded_once(dtype, device, path):
    x, rows, one = _updates(dtype, device, 0)
    one = torch.full_like(one, 1 + 2 * torch.finfo(dtype).eps)
    calls = {
        "scatter_reduce.two": lambda x, one: x.scatter_reduce(0, rows, one, "prod"),
        "index_reduce": lambda x, one: x.index_reduce(0, rows, one, "prod"),
        "scatter.reduce": lambda x, one: torch.ops.aten.scatter.reduce(x, 0, rows, one, reduce="multiply"),
    }
    for name, call in calls.items():
        expected = x.double().scatter_reduce(0, rows, one.double(), "prod").to(dtype)
        with tritonite.use_gems(include=[name]):
            for _ in range(2):
                torch.testing.assert_close(call(x, one), expected, rtol=2 * torch.finfo(dtype).eps, atol=0)
        assert _served(name) == 2


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_elements_without_updates_keep_their_bits(dtype, device):
    """Updates are in place and in views with gaps, whose other elements stay unchanged."""
    memory = torch.randn(40, 6, device=device).to(dtype)
    memory[1] = torch.tensor([-0.0, 0.0, float("inf"), -float("inf"), 1e-7, -0.0], device=device).to(dtype)
    before = memory.clone()
    view = memory[::2, 1:4]
    rows = torch.zeros(300, dtype=torch.int64, device=device)
    with tritonite.use_gems(include=["index_add_"]):
        view.index_add_(0, rows, torch.ones(300, 3, dtype=dtype, device=device))
    assert _served("index_add_") == 1
    expected = before.clone()
    expected[0, 1:4] = (before[0, 1:4].double() + 300).to(dtype)
    assert torch.equal(memory.view(torch.int16), expected.view(torch.int16))


def test_a_large_target_of_few_updates_is_not_copied(monkeypatch):
    """On a GPU, where ATen adds in 16 bits as well, a copy must not cost more than the updates."""
    monkeypatch.setattr(devices, "current", dataclasses.replace(devices.current, aten="cuda"))
    x = torch.empty(2**20, 8, dtype=torch.float16, device="meta")
    few, many = (64, 8), (2**20, 8)
    assert not write._accumulates_wide(x, few, (0, 1), write.ADD)
    assert write._accumulates_wide(x, many, (0, 1), write.ADD)
    assert not write._accumulates_wide(x, many, (8, 1), write.ADD), "one update an element"
    assert not write._accumulates_wide(x, many, (0, 1), write.LARGEST)
    assert write._accumulates_wide(x[:9], few, (0, 1), write.MULTIPLY), "a small target"


@pytest.mark.parametrize("own", [True, False], ids=["own", "without own"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float64], ids=str)
def test_products_of_many_factors(dtype, own, device):
    """Factors are elements, rows, and views."""
    x = torch.randint(2, 4, (4, 6), device=device).to(dtype).t()
    elements, rows = torch.randint(0, 2, (300, 3), device=device), torch.randint(0, 6, (256,), device=device)
    factors, slices = (torch.randint(0, 2, shape, device=device) * 2 - 1 for shape in ((300, 3), (256, 4)))
    factors[7], slices[9] = 2, 2
    factors, slices = factors.to(dtype), slices.to(dtype)
    calls = {
        "scatter_reduce.two": lambda: x[:, :3].scatter_reduce(0, elements, factors, "prod", include_self=own),
        "scatter_reduce_.two": lambda: x.clone().scatter_reduce_(0, elements, factors, "prod", include_self=own),
        "index_reduce": lambda: x.index_reduce(0, rows, slices, "prod", include_self=own),
        "scatter.reduce": lambda: torch.ops.aten.scatter.reduce(x, 0, elements, factors, reduce="multiply"),
    }
    for name, call in calls.items():
        expected = call()
        with tritonite.use_gems(include=[name], faster_only=False):
            result = call()
        assert torch.equal(result, expected) and result.stride() == expected.stride(), name
        assert _served(name) == 1


@pytest.mark.parametrize(
    ("dtype", "reduce", "path"),
    some(
        [torch.float16, torch.float32, torch.float64, torch.int8, torch.int64, torch.bool],
        ["amax", "amin", "sum"],
        ["native", "python"],
        turns=2,
    ),
    ids=str,
    indirect=["path"],
)
def test_many_updates_an_element(reduce, dtype, device, path):
    """Most updates leave the element unchanged: extrema with nan and infinities, and bools."""
    if dtype is torch.bool and device == "cuda" and reduce != "sum":
        pytest.skip("ATen refuses bools on GPUs")
    drawn = torch.randint(-3, 4, (900,), device=device)
    source = drawn.bool() if dtype is torch.bool else drawn.to(dtype)
    index = torch.arange(900, device=device) % 7
    if dtype.is_floating_point and reduce != "sum":
        source[500], source[501], source[502] = float("nan"), float("inf"), -float("inf")
    x = torch.zeros(7, device=device).to(dtype)
    expected = x.scatter_reduce(0, index, source, reduce)
    with tritonite.use_gems(include=["scatter_reduce.two"]):
        for _ in range(2):
            found = x.scatter_reduce(0, index, source, reduce)
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert _served("scatter_reduce.two") == 2
