"""Pointwise operators fused into reductions, row operators and products: bits, launches, layouts, and what is left."""

import copy
import operator

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import tritonite
from tritonite.graph import backend
from tritonite.graph.fused import calls_of
from tritonite.graph.fused_call import NAME
from tritonite.graph.passes.calls import fuse_calls

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


def check(function, *args, count=1, left=0, symbolic=False, calls=(), rtol=0.0, atol=0.0):
    """Fuse a traced function. Compare bits, dtypes and strides with those of the separate operators.

    `count` calls have programs, and `left` other operators remain.
    """
    module = make_fx(function, tracing_mode="symbolic" if symbolic else "fake")(*args)
    separate = copy.deepcopy(module)
    fuse_calls(module)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    assert len(fused_calls(module)) == count, module.code
    assert len(names(module)) == count + left, names(module)
    for given in (args, *calls):
        with tritonite.use_gems():
            expected, actual = separate(*copy.deepcopy(given)), module(*copy.deepcopy(given))
        pairs = zip(actual, expected, strict=True) if isinstance(expected, tuple) else [(actual, expected)]
        for ours, theirs in pairs:
            assert ours.dtype is theirs.dtype
            assert ours.shape == theirs.shape
            assert ours.stride() == theirs.stride()
            torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, equal_nan=True)
    return module


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
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_programs_before_reductions(device, name, dtype):
    for shape in SHAPES[: 3 if name in ("amax", "argmax", "logsumexp", "mean") else 4]:
        x, y, weight = randn(device, shape, shape, shape[-1:], dtype=dtype)
        # Blocks depend on the operands, and so may the order of sums.
        close = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 8e-3, "atol": 1e-2}
        check(lambda x, y, w: REDUCTIONS[name](functional.silu(x * y) + 0.5 * w), x, y, weight, **close)


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
        check(lambda a, b, y, row, column: (a @ b).masked_fill(y > 0, float('-inf')), *given, **close)
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
    check(lambda x, y, square, w, b, middle: functional.linear(x, w) * middle, *given, left=2, **close)
