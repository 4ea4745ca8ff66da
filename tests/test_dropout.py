"""Dropout and rrelu: masks and slopes are the numbers that ATen draws for a seed."""

import math

import numpy as np
import pytest
import torch
from conftest import FULL
from curand import (
    ATEN,
    FLOATS,
    as_numpy,
    assert_near,
    grid_of,
    layouts,
    on_cpu,
    rounded,
    run_kernel,
    strided,
    uniforms,
    vectorized,
)

import tritonite
from tritonite.engine import random as engine
from tritonite.errors import Decline
from tritonite.ops.random.rrelu import rrelu_with_noise

DROPOUT_SIZES = (8, 12, 13, 14, 2048 * 8 + 8, 20_002, 20_004, 20_008, 20_001)


@on_cpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dropout_masks_are_atens(dtype, set_philox):
    for numel in DROPOUT_SIZES:
        x = torch.randn(numel, dtype=dtype)
        vector = next(v for v in (16 // dtype.itemsize, 4, 2, 1) if v <= 16 // dtype.itemsize and numel % v == 0)
        for name, p, given_p in (("native_dropout", 0.3, 0.7), ("_fused_dropout", 0.7, 0.7)):
            given = set_philox(11, 4 * 5)
            out, mask = run_kernel(name, x, p, True) if name == "native_dropout" else run_kernel(name, x, p)
            drawn = strided(uniforms, numel, given) if vector == 1 else vectorized(numel, vector, given, grid_of(numel))
            acc = np.float64 if dtype is torch.float64 else np.float32
            kept = drawn < acc(given_p if name == "_fused_dropout" else 1.0 - p)
            assert mask.dtype is (torch.bool if name == "native_dropout" else torch.uint8)
            assert np.array_equal(mask.bool().numpy(), kept)
            scale = acc(1 / np.float64(acc(1.0 - p if name == "native_dropout" else p)))
            expected = (x.to(torch.float64 if acc is np.float64 else torch.float32).numpy() * acc(1) * kept) * scale
            assert np.array_equal(as_numpy(out), rounded(expected, dtype))
            assert set_philox.advances[-1] == 4 * -(-numel // (grid_of(numel) * 4))


@on_cpu
@pytest.mark.parametrize(
    "numel, programs",
    [(2048 * 8, 2), (2048 * 8 + 8, 3), (1024 * 8, 1), (3000 * 8, 3), (777_000, 95) if FULL else (101_000, 13)],
)
def test_every_program_of_dropout_has_elements(numel, programs, set_philox, monkeypatch):
    grids, launched = [], engine.draw_kernel

    class Noting:
        def __getitem__(self, grid):
            grids.append(grid)
            return launched[grid]

    monkeypatch.setattr(engine, "draw_kernel", Noting())
    given = set_philox(11, 4 * 5)
    _, mask = run_kernel("native_dropout", torch.ones(numel, dtype=torch.float16), 0.5, True)
    assert np.array_equal(mask.numpy(), vectorized(numel, 8, given, grid_of(numel)) < 0.5)
    # A program draws for 1,024 of ATen's 2,048 threads in a round, each with a vector of 8.
    assert grids == [(programs,)]


@on_cpu
def test_dropout_of_other_layouts(set_philox):
    for label, x in layouts(torch.randn):
        given = set_philox(2, 0)
        out, mask = run_kernel("native_dropout", x, 0.5, None)
        assert out.stride() == torch.empty_like(x).stride() == mask.stride(), label
        assert torch.equal(out, x * mask * 2)
        if label == "gaps":
            assert np.array_equal(mask.flatten().numpy(), strided(uniforms, x.numel(), given) < 0.5)


@on_cpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dropout_of_misaligned_tensors(dtype, set_philox):
    for first in (1, 2, 4, 8):
        x = torch.randn(20_000 + first).to(dtype)[first:]
        vector = math.gcd(first, 16 // dtype.itemsize)
        given = set_philox(2, 0)
        mask = run_kernel("native_dropout", x, 0.5, None)[1]
        drawn = vectorized(20_000, vector, given, grid_of(20_000)) if vector > 1 else strided(uniforms, 20_000, given)
        assert np.array_equal(mask.numpy(), drawn < 0.5)


def test_dropout_plans_depend_on_alignment(device, path):
    """The mask depends on the address, so a plan must not serve another alignment."""
    base = torch.randn(2056, device=device)
    with tritonite.use_gems(include="native_dropout"):
        for _ in range(2):
            for first in (0, 1, 2, 3, 4):
                torch.manual_seed(4)
                mask = torch.native_dropout(base[first : first + 2048], 0.5, True)[1]
                torch.manual_seed(4)
                state = tritonite.overloads()["native_dropout"](base[first : first + 2048], 0.5, True)
                assert torch.equal(mask, state[1])
    assert not tritonite.stats()["native_dropout"].declined


@on_cpu
def test_dropout_of_infinities_gives_nan(set_philox):
    set_philox(2, 0)
    out, mask = run_kernel("native_dropout", torch.full((64,), torch.inf), 0.5, True)
    assert bool((out.isnan() == ~mask).all())


@on_cpu
def test_dropout_that_drops_all_or_nothing_draws_nothing(set_philox):
    set_philox(2, 0)
    x = torch.randn(5, 6).t()
    for arguments, expected in (((0.5, False), x), ((1.0, True), torch.zeros(6, 5)), ((1.0, None), torch.zeros(6, 5))):
        out, mask = run_kernel("native_dropout", x, *arguments)
        assert torch.equal(out, expected) and out.stride() == x.stride()
        assert mask.dtype is torch.bool and bool((mask == (arguments[1] is False)).all())
    assert set_philox.advances == []


@on_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_rrelu_slopes_are_uniform_numbers(dtype, set_philox):
    wide, numel = dtype is torch.float64, 9001
    given = set_philox(3, 12)
    x, noise = torch.randn(numel, dtype=dtype), torch.empty(numel, dtype=dtype)
    out = run_kernel("rrelu_with_noise", x, noise, 0.125, 1 / 3, True)
    slope = rounded(strided(uniforms, numel, given, wide), dtype).astype(np.float64) * (1 / 3 - 0.125) + 0.125
    expected = np.where(as_numpy(x) <= 0, rounded(slope if wide else slope.astype(np.float32), dtype), 1)
    assert_near(noise, expected, dtype, eps=1)
    assert torch.equal(out, torch.where(x <= 0, x * noise, x))
    grad = run_kernel("rrelu_with_noise_backward", torch.ones_like(x), x, noise, 0.125, 1 / 3, True, False)
    assert torch.equal(grad, noise)
    for in_training, slope in ((False, (0.125 + 1 / 3) / 2),):
        still = run_kernel("rrelu_with_noise", x, noise, 0.125, 1 / 3, in_training)
        torch.testing.assert_close(still, torch.nn.functional.leaky_relu(x, slope))


@pytest.mark.parametrize("training", [True, False])
def test_rrelu_noise_on_another_device_declines(training):
    """Zero-dim noise is not taken for a number either."""
    x, noise = torch.ones((), device=tritonite.device), torch.ones((), device="meta")
    with pytest.raises(Decline, match="noise on meta"):
        rrelu_with_noise(x, noise, 0.125, 0.25, training)


@pytest.mark.declines("refused slopes")
def test_invalid_rrelu_slopes_raise_atens_error(device):
    x = torch.ones(3, device=device)
    with tritonite.use_gems(include="rrelu_with_noise_backward", faster_only=False):
        for lower in (float("nan"), -5.0):
            with pytest.raises(RuntimeError, match="negative slope"):
                ATEN.rrelu_with_noise_backward(x, x, x, lower, 1.0, False, True)
