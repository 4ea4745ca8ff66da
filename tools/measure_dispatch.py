"""Measure the host time of overridden calls against ATen's, and of new shapes, declines, scopes and threads.

    python tools/measure_dispatch.py [--json FILE] [--every N]

Needs a GPU. Times are host times on 64x64 operands, in turns in one process, without synchronising inside a round.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

import tritonite
from tritonite.bench import timing
from tritonite.bench.run import python_functions
from tritonite.errors import Decline
from tritonite.testing.samples import Sample, calls
from tritonite.testing.stand_in import standing_in

ROUNDS = 9
COMMON = ("add.Tensor", "mul.Tensor", "gelu", "where.self", "add_.Tensor", "exp", "div.Tensor", "add.out", "sigmoid")


def _python_function(overload: str) -> Callable[..., Any]:
    """Return the Python function that users call for an overload, or the operator in torch.ops."""
    return next(python_functions(overload), getattr(torch.ops.aten, overload.partition(".")[0]))


def bind(overload: str, sample: Sample) -> Callable[[], Any] | None:
    """Return the call through the Python function if that reaches the overload, else through torch.ops.

    None if ATen does not accept the sample.
    """
    op = tritonite.overloads()[overload]
    packet, _, name = overload.partition(".")
    exact = getattr(getattr(torch.ops.aten, packet), name or "default")
    try:
        outs = {}
        if op.out_names:
            functional = _python_function(overload)(*sample.args, **sample.kwargs)
            results = functional if isinstance(functional, tuple) else (functional,)
            outs = dict(zip(op.out_names, results, strict=True))
        exact(*sample.args, **sample.kwargs, **outs)
    except (RuntimeError, TypeError, NotImplementedError, ValueError):
        return None
    function = _python_function(overload)
    given = {"out": tuple(outs.values()) if len(outs) > 1 else next(iter(outs.values()))} if outs else {}
    try:
        # The Python function may reach another overload, because it makes tensors of numbers.
        tritonite.reset_stats()
        with tritonite.use_gems(include=[overload], faster_only=False):
            function(*sample.args, **sample.kwargs, **given)
        if overload in tritonite.stats():
            return lambda: function(*sample.args, **sample.kwargs, **given)
    except (RuntimeError, TypeError, NotImplementedError, ValueError):
        pass
    return lambda: exact(*sample.args, **sample.kwargs, **outs)


def compare(call: Callable[[], Any], overload: str) -> tuple[float, float]:
    """Return host microseconds a call, (ATen, Tritonite)."""
    times = timing.measure({timing.ATEN: call, timing.TRITONITE: call}, overload, "host", ROUNDS)
    return times["aten"].median, times["tritonite"].median


def overload_times(every: int) -> dict[str, Any]:
    names = [n for i, n in enumerate(tritonite.overloads()) if i % every == 0 or n in COMMON]
    found = {}
    for name in names:
        op = tritonite.overloads()[name]
        for dtype in (torch.float32, torch.int32):
            tensors = [torch.rand(64, 64, device="cuda").mul(8).to(dtype).contiguous() for _ in range(4)]
            sample = next(iter(calls(op, "bench", tensors)))
            call = bind(name, sample)
            if call is None:
                continue
            tritonite.reset_stats()
            aten, ours = compare(call, name)
            counts = tritonite.stats().get(name)
            if counts is None or not counts.replayed:
                print(f"{name}: not replayed: {counts}")
                break
            found[name] = {"aten_us": aten, "tritonite_us": ours, "ratio": ours / aten}
            break
    return found


def new_shapes() -> float:
    base = torch.rand(3000, device="cuda")
    times = []
    with tritonite.use_gems(include="add"):
        for n in (1, 16, 17, 1024, 2048):
            _ = base[:n] + base[:n]
        for n in range(1, 600):
            x = base[: 2 * n + 1024]
            start = time.perf_counter()
            _ = x + x
            times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def declined() -> tuple[float, float]:
    x = torch.rand(64, 64, dtype=torch.complex64, device="cuda")
    return compare(lambda: x + x, "add")


def numbers_replay() -> dict[str, int]:
    x, y = torch.rand(48, 48, device="cuda"), torch.rand(48, 48, device="cuda")
    tritonite.reset_stats()
    with tritonite.use_gems():
        for i in range(100):
            _ = x * (i + 0.5)
            _ = torch.add(x, y, alpha=i + 0.25)
    return {name: tritonite.stats()[name].launched for name in ("mul.Tensor", "add.Tensor")}


def threads() -> int:
    """Return the number of wrong results in 8 threads of 10,000 calls each, of 50 operators on random shapes."""
    # Random operators give other numbers in every call.
    unary = [
        name
        for name, op in tritonite.overloads().items()
        if "." not in name
        and not name.endswith("_")
        and hasattr(torch, name)
        and op.family not in ("random", "sampling")
    ]
    shapes = [(i % 7 + 1, i % 13 + 1) for i in range(40)]
    inputs = {shape: torch.rand(shape, device="cuda") + 0.25 for shape in shapes}
    expected: dict[Any, torch.Tensor] = {}
    chosen: list[str] = []
    for name in unary:
        try:
            results = {(name, shape): getattr(torch, name)(x) for shape, x in inputs.items()}
        except (RuntimeError, TypeError):
            continue
        if all(isinstance(result, torch.Tensor) for result in results.values()):
            expected |= results
            chosen.append(name)
        if len(chosen) == 50:
            break
    wrong = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        picks = torch.randint(1 << 30, (10000, 2), generator=generator).tolist()
        for a, b in picks:
            name, shape = chosen[a % len(chosen)], shapes[b % len(shapes)]
            actual = getattr(torch, name)(inputs[shape])
            if not torch.allclose(actual, expected[name, shape], rtol=1e-4, atol=1e-6, equal_nan=True):
                wrong.append((name, shape))

    with tritonite.use_gems(include=chosen):
        workers = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    print(f"threads: {len(chosen)} operators, {len(wrong)} wrong {wrong[:3]}")
    return len(wrong)


def many_shapes(total: int) -> tuple[int, int]:
    """Return the process's resident kilobytes after a tenth of the shapes and after all."""
    base = torch.rand(total + 2048, device="cuda")
    resident = []
    with tritonite.use_gems(include="exp"):
        for n in range(1, total + 1):
            base[: n + 1024].exp()
            if n in (total // 10, total):
                with open("/proc/self/statm") as file:
                    resident.append(int(file.read().split()[1]) * resource.getpagesize() // 1024)
    return resident[0], resident[1]


def graph() -> float:
    """Return the largest difference from ATen of a captured chain of overridden operators on new inputs."""

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.sigmoid(torch.exp(torch.neg(x)) * 0.5 + x)
        return x

    x = torch.rand(64, 64, device="cuda")
    with tritonite.use_gems():
        chain(x), chain(x)
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        tritonite.reset_stats()
        with torch.cuda.graph(captured):
            result = chain(x)
        replayed = sum(counts.replayed for counts in tritonite.stats().values())
    x.copy_(torch.rand(64, 64, device="cuda"))
    captured.replay()
    torch.cuda.synchronize()
    print(f"graph: {replayed} operators replayed into it")
    return float((result - chain(x)).abs().max())


def scopes() -> dict[str, float]:
    """Return microseconds to enter and leave a scope of all overloads, and of one operator."""
    found = {}
    for label, include in (("all", None), ("softmax", "softmax")):
        times = []
        for _ in range(300):
            start = time.perf_counter()
            with tritonite.use_gems(include=include):
                pass
            times.append((time.perf_counter() - start) * 1e6)
        found[label] = statistics.median(times)
    return found


def factors() -> int:
    """Return how many of 50 calls of addmm with different alpha are recorded."""
    x = torch.rand(48, 48, device="cuda")
    tritonite.reset_stats()
    with tritonite.use_gems(include="addmm"):
        for i in range(50):
            torch.addmm(x, x, x, alpha=i + 0.5)
    return tritonite.stats()["addmm"].launched


def unserved_list() -> tuple[float, float]:
    """Return host microseconds of `_foreach_add` on 1,500 tensors, (in ATen, declined to ATen)."""

    def decline(tensors: Any, number: Any) -> Any:
        raise Decline("unserved")

    tensors = [torch.rand(64, device="cuda") for _ in range(1500)]

    def call() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch._foreach_add(tensors, 1.0)
        return (time.perf_counter() - start) * 1e6

    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(15):
        times[0].append(call())
        with standing_in("_foreach_add.Scalar", decline):
            call()
            times[1].append(call())
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", default="")
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--shapes", type=int, default=200_000)
    options = parser.parse_args()
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    figures["overloads"] = times = overload_times(options.every)
    for name, entry in sorted(times.items(), key=lambda item: -item[1]["ratio"])[:25]:
        print(
            f"{name:40} ATen {entry['aten_us']:6.2f} us  Tritonite {entry['tritonite_us']:6.2f}  {entry['ratio']:.2f}"
        )
    for name in COMMON:
        if name in times:
            print(f"{name:20} ATen {times[name]['aten_us']:.2f} us  Tritonite {times[name]['tritonite_us']:.2f}")
    ratios = [entry["ratio"] for entry in times.values()]
    figures["geometric_mean"] = statistics.geometric_mean(ratios)
    print(f"{len(ratios)} overloads: geometric mean {figures['geometric_mean']:.3f}, highest {max(ratios):.3f}")
    for name, measure in (
        ("numbers: launched once each", numbers_replay),
        ("new shape, us", new_shapes),
        ("declined, us: ATen, Tritonite", declined),
        ("graph: largest difference", graph),
        ("scope, us", scopes),
        ("50 factors of addmm: recorded", factors),
        ("_foreach_add of 1500 tensors, us: ATen, declined", unserved_list),
        ("threads: wrong results", threads),
        ("many shapes: resident kB after a tenth, after all", lambda: many_shapes(options.shapes)),
    ):
        start = time.perf_counter()
        try:
            figures[name] = measure()
        except Exception as error:  # noqa: BLE001 - the other figures are still wanted
            figures[name] = f"{type(error).__name__}: {error}"
        print(f"{name}: {figures[name]} ({time.perf_counter() - start:.0f} s)", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
