"""Passes of models: checked against ATen's, timed for every provider, and profiled by operator."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

import tritonite
from tritonite.bench import timing
from tritonite.bench.models.catalog import ModelCase, phases
from tritonite.bench.models.workload import Phase
from tritonite.bench.results import ModelResult, Timing
from tritonite.bench.timing import Provider
from tritonite.errors import WrongAnswer
from tritonite.report.report import Report, profiler

# The two providers whose operators are compared.
COMPARED = (timing.ATEN.name, timing.TRITONITE.name)
# The providers whose passes are profiled.
PROFILED = (*COMPARED, timing.EVERY.name, timing.PATCHED.name)
# Least similarity to ATen's results. In fp16 and bf16 the rounding of every layer adds to the difference.
MINIMUM_SIMILARITY = {torch.float32: 0.999, torch.float16: 0.99, torch.bfloat16: 0.99}
_PASSES = 3
_LISTED_OPERATORS = 12
# A phase as each provider runs it, ATen first.
Ways = dict[Provider, Phase]
# Returns the context in which other processes leave the device alone.
Alone = Callable[[], AbstractContextManager[None]]


def measure(
    cases: Sequence[ModelCase],
    providers: Sequence[Provider],
    rounds: int = timing.ROUNDS,
    alone: Alone = nullcontext,
) -> Iterator[ModelResult]:
    """Time and then profile the passes of models: a prompt, and for a decoder one more token; or a training step.

    Args:
        cases: the models.
        providers: the providers to time; the first is ATen.
        rounds: rounds in which providers take turns.
        alone: makes the context in which passes are timed or profiled.

    Yields a ModelResult with times for each pass, and once all are timed a second one with its profile. A pass that a
    provider computes otherwise than ATen has a failure in place of times and profile.
    """
    timed: list[list[ModelResult]] = []
    for case in cases:
        timed.append([])
        for ways in _ways(case, providers):
            _warm(ways)
            timed[-1].append(_timed(case, ways, rounds, alone))
            yield timed[-1][-1]
    # The profiler leaves hooks in the driver that slow calls, so models are made again after all have been timed.
    profiled = [each for each in providers if each.name in PROFILED]
    if not {each.name for each in profiled} >= set(COMPARED):
        return
    for case, results in zip(cases, timed, strict=True):
        if all(result.failure for result in results):
            continue
        for ways, result in zip(_ways(case, profiled), results, strict=True):
            if not result.failure:
                yield dataclasses.replace(result, **_profiled(ways, alone))


def agreements(case: ModelCase, providers: Sequence[Provider]) -> Iterator[ModelResult]:
    """Check the passes of a model without timing them.

    Yields a ModelResult for each pass, with the similarities of results, the shares of calls that kernels serve, and
    the calls that ATen serves with the first provider after ATen; or with a failure.
    """
    for ways in _ways(case, providers):
        result = _timed(case, ways, 0)
        if not result.failure:
            reports = {each.name: _calls(phase, each) for each, phase in list(ways.items())[1:]}
            shares = {name: _share(report) for name, report in reports.items()}
            result = dataclasses.replace(result, call_shares=shares, unserved=_unserved(next(iter(reports.values()))))
        yield result


def _ways(case: ModelCase, providers: Sequence[Provider]) -> list[Ways]:
    """Return each phase as each provider runs it, on a model for each form with the same weights."""
    forms = {each.form: dataclasses.replace(case.workload, form=each.form) for each in providers}
    made = {form: phases(case.name, workload, case.train) for form, workload in forms.items()}
    return [
        {
            each: dataclasses.replace(own, forward=each.wrap(own.forward))
            for each in providers
            for own in [made[each.form][i]]
        }
        for i in range(len(made[""]))
    ]


def _warm(ways: Ways) -> None:
    """Compile the kernels of a phase in processes, which its first pass would compile one after another."""
    if tritonite.backend.interpreted:
        return
    for provider, phase in ways.items():
        if provider.name in PROFILED[1:]:
            with provider.scope(None):
                tritonite.warm(_pass, phase)


def _timed(case: ModelCase, ways: Ways, rounds: int, alone: Alone = nullcontext) -> ModelResult:
    """Return the times of a pass, none for 0 rounds; its failure if a provider's results differ from ATen's."""
    phase, times, host_times, failure = next(iter(ways.values())), dict[str, Timing](), dict[str, Timing](), ""
    similarities: dict[str, float] = {}
    try:
        similarities = _check(f"{case.title} {phase.name}, {case.dtype}", ways, MINIMUM_SIMILARITY[case.workload.dtype])
        if rounds:
            with alone():
                times, host_times = _times(ways, rounds)
    except WrongAnswer as error:
        failure = str(error)
    return ModelResult(
        model=case.title,
        phase=phase.name,
        dtype=case.dtype,
        batch=case.workload.batch,
        tokens=phase.tokens,
        times=times,
        host_times=host_times,
        context=phase.context,
        similarities=similarities,
        failure=failure,
    )


def _profiled(ways: Ways, alone: Alone) -> dict[str, Any]:
    """Return the fields of ModelResult that profiles of a pass give."""
    with alone():
        profiles = {provider.name: _profile(phase, provider) for provider, phase in ways.items()}
    operators = {name: found for name, (found, _) in profiles.items()}
    own = {each: phase for each, phase in ways.items() if each.name != timing.ATEN.name}
    reports = {each.name: _calls(phase, each) for each, phase in own.items()}
    fields: dict[str, Any] = {
        "operators": _differences(operators),
        "call_shares": {name: _share(report) for name, report in reports.items()},
        "unserved": _unserved(reports.get(timing.EVERY.name, reports[timing.TRITONITE.name])),
    }
    if tritonite.backend.profiled:
        fields["device_times"] = {name: sum(taken for _, taken in each.values()) for name, each in operators.items()}
        fields["device_shares"] = {each.name: profiles[each.name][1] for each in own}
    return fields


def _calls(phase: Phase, provider: Provider) -> Report:
    with provider.scope(None):
        return tritonite.report(_pass, phase)


def _share(report: Report) -> float:
    """Return the part of the calls of operators that Tritonite's kernels serve, 0 to 1."""
    reports = report.operators.values()
    return sum(each.tritonite for each in reports) / max(sum(each.calls for each in reports), 1)


def _unserved(report: Report) -> list[tuple[str, str, int]]:
    """Return (overload, reason, calls) of ATen's calls, by name."""
    return sorted((name, reason, n) for name, each in report.operators.items() for reason, n in each.reasons.items())


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


def _check(case: str, ways: Ways, minimum: float) -> dict[str, float]:
    """Return the least similarity of each provider's results to ATen's. Raises WrongAnswer below `minimum`."""
    similarities = {}
    expected = _pass(next(iter(ways.values())))[0]
    for provider, phase in ways.items():
        with provider.scope(None):
            actual = _pass(phase)[0]
        if reason := disagreement(actual, expected, minimum):
            raise WrongAnswer(provider=provider.name, case=case, reason=reason)
        if provider.name != timing.ATEN.name:
            similarities[provider.name] = similarity(actual, expected)
    return similarities


def disagreement(actual: torch.Tensor, expected: torch.Tensor, minimum: float) -> str:
    """Return how results differ from ATen's beyond `minimum` similarity; "" if they agree."""
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return f"{actual.dtype} {list(actual.shape)} where ATen gives {expected.dtype} {list(expected.shape)}"
    if not bool(actual.isfinite().all()):
        return "not all of it is finite"
    found = similarity(actual, expected)
    return "" if found >= minimum else f"a similarity of {found:.6f}, where {minimum} is needed"


def similarity(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the least similarity of rows: like the cosine, but lowered by a difference in length too.

    Two rows of zeros have a similarity of 1.
    """
    own, aten = actual.double(), expected.double()
    size = (own * own).sum(-1) + (aten * aten).sum(-1)
    return float(torch.where(size == 0, 1.0, 2 * (own * aten).sum(-1) / size).min())


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


def _differences(profiles: Mapping[str, dict[str, tuple[int, float]]]) -> list[tuple[str, int, float, float]]:
    """Return the operators whose times differ most, as in ModelResult.operators."""
    if not profiles.keys() >= set(COMPARED):
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
            own = event.self_device_time_total if tritonite.backend.profiled else event.self_cpu_time_total
            found[name] = max(calls, round(event.count / _PASSES)), taken + own / _PASSES
            times[space] += own
    return found, times["tritonite"] / max(sum(times.values()), 1e-9)
