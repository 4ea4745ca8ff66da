"""Passes of models: checked against ATen's, timed for every provider, and profiled by operator."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence

import torch

import tritonite
from tritonite.bench import timing
from tritonite.bench.models.catalog import phases
from tritonite.bench.models.workload import Phase
from tritonite.bench.results import ModelResult, Timing
from tritonite.bench.timing import Provider
from tritonite.errors import WrongAnswer
from tritonite.report.report import profiler

# The two providers whose operators are compared.
COMPARED = (timing.ATEN.name, timing.TRITONITE.name)
# Least similarity to ATen's results. In fp16 and bf16 the rounding of every layer adds to the difference.
MINIMUM_SIMILARITY = {torch.float32: 0.999, torch.float16: 0.99, torch.bfloat16: 0.99}
_PASSES = 3
_LISTED_OPERATORS = 12
# A phase as each provider runs it, ATen first.
Ways = dict[Provider, Phase]


def measure(
    name: str,
    providers: Sequence[Provider],
    *,
    dtype: torch.dtype,
    batch: int = 1,
    tokens: int = 512,
    tiny: bool = False,
    train: bool = False,
    channels_last: bool = False,
    rounds: int = timing.ROUNDS,
) -> Iterator[ModelResult]:
    """Time a model's passes: a prompt of `tokens` tokens, and for a decoder one more token; or its training step.

    Args:
        name: a key of MODELS.
        providers: the providers to time; the first is ATen.
        dtype: the model's dtype, a key of MINIMUM_SIMILARITY.
        batch: number of sequences or images.
        tokens: tokens of a prompt; models of images ignore them.
        tiny: make a model of a few thousand weights.
        train: time the training step instead.
        channels_last: make a model of images channels-last, and say so in its name in the result.
        rounds: rounds in which providers take turns.

    Yields a ModelResult for each pass. Raises WrongAnswer, before anything is timed, if a provider's results differ
    from ATen's.
    """
    text, title = str(dtype).removeprefix("torch."), f"{name} channels-last" if channels_last else name
    every = []
    for phase in phases(name, dtype, batch, tokens, tiny, train, channels_last):
        ways = {each: dataclasses.replace(phase, forward=each.wrap(phase.forward)) for each in providers}
        _check(f"{title} {phase.name}, {text}", ways, MINIMUM_SIMILARITY[dtype])
        every.append(ways)
    # The profiler leaves hooks in the driver that slow calls, so all passes are timed before any is profiled.
    measured = [(ways, *_times(ways, rounds)) for ways in every]
    for ways, times, host_times in measured:
        phase, (profiles, share) = next(iter(ways.values())), _profiles(ways)
        device_times = {name: sum(taken for _, taken in own.values()) for name, own in profiles.items()}
        yield ModelResult(
            model=title,
            phase=phase.name,
            dtype=text,
            batch=batch,
            tokens=phase.tokens,
            times=times,
            host_times=host_times,
            operators=_differences(profiles),
            context=phase.context,
            device_times=device_times if tritonite.device == "cuda" else {},
            own_share=share if tritonite.device == "cuda" else None,
        )


def _pass(phase: Phase) -> tuple[torch.Tensor, float, float]:
    """Run a pass. Return its result, the microseconds until the device was done, and until the call returned."""
    with torch.inference_mode(not phase.trains):
        timing.synchronize()
        begin = time.perf_counter()
        result = phase.forward()
        returned = time.perf_counter()
        timing.synchronize()
        done = time.perf_counter()
        phase.restore()
    return result, (done - begin) * 1e6, (returned - begin) * 1e6


def _check(case: str, ways: Ways, minimum: float) -> None:
    expected = _pass(next(iter(ways.values())))[0]
    for provider, phase in ways.items():
        with provider.scope(None):
            actual = _pass(phase)[0]
        if reason := _disagreement(actual, expected, minimum):
            raise WrongAnswer(provider=provider.name, case=case, reason=reason)


def _disagreement(actual: torch.Tensor, expected: torch.Tensor, minimum: float) -> str:
    """Return how results differ from ATen's beyond `minimum` similarity; "" if they agree."""
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return f"{actual.dtype} {list(actual.shape)} where ATen gives {expected.dtype} {list(expected.shape)}"
    own, aten = actual.double(), expected.double()
    if not bool(own.isfinite().all()):
        return "not all of it is finite"
    # Like the cosine, but lowered by a difference in length too.
    similarity = float((2 * (own * aten).sum(-1) / ((own * own).sum(-1) + (aten * aten).sum(-1))).min())
    return "" if similarity >= minimum else f"a similarity of {similarity:.6f}, where {minimum} is needed"


def _times(ways: Ways, rounds: int) -> tuple[dict[str, Timing], dict[str, Timing]]:
    """Time passes of providers in turns. Return times of the whole pass, and host times, by provider."""
    passes: dict[str, list[tuple[float, float]]] = {provider.name: [] for provider in ways}
    for _ in range(rounds):
        for provider, phase in ways.items():
            with provider.scope(None):
                # The first pass after a switch of providers finds caches cold.
                _pass(phase)
                passes[provider.name] += [_pass(phase)[1:] for _ in range(_PASSES)]
    whole = {name: Timing.of(done for done, _ in taken) for name, taken in passes.items()}
    return whole, {name: Timing.of(returned for _, returned in taken) for name, taken in passes.items()}


def _profiles(ways: Ways) -> tuple[dict[str, dict[str, tuple[int, float]]], float | None]:
    """Profile the passes of ATen and Tritonite. Returns (profiles by provider, the share of Tritonite's own kernels).

    Without both among the providers the result is ({}, None).
    """
    compared = {provider.name: (phase, provider) for provider, phase in ways.items() if provider.name in COMPARED}
    if len(compared) < len(COMPARED):
        return {}, None
    profiled = {name: _profile(*each) for name, each in compared.items()}
    return {name: operators for name, (operators, _) in profiled.items()}, profiled[timing.TRITONITE.name][1]


def _differences(profiles: Mapping[str, dict[str, tuple[int, float]]]) -> list[tuple[str, int, float, float]]:
    """Return the operators whose times differ most, as in ModelResult.operators."""
    if not profiles:
        return []
    aten, ours = (profiles[name] for name in COMPARED)
    rows = []
    for name in {*aten, *ours}:
        (calls, before), (own_calls, after) = aten.get(name, (0, 0.0)), ours.get(name, (0, 0.0))
        if before != after:
            rows.append((name, max(calls, own_calls), before, after))
    return sorted(rows, key=lambda row: (-abs(row[2] - row[3]), row[0]))[:_LISTED_OPERATORS]


def _profile(phase: Phase, provider: Provider) -> tuple[dict[str, tuple[int, float]], float]:
    """Return (calls a pass, microseconds a pass) of each operator, and the share of Tritonite's own kernels.

    An operator's time is without that of operators that it calls. The share is of all operators' time.
    """
    with provider.scope(None):
        _pass(phase)
        with profiler() as profile:
            for _ in range(_PASSES):
                _pass(phase)
    found: dict[str, tuple[int, float]] = {}
    times = {"aten": 0.0, "tritonite": 0.0}
    for event in profile.key_averages():
        space, _, name = event.key.partition("::")
        if space in ("aten", "tritonite"):
            # A Tritonite kernel has a range named by its overload within ATen's range.
            name = name.partition(".")[0]
            calls, taken = found.get(name, (0, 0.0))
            own = event.self_device_time_total if tritonite.device == "cuda" else event.self_cpu_time_total
            found[name] = max(calls, round(event.count / _PASSES)), taken + own / _PASSES
            times[space] += own
    return found, times["tritonite"] / max(sum(times.values()), 1e-9)
