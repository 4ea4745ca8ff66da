"""Training: forward pass, gradients and optimizer run as Triton kernels, in bfloat16 by autocast."""

import contextlib

import torch

import tritonite

device = tritonite.device
torch.manual_seed(0)
inputs = torch.randn(64, 16, device=device)
labels = (inputs.sum(dim=1) > 0).long()


def train(scope):
    """The losses of a few steps from the same start, in a scope."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 2)
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for _ in range(5):
        # backward() belongs into the scope as well: gradients are operators like any other.
        with scope:
            optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    return losses


pytorch, triton = train(contextlib.nullcontext()), train(tritonite.use_gems())
for step, (theirs, ours) in enumerate(zip(pytorch, triton, strict=True), 1):
    print(f"step {step}: loss {theirs:.4f} with PyTorch's kernels, {ours:.4f} with Triton's")

# Both round to bfloat16, so that the last digits differ.
assert all(abs(theirs - ours) < 0.02 for theirs, ours in zip(pytorch, triton, strict=True))
assert triton[-1] < triton[0]
