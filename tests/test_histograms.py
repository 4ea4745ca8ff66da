"""Histograms: bins at the limits, and where they are counted."""

import pytest
import torch
from conftest import FULL, served

import tritonite
from tritonite.engine import histogram


def test_a_range_that_is_not_finite_raises(path, device):
    good, bad = torch.tensor([1.0, 3.0, 2.0], device=device), torch.tensor([1.0, float("inf"), 2.0], device=device)
    with tritonite.use_gems(include="histc"):
        for x in (good, bad, good, bad):
            if x is bad:
                with pytest.raises(RuntimeError):
                    torch.histc(x, 4)
            else:
                assert torch.histc(x, 4).tolist() == [1, 0, 1, 1]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64], ids=str)
def test_limits_of_equal_integers_at_the_ends_of_their_dtype(dtype, device):
    """Equal limits move apart by 1. A flag says that the dtype has no such integers."""
    info = torch.iinfo(dtype)
    ends = [(5, 5, True), (3, 9, True), (info.max, info.max, False), (info.min, info.min, False)]
    # The distance of an element from the lower limit is multiplied by the number of bins in int64.
    for low, high, held in (*ends, (info.min + 1, info.max - 1, info.bits < 64)):
        extrema = tuple(torch.tensor(x, dtype=dtype, device=device) for x in (low, high))
        limits, flag = histogram.limits_of_extrema(dtype, extrema)
        (edges,) = limits.edges
        assert (int(flag) == 0) is held
        assert not held or edges.tolist() == [low - (low == high), high + (low == high)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_limits_of_bins_have_the_precision_of_the_elements(dtype, device, path):
    """The limits 0.1 and 0.7 are rounded to the dtype of the elements, so that elements equal to them are inside."""
    x = torch.tensor([0.1, 0.3, 0.7, 0.7], dtype=dtype, device=device)
    with tritonite.use_gems(include="histc"):
        for _ in range(2):
            assert torch.histc(x, 3, 0.1, 0.7).tolist() == [1, 1, 2]
    assert served("histc")


@pytest.mark.parametrize("ptx", [False, True], ids=["in registers", "in shared memory"])
def test_few_elements_are_counted_by_one_program(ptx, device, monkeypatch, change_device, change_tables):
    """One program stores the result. Several add to it if sums are exact. A strided output is copied to last."""
    change_tables(histogram={"block": 128})
    change_device(ptx=ptx)
    monkeypatch.setattr(histogram, "zeros", noting := _Noting(histogram.zeros))
    monkeypatch.setitem(histogram._EXACT, torch.float32, 601)
    few, many, more = (torch.rand(n, device=device) for n in (100, 600, 700))
    gaps = torch.full((20,), -1.0, device=device)
    calls = ((few, None, 0), (many, None, 0), (more, None, 1), (few, gaps[::2], 1), (few.double(), None, 0))
    for x, out, allocates in calls:
        noting.calls = 0
        expected = torch.histc(x, 10, 0, 1)
        with tritonite.use_gems(include="histc*", faster_only=False):
            found = torch.histc(x, 10, 0, 1) if out is None else torch.histc(x, 10, 0, 1, out=out)
        assert torch.equal(found, expected) and noting.calls == allocates
    assert bool(gaps[1::2].eq(-1).all()) and served("histc") and served("histc.out")


class _Noting:
    """A function that counts its calls."""

    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *args):
        self.calls += 1
        return self.function(*args)


@pytest.mark.parametrize("ptx", [False, True], ids=["in registers or outside", "in shared memory"])
@pytest.mark.parametrize("bins", [3, 1000, 1100, 10239, 10241])
def test_numbers_of_bins_around_the_limits_of_each_kernel(ptx, bins, change_tables, device, change_device):
    change_tables(histogram={"block": 128})
    change_device(ptx=ptx)
    for n in (1, 700, 3000) if FULL else (1, 700):
        x = torch.randint(0, bins, (n,), device=device)
        with tritonite.use_gems(include=["bincount", "histc"]):
            found = torch.bincount(x), torch.bincount(x, x.float()), torch.bincount(x, x), torch.histc(x.float(), bins)
            one, inside = torch.bincount(x * 0 + bins - 1), torch.histc(x.double(), bins, 1, bins)
        expected = torch.bincount(x), torch.bincount(x, x.float()), torch.bincount(x, x), torch.histc(x.float(), bins)
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert one.tolist() == [0] * (bins - 1) + [n]
        assert torch.equal(inside, torch.histc(x.double(), bins, 1, bins))
    assert served("bincount") and served("histc")


@pytest.mark.skipif(tritonite.device != "cpu", reason="ATen has histograms with edges on CPUs only")
def test_widths_of_many_bins_are_exact(device):
    x = torch.linspace(-3, 3, 1000)
    with tritonite.use_gems(include="histogram*"):
        density, _ = torch.histogram(x, 64, density=True)
    expected, _ = torch.histogram(x.double(), 64, range=(-3.0, 3.0), density=True)
    torch.testing.assert_close(density, expected.float(), rtol=3e-7, atol=0)


@pytest.mark.declines("bins without a width")
@pytest.mark.skipif(tritonite.device != "cpu", reason="ATen has histograms with edges on CPUs only")
def test_bins_around_one_huge_number_are_left_to_aten(device):
    for x in (torch.tensor([3e38], dtype=torch.float64), torch.tensor([2.0**30])):
        expected = torch.histogram(x, 5)
        with tritonite.use_gems(include="histogram*"):
            found = torch.histogram(x, 5)
        assert all(map(torch.equal, found, expected))


@pytest.mark.declines("limits that round to one number")
@pytest.mark.parametrize("limits", [(2**63 - 1, 2**63), (1.0, 1.0 + 1e-9)], ids=str)
def test_limits_that_round_to_one_number_are_left_to_aten(limits, device):
    """ATen takes the extrema in their place, if they are equal in its dtype of limits."""
    x = torch.randn(51, generator=torch.Generator().manual_seed(0)).to(device)
    expected = torch.histc(x, 5, *limits)
    with tritonite.use_gems(include="histc"):
        assert torch.equal(torch.histc(x, 5, *limits), expected)
