"""Models of transformers, and a small ResNet, by torch.compile(backend="tritonite"): the bits of eager Tritonite."""

import random

import pytest
import tiny_models
import torch
from conftest import FULL
from torch import nn

import tritonite
from tritonite.graph import backend

MODELS = ("bert", "llama", "gpt2", "vit", "t5", "mixtral") if FULL else ("bert", "llama")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def equal(actual, expected):
    return actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_has_the_bits_of_eager(name):
    model, given = tiny_models.make(name), tiny_models.inputs(name)
    # Models with experts take another path while they are compiled.
    eager = torch.compile(model, backend="aot_eager") if name == "mixtral" else model
    with tritonite.use_gems():
        output, gradients = tiny_models.trained(eager, given)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="tritonite")
    for _ in range(2):
        again, found = tiny_models.trained(compiled, given)
        assert torch.equal(again.loss, output.loss) and torch.equal(again.logits, output.logits)
        plain = [{key.removeprefix("_orig_mod."): value for key, value in each.items()} for each in (found, gradients)]
        assert equal(*plain)
    assert all(not graph.reasons and graph.replayed == 1 for graph in backend.graphs)


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels) for _ in range(2)])

    def forward(self, x):
        y = self.norms[0](self.first(x)).relu()
        return (self.norms[1](self.second(y)) + x).relu()


def test_a_small_resnet(device):
    torch.manual_seed(3)
    layers = [nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), Block(4)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)).to(device)
    x = torch.randn(2, 3, 12, 12, device=device)
    start = {name: value.clone() for name, value in model.state_dict().items()}

    def steps(function):
        model.load_state_dict(start)
        losses = []
        for _ in range(3):
            model.zero_grad()
            loss = function(x).square().mean()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
            losses.append(loss.detach())
        return losses, {name: value.clone() for name, value in model.state_dict().items()}

    with tritonite.use_gems():
        losses, state = steps(model)
        found, after = steps(torch.compile(model, backend="tritonite", fullgraph=True))
    assert all(map(torch.equal, found, losses)) and equal(after, state)


def test_many_shapes_of_a_model_without_a_recompilation():
    model = tiny_models.make("llama").eval()
    compiled = torch.compile(model, backend="tritonite", dynamic=True, fullgraph=True)
    draw = random.Random(5)
    torch._dynamo.utils.counters.clear()
    with torch.no_grad(), tritonite.use_gems():
        for _ in range(24 if FULL else 4):
            shape = draw.randrange(2, 5), draw.randrange(3, 40 if FULL else 12)
            ids = torch.randint(3, 64, shape, device=tritonite.device)
            assert torch.equal(compiled(input_ids=ids).logits, model(input_ids=ids).logits)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    (graph,) = backend.graphs
    assert graph.recorded == len(graph.plans) and not graph.interpreted
