"""A training step on several processes, which test_distributed.py starts.

`main` runs in each process, and raises unless all of Tritonite's steps give ATen's parameters.
"""

import copy

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import utils
from torch.nn.parallel import DistributedDataParallel

import tritonite
from tritonite import optim


def model(device):
    torch.manual_seed(0)
    layers = torch.nn.Linear(6, 10), torch.nn.GELU(), torch.nn.LayerNorm(10), torch.nn.Linear(10, 3)
    return torch.nn.Sequential(*layers).to(device)


def sharded(device, **options):
    module = model(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in module:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(module, mesh=mesh, **options)


def mixed(device):
    """Compute in bfloat16, with parameters, reduced gradients and states of float32."""
    return sharded(device, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def replicated(device):
    return DistributedDataParallel(model(device))


def trained(make, device, options, clip, served=lambda optimizer: optimizer):
    """Return the parameters after two steps, as ordinary tensors."""
    module = make(device)
    optimizer = served(torch.optim.AdamW(module.parameters(), lr=0.1, **options))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        x = torch.randn(4, 6, generator=generator).to(device)
        module(x).square().mean().backward()
        clip(module.parameters())
        optimizer.step()
        optimizer.zero_grad()
    found = [parameter.detach() for parameter in module.parameters()]
    return [copy.deepcopy(x.full_tensor() if hasattr(x, "full_tensor") else x) for x in found]


def clips(module):
    """Return the functions of torch.nn.utils, or of tritonite.optim, that clip by norm and by value."""
    return (
        lambda parameters: module.clip_grad_norm_(parameters, 0.5),
        lambda parameters: module.clip_grad_value_(parameters, 0.01),
    )


def assert_same(found, expected, prefixes, case):
    """Compare parameters, and assert that operators of these prefixes ran as kernels."""
    counts = {name: own for name, own in tritonite.stats().items() if name.startswith(prefixes)}
    assert any(own.launched + own.replayed for own in counts.values()), (case, counts)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def main(rank, processes, file):
    """Run as one of the processes of a group, which meet at a file."""
    if tritonite.device == "cuda":
        torch.cuda.set_device(rank)
    device = torch.device(tritonite.device, rank) if tritonite.device == "cuda" else torch.device("cpu")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, f"file://{file}", rank=rank, world_size=processes)
    torchs, own = clips(utils), clips(optim)
    for make in (sharded, mixed, replicated):
        # ATen's and Tritonite's forward pass round bfloat16 differently, a step of float32 parameters does not.
        for name in () if make is mixed else ("foreach", "fused"):
            options = {name: True}
            expected = trained(make, device, options, torchs[0])
            tritonite.reset_stats()
            with tritonite.use_gems():
                found = trained(make, device, options, torchs[0])
            assert_same(found, expected, ("_foreach", "_fused"), (make.__name__, name))
        # Without an override of ATen's operators: `fuse` and tritonite.optim's functions launch kernels by themselves.
        for theirs, ours in zip(torchs, own, strict=True):
            expected = trained(make, device, {"foreach": False}, theirs)
            tritonite.reset_stats()
            found = trained(make, device, {"foreach": False}, ours, optim.fuse)
            assert_same(found, expected, "tritonite_optim::adam", (make.__name__, "fuse"))
            # Gradients in memory are clipped by one operator, DTensors by torch's function over kernels.
            clipped = "tritonite::clip_grad" if make is replicated else "_foreach"
            assert_same(found, expected, clipped, (make.__name__, "clip"))
    dist.destroy_process_group()
