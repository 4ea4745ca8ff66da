"""torch.compile(backend="tritonite") with DDP, FSDP2 and functional collectives, in a group of one process."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import tritonite
from tritonite.graph import backend


@pytest.fixture(autouse=True)
def group(device):
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    dist.destroy_process_group()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return functional.gelu(self.linear(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x):
        return self.second(self.first(x)).sin()


def gradients(model, function, x):
    for _ in range(2):
        model.zero_grad()
        function(x).square().mean().backward()
    return [getattr(each.grad, "full_tensor", lambda grad=each.grad: grad)() for each in model.parameters()]


@pytest.mark.parametrize("fuse", (False, True), ids=("separate", "fused"))
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_training_step(kind, device, fuse):
    model = Model().to(device)
    x = torch.randn(4, 8, device=device)
    own = copy.deepcopy(model)
    if kind == "fsdp":
        mesh = init_device_mesh(device, (1,))
        for each in (own.first, own.second, own):
            fully_shard(each, mesh=mesh)
    wrapped = nn.parallel.DistributedDataParallel(own) if kind == "ddp" else own
    with tritonite.use_gems():
        expected = gradients(model, model, x)
        actual = gradients(own, torch.compile(wrapped, backend="tritonite", options={"fuse": fuse}), x)
    assert all(map(torch.allclose if fuse else torch.equal, actual, expected))
    assert backend.graphs and all(graph.replayed and not graph.reasons for graph in backend.graphs)


def test_memory_of_a_collective_is_not_shared(device):
    compiled = torch.compile(lambda x: all_reduce(x * 2, "sum", dist.group.WORLD) + 1, backend="tritonite")
    x = torch.randn(4, device=device)
    for _ in range(3):
        assert torch.equal(compiled(x), x * 2 + 1)
    (graph,) = backend.graphs
    assert graph.plans[0].arena == 0
