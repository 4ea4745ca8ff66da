"""Passes over graphs of ATen's operators: regions of pointwise operators become programs."""

import copy
import operator

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import tritonite
from tritonite.graph.fused import calls_of
from tritonite.graph.passes import pointwise
from tritonite.graph.passes.pointwise import fuse_pointwise
from tritonite.graph.program import NAME

pytestmark = [pytest.mark.smoke, pytest.mark.host]
functional = torch.nn.functional


def traced(function, *args, symbolic=False):
    return make_fx(function, tracing_mode="symbolic" if symbolic else "fake")(*args)


def names(module):
    """Return the names of a graph's operators, in order."""
    calls = [node.target for node in calls_of(module.graph)]
    return [target.name() for target in calls if target is not operator.getitem and hasattr(target, "name")]


def programs(module):
    return [node.args[2] for node in calls_of(module.graph) if str(node.target) in NAMES]


NAMES = (f"{NAME.replace('::', '.')}.default",)


def check(function, *args, count=1, symbolic=False, calls=()):
    """Fuse a traced function. Compare bits, dtypes and strides with those of the separate operators."""
    module = traced(function, *args, symbolic=symbolic)
    separate = copy.deepcopy(module)
    fuse_pointwise(module)
    module.graph.lint()
    assert len(programs(module)) == count, module.code
    for given in (args, *calls):
        with tritonite.use_gems():
            expected, actual = separate(*copy.deepcopy(given)), module(*copy.deepcopy(given))
        pairs = zip(actual, expected, strict=True) if isinstance(expected, tuple) else [(actual, expected)]
        for ours, theirs in pairs:
            assert ours.dtype is theirs.dtype
            assert ours.stride() == theirs.stride()
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    return module


def block(x, y, weight, mask):
    hidden = functional.gelu(x * y + weight, approximate="tanh")
    chosen = torch.where(mask, hidden, 2.5 * hidden.float())
    wide = hidden.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    normed = (wide * scale).to(x.dtype) * weight
    return chosen, normed, hidden.masked_fill(mask, -1.0), functional.silu(normed) * normed


def operands(device, *shape, dtype=torch.bfloat16):
    x, y = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    return x, y, torch.randn(shape[-1], device=device).to(dtype), torch.rand(shape, device=device) > 0.5


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64), ids=str)
def test_a_block_around_a_reduction_is_two_programs(device, dtype):
    module = check(block, *operands(device, 4, 6, dtype=dtype), count=2)
    assert names(module) == [NAME, "aten::mean.dim", NAME]


def test_symbolic_sizes(device):
    others = [operands(device, *shape) for shape in ((7, 33), (2, 2), (64, 6))]
    module = check(block, *operands(device, 4, 6), count=2, symbolic=True, calls=others)
    assert names(module).count(NAME) == 2


def test_sizes_as_numbers(device):
    def by_rows(x):
        return (x * 2 + 1) * x.shape[0]

    x = torch.randn(5, 6, device=device, dtype=torch.float64)
    check(by_rows, x, symbolic=True, calls=[(torch.randn(9, 3, device=device, dtype=torch.float64),)])


def test_layouts_and_small_shapes(device):
    def chain(x, y):
        return torch.tanh(x + y) * y, (x + y) > 0

    x, y = (torch.randn(5, 6, device=device) for _ in range(2))
    for given in (
        (x.t(), y.t()),
        (x[:, ::2], y[:, ::2]),
        (x[:, :1], y[:, :1]),
        (x[0, 0], y[0, 0]),
        (x[:0], y[:0]),
        (x.t(), y.t().contiguous()),
        (x.expand(3, 5, 6), y.expand(3, 5, 6)),
        (x[None].to(memory_format=torch.preserve_format), y[None]),
    ):
        check(chain, *given)


def test_integers_and_bools(device):
    def mixed(x, y, mask):
        small = (x * y).clamp(-100, 100)
        return small % 7, (small > 3) & mask, torch.where(mask, small, 0), small.to(torch.int16) + y

    x = torch.arange(-6, 6, device=device, dtype=torch.int8)
    check(mixed, x, torch.arange(12, device=device, dtype=torch.int32), x > 0)


def test_a_smaller_producer_is_repeated_where_only_the_region_reads_it(device):
    x, rows = torch.randn(4, 6, device=device), torch.rand(4, 1, device=device)
    check(lambda x, r: x * (r + 1).rsqrt(), x, rows)
    check(lambda x, r: (x * (r + 1), (r + 1) * 2), x, rows, count=2)

    def shared(x, r):
        scale = (r + 1).rsqrt()
        return (x * scale).exp(), scale

    assert [text.count(";") for text in programs(check(shared, x, rows, count=2))] == [1, 1]


def test_regions_never_depend_on_each_other(device):
    def crossed(x, y):
        # Each sum reads one chain and feeds the other.
        a, b = x * 2 + 1, y * 3 - 1
        left, right = a.sum(-1, keepdim=True), b.sum(-1, keepdim=True)
        c, d = torch.tanh(a * right), torch.tanh(b * left)
        return (c + d).sin() * a, d - c

    check(crossed, torch.randn(4, 6, device=device), torch.randn(4, 6, device=device), count=3)

    def through(x):
        a = x * 2
        b = a.cumsum(0)
        return (a + b).exp() * a

    check(through, torch.randn(4, 6, device=device), count=1)


def test_what_writes_memory_stays_in_order(device):
    def writing(x, y):
        a = x * 2
        b = a + y
        y.copy_(b)
        c = y * 3
        return (c + 1) * a, b

    module = check(writing, torch.randn(4, 6, device=device), torch.randn(4, 6, device=device), count=2)
    assert names(module) == [NAME, "aten::copy_", NAME]


def test_draws_keep_their_order(device):
    def drawing(x):
        a = torch.rand_like(x)
        late = (x.sum() + x) * a
        b = torch.rand_like(x)
        return late * 2 + b, b

    x = torch.randn(4, 6, device=device)
    module = traced(drawing, x)
    separate = copy.deepcopy(module)
    fuse_pointwise(module)
    assert [name for name in names(module) if "rand" in name] == ["aten::rand_like"] * 2
    torch.manual_seed(5)
    expected = separate(x)
    torch.manual_seed(5)
    torch.testing.assert_close(module(x), expected)
    assert len(programs(module)) == 1


def test_limits_of_a_region(device, monkeypatch):
    def long(x):
        for i in range(9):
            x = torch.sin(x + i)
        return x

    monkeypatch.setattr(pointwise, "_MOST_STEPS", 6)
    check(long, torch.randn(8, device=device), count=3)
    monkeypatch.setattr(pointwise, "_MOST_TENSORS", 4)
    check(lambda a, b, c, d, e: a + b + c + d + e, *[torch.randn(8, device=device) for _ in range(5)], count=2)


def test_what_is_left_alone(device):
    x = torch.randn(4, 6, device=device)
    # One operator; a number out of the dtype's range; complex numbers; a view between two operators.
    check(lambda x: x + 1, x, count=0)
    check(lambda x: x.half() * 1e6, x, count=0)
    check(lambda x: torch.view_as_real((x + 1j * x) * 2), x, count=0)
    check(lambda x: (x + 1).t()[0] * 2, x, count=0)


def test_operators_that_share_an_input_become_one_program(device):
    x, y, z = (torch.randn(4, 6, device=device) for _ in range(3))
    check(lambda x, y, z: ((x + y).exp(), (x * z).sin()), x, y, z)
    # One depends on the other by way of a sum.
    check(lambda x, y: (x + 1).exp() * y + ((x * 2).cos() + (x + 1).exp().sum()), x, y, count=2)
