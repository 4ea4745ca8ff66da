"""Cross entropy over shards of a vocabulary on several processes, which test_linear_cross_entropy.py starts.

`main` runs in each process, and raises unless the results are those of the whole.
"""

import torch
import torch.distributed as dist

import tritonite
from tritonite import fused

TOKENS, SIZE, CLASSES = 7, 8, 12


def operands(device):
    """Return input, weight, bias, target and class weights, the same on every process."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(device)
    target = torch.randint(0, CLASSES, (TOKENS,), generator=generator)
    target[2] = -100
    tensors = draw(TOKENS, SIZE), draw(CLASSES, SIZE), draw(CLASSES), target.to(device), draw(CLASSES).abs()
    return (*tensors, draw(TOKENS).abs())


def main(rank, processes, file):
    """Run as one of the processes of a group, which meet at a file."""
    if tritonite.device == "cuda":
        torch.cuda.set_device(rank)
    device = torch.device(tritonite.device, rank) if tritonite.device == "cuda" else torch.device("cpu")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, f"file://{file}", rank=rank, world_size=processes)
    own = slice(rank * CLASSES // processes, (rank + 1) * CLASSES // processes)
    for reduction in ("mean", "none"):
        for weighted in (False, True):
            options = {"label_smoothing": 0.1, "softcap": 4.0, "z_loss": 0.1, "chunk_tokens": 4} if weighted else {}
            x, weight, bias, target, class_weight, scale = operands(device)
            given = {"class_weight": class_weight, "token_scale": scale} if weighted else {}
            given |= options | {"reduction": reduction, "return_z_loss": True, "return_accuracy": True}
            whole = [each.clone().requires_grad_() for each in (x, weight, bias)]
            shard = [x.clone().requires_grad_(), *(each[own].clone().requires_grad_() for each in (weight, bias))]
            expected = fused.linear_cross_entropy(*whole[:2], target, whole[2], **given)
            found = fused.linear_cross_entropy(*shard[:2], target, shard[2], process_group=dist.group.WORLD, **given)
            torch.testing.assert_close(found, expected)
            grad = torch.linspace(1, 2, expected[0].numel(), device=device).view(expected[0].shape)
            expected[0].backward(grad)
            found[0].backward(grad)
            torch.testing.assert_close(shard[0].grad, whole[0].grad)
            torch.testing.assert_close([each.grad for each in shard[1:]], [each.grad[own] for each in whole[1:]])
    dist.destroy_process_group()
