"""What a run of drawn cases says: percentiles of speedups, what kernels left to ATen and why, and the worst cases."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tritonite.bench.results import Result, Run, quantile

PROVIDER = "tritonite"


@dataclass(frozen=True)
class Percentiles:
    """Of ATen's time over Tritonite's, in the cases of a family and a dtype that kernels of Tritonite's served.

    `cases` are all that were drawn and that ATen has, of which `served` have a time that counts here; speedups are None
    where there is none.
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
    """Of every family and dtype, and of all; a run that drew none has none."""
    results = _drawn(run)
    groups = sorted({(result.family, result.dtype) for result in results})
    for family, dtype in [*groups, *[("all", "all")] * bool(groups)]:
        among = [each for each in results if (family, dtype) in (("all", "all"), (each.family, each.dtype))]
        found = sorted(speedup for each in among if (speedup := _speedup(each)) is not None)
        if not found:
            yield Percentiles(family, dtype, len(among), 0)
            continue
        least, tenth, median = (quantile(found, share) for share in (0, 0.1, 0.5))
        yield Percentiles(family, dtype, len(among), len(found), least, tenth, median, statistics.geometric_mean(found))


def declines(run: Run) -> list[tuple[str, int]]:
    """Why no kernel of Tritonite's served drawn cases, and how many, the most frequent reason first."""
    return Counter(result.declined for result in _drawn(run) if result.declined).most_common()


def worst(run: Run, count: int = 10) -> list[tuple[float, Result]]:
    """The drawn cases with the lowest speedups, the lowest first."""
    found = [(speedup, result) for result in _drawn(run) if (speedup := _speedup(result)) is not None]
    return sorted(found, key=lambda each: each[0])[:count]


def reproduction(run: Run, result: Result) -> str:
    """A command that measures a drawn case again."""
    return f"tritonite bench --seed {run.machine.seed} --family {result.family} --case {result.number}"


def _drawn(run: Run) -> list[Result]:
    return [result for result in run.results if result.number is not None]


def _speedup(result: Result) -> float | None:
    """None of a call that was left to ATen, whose time says nothing of a kernel."""
    return None if result.declined else result.speedup(PROVIDER)
