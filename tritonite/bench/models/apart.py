"""Measures several models at a time, each in a process of its own; while one is timed, the others are stopped.

    python -m tritonite.bench.models.apart '{"model": "bert", "train": false, ...}'

is such a process. It prints its results as JSON in the last line of its output.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from tritonite.bench import processes, run, timing
from tritonite.bench.models.catalog import ModelCase
from tritonite.bench.models.passes import measure
from tritonite.bench.models.workload import Workload
from tritonite.bench.results import ModelResult
from tritonite.bench.turns import Turns


def measure_apart(
    cases: Sequence[ModelCase], providers: Sequence[str], every: bool, rounds: int, jobs: int, limit: float
) -> Iterator[ModelResult]:
    """Yield the results of `measure`, of each model when its process has ended.

    A model that finds the device's memory full is measured again after all others, alone. A process that fails, or
    takes longer than the limit, gives a result with a failure.

    Args:
        cases: the models.
        providers: texts for `run.provider`, timed beside ATen and Tritonite.
        every: whether every overload that Tritonite has is timed, too.
        rounds: rounds in which providers take turns.
        jobs: models that are measured at a time.
        limit: seconds that a process may take.
    """
    with tempfile.TemporaryDirectory(prefix="tritonite-bench-") as folder, ThreadPoolExecutor(jobs) as pool:
        shared = {"providers": list(providers), "every": every, "rounds": rounds, "turns": folder}
        started = {pool.submit(_results, case, shared, limit): case for case in cases}
        large: list[ModelCase] = []
        try:
            for future in as_completed(started):
                results = future.result()
                if any(processes.memory_is_full(each.failure) for each in results):
                    large.append(started[future])
                else:
                    yield from results
            for case in large:
                yield from _results(case, shared, limit)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            Turns(Path(folder)).end()


def _results(case: ModelCase, shared: dict[str, Any], limit: float) -> list[ModelResult]:
    """Return the results of a process that measures one model."""
    workload = dataclasses.asdict(case.workload) | {"dtype": str(case.workload.dtype).removeprefix("torch.")}
    task = {"model": case.name, "train": case.train, "workload": workload, **shared}
    found = processes.answer("tritonite.bench.models.apart", task, Path(shared["turns"]), limit)
    if reason := found.get("failure"):
        phase, size = "train" if case.train else "forward", (case.workload.batch, case.workload.tokens)
        return [ModelResult(case.title, phase, case.dtype, *size, {}, {}, failure=reason)]
    return [ModelResult.of_json(each) for each in found["results"]]


def _answer(task: dict[str, Any]) -> dict[str, Any]:
    """Return the results of a task, the later one of each pass."""
    workload = Workload(**task["workload"] | {"dtype": getattr(torch, task["workload"]["dtype"])})
    case = ModelCase(task["model"], workload, task["train"])
    further = (*((timing.EVERY,) if task["every"] else ()), *map(run.provider, task["providers"]))
    turns = Turns(Path(task["turns"]))
    found = {
        result.key: result
        for result in measure([case], (timing.ATEN, timing.TRITONITE, *further), task["rounds"], turns.alone)
    }
    return {"results": [dataclasses.asdict(each) for each in found.values()]}


if __name__ == "__main__":
    sys.stdout.write(f"\n{json.dumps(_answer(json.loads(sys.argv[1])))}\n")
