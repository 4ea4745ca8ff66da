"""`tritonite.record`: a function as a graph without Dynamo and guards."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import tritonite
from tritonite.errors import RecordedWithoutGradient

OPTIONS = {"fuse": False}


@pytest.fixture(autouse=True, params=(False, True), ids=("separate", "fused"))
def options(request):
    OPTIONS["fuse"] = request.param


def record(function):
    return tritonite.record(function, options=OPTIONS)


def same(actual, expected):
    """Return whether results have equal bits, or if operators may be fused, are equal within the resolution."""
    return torch.allclose(actual, expected) if OPTIONS["fuse"] else torch.equal(actual, expected)


def enabled(function, *args, **kwargs):
    with tritonite.use_gems():
        return function(*args, **kwargs)


def test_a_module_in_training(device):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3)).to(device)
    eager = copy.deepcopy(model)
    recorded = record(lambda x, scale: {"y": model(x) * scale["k"], "n": 3})
    with torch.no_grad():
        for seed in range(3):
            x, scale = torch.randn(2, 3, 5, 5, device=device), torch.randn(1, device=device)
            torch.manual_seed(seed)
            expected = enabled(lambda x, scale: eager(x) * scale, x, scale)
            torch.manual_seed(seed)
            actual = recorded(x, {"k": scale})
            assert same(actual["y"], expected) and actual["n"] == 3
            for found, wanted in zip(model.state_dict().values(), eager.state_dict().values(), strict=True):
                assert same(found, wanted)
    (graph,) = recorded.graphs
    assert graph.replayed == 2 and not graph.reasons


def test_arguments_are_written(device):
    def function(x, y):
        x[1:].mul_(2)
        torch.add(x, 1, out=y)
        return x.t()

    recorded = record(function)
    for _ in range(3):
        x, y = torch.randn(3, 3, device=device), torch.empty(3, 3, device=device)
        own, other = x.clone(), y.clone()
        assert same(recorded(x, y), enabled(function, own, other))
        assert same(x, own) and same(y, other)


def test_a_gradient_within_the_function(device):
    def function(w, x):
        return torch.func.grad(lambda w: torch.tanh(x @ w).square().sum())(w)

    recorded = record(function)
    for rows in (3, 3, 5, 3):
        w, x = torch.randn(4, 4, device=device), torch.randn(rows, 4, device=device)
        assert same(recorded(w, x), enabled(function, w, x))
    assert len(recorded.graphs) == 2


def test_a_result_that_needs_a_gradient_is_refused(device):
    model = nn.Linear(3, 3).to(device)
    recorded = record(model)
    x = torch.randn(2, 3, device=device)
    with pytest.raises(RecordedWithoutGradient, match="no_grad"):
        recorded(x)
    with torch.no_grad():
        assert same(recorded(x), enabled(model, x))


def test_a_dispatch_mode_sees_the_calls(device):
    recorded = record(lambda x: (x @ x).exp())
    x = torch.randn(4, 4, device=device)
    expected = recorded(x)
    with FlopCounterMode(display=False) as counter:
        actual = recorded(x)
    assert counter.get_total_flops() == 2 * 4**3 and same(actual, expected)


def test_autocast_is_part_of_the_kind(device):
    recorded = record(lambda x: x @ x)
    x = torch.randn(8, 8, device=device)
    assert recorded(x).dtype is torch.float32
    for _ in range(2):
        with torch.autocast(device, dtype=torch.bfloat16):
            assert recorded(x).dtype is torch.bfloat16


def test_values_of_other_arguments_are_part_of_the_kind(device):
    recorded = record(lambda x, factor, name=None: x * factor if name else x + factor)
    x = torch.randn(4, device=device)
    assert same(recorded(x, 2), x + 2)
    assert same(recorded(x, 3, name="a"), x * 3)
    assert recorded(x, 2.0).dtype is torch.float32 and len(recorded.graphs) == 3
