"""Time pointwise operators against ATen on this GPU, side by side, and print ratios (above 1 is faster than ATen).

    python tools/measure_pointwise.py [--json FILE] [--quick]

Device time: CUDA events around runs of both, alternating, median; tensors of 8192x8192 exceed the L2 cache. Host time:
64x64 operands, wall clock without synchronising inside a round. Each result is compared with ATen's first.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

import tritonite

SIDE = 8192
ROUNDS = 15


def device_time(run: Callable[[], Any], repeats: int) -> float:
    """Milliseconds a call, of `repeats` calls in a row."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # The device waits while the host queues all the calls, so that host time does not count.
    torch.cuda._sleep(2_000_000)
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def host_time(run: Callable[[], Any], calls: int = 300) -> float:
    """Microseconds a call on the host."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    taken = time.perf_counter() - begin
    torch.cuda.synchronize()
    return taken / calls * 1e6


def compare(
    run: Callable[[], Any], timer: Callable[..., float], rounds: int, *args: int, **scope: Any
) -> tuple[float, float]:
    """Medians of (ATen, Tritonite), alternating; `scope` goes to `use_gems`."""
    aten, ours = [], []
    run()
    with tritonite.use_gems(**scope):
        run()
    for _ in range(rounds):
        aten.append(timer(run, *args))
        with tritonite.use_gems(**scope):
            ours.append(timer(run, *args))
    return statistics.median(aten), statistics.median(ours)


def cases(dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda").to(dtype)

    x, y, row, column = make(SIDE, SIDE), make(SIDE, SIDE), make(SIDE), make(SIDE, 1)
    positive, ints = x.abs() + 0.1, torch.randint(-99, 99, (SIDE, SIDE), device="cuda", dtype=torch.int32)
    condition, wide = x > 0, make(SIDE, 2 * SIDE)
    aten = torch.ops.aten
    out = torch.empty_like(x)
    found: dict[str, Callable[[], Any]] = {
        name: functools.partial(getattr(torch, name), x)
        for name in ("abs", "neg", "exp", "tanh", "relu", "sigmoid", "isnan")
    }
    found |= {
        "silu": lambda: functional.silu(x),
        "gelu": lambda: functional.gelu(x),
        "gelu tanh": lambda: functional.gelu(x, approximate="tanh"),
        "rsqrt": lambda: torch.rsqrt(positive),
        "add": lambda: torch.add(x, y),
        "sub": lambda: torch.sub(x, y),
        "mul": lambda: torch.mul(x, y),
        "div": lambda: torch.div(x, y),
        "pow": lambda: torch.pow(positive, y),
        "where": lambda: torch.where(condition, x, y),
        "clamp": lambda: torch.clamp(x, -1.0, 1.0),
        "eq": lambda: torch.eq(x, y),
        "bitwise_and": lambda: torch.bitwise_and(ints, ints),
        "silu_backward": lambda: aten.silu_backward.grad_input(x, y, grad_input=out),
        "gelu_backward": lambda: aten.gelu_backward(x, y),
        "gelu_backward tanh": lambda: aten.gelu_backward(x, y, approximate="tanh"),
        "add row broadcast": lambda: torch.add(x, row),
        "add column broadcast": lambda: torch.add(x, column),
        "add transposed": lambda: torch.add(x, y.t()),
        "exp transposed": lambda: torch.exp(x.t()),
        "add strided": lambda: torch.add(x, wide[:, ::2]),
        "add sliced": lambda: torch.add(x, wide[:, :SIDE]),
    }
    return found


def host_cases() -> dict[str, Callable[[], Any]]:
    x, y = torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda")
    condition = x > 0
    return {
        "add": lambda: torch.add(x, y),
        "mul": lambda: torch.mul(x, y),
        "mul number": lambda: x * 0.5,
        "gelu": lambda: functional.gelu(x),
        "where": lambda: torch.where(condition, x, y),
        "add_": lambda: x.add_(y),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    known = {name.partition(".")[0] for name in tritonite.overloads()}
    source = torch.randn(SIDE, SIDE, device="cuda")
    target = torch.empty_like(source)
    copy = statistics.median(device_time(lambda: target.copy_(source), 10) for _ in range(ROUNDS))
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    results["copy_TB_s"] = 2 * source.nbytes / copy / 1e9
    print(f"copy {results['copy_TB_s']:.2f} TB/s")
    ratios = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for name, run in cases(dtype).items():
            if name.split()[0] not in known:
                continue
            expected = run().clone()
            with tritonite.use_gems():
                torch.testing.assert_close(run(), expected, equal_nan=True)
            aten, ours = compare(run, device_time, 5 if options.quick else ROUNDS, 5)
            ratios.append(aten / ours)
            key = f"{name} {str(dtype).removeprefix('torch.')}"
            results[key] = {"aten_ms": aten, "tritonite_ms": ours, "ratio": aten / ours}
            print(f"{key:34} ATen {aten:7.4f} ms  Tritonite {ours:7.4f} ms  ratio {aten / ours:5.3f}")
    results["geometric_mean"] = statistics.geometric_mean(ratios)
    print(f"geometric mean {results['geometric_mean']:.3f}, lowest {min(ratios):.3f}")
    for name, run in host_cases().items():
        if name.split()[0].rstrip("_") not in known:
            continue
        aten, ours = compare(run, host_time, 11)
        results[f"host {name}"] = {"aten_us": aten, "tritonite_us": ours}
        print(f"host {name:20} ATen {aten:5.1f} us  Tritonite {ours:5.1f} us")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
