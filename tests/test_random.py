"""Random numbers against NumPy's, by cuRAND's definitions and in ATen's order."""

import math

import numpy as np
import pytest
import torch
from conftest import FULL, some
from curand import (
    ATEN,
    FLOATS,
    INTEGERS,
    as_numpy,
    assert_near,
    grid_of,
    layouts,
    normals,
    on_cpu,
    philox,
    rounded,
    run_kernel,
    strided,
    uniforms,
    vectorized,
    whole_words,
)

import tritonite
from tritonite.engine import random as engine
from tritonite.engine.iteration import contiguous_strides, fastest_first

# Below ATen's grid, above it, and several rounds of it. Some end within a block or a vector.
SIZES = (1, 7, 256, 1000, 2049, 8192, 20_001)
SEEDS = ((0, 0), (2**63 - 12345, 4 * 7), (0x9E3779B97F4A7C15 - 2**64, 4 * (2**32 - 2)))


@on_cpu
def test_philox_gives_the_published_numbers():
    """Known answers of Random123 (Salmon et al. 2011)."""
    zeros = philox(0, 0, 0)
    assert [int(x) for x in zeros] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = philox(-1, 2**64 - 1, 2**64 - 1)
    assert [int(x) for x in ones] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@on_cpu
@pytest.mark.parametrize(("dtype", "seed_and_offset"), some(FLOATS, SEEDS), ids=str)
def test_uniform_numbers_are_curands(dtype, seed_and_offset, set_philox):
    wide = dtype is torch.float64
    for numel in SIZES:
        given = set_philox(*seed_and_offset)
        x = torch.empty(numel, dtype=dtype)
        run_kernel("uniform_", x)
        drawn = strided(uniforms, numel, given, wide)
        expected = rounded(drawn, dtype)
        assert np.array_equal(as_numpy(x), np.where(expected == 1, 0, expected))
        values = 2 if wide else 4
        assert set_philox.advances[-1] == 4 * -(-numel // (grid_of(numel) * values))
    set_philox(*seed_and_offset)
    run_kernel("uniform_", x, -3.0, 5.0)
    near = rounded(drawn.astype(np.float64) * 8 - 3, dtype)
    assert np.abs(as_numpy(x) - np.where(near == 5, -3, near)).max() <= 4 * torch.finfo(dtype).eps
    assert (as_numpy(x) >= -3).all() and (as_numpy(x) < 5).all()


@on_cpu
@pytest.mark.parametrize(("dtype", "seed_and_offset"), some(FLOATS, SEEDS), ids=str)
def test_normal_numbers_are_curands(dtype, seed_and_offset, set_philox):
    wide = dtype is torch.float64
    for numel in SIZES[::2]:
        given = set_philox(*seed_and_offset)
        x = torch.empty(numel, dtype=dtype)
        run_kernel("normal_", x, 0.0, 1.0)
        drawn = strided(normals, numel, given, wide)
        # Near a zero of the sine, NumPy's sine of a rounded angle is no reference in float64.
        assert np.abs(as_numpy(x) - drawn).max() < 1e-14 if wide else not assert_near(x, rounded(drawn, dtype), dtype)
    set_philox(*seed_and_offset)
    run_kernel("normal_", x, 7.0, 0.25)
    assert (
        np.abs(as_numpy(x) - rounded(drawn.astype(np.float64) * 0.25 + 7, dtype)).max() <= 16 * torch.finfo(dtype).eps
    )


TRANSFORMED = {
    "exponential_": ((1.5,), lambda u, eps: -np.where(u >= 1 - eps / 2, -eps / 2, np.log(u)) / 1.5),
    "geometric_": ((0.3,), lambda u, eps: np.ceil(np.log(u) / np.log1p(-np.float32(0.3) if eps > 1e-10 else -0.3))),
    "cauchy_": ((0.0, 2.0), lambda u, eps: 2 * np.tan(math.pi * (np.clip(u, eps, 1 - eps) - 0.5))),
}


@on_cpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", TRANSFORMED)
def test_transforms_of_uniform_numbers_are_atens(name, dtype, set_philox):
    wide, numel = dtype is torch.float64, 9000
    given = set_philox(5, 8)
    numbers, transform = TRANSFORMED[name]
    x = torch.empty(numel, dtype=dtype)
    run_kernel(name, x, *numbers)
    drawn = strided(uniforms, numel, given, wide).astype(np.float64)
    expected = transform(drawn, torch.finfo(torch.float64 if wide else torch.float32).eps)
    if name == "cauchy_":
        # The tangent is of a rounded angle.
        expected = rounded(expected, dtype)
        there = np.isfinite(expected) & (expected != 0)
        far = np.abs(as_numpy(x)[there] / expected[there] - 1)
        assert there.mean() > 0.99 and far.max() < (1e-9 if wide else 0.1)
        assert np.median(far) < 2 * torch.finfo(dtype).eps
    elif name == "geometric_":
        assert (as_numpy(x) == rounded(expected, dtype)).mean() > 0.999
        assert np.abs(as_numpy(x) - rounded(expected, dtype)).max() <= 1
    else:
        assert_near(x, rounded(expected, dtype), dtype)


@on_cpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_normal_numbers_are_scaled_and_then_shifted(dtype, set_philox):
    """Each step is rounded to the result's dtype, as in ATen."""
    drawn = strided(normals, 3000, set_philox(5, 8), dtype is torch.float64)
    deviations, means = torch.rand(3000, dtype=dtype) * 3, torch.randn(3000, dtype=dtype)
    scaled = rounded(rounded(drawn, dtype).astype(np.float64) * as_numpy(deviations), dtype).astype(np.float64)
    for mean, expected in ((means, scaled + as_numpy(means)), (0.3, scaled + torch.tensor(0.3, dtype=dtype).item())):
        set_philox(5, 8)
        x = run_kernel("normal.Tensor_Tensor" if mean is means else "normal.float_Tensor", mean, deviations)
        bound = 3 * torch.finfo(dtype).eps * (np.abs(scaled) + np.abs(expected))
        assert (np.abs(as_numpy(x) - expected) <= bound).all()


@pytest.mark.parametrize("deviation", [-1.0, math.nan])
def test_invalid_deviations_leave_the_generator_unchanged(deviation, device, path):
    """Later calls as well, in which the host waits for the deviations before it draws."""
    good, bad = torch.rand(40, device=device), torch.rand(40, device=device)
    bad[17] = deviation
    generator = torch.Generator(device).manual_seed(3)
    tritonite.reset_stats()
    with tritonite.use_gems(include="normal"):
        for _ in range(2):
            torch.normal(0.5, good, generator=generator)
            torch.normal(good, good, generator=generator)
        before = generator.get_state()
        for mean in (0.5, good):
            with pytest.raises(RuntimeError, match="all elements of std >= 0"):
                torch.normal(mean, bad, generator=generator)
        assert torch.equal(generator.get_state(), before)
        assert torch.normal(0.5, bad[:0], generator=generator).shape == (0,)
    for name, calls in (("normal.float_Tensor", 3), ("normal.Tensor_Tensor", 2)):
        counts = tritonite.stats()[name]
        assert counts.launched + counts.replayed == calls and sum(counts.declined.values()) == 1


@on_cpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_log_normal_numbers_are_exponentials_of_normal_ones(dtype, set_philox):
    given = set_philox(5, 8)
    x = torch.empty(3000, dtype=dtype)
    run_kernel("log_normal_", x, 0.5, 0.25)
    expected = np.exp(strided(normals, 3000, given, dtype is torch.float64).astype(np.float64) * 0.25 + 0.5)
    assert_near(x, expected, dtype, eps=4)


@on_cpu
@pytest.mark.parametrize("dtype", (torch.bool, *INTEGERS, *FLOATS), ids=str)
def test_integers_are_the_random_bits_modulo_the_range(dtype, set_philox):
    ends = [(0, 2), (0, 100)] if dtype is not torch.bool else [(0, 2)]
    if dtype in (torch.int32, torch.int64, torch.float64):
        ends += [(-5, 2**28 - 5), (-5, 2**28 - 6), (-(2**31), 2**31 - 1)]
    if dtype is torch.int64:
        ends += [(-(2**63), 2**63 - 1), (-7, 2**62), (-(2**63), None), (5, None)]
    for low, high in ends:
        # Long enough for a second round of ATen's grid.
        for numel in (7, 20_001 if FULL else 8193):
            given = set_philox(*SEEDS[1])
            x = torch.empty(numel, dtype=dtype)
            run_kernel("random_.from", x, low, high)
            span = (2**63 if high is None else high) - low
            wide = span >= 2**28
            drawn = [int(word) for word in strided(whole_words, numel, given, wide)]
            # ATen's integers wrap around at 64 bits.
            found = [(word % span + low + 2**63) % 2**64 - 2**63 if span < 2**64 else word for word in drawn]
            if span == 2**64:
                found = [(word + 2**63) % 2**64 - 2**63 for word in drawn]
            assert x.tolist() == found


@on_cpu
@pytest.mark.parametrize("dtype", (torch.bool, *INTEGERS[:5], *FLOATS), ids=str)
def test_integers_without_bounds_span_the_dtype(dtype, set_philox):
    given = set_philox(9, 4)
    x = torch.empty(5000, dtype=dtype)
    run_kernel("random_", x)
    wide = dtype in (torch.int64, torch.float64)
    digits = {torch.float32: 24, torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}
    spans = {torch.bool: 2} | {d: 2**bits + 1 for d, bits in digits.items()}
    span = spans.get(dtype) or torch.iinfo(dtype).max + 1
    assert x.tolist() == [int(word) % span for word in strided(whole_words, 5000, given, wide)]


@on_cpu
@pytest.mark.parametrize("dtype", (torch.bool, torch.uint8, torch.int64, *FLOATS), ids=str)
def test_bernoulli_compares_uniform_numbers(dtype, set_philox):
    numel = 9001
    given = set_philox(3, 12)
    x = torch.empty(numel, dtype=dtype)
    run_kernel("bernoulli_.float", x, 0.3)
    drawn = strided(uniforms, numel, given, dtype is torch.float64)
    assert np.array_equal(as_numpy(x), drawn < (0.3 if dtype is torch.float64 else np.float32(0.3)))
    for shape in ((numel,), (50, 31), (3, 4, 5)):
        p = torch.rand(shape)
        x = torch.empty(shape, dtype=dtype)
        given = set_philox(3, 12)
        run_kernel("bernoulli_.Tensor", x, p)
        assert set_philox.advances[-1] == 12
        drawn = vectorized(x.numel(), 4, given, 2**40).reshape(shape)
        assert np.array_equal(as_numpy(x), drawn <= p.numpy())


@on_cpu
def test_bernoulli_draws_in_memory_order_for_equal_layouts(set_philox):
    p = torch.rand(13, 9).t()
    given = set_philox(3, 12)
    x = torch.empty(13, 9).t()
    run_kernel("bernoulli_.Tensor", x, p)
    assert np.array_equal(x.t().numpy(), vectorized(117, 4, given, 2**40).reshape(13, 9) <= p.t().numpy())
    # The result of `bernoulli` is contiguous, whatever the layout of the probabilities.
    set_philox(3, 12)
    x = run_kernel("bernoulli", p)
    assert x.is_contiguous()
    assert np.array_equal(x.numpy(), vectorized(117, 4, given, 2**40).reshape(9, 13) <= p.numpy())


@on_cpu
def test_elements_are_drawn_in_memory_order(set_philox):
    for label, x in layouts(lambda *shape: torch.full(shape, -1.0)):
        given = set_philox(1, 0)
        run_kernel("uniform_", x)
        drawn = torch.from_numpy(strided(uniforms, x.numel(), given))
        order = fastest_first(x.shape, [x.stride()])
        expected = drawn.as_strided(x.shape, contiguous_strides(x.shape, order))
        assert torch.equal(x, expected), label
        if x._base is not None and label.endswith("gaps"):
            assert int((x._base == -1).sum()) == x._base.numel() - x.numel()


@on_cpu
def test_complex_normal_numbers(set_philox):
    given = set_philox(1, 0)
    x = torch.empty(3000, dtype=torch.complex64)
    run_kernel("normal_", x, 0.0, 1.0)
    expected = strided(normals, 6000, given).astype(np.float64) / math.sqrt(2)
    assert np.abs(torch.view_as_real(x).flatten().numpy() - expected).max() < 1e-6


@pytest.mark.declines("ATen refuses the range")
def test_uint64_without_an_upper_bound_raises_atens_error(device):
    x = torch.zeros(3, dtype=torch.uint64, device=device)
    with tritonite.use_gems(include="random_.from", faster_only=False):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="out of bounds"):
                ATEN.random_(x, 3, None)


@on_cpu
def test_tensors_beyond_32_bits_are_drawn_in_halves(monkeypatch, set_philox):
    """ATen splits tensors of 2 GiB and more, after it has advanced the generator for the whole tensor."""
    monkeypatch.setattr(engine, "_within_32_bits", lambda numel, itemsize: iter([(0, 500), (500, 501)]))
    given = set_philox(1, 0)
    x = torch.empty(1001)
    run_kernel("uniform_", x)
    first, second = (strided(uniforms, n, (given[0], offset)) for n, offset in ((500, 4), (501, 8)))
    assert np.array_equal(x.numpy(), np.concatenate([first, second]))


def test_tensors_are_halved_until_32_bit_offsets_suffice():
    assert list(engine._within_32_bits(2**29 - 1, 4)) == [(0, 2**29 - 1)]
    assert list(engine._within_32_bits(2**29 + 3, 4)) == [(0, 2**28 + 1), (2**28 + 1, 2**28 + 2)]
    assert list(engine._within_32_bits(2**31, 1)) == [(0, 2**30), (2**30, 2**30)]


@pytest.mark.declines("ATen refuses the arguments")
def test_invalid_arguments_raise_atens_error(device):
    x, whole = torch.empty(4, device=device), torch.empty(4, dtype=torch.int32, device=device)
    refused = [
        lambda: x.uniform_(1.0, 0.0),
        lambda: x.uniform_(-3e38, 3e38),
        lambda: x.normal_(0.0, -1.0),
        lambda: x.exponential_(0.0),
        lambda: x.exponential_(-1.0),
        lambda: x.log_normal_(0.0, 0.0),
        lambda: x.cauchy_(0.0, -1.0),
        lambda: x.geometric_(0.0),
        lambda: x.geometric_(1.0),
        lambda: x.bernoulli_(1.5),
        lambda: x.bernoulli_(-0.5),
        lambda: x.random_(5, 5),
        lambda: whole.random_(0, 2**40),
        lambda: torch.rand(4, dtype=torch.int32, device=device),
        lambda: torch.randint(7, 7, (3,), device=device),
        lambda: x.expand(3, 4).uniform_(),
    ]
    with tritonite.use_gems(include="*"):
        for call in refused:
            with pytest.raises(RuntimeError):
                call()
