"""Measuring a model of your own with Tritonite beside PyTorch's kernels. `tritonite bench` measures all operators."""

import torch

import tritonite
from tritonite.bench.timing import ATEN, TRITONITE, measure

size = 1024 if tritonite.device == "cuda" else 64
model = torch.nn.Sequential(torch.nn.LayerNorm(size), torch.nn.Linear(size, size), torch.nn.GELU())
model = model.to(tritonite.device).eval()
x = torch.randn(32, size, device=tritonite.device)


def run():
    with torch.no_grad():
        model(x)


# Both are run before they are timed, which compiles the kernels, and then take turns. "*" enables every operator.
# On a GPU these are times of the device. Times of the interpreter say nothing about those of a GPU.
times = measure({ATEN: run, TRITONITE: run}, "*", rounds=5)
for name, time in times.items():
    print(f"{name}: {time.median:.1f} microseconds")
print(f"speedup: {times['aten'].median / times['tritonite'].median:.2f}")

# One more run: who runs each operator, how often, and why Tritonite does not, if it does not.
print(tritonite.report(run))
