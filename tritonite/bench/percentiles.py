"""Statistics of drawn cases: percentiles of speedups, reasons of declines, and the worst cases."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tritonite.bench.results import Result, Run, quantile

PROVIDER = "tritonite"


@dataclass(frozen=True)
class Percentiles:
    """Speedups over ATen in the drawn cases of one family and dtype.

    Attributes:
        cases: number of cases drawn that ATen can run.
        served: number of cases that a Tritonite kernel served; only these have speedups.
        minimum, tenth, median, mean: lowest speedup, 10th percentile, median, geometric mean; None if none was served.
    """

    family: str
    dtype: str
    cases: int
    served: int
    minimum: float | None = None
    tenth: float | None = None
    median: float | None = None
    mean: float | None = None

    @property
    def speedups(self) -> tuple[float | None, ...]:
        return self.minimum, self.tenth, self.median, self.mean


def percentiles(run: Run) -> Iterator[Percentiles]:
    """Yield the percentiles of every family and dtype with drawn cases, then those of all as ("all", "all")."""
    results = _drawn(run)
    groups = sorted({(result.family, result.dtype) for result in results})
    for family, dtype in [*groups, *[("all", "all")] * bool(groups)]:
        among = [each for each in results if (family, dtype) in (("all", "all"), (each.family, each.dtype))]
        speedups = sorted(speedup for each in among if (speedup := kernel_speedup(each)) is not None)
        if not speedups:
            yield Percentiles(family, dtype, len(among), 0)
            continue
        least, tenth, median = (quantile(speedups, fraction) for fraction in (0, 0.1, 0.5))
        mean = statistics.geometric_mean(speedups)
        yield Percentiles(family, dtype, len(among), len(speedups), least, tenth, median, mean)


def declines(run: Run) -> list[tuple[str, int]]:
    """Return (reason, number of drawn cases declined for it), the most frequent first."""
    return Counter(result.declined for result in _drawn(run) if result.declined).most_common()


def worst(run: Run, count: int = 10) -> list[tuple[float, Result]]:
    """Return the `count` drawn cases with the lowest speedups, lowest first."""
    served = [(speedup, result) for result in _drawn(run) if (speedup := kernel_speedup(result)) is not None]
    return sorted(served, key=lambda each: each[0])[:count]


def reproduction(run: Run, result: Result) -> str:
    """Return the command that measures a drawn case again."""
    return f"tritonite bench --seed {run.machine.seed} --family {result.family} --case {result.number}"


def _drawn(run: Run) -> list[Result]:
    return [result for result in run.results if result.number is not None]


def kernel_speedup(result: Result) -> float | None:
    """Return a case's speedup; None if it was declined, because its time is not a kernel's."""
    return None if result.declined else result.speedup(PROVIDER)
