"""Fused parts of compiled graphs: what declines at run time, what memory and random numbers forbid, and `explain`."""

import copy
import operator

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import tritonite
from tritonite.errors import Decline
from tritonite.fused import norm
from tritonite.graph import backend, program
from tritonite.graph.fused import Fused, calls_of
from tritonite.graph.passes import run_passes
from tritonite.install.override import select

pytestmark = pytest.mark.smoke


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def declines(*_, **__):
    raise Decline("for the test")


def eager(function, *args):
    with tritonite.use_gems():
        return function(*args)


def rms_norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def fused(function, *args, **options):
    """Return the names of the operators in a function's graph after all passes."""
    module = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)
    run_passes(module, select(**options), True)
    targets = [node.target for node in calls_of(module.graph) if node.target is not operator.getitem]
    return [str(target).removesuffix(".default") for target in targets]


def check(function, *args):
    """Compare a recorded function with eager mode, arguments that are written included. Returns its operators."""
    recorded = tritonite.record(function)
    with torch.no_grad():
        for _ in range(3):
            own, other = copy.deepcopy(args), copy.deepcopy(args)
            torch.manual_seed(3)
            actual = recorded(*own)
            torch.manual_seed(3)
            torch.testing.assert_close((actual, own), (eager(function, *other), other))
    (graph,) = recorded.graphs
    assert not graph.reasons
    return [note.operator.removeprefix("tritonite::") for note in graph.plans[-1].notes if not note.view]


def test_a_pattern_that_declines_runs_its_separate_operators(device, monkeypatch):
    monkeypatch.setattr(norm, "forward", declines)

    def function(x, y, weight):
        total = x + y
        return rms_norm(total, weight) + 1, total

    x, y, weight = torch.randn(3, 8, device=device), torch.randn(3, 8, device=device), torch.randn(8, device=device)
    compiled = torch.compile(function, backend="tritonite", fullgraph=True)
    for _ in range(3):
        torch.testing.assert_close(compiled(x, y, weight), eager(function, x, y, weight), rtol=0, atol=0)
    (graph,) = backend.graphs
    assert graph.replayed == 2
    text = tritonite.explain(compiled)
    assert "fused      rms_norm: add, pow_1, mean, add_1, rsqrt, mul, mul_1" in text
    assert "not fused: for the test" in text
    # A call of the user's own has no separate operators.
    with pytest.raises(tritonite.errors.Unsupported, match="for the test"):
        tritonite.fused.rms_norm(x, weight)


def test_a_program_that_declines_runs_its_separate_operators(device, monkeypatch):
    monkeypatch.setattr(program, "_program", declines)

    def function(x, y):
        left = (x + y).tanh() * y
        return left, left.sum(-1, keepdim=True).exp() * 2

    x = torch.randn(3, 8, device=device)
    compiled = torch.compile(function, backend="tritonite", dynamic=True)
    for rows in (3, 3, 5, 3):
        given = torch.randn(rows, 8, device=device), torch.randn(8, device=device)
        torch.testing.assert_close(compiled(*given), eager(function, *given), rtol=0, atol=0)
    (graph,) = backend.graphs
    assert graph.replayed == 2 and len(graph.plans) == 2
    assert "pointwise_program" in tritonite.explain(compiled)
    # Without a plan, the interpreter falls back in the same way.
    graph.reason = "for the test"
    y = torch.randn(8, device=device)
    torch.testing.assert_close(compiled(x, y), eager(function, x, y), rtol=0, atol=0)
    assert graph.interpreted == 1


def test_explain_tells_what_is_fused(device):
    compiled = torch.compile(lambda x, y: (functional.silu(x) * y, (x + y).exp()), backend="tritonite")
    compiled(torch.randn(3, 8, device=device), torch.randn(3, 8, device=device))
    text = tritonite.explain(compiled)
    assert "fused      gated_activation: silu, mul" in text
    assert "fused      pointwise_program: add, exp" in text
    compiled = torch.compile(lambda x: (x + 1).exp(), backend="tritonite", options={"fuse": False})
    compiled(torch.randn(3, device=device))
    assert "fused" not in tritonite.explain(compiled)


def test_operators_that_are_not_selected_stay(device):
    x, y = torch.randn(3, 8, device=device), torch.randn(3, 8, device=device)
    assert fused(lambda x, y: functional.silu(x) * y, x, y) == ["tritonite.silu_and_mul"]
    assert fused(lambda x, y: functional.silu(x) * y, x, y, exclude="silu") == ["aten.silu", "aten.mul.Tensor"]
    assert fused(lambda x: x.exp() * 2, x, include="softmax") == ["aten.exp", "aten.mul.Tensor"]


def test_memory_that_is_written_between(device):
    x, y, weight = torch.randn(3, 8, device=device), torch.randn(3, 8, device=device), torch.randn(8, device=device)

    def gated(x, y):
        gate = functional.silu(x)
        x.mul_(2)
        return gate * y, x + 1

    assert "silu_and_mul" not in check(gated, x, y)

    def late_weight(x, y, weight):
        total = x + y
        weight.mul_(2)
        return rms_norm(total, weight), total

    assert check(late_weight, x, y, weight).count("rms_norm") == 1

    def through_a_view(x, y):
        rows = x[1:]
        before = (x * 2).tanh()
        rows.add_(1)
        return before + (x * 2).tanh(), (rows + y[1:]).exp()

    check(through_a_view, x, y)

    def converted(x):
        wide = x.float()
        before = (wide * 2).sin()
        wide.add_(1)
        return before + (wide * 2).sin() + wide.sum()

    check(converted, x.bfloat16())

    def overlapping(x):
        a = x * 2 + 1
        x.copy_(a.tanh())
        b = x * 2 + 1
        x[:, 0] = b[:, 1]
        return a + b, x.exp() + b

    check(overlapping, x)


def test_random_numbers_in_order(device):
    def function(x):
        first = functional.dropout(x * 2 + 1, 0.5)
        early = torch.rand_like(x).mul(2).add(1)
        x.add_(torch.randn_like(x))
        return first.exp() + early, functional.dropout(x, 0.5) * early

    check(function, torch.randn(5, 8, device=device))


def test_zero_dims_numbers_and_sizes(device):
    x, scalar = torch.randn(3, 4, device=device), torch.tensor(2.5, device=device, dtype=torch.float64)

    def function(x, scalar):
        half = x.half()
        return half * scalar + 1, (scalar * 2 + scalar).exp(), half * torch.tensor(3, device=x.device) + 0.1, x + True

    check(function, x, scalar)
    compiled = torch.compile(lambda x, n: ((x + n).tanh() * x.shape[0] + n / 3, x.t() * x.shape[1]), dynamic=True,
                             backend="tritonite")  # fmt: skip
    for rows, n in ((3, 2), (5, 7), (4, 9)):
        given = torch.randn(rows, rows + 1, device=device)
        expected = eager(lambda x, n: ((x + n).tanh() * x.shape[0] + n / 3, x.t() * x.shape[1]), given, n)
        torch.testing.assert_close(compiled(given, n), expected)


def test_parameters_of_a_recorded_module(device):
    layer = torch.nn.LayerNorm(8).to(device)

    def function(x, y):
        total = x + y
        return layer(total) * layer.weight + layer.bias, total

    found = check(function, torch.randn(3, 8, device=device), torch.randn(3, 8, device=device))
    assert found == ["layer_norm", "pointwise_program"]


def test_nodes_without_values_are_skipped(device):
    graph, mode = fx.Graph(), FakeTensorMode()
    x = graph.placeholder("x")
    unknown = graph.call_function(torch.ops.higher_order.cond, (x, x, x, ()))
    first = graph.call_function(torch.ops.aten.mul.Tensor, (x, unknown))
    second = graph.call_function(torch.ops.aten.silu.default, (first,))
    third = graph.call_function(torch.ops.aten.mul.Tensor, (second, unknown))
    x.meta["val"] = first.meta["val"] = second.meta["val"] = mode.from_tensor(torch.randn(3, device=device))
    graph.output((third,))
    module = fx.GraphModule(torch.nn.Module(), graph)
    run_passes(module, select(), True)
    assert not any(isinstance(node.target, Fused) for node in module.graph.nodes)


def test_control_flow_between_pointwise_operators(device):
    def function(x, flag):
        wide = (x * 2).tanh()
        chosen = torch.cond(flag.sum() > 0, lambda x: x.exp() * 2, lambda x: x * 2 + 1, (wide,))
        return functional.silu(chosen) * wide + 1

    compiled = torch.compile(function, backend="tritonite", fullgraph=True)
    x = torch.randn(4, device=device)
    for value in (1, -1, 1):
        flag = torch.tensor([value], device=device)
        torch.testing.assert_close(compiled(x, flag), eager(function, x, flag))


def test_autocast(device):
    weight = torch.randn(8, 8, device=device)

    def function(x):
        with torch.autocast(device, dtype=torch.bfloat16):
            product = x @ weight
            return product * 2 + x, functional.silu(product) * (x @ weight), rms_norm(product.float(), weight[0])

    x = torch.randn(4, 8, device=device)
    compiled = torch.compile(function, backend="tritonite", fullgraph=True)
    for _ in range(2):
        for found, wanted in zip(compiled(x), eager(function, x), strict=True):
            assert found.dtype is wanted.dtype
            torch.testing.assert_close(found, wanted)
