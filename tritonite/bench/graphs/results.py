"""Results of `tritonite bench --graphs`, their JSON file and their table."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tritonite.bench.results import Machine, Timing, readable
from tritonite.errors import InvalidResults

SCHEMA = 1
# The times of a result, and their names in tables.
COLUMNS = {
    "cold": "cold start, s",
    "cached": "with disk caches, s",
    "new_shape": "new shape, ms",
    "later_shape": "later shape, ms",
    "steady": "steady, ms",
    "host": "host, ms",
}


@dataclass(frozen=True)
class GraphResult:
    """Times of a model that runs in one way.

    Attributes:
        model, phase, dtype, way: identify the result.
        shape: the shapes of the inputs.
        cold: seconds from the first use of the way to the first result, with empty caches on disk.
        cached: the same in a second process, which finds the first one's caches; None if it was not measured.
        new_shape: milliseconds of the first call with the first new shape.
        later_shape: milliseconds of the first call with the shape after that.
        steady: microseconds of a call, until the device was done.
        host: microseconds until the call returned.
        failure: why there are no times, such as a wrong answer; "" if there are.
    """

    model: str
    phase: str
    dtype: str
    way: str
    shape: str = ""
    cold: float = math.nan
    cached: float | None = None
    new_shape: float | None = None
    later_shape: float | None = None
    steady: Timing | None = None
    host: Timing | None = None
    failure: str = ""

    @classmethod
    def of_json(cls, data: dict[str, Any]) -> GraphResult:
        """Return a result of a JSON object. Raises InvalidResults."""
        try:
            times = {name: data[name] and Timing(**data[name]) for name in ("steady", "host") if name in data}
            fields: dict[str, Any] = data | times
            return cls(**fields)
        except TypeError as error:
            raise InvalidResults(path="a result", reason=error) from None

    def cell(self, column: str) -> str:
        """Return a time as a table shows it, or "" without one."""
        value = getattr(self, column)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return ""
        return readable(value.median / 1e3 if isinstance(value, Timing) else value, 2)


@dataclass
class GraphRun:
    """The results of a run on one machine."""

    machine: Machine
    results: list[GraphResult] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write the run as JSON."""
        results = [
            {name: value for name, value in dataclasses.asdict(each).items() if value == value} for each in self.results
        ]
        data = {"schema": SCHEMA, "machine": dataclasses.asdict(self.machine), "results": results}
        path.write_text(json.dumps(data, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> GraphRun:
        """Read a run. Raises InvalidResults."""
        try:
            data = json.loads(path.read_text())
            if data["schema"] != SCHEMA:
                raise InvalidResults(path=path, reason=f"its schema is {data['schema']}, not {SCHEMA}")
            return cls(Machine(**data["machine"]), [GraphResult.of_json(each) for each in data["results"]])
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise InvalidResults(path=path, reason=repr(error)) from error


def table(run: GraphRun) -> Iterator[str]:
    """Yield the lines of a Markdown table with a row for each model and way."""
    yield f"| {run.machine.device} | way | {' | '.join(COLUMNS.values())} |"
    yield f"| --- | --- |{' ---: |' * len(COLUMNS)}"
    previous = None
    for each in run.results:
        title = f"{each.model} {each.phase}, {each.dtype}, {each.shape}" if each.shape else f"{each.model} {each.phase}"
        named = "" if (each.model, each.phase, each.dtype) == previous else title
        previous = each.model, each.phase, each.dtype
        cells = [f"failed: {each.failure}", *[""] * (len(COLUMNS) - 1)] if each.failure else map(each.cell, COLUMNS)
        yield f"| {named} | {each.way} | {' | '.join(cell.replace('|', '/') for cell in cells)} |"
