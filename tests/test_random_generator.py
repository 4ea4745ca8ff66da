"""The generator's state before and after a call, and the distribution of the numbers that it gives."""

import math

import numpy as np
import pytest
import torch
from conftest import FULL
from curand import chi_square, kolmogorov, on_cpu

import tritonite
from tritonite.runtime.symbols import Limits


def _draws(device, generator=None):
    x = torch.empty(300, device=device)
    keywords = {} if generator is None else {"generator": generator}
    yield torch.rand(300, device=device, **keywords)
    yield torch.randn(300, device=device, **keywords)
    yield torch.randint(0, 9, (300,), device=device, **keywords)
    yield x.clone().exponential_(2.0, **keywords)
    yield torch.bernoulli(torch.full((300,), 0.5, device=device), **keywords)
    if generator is None:
        yield torch.nn.functional.dropout(torch.ones(300, device=device), 0.5)


def test_a_seed_gives_the_same_numbers_again(device, path):
    with tritonite.use_gems(include="*"):
        for _ in range(2):
            torch.manual_seed(3)
            first = list(_draws(device))
            second = list(_draws(device))
            torch.manual_seed(3)
            again = list(_draws(device))
            assert all(map(torch.equal, first, again))
            assert not any(map(torch.equal, first, second))
    assert not any(counts.declined for name, counts in tritonite.stats().items() if "rand" in name)


def test_a_given_generator_leaves_the_default_one_unchanged(device, path):
    place = torch.cuda if device == "cuda" else torch
    with tritonite.use_gems(include="*"):
        before = place.get_rng_state()
        drawn = [list(_draws(device, torch.Generator(device).manual_seed(5))) for _ in range(2)]
        assert all(map(torch.equal, *drawn))
        assert torch.equal(place.get_rng_state(), before)


def test_a_restored_state_gives_the_same_numbers(device, path):
    place = torch.cuda if device == "cuda" else torch
    with tritonite.use_gems(include="*"):
        list(_draws(device))
        state = place.get_rng_state()
        first = list(_draws(device))
        place.set_rng_state(state)
        assert all(map(torch.equal, first, _draws(device)))


def test_both_paths_draw_the_same(device):
    from conftest import calls_through

    found = []
    for way in ("native", "python"):
        with calls_through(way), tritonite.use_gems(include="*"):
            torch.manual_seed(8)
            found.append([*_draws(device), *_draws(device)])
    assert all(map(torch.equal, *found))


def test_checkpoints_draw_the_same_again(device, path):
    x = torch.randn(64, 64, device=device, requires_grad=True)

    def drop(x):
        return torch.nn.functional.dropout(x, 0.5).sin()

    with tritonite.use_gems(include="*"):
        torch.manual_seed(1)
        out = torch.utils.checkpoint.checkpoint(drop, x, use_reentrant=False)
        out.sum().backward()
        torch.manual_seed(1)
        y = x.detach().clone().requires_grad_()
        drop(y).sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_arguments_are_checked_in_replayed_calls(device):
    """One plan serves all arguments within the limits. Others go to ATen."""
    from conftest import calls_through

    with calls_through("native"), tritonite.use_gems(include="*"):
        x = torch.empty(1000, device=device)
        for deviation in (1.0, 0.5, 4.0):
            x.normal_(100.0, deviation)
            assert abs(float(x.double().std()) - deviation) < 0.1 * deviation
        for p in (0.0, 0.25, 1.0):
            assert abs(float(x.bernoulli_(p).mean()) - p) < 0.06
        for number in (-1.0, math.nan):
            with pytest.raises(RuntimeError):
                x.normal_(0.0, number)
            with pytest.raises(RuntimeError):
                x.bernoulli_(number)
    stats = tritonite.stats()
    assert (stats["normal_"].launched, stats["normal_"].replayed) == (1, 2)
    assert (stats["bernoulli_.float"].launched, stats["bernoulli_.float"].replayed) == (1, 2)


def test_limits_have_a_least_number():
    limits = Limits(0, 1, 1.0, True, 0.0)
    assert limits.hold(0.0) and limits.hold(-0.0) and limits.hold(1.0) and limits.hold(1)
    assert not any(map(limits.hold, (-0.1, 1.1, math.nan, math.inf, -math.inf, 2, -1)))
    assert limits.and_(Limits(0, 9, 9.0, False, 0.5)).least == 0.5


def test_explaining_draws_nothing(device):
    place = torch.cuda if device == "cuda" else torch
    x = torch.empty(10, device=device)
    before = place.get_rng_state()
    assert "draw_kernel" in tritonite.explain("normal_", x, 0.0, 1.0)
    assert torch.equal(place.get_rng_state(), before)


@on_cpu
def test_random_operators_stay_atens_unless_named():
    torch.manual_seed(0)
    expected = torch.rand(5)
    tritonite.enable()
    torch.manual_seed(0)
    assert torch.equal(torch.rand(5), expected)


@pytest.fixture
def drawn(device):
    def call(function):
        with tritonite.use_gems(include="*"):
            torch.manual_seed(20240229)
            return function().double().cpu().numpy()

    return call


N = 100_000
# Samples of tests whose bounds follow from the number of samples.
FEW = N if FULL else 20_000
_erf = np.vectorize(math.erf)


@pytest.mark.parametrize(
    ("make", "distribution"),
    [
        (lambda d: torch.rand(FEW, device=d), lambda x: x),
        (lambda d: torch.rand(FEW, device=d, dtype=torch.float64), lambda x: x),
        (lambda d: torch.randn(FEW, device=d), lambda x: (1 + _erf(x / math.sqrt(2))) / 2),
        (lambda d: torch.randn(FEW, device=d, dtype=torch.float64), lambda x: (1 + _erf(x / math.sqrt(2))) / 2),
        (lambda d: torch.empty(FEW, device=d).exponential_(2.0), lambda x: 1 - np.exp(-2 * x)),
        (lambda d: torch.empty(FEW, device=d).cauchy_(1.0, 2.0), lambda x: 0.5 + np.arctan((x - 1) / 2) / math.pi),
        (
            lambda d: torch.empty(FEW, device=d).log_normal_(0.5, 0.25),
            lambda x: (1 + _erf((np.log(x) - 0.5) / 0.25 / math.sqrt(2))) / 2,
        ),
        (lambda d: torch.empty(FEW, device=d).uniform_(-2, 6), lambda x: (x + 2) / 8),
    ],
    ids=["rand", "rand64", "randn", "randn64", "exponential", "cauchy", "log_normal", "uniform"],
)
def test_distributions(make, distribution, drawn, device):
    """By the Kolmogorov-Smirnov test, one in a thousand samples exceeds 1.95."""
    assert kolmogorov(drawn(lambda: make(device)), distribution) < 1.95


def test_discrete_distributions(drawn, device):
    """Pearson's chi-square of k classes has mean k - 1 and a deviation of the square root of twice that."""
    values = drawn(lambda: torch.randint(0, 50, (FEW,), device=device))
    assert values.min() == 0 and values.max() == 49
    assert abs(chi_square(values, [1 / 50] * 50) - 49) < 4 * math.sqrt(98)
    values = drawn(lambda: torch.empty(FEW, device=device).geometric_(0.25))
    assert values.min() == 1
    tail = [0.25 * 0.75**k for k in range(19)]
    merged = np.minimum(values, 20) - 1
    assert abs(chi_square(merged, [*tail, 1 - sum(tail)]) - 19) < 4 * math.sqrt(38)
    for p in (0.1, 0.5):
        assert abs(drawn(lambda p=p: torch.empty(N, device=device).bernoulli_(p)).mean() - p) < 0.006
        by = drawn(lambda p=p: torch.bernoulli(torch.full((N,), p, device=device)))
        assert abs(by.mean() - p) < 0.006
        kept = drawn(lambda p=p: torch.nn.functional.dropout(torch.ones(N, device=device), p))
        assert abs(kept.mean() - 1) < 0.012


def test_numbers_of_neighbouring_elements_and_rounds_are_independent(drawn, device):
    values = drawn(lambda: torch.randn(N, device=device))
    for lag in (1, 2, 3, 4, 256, 2048, 8192):
        assert abs(np.corrcoef(values[:-lag], values[lag:])[0, 1]) < 0.015
    assert abs(values.mean()) < 0.012 and abs(values.std() - 1) < 0.01
    assert abs((values**3).mean()) < 0.03 and abs((values**4).mean() - 3) < 0.1
