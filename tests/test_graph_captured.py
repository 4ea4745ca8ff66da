"""Compiled graphs that are captured as CUDA graphs: shapes, training steps, and inputs that are written."""

import copy

import pytest
import torch
from torch import nn

import tritonite
import tritonite.graph

pytestmark = pytest.mark.skipif(tritonite.device != "cuda", reason="only NVIDIA's GPUs have CUDA graphs")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model():
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8)).cuda()


def test_each_shape_is_captured(device):
    module = model()
    compiled = torch.compile(module, backend="tritonite", mode="reduce-overhead")
    with torch.no_grad():
        # The second size makes the sizes symbols; the others are captured one by one, and replayed in any order.
        for size in (8, 6, 4, 4, 8, 6, 8, 4, 5, 6, 4):
            torch.compiler.cudagraph_mark_step_begin()
            x = torch.randn(size, 16, device=device)
            torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-4)


def test_training_steps_of_several_shapes(device):
    module = model()
    expected = copy.deepcopy(module)
    compiled = torch.compile(module, backend="tritonite", mode="reduce-overhead")
    for size in (8, 6, 4, 8, 4, 6, 8):
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.randn(size, 16, device=device)
        compiled(x).square().mean().backward()
        expected(x).square().mean().backward()
        for found, wanted in zip(module.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-3, atol=1e-3)
        module.zero_grad()
        expected.zero_grad()


def test_an_input_is_written(device):
    compiled = torch.compile(lambda x, y: x.add_(y).exp(), backend="tritonite", mode="reduce-overhead")
    for size in (4, 3, 2, 4, 3):
        x, y = torch.randn(2, size, device=device)
        wanted = x + y
        torch.compiler.cudagraph_mark_step_begin()
        torch.testing.assert_close(compiled(x, y), wanted.exp())
        torch.testing.assert_close(x, wanted)


class Cache(nn.Module):
    """A buffer that calls write by places, by a slice and by a view."""

    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.zeros(4, 8, 3))

    def forward(self, x, places):
        self.kept.index_copy_(1, places, x)
        self.kept[:, 6:] = x
        self.kept[0].index_add_(0, places, x[0])
        return self.kept.softmax(-1)


def test_a_cache_is_written_in_place(device):
    module = Cache().to(device)
    expected = copy.deepcopy(module)
    compiled = torch.compile(module, backend="tritonite", mode="reduce-overhead")
    with torch.no_grad():
        for first in (0, 3, 1, 4, 2):
            places = torch.tensor([first, first + 1], device=device)
            x = torch.randn(4, 2, 3, device=device)
            torch.compiler.cudagraph_mark_step_begin()
            torch.testing.assert_close(compiled(x, places), expected(x, places))
            torch.testing.assert_close(module.kept, expected.kept)
