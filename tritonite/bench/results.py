"""Results of benchmark runs, their JSON files, and comparison of runs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tritonite import devices
from tritonite.errors import InvalidResults

SCHEMA = 1
REFERENCE = "aten"
# Kinds of time: on the device with a cold cache, on the device within a CUDA graph, and on the host.
MEASURES = ("device", "graph", "host")


def quantile(ordered: Sequence[float], fraction: float) -> float:
    """Return the quantile of ascending numbers at a fraction of 0 to 1, with linear interpolation."""
    rank = fraction * (len(ordered) - 1)
    below = ordered[math.floor(rank)]
    return below + (rank - math.floor(rank)) * (ordered[math.ceil(rank)] - below)


def readable(value: float, digits: int) -> str:
    """Return a number with `digits` decimals, or with two significant digits if it would be rounded to 0."""
    text = f"{value:,.{digits}f}"
    return f"{value:.2g}" if value and not float(text.replace(",", "")) else text


@dataclass(frozen=True)
class Timing:
    """Microseconds a call: median, lower and upper quartile of the samples."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, times: Iterable[float]) -> Timing:
        ordered = sorted(times)
        # Clocks resolve a nanosecond.
        return cls(*(round(quantile(ordered, fraction), 3) for fraction in (0.5, 0.25, 0.75)))

    @property
    def spread(self) -> float:
        """Half the interquartile range as a fraction of the median."""
        return (self.high - self.low) / 2 / self.median


@dataclass(frozen=True)
class Result:
    """Times of one case.

    Attributes:
        op, label, dtype, measure: identify the case; `label` names the shapes ("4096x4096", "row broadcast").
        family: the operator's family.
        elements: elements of the largest tensor.
        bytes: least bytes to read and write.
        flops: floating-point operations; None for a memory-bound call.
        times: times by provider ("aten", "tritonite", ...).
        similarities: the least similarity of a result to ATen's by provider, 1 for the same.
        unserved: (overload, reason, calls a pass) of ATen's calls, with kernels also where ATen is known to be faster.
        failure: why there are no times, such as a wrong answer; "" if there are.
        declined: why no Tritonite kernel serves the call, or would not by default; "" if one does.
        number: the number of a drawn case; None for a fixed case.
    """

    op: str
    family: str
    label: str
    dtype: str
    measure: str
    elements: int
    bytes: int
    flops: int | None = None
    times: dict[str, Timing] = field(default_factory=dict)
    failure: str = ""
    declined: str = ""
    number: int | None = None

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.op, self.label, self.dtype, self.measure

    def speedup(self, provider: str = "tritonite") -> float | None:
        """Return ATen's time over the provider's; None if one of them is missing."""
        if REFERENCE not in self.times or provider not in self.times:
            return None
        return self.times[REFERENCE].median / self.times[provider].median


@dataclass(frozen=True)
class ModelResult:
    """Times of a model's pass.

    Attributes:
        model, phase, dtype, batch: identify the pass; `phase` is "prefill", "decode", "encode", "forward" or "train".
        tokens: tokens of every sequence in the pass, after `context` earlier ones.
        times: times of the whole pass by provider, in microseconds.
        host_times: times until the call returned.
        operators: (name, calls a pass, ATen's microseconds a pass, Tritonite's) of the operators whose times differ
            most, largest difference first.
        device_times: sum of all kernels' microseconds in a pass by profiled provider; empty without a GPU.
        call_shares: the part of a pass's calls that Tritonite's kernels serve, 0 to 1, by provider.
        device_shares: the part of a pass's device time that Tritonite's kernels take, 0 to 1, by provider; empty
            without a GPU.
        failure: why there are no times, such as a wrong answer; "" if there are.
    """

    model: str
    phase: str
    dtype: str
    batch: int
    tokens: int
    times: dict[str, Timing]
    host_times: dict[str, Timing]
    operators: list[tuple[str, int, float, float]] = field(default_factory=list)
    context: int = 0
    device_times: dict[str, float] = field(default_factory=dict)
    call_shares: dict[str, float] = field(default_factory=dict)
    device_shares: dict[str, float] = field(default_factory=dict)
    similarities: dict[str, float] = field(default_factory=dict)
    unserved: list[tuple[str, str, int]] = field(default_factory=list)
    failure: str = ""

    @classmethod
    def of_json(cls, entry: dict[str, Any]) -> ModelResult:
        """Return a result of a JSON object."""
        operators = [tuple(operator) for operator in entry["operators"]]
        unserved = [tuple(each) for each in entry.get("unserved", ())]
        times = {"times": _times(entry["times"]), "host_times": _times(entry["host_times"])}
        return cls(**{**entry, **times, "operators": operators, "unserved": unserved})

    @property
    def key(self) -> tuple[str, str, str, int, int, int]:
        return self.model, self.phase, self.dtype, self.batch, self.tokens, self.context

    def tokens_per_second(self, provider: str) -> float:
        return self.batch * self.tokens / self.times[provider].median * 1e6

    def speedup(self, provider: str) -> float:
        """Return ATen's time of the pass over the provider's."""
        return self.times[REFERENCE].median / self.times[provider].median

    def device_speedup(self, provider: str = "tritonite") -> float | None:
        """Return ATen's device time of the pass over a provider's; None without a profile on a GPU."""
        times = self.device_times
        return times[REFERENCE] / times[provider] if times.keys() >= {REFERENCE, provider} else None

    def host_speedup(self, provider: str = "tritonite") -> float:
        """Return ATen's host time of the pass over a provider's."""
        return self.host_times[REFERENCE].median / self.host_times[provider].median


@dataclass(frozen=True)
class Machine:
    """Machine and command of a run.

    Attributes:
        copy_bandwidth: measured bytes a second of a copy.
        matmul_rates: measured flops a second of matrix products, by dtype.
        seed: the seed of drawn cases; None for fixed cases.
    """

    device: str
    kind: str
    versions: dict[str, str]
    commit: str
    command: str
    date: str
    copy_bandwidth: float
    matmul_rates: dict[str, float] = field(default_factory=dict)
    seed: int | None = None

    @property
    def interpreted(self) -> bool:
        return self.kind == devices.INTERPRETER


@dataclass(frozen=True)
class Run:
    """Results of one run; `interrupted` if it was stopped early."""

    machine: Machine
    results: list[Result] = field(default_factory=list)
    models: list[ModelResult] = field(default_factory=list)
    interrupted: bool = False

    def providers(self) -> list[str]:
        """Return the names of providers with a time: ATen, Tritonite, others in order of appearance."""
        every = [result.times for result in self.results] + [model.times for model in self.models]
        names = dict.fromkeys(name for times in every for name in times)
        return sorted(names, key=lambda name: (name != REFERENCE, name != "tritonite", list(names).index(name)))

    @classmethod
    def of_shards(cls, runs: Sequence[Run], command: str) -> Run:
        """Merge the runs of all shards of the cases into one, in the order of an unsharded run."""
        machine = dataclasses.replace(runs[0].machine, command=command)
        # Shards take operators, or drawn cases, in turns.
        dealt = [[list(own) for _, own in itertools.groupby(run.results, _dealt)] for run in runs]
        turns = itertools.zip_longest(*dealt, fillvalue=[])
        return cls(
            machine,
            [result for turn in turns for own in turn for result in own],
            [model for run in runs for model in run.models],
            any(run.interrupted for run in runs),
        )

    def roofline_share(self, result: Result, provider: str) -> float | None:
        """Return the least time for a case at the machine's rates, over the provider's device time."""
        if result.measure == "host" or provider not in result.times or not self.machine.copy_bandwidth:
            return None
        floor = result.bytes / self.machine.copy_bandwidth
        rate = self.machine.matmul_rates.get(result.dtype)
        if result.flops and rate:
            floor = max(floor, result.flops / rate)
        return floor * 1e6 / result.times[provider].median

    def save(self, path: Path) -> None:
        """Write the run as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        fields = {"schema": SCHEMA, **dataclasses.asdict(self)}
        rows = [
            {name: value for name, value in row.items() if value not in ("", None)} for row in fields.pop("results")
        ]
        lines = [f'"{name}": {json.dumps(value)}' for name, value in fields.items()]
        # One line a result, for readable diffs.
        lines.append('"results": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]")
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")

    @classmethod
    def load(cls, path: Path) -> Run:
        """Read what `save` wrote. Raises InvalidResults for anything else."""
        try:
            fields = json.loads(path.read_text())
            if fields["schema"] != SCHEMA:
                raise InvalidResults(path=path, reason=f"it has schema {fields['schema']}, this version reads {SCHEMA}")
            return cls(
                Machine(**fields["machine"]),
                [Result(**{**entry, "times": _times(entry["times"])}) for entry in fields["results"]],
                [ModelResult.of_json(entry) for entry in fields["models"]],
                fields["interrupted"],
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidResults(path=path, reason=str(error)) from error


def _dealt(result: Result) -> tuple[str, int | None]:
    return (result.op, None) if result.number is None else (result.family, result.number)


def _times(entries: dict[str, Any]) -> dict[str, Timing]:
    return {name: Timing(**entry) for name, entry in entries.items()}


@dataclass(frozen=True)
class Summary:
    """A provider's speedups over ATen in a family's cases, or in all ("all")."""

    family: str
    measure: str
    provider: str
    cases: int
    mean: float
    lowest: float
    worst: Result


def summaries(run: Run) -> Iterator[Summary]:
    """Yield a summary of every family, then of all families, by measure and provider."""
    groups = dict.fromkeys((result.family, result.measure) for result in run.results)
    for family, measure in (*groups, *dict.fromkeys(("all", measure) for _, measure in groups)):
        among = [result for result in run.results if result.measure == measure and family in ("all", result.family)]
        for provider in run.providers():
            timed = [(speedup, result) for result in among if (speedup := result.speedup(provider)) is not None]
            if provider != REFERENCE and timed:
                mean = statistics.geometric_mean(speedup for speedup, _ in timed)
                lowest, worst = min(timed, key=lambda each: each[0])
                yield Summary(family, measure, provider, len(timed), mean, lowest, worst)


# Elements from which a call's time is its kernel's, and the speedup below which ATen serves a call.
_LARGE, _ENOUGH = 2**22, 0.85


def slower_operators(run: Run) -> dict[str, list[str]]:
    """Return, by operator, the dtypes in which no large case reaches 0.85 of ATen's speed on the device.

    Matrix products are left out, because their speed depends on the shape.
    """
    best: dict[tuple[str, str], float] = {}
    for result in run.results:
        speedup = result.speedup()
        known = result.family != "classic" and result.flops is None and speedup is not None
        if known and result.measure == "device" and result.elements >= _LARGE:
            best[result.op, result.dtype] = max(best.get((result.op, result.dtype), 0.0), speedup or 0.0)
    slower: dict[str, list[str]] = {}
    for (op, dtype), speedup in sorted(best.items()):
        if speedup < _ENOUGH:
            slower.setdefault(op, []).append(dtype)
    return slower


@dataclass(frozen=True)
class Change:
    """A case whose time differs between two runs.

    Attributes:
        ratio: new time over old, each relative to ATen's time in its own run.
        noise: the difference expected without a change, as a fraction.
    """

    result: Result
    provider: str
    ratio: float
    noise: float


def compare(old: Run, new: Run, provider: str = "tritonite") -> list[Change]:
    """Return the cases that got slower or faster beyond the noise, the slowest first.

    Times are relative to ATen's in the same run, so that the state of the machine cancels out. The noise of a case is
    the sum of the spreads of both times in both runs: at least 3 % on the device, 8 % on the host, 25 % in the
    interpreter.
    """
    before = {result.key: result for result in old.results}
    changes = []
    for result in new.results:
        earlier = before.get(result.key)
        if earlier is None or not (was := earlier.speedup(provider)) or not (now := result.speedup(provider)):
            continue
        noise = sum(each.times[name].spread for each in (earlier, result) for name in (REFERENCE, provider))
        noise = max(noise, 0.25 if new.machine.interpreted else 0.08 if result.measure == "host" else 0.03)
        ratio = was / now
        if abs(math.log(ratio)) > math.log1p(noise):
            changes.append(Change(result, provider, ratio, noise))
    return sorted(changes, key=lambda change: -change.ratio)
