"""Measure steps of AdamW over large and over many small parameters, and operators over lists. Needs a GPU.

    python tools/measure_optimizers.py

Prints milliseconds of the device between the first and the last kernel of a call, the share of copy bandwidth, and for
small parameters the host's microseconds. A step of torch's class includes its Python code, in which a GPU with little
work waits.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

import tritonite
from tritonite.bench import timing

# The parameters of Llama-3.2-1B, whose head is the embedding.
WIDTH, INNER, WORDS, LAYERS = 2048, 8192, 128256, 16
LAYER = [(WIDTH, WIDTH)] * 2 + [(512, WIDTH)] * 2 + [(INNER, WIDTH)] * 2 + [(WIDTH, INNER), (WIDTH,), (WIDTH,)]
LARGE = [(WORDS, WIDTH), *LAYER * LAYERS, (WIDTH,)]
SMALL = [(64, 64)] * 1500
# Bytes that AdamW reads and writes for a byte of parameters: parameter, gradient and two moments; all but the gradient.
ADAMW_STREAMS = 7


def device_time(call: Callable[[], object], rounds: int = 5) -> float:
    """Return the median milliseconds of a call on the device."""
    return statistics.median(timing.device_samples(call, rounds + 2)[2:]) / 1e3


def host_time(call: Callable[[], object], rounds: int = 20) -> float:
    """Return the median microseconds until a call returns."""
    found = []
    for i in range(rounds + 4):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        if i >= 4:
            found.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(found)


def parameters(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Return parameters with gradients."""
    made = [torch.nn.Parameter(torch.randn(shape, device="cuda", dtype=dtype) * 0.02) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter) * 0.01
    return made


def steps(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, bandwidth: float) -> None:
    """Print the times of a step by ATen, by kernels behind ATen's operators, and by `tritonite.optim.fuse`."""
    own = parameters(shapes, dtype)
    moved = ADAMW_STREAMS * sum(parameter.nbytes for parameter in own)
    for options in ({"foreach": True}, {"fused": True}):
        for served in ("ATen", "enable()", "optim.fuse"):
            optimizer = torch.optim.AdamW(own, lr=1e-3, **options)
            if served == "optim.fuse":
                tritonite.optim.fuse(optimizer)
            with tritonite.use_gems([] if served == "ATen" else None):
                taken, host = device_time(optimizer.step), host_time(optimizer.step)
            name = f"{dtype} {len(own)} tensors, {next(iter(options))}, {served}"
            print(
                f"{name}: {taken:.3f} ms, {moved / taken / 1e6 / bandwidth:.2f} of copy bandwidth, host {host:.0f} us"
            )
            optimizer.state.clear()


def operators() -> None:
    """Print the times of operators over the gradients of the large parameters, ATen's first."""
    own = parameters(LARGE, torch.bfloat16)
    gradients = [parameter.grad for parameter in own]
    calls: dict[str, Callable[[], object]] = {
        "_foreach_norm": lambda: torch._foreach_norm(gradients),
        "_foreach_mul_": lambda: torch._foreach_mul_(gradients, 0.99),
        "_foreach_sqrt": lambda: torch._foreach_sqrt(gradients),
        "clip_grad_norm_": lambda: torch.nn.utils.clip_grad_norm_(own, 1.0),
    }
    for name, call in calls.items():
        aten = device_time(call)
        with tritonite.use_gems():
            print(f"{name}: {aten:.3f} ms, {device_time(call):.3f} ms")
    print(f"tritonite.optim.clip_grad_norm_: {device_time(lambda: tritonite.optim.clip_grad_norm_(own, 1.0)):.3f} ms")


def copy_bandwidth() -> float:
    """Return the GB/s that a copy of 2 GiB reads and writes."""
    source = torch.empty(2**30, dtype=torch.bfloat16, device="cuda")
    destination = torch.empty_like(source)
    return 2 * source.nbytes / device_time(lambda: destination.copy_(source)) / 1e6


def main() -> None:
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy bandwidth {bandwidth:.0f} GB/s")
    steps(LARGE, torch.bfloat16, bandwidth)
    steps(LARGE[:40], torch.float32, bandwidth)
    steps(SMALL, torch.bfloat16, bandwidth)
    operators()


if __name__ == "__main__":
    main()
