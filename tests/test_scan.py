"""Scans where the samples do not reach: rows of several blocks and of several programs, outputs over inputs."""

import contextlib

import pytest
import torch

import tritonite
from tritonite.testing.judge import assert_close

SCANS = (torch.cumsum, torch.cumprod, torch.logcumsumexp, torch.cummax, torch.cummin)
LAYOUTS = {
    "rows": (lambda: torch.randn(2, 260), 1),
    "columns": (lambda: torch.randn(40, 3), 0),
    "middle": (lambda: torch.randn(2, 40, 3), 1),
    "transposed": (lambda: torch.randn(40, 3).t(), 1),
    "expanded": (lambda: torch.randn(1, 40).expand(3, 40), 1),
    "repeated": (lambda: torch.randn(3, 1).expand(3, 40), 1),
}


@pytest.fixture(params=[1, 64], ids=["whole rows", "split rows"])
def tiny_blocks(request, change_device):
    """Make blocks of 64 elements, on a device with few programs; rows are whole or split."""
    change_device(row_elements=256, row_columns=8, programs=request.param)


def compare(function, x, dim):
    with tritonite.use_gems():
        actual = function(x, dim)
    wide = x.double() if x.is_floating_point() else x
    results = [
        value if isinstance(value, tuple) else (value,) for value in (actual, function(x, dim), function(wide, dim))
    ]
    for ours, aten, reference in zip(*results, strict=True):
        assert_close(ours, aten, reference if reference.is_floating_point() else None, terms=x.shape[dim])


@pytest.mark.parametrize(
    ("function", "layout"),
    [(torch.cummax, layout) for layout in LAYOUTS]
    + [(function, "rows") for function in SCANS if function != torch.cummax],
)
def test_blocks_follow_each_other(function, layout, tiny_blocks, device):
    make, dim = LAYOUTS[layout]
    compare(function, make().to(device), dim)


@pytest.mark.smoke
@pytest.mark.parametrize("function", [torch.cumsum, torch.logcumsumexp, torch.cummin, torch.cummax])
def test_special_values_are_carried(function, tiny_blocks, device):
    x = torch.randn(4, 260)
    x[0, :70] = -float("inf")
    x[0, 200] = float("inf")
    x[1, 50] = x[1, 240] = float("nan")
    # A maximum and a minimum start from an infinity.
    x[2] = -float("inf")
    x[3] = float("inf")
    compare(function, x.to(device), 1)
    compare(function, x.to(device).t().contiguous(), 0)


@pytest.mark.parametrize("function", [torch.cumsum, torch.cummax])
def test_the_sign_of_zeros_and_the_last_of_equals(function, tiny_blocks, device):
    zeros = torch.zeros(2, 260)
    zeros[0] = -0.0
    zeros[1, 70::3] = -0.0
    compare(function, zeros.to(device), 1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float16])
def test_the_last_of_equals_is_found_in_every_dtype(dtype, tiny_blocks, device):
    compare(torch.cummax, torch.randint(0, 2, (1, 260)).to(device, dtype), 1)


@pytest.mark.smoke
def test_an_output_may_be_the_input(tiny_blocks, device):
    x = torch.randint(-9, 9, (40, 3), device=device)
    for dim in (0, 1):
        expected = x.cumsum(dim)
        with tritonite.use_gems():
            assert torch.equal(x.clone().cumsum_(dim), expected)
            same = x.clone()
            torch.cumsum(same, dim, out=same)
        assert torch.equal(same, expected)
    counts = tritonite.stats()
    assert counts["cumsum_"].launched + counts["cumsum_"].replayed and not counts["cumsum.out"].declined


@pytest.mark.declines("the output overlaps the input")
def test_an_output_that_overlaps_the_input_declines(device):
    x = torch.randn(20, device=device)
    # ATen refuses it on a CPU and not on a GPU.
    with tritonite.use_gems(), contextlib.suppress(RuntimeError):
        torch.cumsum(x[:10], 0, out=x[5:15])
    assert tritonite.stats()["cumsum.out"].declined


def test_elements_are_converted_first(device):
    x = torch.tensor([0.6, 0.6, 300.0], device=device)
    with tritonite.use_gems():
        assert torch.equal(torch.cumsum(x, 0, dtype=torch.int32).cpu(), torch.tensor([0, 0, 300], dtype=torch.int32))
        into = torch.empty(3, dtype=torch.float64, device=device)
        assert torch.cumsum(x, 0, out=into).dtype is torch.float64
        with pytest.raises(RuntimeError):
            torch.ones(3, dtype=torch.int32, device=device).cumsum_(0, dtype=torch.float32)


def test_cummax_writes_into_given_tensors(device):
    x = torch.randn(4, 9, device=device)
    values, indices = torch.empty_like(x), torch.empty(4, 9, dtype=torch.int64, device=device)
    with tritonite.use_gems():
        assert torch._cummax_helper(x, values, indices, 1) is None
    expected = torch.cummax(x, 1)
    assert torch.equal(values, expected.values) and torch.equal(indices, expected.indices)


def test_scans_of_zero_dim_tensors_keep_the_sign_of_zero(device):
    x = torch.tensor(-0.0, device=device)
    with tritonite.use_gems():
        sums = x.cumsum(0), x.cumsum(-1, dtype=torch.float64), x.clone().cumsum_(0)
    assert all(each == 0 and each.signbit() for each in sums)
    assert not tritonite.stats()["cumsum"].declined
