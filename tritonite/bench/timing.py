"""Timing of calls: device time with a cold L2 cache, device time within a CUDA graph, and host time."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import tritonite
from tritonite.bench.results import Timing

Call = Callable[..., Any]
ROUNDS = 10
# Seconds of rounds after which a case ends; three rounds are always made.
SECONDS = 2.0
_DEVICE_CALLS = 4
_HOST_CALLS = 200
_GRAPH_CALLS = 20
# Cycles for which the device is kept busy while the host queues a graph.
_CYCLES = 400_000


@dataclass(frozen=True)
class Provider:
    """A way to run operators.

    Attributes:
        name: the name in results.
        scope: returns a context manager for calls of an operator. Its argument is the operator's name, "" for a
            function that is not overridden, or None for a whole model.
        wrap: returns the function to call in place of the given one.
        form: the form of its models, "patched" or "compiled"; "" for models as they are.
    """

    name: str
    scope: Callable[[str | None], contextlib.AbstractContextManager[Any]] = lambda _: contextlib.nullcontext()
    wrap: Callable[[Call], Call] = lambda function: function
    form: str = ""


ATEN = Provider("aten")


def _scope(op: str | None) -> contextlib.AbstractContextManager[Any]:
    return tritonite.use_gems() if op is None else tritonite.use_gems(include=op or (), faster_only=False)


TRITONITE = Provider("tritonite", _scope)
# Models with kernels also where ATen is known to be faster.
EVERY = Provider("every kernel", lambda _: tritonite.use_gems(faster_only=False))
COMPILE = Provider("compile", wrap=lambda function: torch.compile(function, dynamic=False))
# torch.compile leaves some operators, such as matrix products, to ATen; Tritonite serves those here.
BOTH = Provider("compile+tritonite", TRITONITE.scope, COMPILE.wrap)

# Models whose modules have fused operators, and models compiled by Tritonite's backend.
PATCHED = Provider("patched", _scope, form="patched")
COMPILED = Provider("compiled", _scope, form="compiled")


def _as_graph(function: Call) -> Call:
    import tritonite.graph  # noqa: F401 - registers the backend

    compiled: Call = torch.compile(function, backend="tritonite", dynamic=False)
    return compiled


GRAPH = Provider("tritonite-graph", wrap=_as_graph)


def synchronize() -> None:
    if tritonite.backend.profiled:
        torch.cuda.synchronize()


@functools.lru_cache(maxsize=1)
def _flush() -> Call:
    """Return a call that evicts the L2 cache by reading 256 MB; written lines would have to be written back first.

    The call replays a graph, so that no override changes it.
    """
    buffer = torch.zeros(2**26, dtype=torch.int32, device="cuda")
    torch.amax(buffer)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        torch.amax(buffer)
    # A graph does not own the tensors it reads.
    return lambda: (graph.replay(), buffer)[0]


def device_samples(call: Call, calls: int = _DEVICE_CALLS, cycles: int = 0) -> list[float]:
    """Return device microseconds of each of a few calls, with operands evicted from the L2 cache.

    The eviction takes longer than the host needs to queue an operator, so that host time is hidden. For longer calls
    the device is kept busy for further `cycles`.
    """
    if not tritonite.backend.profiled:
        return [_wall(call)]
    flush = _flush()
    events = []
    for _ in range(calls):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        flush()
        if cycles:
            torch.cuda._sleep(cycles)
        begin.record()
        call()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 for begin, end in events]


def host_samples(call: Call) -> list[float]:
    """Return [host microseconds a call], averaged over many calls without waiting for the device."""
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


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Capture what the block launches, without garbage collection, which could end another graph and so the capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph):
            yield
    finally:
        if collects:
            gc.enable()


def captured(call: Call, calls: int = _GRAPH_CALLS) -> Call:
    """Capture several calls into a CUDA graph and return its replay."""
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        for _ in range(calls):
            call()
    return graph.replay


def graph_samples(call: Call, samples: int) -> list[float]:
    """Return device microseconds a call, averaged over a graph of many; operands stay in the cache if they fit."""
    replay = captured(call)
    replay()
    return [each for _ in range(samples) for each in _graph_samples(replay)]


def _graph_samples(replay: Call) -> list[float]:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # An idle device would wait for the host between the event and the graph.
    torch.cuda._sleep(_CYCLES)
    begin.record()
    replay()
    end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 / _GRAPH_CALLS]


def _samples(kind: str, call: Call, alone: float) -> list[float]:
    """Return one round's times of a call that takes `alone` seconds; a long call is timed once a round."""
    if kind == "graph":
        return _graph_samples(call)
    if kind == "host":
        return host_samples(call)
    return device_samples(call, 1 if alone * ROUNDS > SECONDS / 20 else _DEVICE_CALLS)


def measure(calls: Mapping[Provider, Call], op: str, kind: str = "device", rounds: int = ROUNDS) -> dict[str, Timing]:
    """Time a call by every provider, in turns round by round, after untimed warm-up calls.

    Args:
        calls: the call of each provider.
        op: the operator that a provider's scope overrides.
        kind: "device", "graph" or "host" (`results.MEASURES`).

    Returns times in microseconds by the provider's name.
    """
    if kind == "device" and tritonite.backend.profiled:
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
            with provider.scope(op) if kind != "graph" else contextlib.nullcontext():
                times[provider] += _samples(kind, call, alone)
    return {provider.name: Timing.of(samples) for provider, samples in times.items()}


def copy_bandwidth() -> float:
    """Measure the device's copy bandwidth in bytes a second; reads and writes both count."""
    count = 2**28 if tritonite.backend.profiled else 2**22
    source = torch.zeros(count, device=tritonite.device)
    target = torch.empty_like(source)
    taken = measure({ATEN: lambda: target.copy_(source)}, "copy_")["aten"].median
    return 2 * source.nbytes / taken * 1e6


def matmul_rates(dtypes: Sequence[torch.dtype]) -> Iterator[tuple[str, float]]:
    """Measure ATen's square matrix products that fill the device. Yields (dtype, flops a second)."""
    side = 8192 if tritonite.backend.profiled else 256
    for dtype in dtypes:
        x = torch.randn(side, side, device=tritonite.device).to(dtype)
        taken = measure({ATEN: functools.partial(torch.mm, x, x)}, "mm")["aten"].median
        yield str(dtype).removeprefix("torch."), 2 * side**3 / taken * 1e6
