"""Training with a fused optimizer: clipping and the update of all parameters are a few launches a step."""

import torch

import tritonite

device = tritonite.device
torch.manual_seed(0)
inputs = torch.randn(64, 8, device=device)
targets = inputs.sin().sum(dim=1, keepdim=True)


def train(fused):
    """Return the losses of a few steps from the same start."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    # Neither function needs tritonite.enable(), which would serve the forward and the backward pass.
    clip = tritonite.optim.clip_grad_norm_ if fused else torch.nn.utils.clip_grad_norm_
    if fused:
        tritonite.optim.fuse(optimizer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    losses = []
    for _ in range(5):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


plain, fused = train(False), train(True)
for step, (theirs, ours) in enumerate(zip(plain, fused, strict=True), 1):
    print(f"step {step}: loss {theirs:.5f} with PyTorch's kernels, {ours:.5f} with Triton's")
print(tritonite.stats())

assert all(abs(theirs - ours) < 1e-4 for theirs, ours in zip(plain, fused, strict=True))
assert fused[-1] < fused[0]
