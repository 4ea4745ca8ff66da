"""Observers through torch.ao's module-level function: states, switches, gradients."""

import pytest
import torch

import tritonite
from tritonite.errors import Decline

NAME = "_fused_moving_avg_obs_fq_helper"


def states(size):
    device = tritonite.device
    low, high = torch.full((size,), torch.inf, device=device), torch.full((size,), -torch.inf, device=device)
    return [low, high, torch.ones(size, device=device), torch.zeros(size, dtype=torch.int32, device=device)]


def call(x, own, observes=1, quantises=1, per_row=False, symmetric=False):
    switches = [torch.tensor([flag], device=x.device) for flag in (observes, quantises)]
    numbers = (0.01, -128, 127, 0, per_row, symmetric)
    return torch.fused_moving_avg_obs_fake_quant(x, *switches, *own, *numbers)


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_steps_of_training(per_row, symmetric, device):
    own, aten = states(3 if per_row else 1), states(3 if per_row else 1)
    for step in range(3):
        x = torch.randn(3, 40, device=device) * (1 + step)
        ours, theirs = [x.clone().requires_grad_() for _ in range(2)]
        with tritonite.use_gems(include=[NAME]):
            found = call(ours, own, per_row=per_row, symmetric=symmetric)
        expected = call(theirs, aten, per_row=per_row, symmetric=symmetric)
        for state, other in zip(own, aten, strict=True):
            torch.testing.assert_close(state, other, rtol=1e-6, atol=0)
        scale = float(aten[2].max())
        # A number in the middle of two steps may round to either.
        assert float((found - expected).abs().max()) <= 1.01 * scale
        assert float(((found - expected).abs() > 1e-5).float().mean()) < 0.05
        found.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("per_row", [False, True])
def test_switches(per_row, device):
    x = torch.randn(2, 5, device=device)
    own = states(2 if per_row else 1)
    with tritonite.use_gems(include=[NAME]):
        assert torch.equal(call(x, own, observes=1, quantises=0, per_row=per_row), x)
        low = x.amin(1) if per_row else x.min().view(1)
        assert torch.equal(own[0], low) and torch.equal(own[2], torch.ones_like(own[2]))
        call(2 * x, own, observes=0, quantises=1, per_row=per_row)
    assert torch.equal(own[0], low) and bool((own[2] != 1).all())


@pytest.mark.parametrize(("change", "match"), [({"axis": 1}, "dimension 1"), ({"size": 3}, "a state of")])
def test_declines(change, match, device):
    x, on = torch.randn(2, 5, device=device), torch.ones(1, dtype=torch.int64, device=device)
    numbers = 0.01, -128, 127, change.get("axis", 0), True, False
    with pytest.raises(Decline, match=match):
        tritonite.overloads()[NAME](x, on, on, *states(change.get("size", 2)), *numbers)
