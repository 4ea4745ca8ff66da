"""Binary search and membership where samples do not reach: blocks in shared memory, nan, sorters out of range."""

import itertools

import pytest
import torch
from conftest import FULL, WAYS, served, some
from ties import values

import tritonite


@pytest.mark.parametrize(
    ("tests", "invert", "way", "dtype"),
    some(
        [0, 5, 64, 65, 300],
        [False, True],
        WAYS,
        [torch.float32, torch.float16, torch.int8, torch.int16, torch.int64],
        turns=6,
    ),
    ids=str,
    indirect=["way"],
)
def test_isin(dtype, tests, invert, way, device):
    x, others = values(dtype, 5, 40, device=device), values(dtype, tests + 5, device=device)[:tests]
    expected = ((x[..., None] == others).any(-1) != invert) if tests else torch.full_like(x, invert, dtype=torch.bool)
    with tritonite.use_gems(include="isin*"):
        assert torch.equal(torch.isin(x, others, invert=invert), expected)
        assert torch.equal(torch.isin(x.t(), others, invert=invert), expected.t())
        assert torch.isin(2, others).item() == bool((others == 2).any())
        assert torch.equal(torch.isin(x, 2), x == 2)
    assert served("isin.Tensor_Tensor") and served("isin.Scalar_Tensor") and served("isin.Tensor_Scalar")


@pytest.mark.parametrize("count", [8, 300])
def test_isin_of_a_number_compares_in_atens_dtype(count, device):
    """With many elements ATen sorts and compares in float64. With few, a CPU compares in the elements' dtype."""
    tests = torch.rand(count, device=device)
    tests[2] = 0.1
    for number in (0.1, 0.5, torch.tensor(0.1, dtype=torch.float64, device=device)):
        expected = torch.isin(number, tests)
        with tritonite.use_gems(include="isin*", faster_only=False):
            assert torch.isin(number, tests) == expected
    with tritonite.use_gems(include="isin*", faster_only=False):
        assert torch.isin(0.1, tests).item() == (count == 8 and tritonite.device == "cpu")


@pytest.mark.parametrize("wrong", [3, -1])
def test_a_sorter_out_of_range_raises(wrong, path, device):
    bounds, good = torch.tensor([3.0, 1.0, 2.0], device=device), torch.tensor([1, 2, 0], device=device)
    bad = torch.tensor([1, 2, wrong], device=device)
    with tritonite.use_gems(include="searchsorted*"):
        for sorter in (good, bad, good, bad):
            if sorter is bad:
                with pytest.raises(RuntimeError):
                    torch.searchsorted(bounds, bounds, sorter=sorter)
            else:
                assert torch.searchsorted(bounds, bounds, sorter=sorter).tolist() == [2, 0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8], ids=str)
@pytest.mark.parametrize("length", [1, 2, 7, 8, 100, 1000])
def test_searches_that_begin_in_shared_memory(dtype, length, change_tables, device, change_device):
    """The search visits the elements that ATen visits, so that nan among boundaries gives ATen's indices."""
    change_tables(searching={"shared_programs": 1, "shared_queries": 64, "shared_levels": {4: 6, 8: 5}})
    change_device(ptx=True)
    bounds = values(dtype, length, device=device) if length > 5 else torch.ones(length, dtype=dtype, device=device)
    bounds, x = bounds.sort().values, values(dtype, 40 if FULL else 5, 33, device=device)
    for right, queries in itertools.product((False, True), (x, x.t())):
        expected = torch.searchsorted(bounds, queries.contiguous(), right=right)
        with tritonite.use_gems(include="searchsorted*"):
            assert torch.equal(torch.searchsorted(bounds, queries, right=right), expected)
    assert served("searchsorted.Tensor")


def test_isin_of_a_noncontiguous_matrix_of_few_tests_declines(device):
    """If ATen does not sort, it compares all pairs through a view, which fails for this layout."""
    x, tests = torch.arange(9.0, device=device), torch.arange(600.0, device=device).view(-1, 4)[:, :3]
    with tritonite.use_gems(include="isin.Tensor_Tensor", faster_only=False):
        assert torch.isin(x, tests).tolist() == [True, True, True, False, True, True, True, False, True]
        assert torch.isin(x, tests[:4, 0]).tolist() == [True, False, False, False, True, False, False, False, True]
        assert served("isin.Tensor_Tensor")
        with pytest.raises(RuntimeError, match="view size"):
            torch.isin(x, tests[:4])


@pytest.mark.parametrize("dtypes", [(torch.int16, torch.bfloat16), (torch.int64, torch.float32)], ids=str)
def test_integers_that_round_are_left_to_aten(dtypes, device):
    """ATen sorts elements and tests, and finds an element that rounds to the one before it."""
    elements, tests = dtypes
    x = (torch.arange(40, device=device) + 2 ** (10 if elements is torch.int16 else 30)).to(elements)
    others = torch.zeros(50, dtype=tests, device=device)
    expected = torch.isin(x, others)
    with tritonite.use_gems(include="isin*"):
        assert torch.equal(torch.isin(x, others), expected) and expected.any()
        # ATen compares few tests one by one, and float64 has these integers.
        assert not torch.isin(x, others[:3]).any() and not torch.isin(x.double(), others.double()).any()
    counts = tritonite.stats()["isin.Tensor_Tensor"]
    assert sum(counts.declined.values()) == 1 and counts.launched + counts.replayed == 2
