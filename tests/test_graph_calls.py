"""Pointwise operators fused into reductions, row operators and products: bits, launches, layouts, and what is left."""

import copy
import operator

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import tritonite
from tritonite.engine.fusing import Prologue, fusing
from tritonite.errors import Decline
from tritonite.graph import backend, fused_call
from tritonite.graph.fused import Fused, calls_of
from tritonite.graph.fused_call import NAME
from tritonite.graph.passes import calls as passes
from tritonite.graph.passes.calls import fuse_calls
from tritonite.runtime.hollow import hollow

pytestmark = pytest.mark.smoke
functional = torch.nn.functional

FLOATS = (torch.float32, torch.bfloat16)
SHAPES = ((4, 6), (3, 2, 33), (1, 8), (0, 8))


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def names(module):
    calls = [node.target for node in calls_of(module.graph)]
    return [target.name() for target in calls if target is not operator.getitem and hasattr(target, "name")]


def fused_calls(module):
    return [node for node in calls_of(module.graph) if str(node.target) == f"{NAME.replace('::', '.')}.default"]


def check(function, *args, count=1, left=0, symbolic=False, calls=(), declines=False, rtol=0.0, atol=0.0):
    """Fuse a traced function. Compare bits, dtypes and strides with those of the separate operators.

    `count` calls have programs, and `left` other operators remain. `declines` says whether separate operators run.
    """
    module = make_fx(function, tracing_mode="symbolic" if symbolic else "fake")(*args)
    separate = copy.deepcopy(module)
    fuse_calls(module)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    assert len(fused_calls(module)) == count, module.code
    assert left is None or len(names(module)) == count + left, names(module)
    separately = []
    for node in module.graph.nodes:
        if isinstance(node.target, Fused):
            node.target.separate = noted(node.target.separate, separately)
    for given in (args, *calls):
        with tritonite.use_gems():
            expected, actual = separate(*copy.deepcopy(given)), module(*copy.deepcopy(given))
        pairs = zip(actual, expected, strict=True) if isinstance(expected, tuple) else [(actual, expected)]
        for ours, theirs in pairs:
            assert ours.dtype is theirs.dtype
            assert ours.shape == theirs.shape
            assert ours.stride() == theirs.stride()
            torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, equal_nan=True)
    assert bool(separately) == declines
    return module


def noted(function, calls):
    def call(*args):
        calls.append(args)
        return function(*args)

    return call


def randn(device, *shapes, dtype=torch.float32):
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


REDUCTIONS = {
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(0, keepdim=True),
    "all": lambda x: x.sum(),
    "amax": lambda x: x.amax(-1),
    "var_mean": lambda x: torch.var_mean(x, -1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "argmax": lambda x: x.argmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "count_nonzero": lambda x: x.count_nonzero(-1),
    "aminmax": lambda x: torch.aminmax(x, dim=-1),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_programs_before_reductions(device, name, dtype):
    for shape in SHAPES[: 3 if name in ("amax", "argmax", "logsumexp", "mean", "aminmax") else 4]:
        x, y, weight = randn(device, shape, shape, shape[-1:], dtype=dtype)
        # Blocks depend on the operands, and so may the order of sums.
        close = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 8e-3, "atol": 1e-2}
        check(lambda x, y, w: REDUCTIONS[name](functional.silu(x * y) + 0.5 * w), x, y, weight, **close)


def root(x):
    return x.square().mean(-1, keepdim=True).add(1e-5).rsqrt()


# A reduction of x, and programs of its result and of y, an element per row.
AFTER = {
    "keepdim": lambda x, y: root(x),
    "operands": lambda x, y: x.sum(-1) * 2 + y,
    "two results": lambda x, y: (lambda z: (z * 2, z * y + 1))(x.amax(-1)),
    "first of two": lambda x, y: (lambda var, mean: (var.sqrt() + y, mean))(*torch.var_mean(x, -1)),
    "index": lambda x, y: x.argmax(-1) * 3 + y,
    "number": lambda x, y: (x.sum() * 0.5).exp(),
    "columns": lambda x, y: x.mean(0).sigmoid() * x[0],
    "dtype": lambda x, y: torch.linalg.vector_norm(x, dim=-1).clamp_min(1e-3).reciprocal().to(torch.float64),
    "bool": lambda x, y: ~(x > 0).any(-1),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", AFTER)
def test_programs_after_reductions(device, name, dtype):
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 8e-3, "atol": 1e-2}
    # Long rows and columns are split, and the last launch has the program.
    for shape in ((4, 6), (3, 33), (5000, 3), (2, 5001))[: 4 if dtype is torch.float32 else 2]:
        x, y = randn(device, shape, shape[:1], dtype=dtype)
        check(AFTER[name], x, y, left=None, **close)


def test_reductions_of_no_elements(device):
    x, y = randn(device, (3, 0), 3)
    check(lambda x, y: x.sum(-1) * 2 + y, x, y)
    check(lambda x, y: (x * 2).sum(0).exp() + 1, x, y)


# Operators whose kernels read their operand and write their result without asking for a program.
UNASKING = {
    "cumsum": lambda x: x.cumsum(-1),
    "flip": lambda x: x.flip(0),
    "sort": lambda x: x.sort(-1)[0],
    "tril": lambda x: x.tril(),
    "repeat": lambda x: x.repeat(2, 1),
}


@pytest.mark.parametrize("name", UNASKING)
def test_values_that_a_host_function_uses_in_memory(device, name, monkeypatch):
    monkeypatch.setattr(passes, "_REDUCTIONS", frozenset((name,)))
    x, y = randn(device, (4, 6), (4, 6))
    function = UNASKING[name]
    check(lambda x, y: function(x * y), x, y, left=None, declines=True)
    check(lambda x, y: function(x) * 2 + 1, x, y, left=None, declines=True)


def test_every_use_of_a_fused_value_asks_for_its_program(device):
    x = torch.ones(4, device=device)
    value = hollow((4,), (1,), torch.float32, x.device)
    prologue = Prologue(None, (x,), (), value)
    for use in (lambda: None, lambda: value + 1, lambda: value.view(2, 2).copy_(x[:1]), lambda: x.copy_(value)):
        with pytest.raises(Decline), fusing(prologue, None):
            use()


def test_one_row_of_bits(device):
    x, y = randn(device, (4, 33), (4, 33), dtype=torch.bfloat16)
    check(lambda x, y: (x * y).sum(-1), x, y)
    check(lambda x, y: torch.softmax(x * y, -1), x, y)


ROWS = {
    "softmax": lambda x, w: torch.softmax(x, -1),
    "columns": lambda x, w: torch.softmax(x, 0),
    "log_softmax": lambda x, w: torch.log_softmax(x, -1),
    "layer_norm": lambda x, w: functional.layer_norm(x, x.shape[-1:], w, w),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_programs_before_and_after_row_operators(device, name, dtype):
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 8e-3, "atol": 1e-2}
    for shape in SHAPES[: 3 if name == "layer_norm" else 4]:
        x, y, weight = randn(device, shape, shape, shape[-1:], dtype=dtype)
        row = ROWS[name]
        check(lambda x, y, w: row(x * 0.5 + y, w), x, y, weight, **close)
        check(lambda x, y, w: row(x, w) * y + w, x, y, weight, **close)
        check(lambda x, y, w: (row(x * y, w) * (w + 1)).to(torch.float64), x, y, weight, **close)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_programs_after_products(device, dtype):
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 8e-3, "atol": 1e-2}
    for rows, inner, columns in ((5, 7, 9), (1, 8, 4), (32, 16, 64), (3, 0, 4), (0, 4, 3)):
        shapes = (rows, inner), (inner, columns), (rows, columns), columns, (rows, 1)
        given = randn(device, *shapes, dtype=dtype)
        check(lambda a, b, y, row, column: functional.silu(a @ b) * 0.5 + y, *given, **close)
        check(lambda a, b, y, row, column: (torch.addmm(row, a, b) * column + row).float(), *given, **close)
        check(lambda a, b, y, row, column: (a @ b).masked_fill(y > 0, float("-inf")), *given, **close)
        # Something else reads the product.
        check(lambda a, b, y, row, column: ((a @ b) * 2, (a @ b).sum(), y), *given, left=2, **close)


def test_programs_after_batched_products_and_views(device):
    given = randn(device, (2, 3, 8), (2, 3, 6), (2, 3, 3), (6, 8), 6, (2, 1, 6))
    close = {"rtol": 1e-5, "atol": 1e-5}

    def linear(x, y, square, weight, bias, middle):
        return functional.linear(x, weight, bias).sigmoid() * y + bias

    module = check(linear, *given, left=2, **close)
    assert sorted(names(module)) == ["aten::t", "aten::view", NAME]
    check(lambda x, y, square, w, b, middle: functional.linear(x, w) + y, *given, left=2, **close)
    check(lambda x, y, square, w, b, middle: torch.bmm(x, x.mT) * 0.125 + square, *given, left=1, **close)
    # An operand that is broadcast along the middle dimension is no matrix of the product's rows.
    check(lambda x, y, square, w, b, middle: functional.linear(x, w) * middle, *given, left=2, declines=True, **close)


def launches_of(function, *args, **options):
    """Return the launches of a compiled function, the largest relative difference from eager mode, and its graph."""
    compiled = torch.compile(function, backend="tritonite", fullgraph=True, options=options)
    for _ in range(2):
        with torch.no_grad():
            actual = compiled(*args)
        with tritonite.use_gems(), torch.no_grad():
            expected = function(*args)
        torch.testing.assert_close(actual, expected)
    graph = backend.graphs[-1]
    assert not graph.reasons
    return graph.plans[-1].launches, tritonite.explain(compiled)


def head(x, weight, bias, mask):
    scores = functional.linear(x, weight, bias).tanh() * 0.5
    chosen = torch.softmax(scores.masked_fill(mask, float("-inf")), -1) * scores
    return (chosen * chosen).sum(-1), functional.layer_norm(chosen, chosen.shape[-1:]) + bias


def test_fewer_launches_and_explain(device):
    x, weight, bias = randn(device, (2, 5, 8), (6, 8), 6)
    mask = torch.rand(2, 5, 6, device=device) > 0.8
    mask[..., 0] = False
    separate, _ = launches_of(head, x, weight, bias, mask, fuse=False)
    fused, text = launches_of(head, x, weight, bias, mask)
    assert fused < separate - 4
    assert text.count("fused      fused_call") >= 3


def test_a_kernel_that_declines_runs_separate_programs(device, monkeypatch):
    def declines(text):
        raise Decline("for the test")

    def function(x, weight, bias):
        return functional.linear(x, weight).tanh() * 0.5 + bias

    given = randn(device, (2, 5, 8), (6, 8), 6)
    compiled = torch.compile(function, backend="tritonite", fullgraph=True)
    monkeypatch.setattr(fused_call, "called", declines)
    for _ in range(2):
        with torch.no_grad(), tritonite.use_gems():
            torch.testing.assert_close(compiled(*given), function(*given), rtol=0, atol=0)
    (graph,) = backend.graphs
    # The product, and one program.
    assert graph.plans[-1].launches == 2
    assert "not fused: for the test" in tritonite.explain(compiled)


def test_dynamic_shapes_without_recompilation(device):
    def function(x, weight, scale):
        scores = torch.softmax(x * scale + x, -1)
        return (scores * x).sum(-1), functional.linear(x, weight).relu() * x

    compiled = torch.compile(function, backend="tritonite", dynamic=True, fullgraph=True)
    weight, scale = randn(device, (8, 8), 8)
    for shape in ((2, 3, 8), (4, 5, 8), (3, 7, 8), (2, 3, 8)):
        (x,) = randn(device, shape)
        with tritonite.use_gems(), torch.no_grad():
            expected = function(x, weight, scale)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, weight, scale), expected)
    (graph,) = backend.graphs
    assert len(graph.plans) == 3 and graph.replayed == 1
    assert "fused_call" in tritonite.explain(compiled)


def test_training(device):
    def loss(x, y, weight):
        hidden = functional.gelu(functional.linear(x, weight) + y)
        scores = torch.log_softmax(hidden * y, -1)
        return (functional.layer_norm(scores * y, (6,)) * weight[:, 0]).square().mean()

    given = [each.requires_grad_() for each in randn(device, (4, 8), (4, 6), (6, 8))]
    compiled = torch.compile(loss, backend="tritonite", fullgraph=True)
    with tritonite.use_gems():
        expected = torch.autograd.grad(loss(*given), given)
    for _ in range(2):
        for ours, theirs in zip(torch.autograd.grad(compiled(*given), given), expected, strict=True):
            torch.testing.assert_close(ours, theirs)
    assert {graph.kind for graph in backend.graphs} == {"forward", "backward"}
    assert "fused_call" in tritonite.explain(compiled)


def test_what_is_left_alone(device):
    x, y = randn(device, (4, 6), (4, 6))
    # Something else reads the value between; all operands are broadcast; an operator that is not selected.
    check(lambda x, y: ((x * y).sum(-1), x * y + 1), x, y, left=2)
    check(lambda x, y: (lambda z: (z.sum(-1), z.exp()))(x * y), x, y, count=0, left=3)
    check(lambda x, y: (x[:, :1] * y[:1]).sum(-1), x, y, count=0, left=4)
    check(lambda x, y: (lambda p: (p * y, p))(torch.softmax(x, -1)), x, y, count=0, left=2)
    # Memory is written between the operator before and the reduction.
    check(lambda x, y: ((z := x * y), x.add_(1), z.sum(-1))[2], x, y, count=0, left=3)
    module = make_fx(lambda x, y: torch.softmax(x * y, -1), tracing_mode="fake")(x, y)
    fuse_calls(module, frozenset(("mul.Tensor",)))
    assert not fused_calls(module)


def test_values_between_two_kernels(device):
    x, y, weight = randn(device, (4, 6), (4, 6), (6, 6))
    # One program is between two kernels, which may each have it.
    check(lambda x, y, w: torch.softmax(torch.softmax(x, -1) * y, -1).sum(-1), x, y, weight, left=2)
    check(lambda x, y, w: torch.softmax((x @ w) * 0.5 + y, -1), x, y, weight, left=1)
    check(lambda x, y, w: (torch.softmax(x + y, -1) * y).sum(), x, y, weight, left=1, rtol=1e-6)


def test_layouts(device):
    x, y = randn(device, (5, 6), (5, 6))
    close = {"rtol": 1e-5, "atol": 1e-5}
    for given in (
        (x.t(), y.t()),
        (x[:, ::2], y[:, ::2]),
        (x[:, 1:], y[:, 1:]),
        (x.t(), y.t().contiguous()),
        (x[:, :1], y[:, :1]),
        (x[0, 0], y[0, 0]),
        (x.expand(3, 5, 6), y.expand(3, 5, 6)),
    ):
        check(lambda x, y: (x * y + 1).sum(), *given, **close)
        if given[0].dim() > 1:
            check(lambda x, y: torch.softmax(x * y, 0), *given, **close)
            check(lambda x, y: torch.softmax(x, -1) * y, *given, **close)
    images = randn(device, (2, 3, 4, 5))[0].to(memory_format=torch.channels_last)
    check(lambda x: (x * 2 + 1).mean((2, 3)), images, **close)
    check(lambda x: torch.softmax(x * 2, 1), images, **close)


def test_long_rows_and_columns(device):
    close = {"rtol": 1e-4, "atol": 1e-4}
    for shape, dim in (((2, 5001), -1), ((1, 40000), -1), ((5000, 3), 0)):
        x, y = randn(device, shape, shape)
        check(lambda x, y: (x * y).sum(dim), x, y, **close)
        check(lambda x, y: torch.softmax(x * y + 1, dim) * y, x, y, **close)


@pytest.mark.parametrize("dtype", (torch.float16, torch.float64), ids=str)
def test_other_dtypes(device, dtype):
    x, y = randn(device, (4, 33), (4, 33), dtype=dtype)
    close = {"rtol": 2e-3, "atol": 2e-3}
    check(lambda x, y: (x * y).sum(-1), x, y, **close)
    check(lambda x, y: torch.softmax(x.float() * 2, -1).to(dtype) * y, x, y, **close)
    check(lambda x, y: (x @ y.mT + 1).float(), x, y, left=1, **close)
    whole = torch.arange(12, device=device).view(3, 4)
    check(lambda x: ((x * 3) % 5).sum(-1), whole)
    check(lambda x: (x > 3).sum(), whole)
    check(lambda x: (x > 3).any(-1), whole)


def test_invariant_bits(device):
    """A row has the same bits in any number of rows."""
    x, y = randn(device, (7, 33), (7, 33))
    module = make_fx(lambda x, y: (torch.softmax(x * y, -1) * y).sum(-1), tracing_mode="symbolic")(x, y)
    fuse_calls(module)
    with tritonite.use_gems(invariant=True):
        assert torch.equal(module(x, y)[2:3], module(x[2:3], y[2:3]))


CONVOLUTIONS = {
    "taps": lambda x, w: functional.conv2d(x, w, padding=1),
    "strided": lambda x, w: functional.conv2d(x, w, w[:, 0, 0, 0], stride=2, padding=1),
    "one tap": lambda x, w: functional.conv2d(x, w[:, :, :1, :1].contiguous()),
    "transposed": lambda x, w: functional.conv_transpose2d(x, w.transpose(0, 1).contiguous(), stride=2),
    "sequence": lambda x, w: functional.conv1d(x[:, :, 0], w[:, :, 0]),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_programs_after_convolutions(device, name):
    convolution = CONVOLUTIONS[name]
    for dtype, layout in ((torch.float32, torch.contiguous_format), (torch.bfloat16, torch.channels_last)):
        close = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 8e-3, "atol": 3e-2}
        for batch in (2, 1, 0):
            x, weight = randn(device, (batch, 3, 5, 6), (4, 3, 3, 3), dtype=dtype)
            x = x.contiguous(memory_format=layout)
            y = torch.randn_like(convolution(x, weight))
            scale, shift = (randn(device, (4, *(1,) * (y.dim() - 2)), dtype=dtype)[0] for _ in range(2))
            module = check(
                lambda x, w, y, a, b: convolution(x, w) * a + b, x, weight, y, scale, shift, left=None, **close
            )
            assert NAME in names(module)
            check(
                lambda x, w, y, a, b: (convolution(x, w) * 0.5).sigmoid() * y,
                x,
                weight,
                y,
                scale,
                shift,
                left=None,
                **close,
            )


def test_convolutions_whose_programs_are_launched_alone(device):
    x, weight, y = randn(device, (2, 4, 5, 5), (4, 1, 3, 3), (2, 4, 3, 3))
    check(lambda x, w: functional.conv2d(x, w, groups=4) * 2, x, weight, declines=True)
    close = {"rtol": 1e-5, "atol": 1e-5}
    check(lambda x, w, y: functional.conv2d(x, w) * y, x, weight.expand(4, 4, 3, 3), y.mT, declines=True, **close)
