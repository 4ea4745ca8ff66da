"""A training step on several processes, which test_distributed.py starts.

Usage: python distributed.py RANK PROCESSES FILE. Prints "equal" if all of Tritonite's steps give ATen's parameters.
"""

import copy
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import tritonite


def model(device):
    torch.manual_seed(0)
    layers = torch.nn.Linear(6, 10), torch.nn.GELU(), torch.nn.LayerNorm(10), torch.nn.Linear(10, 3)
    return torch.nn.Sequential(*layers).to(device)


def sharded(device):
    module = model(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in module:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def replicated(device):
    return DistributedDataParallel(model(device))


def trained(make, device, options, served):
    """Return the parameters after two steps, as ordinary tensors."""
    module = make(device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, **options)
    if served:
        optimizer = served(optimizer)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        x = torch.randn(4, 6, generator=generator).to(device)
        module(x).square().mean().backward()
        clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    found = [parameter.detach() for parameter in module.parameters()]
    return [copy.deepcopy(x.full_tensor() if hasattr(x, "full_tensor") else x) for x in found]


def main(rank, processes, file):
    if tritonite.device == "cuda":
        torch.cuda.set_device(rank)
    device = torch.device(tritonite.device, rank) if tritonite.device == "cuda" else torch.device("cpu")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, f"file://{file}", rank=rank, world_size=processes)
    plans = {"foreach": {"foreach": True}, "fused": {"fused": True}}
    for make in (sharded, replicated):
        for name, options in plans.items():
            expected = trained(make, device, options, None)
            tritonite.reset_stats()
            with tritonite.use_gems():
                found = trained(make, device, options, lambda optimizer: optimizer)
            counts = tritonite.stats()
            lists = [key for key in counts if key.startswith(("_foreach", "_fused"))]
            assert any(counts[key].launched + counts[key].replayed for key in lists), (make.__name__, name, counts)
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, theirs)
    dist.destroy_process_group()
    print("equal")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
