"""Samples of distributions in tensors against NumPy's, by cuRAND's definitions, and against ATen's own on a GPU."""

import math

import numpy as np
import pytest
import torch
from test_random import (
    FLOATS,
    OFFSETS,
    _chi_square,
    _numpy,
    _outcome,
    _run,
    on_cpu,
    on_gpu,
    strided,
    uniform_of,
    uniforms,
)
from test_random import philox as words_of

import tritonite
from tritonite.engine import multinomial as rows_engine
from tritonite.engine import random as engine

WIDE = (torch.float32, torch.float64)


@pytest.fixture
def state(monkeypatch):
    """Sets the seed and offset that draws have, one after the other; the generator moves on as it is asked to."""
    box = {"advances": []}

    def give(seed, offset):
        box["next"] = offset

        def drawn(device, advance, generator=None):
            box["advances"].append(advance)
            before, box["next"] = box["next"], box["next"] + advance
            return seed, before

        for module in (engine, rows_engine):
            monkeypatch.setattr(module, "random_state", drawn)
        return seed, offset

    give.box = box
    return give


# Categories.


def _times(numel, given, dtype):
    """Exponential numbers as ATen rounds them."""
    wide = dtype is torch.float64
    half = 2.0**-53 if wide else 2.0**-24
    u = strided(uniforms, numel, given, wide).astype(np.float64)
    return torch.from_numpy(-np.where(u >= 1 - half, -half, np.log(u))).to(dtype)


@on_cpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_samples_without_replacement_win_a_race(dtype, state):
    for shape, count in (((500,), 1), ((7, 300), 1), ((3, 1000), 5), ((2, 40), 40)):
        weights = torch.rand(shape).to(dtype)
        given = state(17, 4 * 9)
        drawn = _run("multinomial", weights, count)
        times = _times(weights.numel(), given, dtype).view(shape)
        ratios = (weights.double() / times.double()).to(dtype).double()
        assert drawn.dtype is torch.int64 and drawn.shape == (*shape[:-1], count)
        # Which of two that are equal comes first ATen does not say; a logarithm may be rounded to another number.
        best = ratios.sort(descending=True, dim=-1).values[..., :count]
        assert ((ratios.gather(-1, drawn) - best).abs() <= 2 * torch.finfo(dtype).eps * best).all()
        assert all(len(set(row.tolist())) == count for row in drawn.view(-1, count))
        values = 2 if dtype is torch.float64 else 4
        assert state.box["advances"][-1] == 4 * -(-weights.numel() // (min(2048, weights.numel() + 255) * values))


def _total(row, lanes):
    """A row's sum as ATen's threads add it up: each its own, then warps by halves, then those."""
    padded = np.zeros(-(-len(row) // lanes) * lanes, row.dtype)
    padded[: len(row)] = row
    total = np.zeros(lanes, row.dtype)
    for chunk in padded.reshape(-1, lanes):
        total = total + chunk

    def folded(x):
        while x.shape[-1] > 1:
            half = x.shape[-1] // 2
            x = x[..., :half] + x[..., half:]
        return x[..., 0]

    warps = np.zeros(32, row.dtype)
    warps[: lanes // 32] = folded(total.reshape(-1, 32))
    return folded(warps)


@on_cpu
@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_weights_are_added_up_in_atens_order(dtype):
    for n in (1, 31, 33, 100, 1000, 1024, 5000):
        weights = torch.rand(3, n, dtype=dtype)
        expected = np.stack([row / _total(row, min(1024, -(-n // 32) * 32)) for row in weights.numpy()])
        assert np.array_equal(rows_engine.normalized(weights).numpy(), expected)
        assert np.array_equal(rows_engine.normalized(weights.t().contiguous().t()).numpy(), expected)


@on_cpu
@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_samples_with_replacement_are_where_uniform_numbers_fall(dtype, state, monkeypatch):
    # Rows of ATen's grid, of which a device has more: each takes every third row of weights.
    monkeypatch.setattr(rows_engine, "_ATEN_ROWS", 3)
    for n_rows, n, count in ((1, 1, 5), (2, 10, 300), (8, 1000, 130)):
        weights = torch.rand(n_rows, n, dtype=dtype)
        weights[:, n // 2 : n // 2 + n // 3] = 0
        seed, offset = state(5, 4 * 3)
        drawn = _run("multinomial", weights if n_rows > 1 else weights[0], count, True).view(n_rows, count)
        height, width = min(n_rows, 3), -(-count // 128) * 128
        assert state.box["advances"][-1] == 4 * -(-n_rows // height)
        shares = rows_engine.normalized(weights)
        sums = tritonite.ops.cumsum(shares, 1).numpy()
        for row in range(n_rows):
            threads = row % height * width + np.arange(count)
            u = uniform_of(words_of(seed, offset // 4 + row // height, threads)[0]).astype(sums.dtype)
            expected = np.minimum(np.searchsorted(sums[row], u), n - 1)
            assert (shares[row, drawn[row]] > 0).all()
            assert np.array_equal(drawn[row].numpy(), expected)


@on_cpu
def test_a_number_beyond_all_sums_takes_the_last_category_that_has_a_weight(state):
    """The largest uniform number, 1, is more than a sum that rounding has made less."""
    state(0, 0)
    shares = torch.tensor([[0.0, 0.5, 0.0, 0.25, 0.0, 0.0]])
    out = torch.empty(1, 64, dtype=torch.int64)
    rows_engine.sample_rows(shares, torch.tensor([[0.0, 1e-9, 1e-9, 2e-9, 2e-9, 2e-9]]), out, None)
    assert set(out.flatten().tolist()) <= {1, 3} and 3 in out
    shares = torch.tensor([[1.0, 0.0, 0.0]])
    rows_engine.sample_rows(shares, torch.full((1, 3), 1e-9), out, None)
    assert not out.any()


@pytest.mark.parametrize(("count", "replacement"), [(1, False), (3, False), (1, True), (3, True)])
@on_cpu
def test_weights_that_are_none_are_atens_to_refuse(count, replacement, device, path):
    """On a GPU ATen's kernels stop the program, and so do these."""
    with tritonite.use_gems(include="multinomial"):
        for bad in ([0.0, 0.0, 0.0], [1.0, -1.0, 1.0], [1.0, math.nan, 1.0], [1.0, math.inf, 1.0]):
            weights = torch.rand(5, 3, device=device)
            torch.multinomial(weights, count, replacement)
            weights[3] = torch.tensor(bad)
            with pytest.raises(RuntimeError, match="invalid multinomial|probability tensor"):
                torch.multinomial(weights, count, replacement)
        for call in (
            lambda: torch.multinomial(weights, 4),
            lambda: torch.multinomial(weights, 0),
            lambda: torch.multinomial(weights[None], 1),
            lambda: torch.multinomial(weights.int(), 1),
            lambda: torch.multinomial(weights[:, :0], 1),
        ):
            with pytest.raises(RuntimeError):
                call()
        assert torch.multinomial(weights[:0], count, replacement).shape == (0, count)


def test_multinomial_writes_outputs_of_any_layout(device):
    weights = torch.rand(4, 50, device=device)
    with tritonite.use_gems(include="multinomial"):
        for replacement in (False, True):
            out = torch.full((6, 8), -1, device=device)
            torch.manual_seed(3)
            expected = torch.multinomial(weights, 3, replacement)
            torch.manual_seed(3)
            torch.multinomial(weights, 3, replacement, out=out[1:5, ::3])
            assert torch.equal(out[1:5, ::3], expected)
            assert int((out == -1).sum()) == out.numel() - expected.numel()
    assert not tritonite.stats()["multinomial.out"].declined


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_categories_come_as_often_as_their_weights_say(dtype, device):
    torch.manual_seed(20240229)
    weights = torch.tensor([0.5, 2.0, 0.0, 1.0, 4.0, 0.25, 0.25], dtype=dtype, device=device)
    shares = [x for x in (weights / weights.sum()).tolist() if x]
    kept = torch.tensor([0, 1, 3, 4, 5, 6], device=device)
    with tritonite.use_gems(include="multinomial"):
        found = [torch.multinomial(weights.expand(500, 7), 1).flatten()]
        if dtype in WIDE:
            found += [torch.multinomial(weights, 20_000, True), torch.multinomial(weights.expand(20, 7), 400, True)]
        first, second = torch.multinomial(weights.expand(500, 7), 2).t().contiguous()
    for drawn in (*found, first):
        assert not (drawn == 2).any()
        values = torch.searchsorted(kept, drawn.flatten()).cpu().numpy()
        assert _chi_square(values, shares) < 5 + 5 * math.sqrt(10)
    assert not (first == second).any()
    # The second is by the weights that are left.
    after = second[first == 4]
    left = [x for i, x in enumerate(weights.double().tolist()) if x and i != 4]
    rest = torch.tensor([0, 1, 3, 5, 6], device=device)
    values = torch.searchsorted(rest, after).cpu().numpy()
    assert _chi_square(values, [x / sum(left) for x in left]) < 4 + 5 * math.sqrt(8)
