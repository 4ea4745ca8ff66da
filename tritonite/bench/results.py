"""What a benchmark run found, and its form on disk."""

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

from tritonite.errors import InvalidResults

SCHEMA = 1
REFERENCE = "aten"
# What a time is of: the device's work, the same captured into a CUDA graph, or the host's part of a call.
MEASURES = ("device", "graph", "host")


def quantile(ordered: Sequence[float], share: float) -> float:
    """What so large a share of numbers in ascending order lies below, between two of them by their distance."""
    place = share * (len(ordered) - 1)
    below = ordered[math.floor(place)]
    return below + (place - math.floor(place)) * (ordered[math.ceil(place)] - below)


def readable(value: float, digits: int) -> str:
    """Return a number with `digits` decimals, or with two significant ones where it would be rounded to 0."""
    text = f"{value:,.{digits}f}"
    return f"{value:.2g}" if value and not float(text.replace(",", "")) else text


@dataclass(frozen=True)
class Timing:
    """Microseconds a call: the median of rounds, and their quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, times: Iterable[float]) -> Timing:
        ordered = sorted(times)
        # Clocks do not know less than a nanosecond.
        return cls(*(round(quantile(ordered, share), 3) for share in (0.5, 0.25, 0.75)))

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles, as a share of the median."""
        return (self.high - self.low) / 2 / self.median


@dataclass(frozen=True)
class Result:
    """One case: an operator's call on tensors of a dtype, timed for every provider ("aten", "tritonite", ...).

    `label` tells calls of an operator apart ("4096x4096", "row broadcast"), `elements` is the size of its largest
    tensor, `bytes` what it has to read and write at least, `flops` None where arithmetic does not count. `failure`
    says why there are no times: a wrong answer, an error. `declined` says why no kernel of Tritonite's served the call,
    or by default would, "" where one does. A case that was drawn has a `number`.
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
        """ATen's time over the provider's; None where one of them has none."""
        if REFERENCE not in self.times or provider not in self.times:
            return None
        return self.times[REFERENCE].median / self.times[provider].median


@dataclass(frozen=True)
class ModelResult:
    """A model's forward pass, timed for every provider, and what its operators contribute.

    `phase` is "prefill" or "decode", of `tokens` tokens after `context` others. `operators` has, for those that cost
    the difference between ATen and Tritonite, (name, calls a pass, ATen's microseconds a pass, Tritonite's), the
    largest difference first; `device_times` what all kernels of a pass take on a GPU, in microseconds, of these two.
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

    def tokens_per_second(self, provider: str) -> float:
        return self.batch * self.tokens / self.times[provider].median * 1e6


@dataclass(frozen=True)
class Machine:
    """Where and how a run was made. Rates are the machine's own, measured first: bytes and flops a second.

    `seed` is that of cases which were drawn.
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
        return self.kind == "interpreter"


@dataclass(frozen=True)
class Run:
    """All of one run's results; `interrupted` where it was stopped before its end."""

    machine: Machine
    results: list[Result] = field(default_factory=list)
    models: list[ModelResult] = field(default_factory=list)
    interrupted: bool = False

    def providers(self) -> list[str]:
        """Those with a time, ATen first."""
        every = [result.times for result in self.results] + [model.times for model in self.models]
        found = dict.fromkeys(name for times in every for name in times)
        return sorted(found, key=lambda name: (name != REFERENCE, name != "tritonite", list(found).index(name)))

    @classmethod
    def of_parts(cls, runs: Sequence[Run], command: str) -> Run:
        """One run of the results of several, of a part of the cases each, and of the first one's machine."""
        machine = dataclasses.replace(runs[0].machine, command=command)
        # What parts are of in turns: operators, or drawn cases.
        dealt = [[list(own) for _, own in itertools.groupby(run.results, _dealt)] for run in runs]
        turns = itertools.zip_longest(*dealt, fillvalue=[])
        return cls(
            machine,
            [result for turn in turns for own in turn for result in own],
            [model for run in runs for model in run.models],
            any(run.interrupted for run in runs),
        )

    def roofline_share(self, result: Result, provider: str) -> float | None:
        """The least time the machine could take for a case's bytes and flops, over the provider's device time."""
        if result.measure == "host" or provider not in result.times or not self.machine.copy_bandwidth:
            return None
        floor = result.bytes / self.machine.copy_bandwidth
        rate = self.machine.matmul_rates.get(result.dtype)
        if result.flops and rate:
            floor = max(floor, result.flops / rate)
        return floor * 1e6 / result.times[provider].median

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        parts = {"schema": SCHEMA, **dataclasses.asdict(self)}
        rows = [{name: value for name, value in row.items() if value not in ("", None)} for row in parts.pop("results")]
        lines = [f'"{name}": {json.dumps(value)}' for name, value in parts.items()]
        # A line for each result, so that two files can be told apart by eye.
        lines.append('"results": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]")
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")

    @classmethod
    def load(cls, path: Path) -> Run:
        """Read what `save` wrote. Raises InvalidResults for anything else."""
        try:
            parts = json.loads(path.read_text())
            if parts["schema"] != SCHEMA:
                raise InvalidResults(path=path, reason=f"it has schema {parts['schema']}, this version reads {SCHEMA}")
            return cls(
                Machine(**parts["machine"]),
                [Result(**{**entry, "times": _times(entry["times"])}) for entry in parts["results"]],
                [_model(entry) for entry in parts["models"]],
                parts["interrupted"],
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidResults(path=path, reason=str(error)) from error


def _dealt(result: Result) -> tuple[str, int | None]:
    return (result.op, None) if result.number is None else (result.family, result.number)


def _times(entries: dict[str, Any]) -> dict[str, Timing]:
    return {name: Timing(**entry) for name, entry in entries.items()}


def _model(entry: dict[str, Any]) -> ModelResult:
    operators = [tuple(operator) for operator in entry["operators"]]
    times = {"times": _times(entry["times"]), "host_times": _times(entry["host_times"])}
    return ModelResult(**{**entry, **times, "operators": operators})


@dataclass(frozen=True)
class Summary:
    """A provider's speedups over ATen, of a family's cases or of "all": the geometric mean, and the lowest's case."""

    family: str
    measure: str
    provider: str
    cases: int
    mean: float
    lowest: float
    worst: Result


def summaries(run: Run) -> Iterator[Summary]:
    """Of every family, and then of all, by measure and provider."""
    groups = dict.fromkeys((result.family, result.measure) for result in run.results)
    for family, measure in (*groups, *dict.fromkeys(("all", measure) for _, measure in groups)):
        among = [result for result in run.results if result.measure == measure and family in ("all", result.family)]
        for provider in run.providers():
            found = [(speedup, result) for result in among if (speedup := result.speedup(provider)) is not None]
            if provider != REFERENCE and found:
                mean = statistics.geometric_mean(speedup for speedup, _ in found)
                lowest, worst = min(found, key=lambda each: each[0])
                yield Summary(family, measure, provider, len(found), mean, lowest, worst)


# Of so many elements a call's time is its kernel's, and below this speed ATen is left to serve it.
_LARGE, _ENOUGH = 2**22, 0.85


def slower_operators(run: Run) -> dict[str, list[str]]:
    """The dtypes in which no large case of an operator reaches 0.85 of ATen's speed on the device.

    Not of products, of which the shape decides.
    """
    best: dict[tuple[str, str], float] = {}
    for result in run.results:
        speedup = result.speedup()
        known = result.family != "classic" and result.flops is None and speedup is not None
        if known and result.measure == "device" and result.elements >= _LARGE:
            best[result.op, result.dtype] = max(best.get((result.op, result.dtype), 0.0), speedup or 0.0)
    found: dict[str, list[str]] = {}
    for (op, dtype), speedup in sorted(best.items()):
        if speedup < _ENOUGH:
            found.setdefault(op, []).append(dtype)
    return found


@dataclass(frozen=True)
class Change:
    """A case whose time differs between two runs: `ratio` is new over old, both relative to ATen in their own run."""

    result: Result
    provider: str
    ratio: float
    noise: float


def compare(old: Run, new: Run, provider: str = "tritonite") -> list[Change]:
    """The cases that got slower or faster beyond the noise, the worst first.

    Times are taken relative to ATen's of the same run, so that a machine's mood cancels out. The noise of a case is the
    sum of both runs' spreads of both times, 3 % at least for a device, 8 % for a host, 25 % in the interpreter.
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
