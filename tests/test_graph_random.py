"""Random graphs of pointwise operators, reductions, views and writes: compiled and recorded, fused or not, as eager."""

import random

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import tritonite

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool)
SHAPES = ((3, 4), (4,), (3, 1), (2, 3, 4), (1, 1, 4), (), (0, 4), (3, 0), (1,))


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def floating(x):
    return x if x.is_floating_point() else x.to(torch.float32)


def integral(x):
    return x if not x.is_floating_point() else (x > 0).to(torch.int16)


def broadcast(function):
    def call(draw, x, y):
        try:
            torch.broadcast_shapes(x.shape, y.shape)
        except RuntimeError:
            y = y.sum()
        return function(x, y)

    return call


def reduced(function):
    def call(draw, x, y):
        if not x.dim() or 0 in x.shape:
            return function(x.reshape(-1).sum(0, keepdim=True), 0)
        return function(x, draw.randrange(x.dim()), keepdim=draw.random() < 0.7)

    return call


def view(draw, x, y):
    if x.dim() > 1 and draw.random() < 0.5:
        return x.transpose(0, draw.randrange(1, x.dim()))
    if x.dim() and draw.random() < 0.3:
        return x.narrow(-1, 0, x.shape[-1] - x.shape[-1] // 2)
    return draw.choice((lambda: x.reshape(-1), lambda: x.unsqueeze(0), lambda: x[None].expand(2, *x.shape)))()


def written(draw, x, y):
    """Return a copy that is written twice, with a read between."""
    own = floating(x).clone()
    before = own * 2 + 1
    own.mul_(draw.uniform(-1, 1))
    if own.dim() and own.shape[0]:
        own[0].add_(0.5)
    return before + own.tanh()


POINTWISE = (
    broadcast(lambda x, y: x + y),
    broadcast(lambda x, y: floating(x) - 0.5 * y),
    broadcast(lambda x, y: torch.sub(floating(x), floating(y), alpha=0.25)),
    broadcast(lambda x, y: x * y),
    broadcast(lambda x, y: torch.where(x > 0, x, y)),
    broadcast(lambda x, y: torch.maximum(x, y)),
    broadcast(lambda x, y: (x >= y) | (x < 1)),
    broadcast(lambda x, y: integral(x) ^ integral(y)),
    broadcast(lambda x, y: torch.nn.functional.silu(floating(x)) * y),
    lambda draw, x, y: floating(x).tanh(),
    lambda draw, x, y: torch.sigmoid(floating(x)),
    lambda draw, x, y: torch.nn.functional.gelu(floating(x)),
    lambda draw, x, y: floating(x).clamp(-2, 1.5).abs(),
    lambda draw, x, y: integral(x) * draw.randrange(-3, 4),
    lambda draw, x, y: x.to(draw.choice((torch.float32, torch.bfloat16, torch.float64))),
    lambda draw, x, y: floating(x) * draw.choice((2, 0.5, -1.0)) + draw.choice((1, 0.25)),
)
OTHERS = (
    reduced(lambda x, *dims, **kept: floating(x).mean(*dims, **kept)),
    reduced(lambda x, *dims, **kept: x.sum(*dims, **kept)),
    reduced(lambda x, *dims, **kept: x.amax(*dims, **kept)),
    lambda draw, x, y: torch.softmax(floating(x), -1) if x.dim() else floating(x).exp(),
    view,
    view,
    written,
)


def inputs(seed, device):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    found = []
    for _ in range(draw.randrange(2, 5)):
        value = torch.randn(draw.choice(SHAPES), device=device) * 3
        found.append((value.abs() if draw.random() < 0.2 else value).to(draw.choice(DTYPES)))
    return [x.t() if x.dim() == 2 and draw.random() < 0.3 else x for x in found]


def graph(seed):
    """Return a function of several tensors. Every call draws the same operators."""

    def function(*tensors):
        draw = random.Random(seed)
        values = list(tensors)
        for _ in range(draw.randrange(5, 16)):
            step = draw.choice(POINTWISE if draw.random() < 0.7 else OTHERS)
            values.append(step(draw, values[-1] if draw.random() < 0.6 else draw.choice(values), draw.choice(values)))
        if draw.random() < 0.4 and tensors[0].is_floating_point():
            last = floating(values[-1]).sum().clamp(-3, 3)
            tensors[0].mul_(0.5)
            values.append(tensors[0] * 2 + last)
        return [values[-1], *draw.sample(values[len(tensors) :], 2)]

    return function


def check(seed, device, function):
    own = inputs(seed, device)
    with tritonite.use_gems():
        expected = graph(seed)(*own)
    for fuse, tolerances in ((False, {"rtol": 0, "atol": 0}), (True, {})):
        torch._dynamo.reset()
        call = function(graph(seed), {"fuse": fuse})
        for _ in range(2):
            given = inputs(seed, device)
            actual = call(*given)
            for found, wanted in zip([*actual, *given], [*expected, *own], strict=True):
                assert found.dtype is wanted.dtype and found.shape == wanted.shape
                assert found.stride() == wanted.stride() or not found.numel()
                torch.testing.assert_close(found, wanted, equal_nan=True, **tolerances)


@pytest.mark.parametrize("seed", range(10))
def test_compiled(device, seed):
    # Dynamo does not trace a generator of the standard library.
    traced = make_fx(graph(seed))(*inputs(seed, device))

    def compile(_, options):
        return torch.compile(traced, backend="tritonite", options=options)

    check(seed, device, compile)


@pytest.mark.parametrize("seed", range(100, 125))
def test_recorded(device, seed):
    with torch.no_grad():
        check(seed, device, tritonite.record)
