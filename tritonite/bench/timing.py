"""Clocks: device time with a cold cache, the same from a CUDA graph, and the host's part of a call."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

import tritonite
from tritonite.bench.results import Timing

Call = Callable[..., Any]
ROUNDS = 10
# A case ends after this many seconds, though not before the third round.
SECONDS = 2.0
_DEVICE_CALLS = 4
_HOST_CALLS = 200
_GRAPH_CALLS = 20
# For so many cycles, some 200 us, the device is busy while the host queues a graph.
_CYCLES = 400_000


@dataclass(frozen=True)
class Provider:
    """A way to run operators: in what `scope` makes of an operator's name, as functions that `wrap` makes of theirs.

    The name is "" of what is not overridden, and None of a model, which runs as users have it.
    """

    name: str
    scope: Callable[[str | None], AbstractContextManager[Any]] = lambda _: nullcontext()
    wrap: Callable[[Call], Call] = lambda function: function


ATEN = Provider("aten")


def _scope(op: str | None) -> AbstractContextManager[Any]:
    return tritonite.use_gems() if op is None else tritonite.use_gems(include=op or (), faster_only=False)


TRITONITE = Provider("tritonite", _scope)
COMPILE = Provider("compile", wrap=lambda function: torch.compile(function, dynamic=False))
# What the compiler leaves to ATen's operators, such as products, runs as Triton kernels of ours.
BOTH = Provider("compile+tritonite", TRITONITE.scope, COMPILE.wrap)


def synchronize() -> None:
    if tritonite.device == "cuda":
        torch.cuda.synchronize()


@functools.lru_cache(maxsize=1)
def _flush() -> Call:
    """Drives everything out of the L2 cache by reading 256 MB: what was written would have to be written back first.

    A graph, so that it is the same whatever operator is overridden.
    """
    buffer = torch.zeros(2**26, dtype=torch.int32, device="cuda")
    torch.amax(buffer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.amax(buffer)
    # A graph does not keep what it reads.
    return lambda: (graph.replay(), buffer)[0]


def device_samples(call: Call, calls: int = _DEVICE_CALLS) -> list[float]:
    """Microseconds of the device for each of a few calls, whose operands have been driven out of its L2 cache.

    Driving them out takes the device longer than the host takes to queue the call, so that no host time is in it.
    """
    if tritonite.device != "cuda":
        return [_wall(call)]
    flush = _flush()
    events = []
    for _ in range(calls):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        flush()
        begin.record()
        call()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 for begin, end in events]


def host_samples(call: Call) -> list[float]:
    """Microseconds of the host a call, of many without waiting for the device."""
    synchronize()
    begin = time.perf_counter()
    for _ in range(_HOST_CALLS):
        call()
    taken = time.perf_counter() - begin
    synchronize()
    return [taken / _HOST_CALLS * 1e6]


def _wall(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


def captured(call: Call, calls: int = _GRAPH_CALLS) -> Call:
    """Replays of a graph of several calls, for which host time is nothing."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph.replay


def graph_samples(call: Call, samples: int) -> list[float]:
    """Microseconds of the device for each of many calls in a row, whose operands are where the one before left them."""
    replay = captured(call)
    replay()
    return [found for _ in range(samples) for found in _graph_samples(replay)]


def _graph_samples(replay: Call) -> list[float]:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # An idle device would wait for the host in between, which takes 10 us for a graph, or 200 where it is interrupted.
    torch.cuda._sleep(_CYCLES)
    begin.record()
    replay()
    end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 / _GRAPH_CALLS]


def _samples(kind: str, call: Call, alone: float) -> list[float]:
    """Of a call that took `alone` seconds by itself: one that takes long is timed once a round."""
    if kind == "graph":
        return _graph_samples(call)
    if kind == "host":
        return host_samples(call)
    return device_samples(call, 1 if alone * ROUNDS > SECONDS / 20 else _DEVICE_CALLS)


def measure(calls: Mapping[Provider, Call], op: str, kind: str = "device", rounds: int = ROUNDS) -> dict[str, Timing]:
    """Times of a call by every provider, which take turns round by round; each is run before, and not timed."""
    if kind == "device" and tritonite.device == "cuda":
        _flush()
    ready: dict[Provider, tuple[Call, float]] = {}
    for provider, call in calls.items():
        with provider.scope(op):
            call()
            synchronize()
            alone = -time.perf_counter()
            call()
            synchronize()
            alone += time.perf_counter()
            ready[provider] = captured(call) if kind == "graph" else call, alone
    times: dict[Provider, list[float]] = {provider: [] for provider in calls}
    end = time.perf_counter() + SECONDS
    for number in range(rounds):
        if number >= 3 and time.perf_counter() > end:
            break
        for provider, (call, alone) in ready.items():
            with provider.scope(op) if kind != "graph" else nullcontext():
                times[provider] += _samples(kind, call, alone)
    return {provider.name: Timing.of(found) for provider, found in times.items()}


def copy_bandwidth() -> float:
    """Bytes a second that the device copies, read and write both counted."""
    count = 2**28 if tritonite.device == "cuda" else 2**22
    source = torch.zeros(count, device=tritonite.device)
    target = torch.empty_like(source)
    taken = measure({ATEN: lambda: target.copy_(source)}, "copy_")["aten"].median
    return 2 * source.nbytes / taken * 1e6


def matmul_rates(dtypes: Sequence[torch.dtype]) -> Iterator[tuple[str, float]]:
    """(dtype, flops a second) of square products large enough to fill the device."""
    side = 8192 if tritonite.device == "cuda" else 256
    for dtype in dtypes:
        x = torch.randn(side, side, device=tritonite.device).to(dtype)
        taken = measure({ATEN: functools.partial(torch.mm, x, x)}, "mm")["aten"].median
        yield str(dtype).removeprefix("torch."), 2 * side**3 / taken * 1e6
