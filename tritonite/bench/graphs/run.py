"""Measures models in processes of their own, so that no cold start finds what another one has loaded or compiled."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tritonite.bench import processes
from tritonite.bench.graphs.results import GraphResult
from tritonite.bench.graphs.subjects import SUBJECTS
from tritonite.bench.graphs.ways import CACHED, FORWARD_ONLY, WAYS
from tritonite.bench.turns import Turns

# Variables that name folders of disk caches.
_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


@dataclass(frozen=True)
class Plan:
    """The models and ways to measure, and their sizes.

    Attributes:
        models: names of models; empty for all.
        ways: names of ways; empty for all.
        dtype: the name of a dtype of torch.
        limit: seconds that a process may take. A model in one way takes two, and a third if it writes a file.
        jobs: results that are measured at a time. While one process measures its steady state, the others are stopped.
    """

    models: Sequence[str] = ()
    ways: Sequence[str] = ()
    dtype: str = "bfloat16"
    batch: int = 1
    tokens: int = 512
    tiny: bool = False
    rounds: int = 30
    limit: float = 300.0
    jobs: int = 1


def measure(plan: Plan) -> Iterator[GraphResult]:
    """Yield a result for each model and way, when it is there.

    What takes longer than the limit, or fails, has a failure.
    """
    with (
        tempfile.TemporaryDirectory(prefix="tritonite-bench-") as temporary,
        ThreadPoolExecutor(plan.jobs) as pool,
    ):
        folder, started = Path(temporary), dict[tuple[str, str, str], Future[GraphResult]]()
        try:
            for model, phase, way in _chosen(plan):
                # The file is written by another way, if that is measured.
                writer = started.get((model, phase, "tritonite-record")) if way == "tritonite-file" else None
                given = plan, model, phase, way, folder, writer
                started[model, phase, way] = pool.submit(_measured, *given)
            yield from (future.result() for future in as_completed(started.values()))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            Turns(folder).end()


def position(result: GraphResult) -> tuple[int, int]:
    """Return the place of a result in the order of models and ways."""
    return list(SUBJECTS).index((result.model, result.phase)), list(WAYS).index(result.way)


def count(plan: Plan) -> int:
    """Return the number of results of `measure`."""
    return len(_chosen(plan))


def _chosen(plan: Plan) -> list[tuple[str, str, str]]:
    """Return (model, phase, way) of each result. A training step runs in no way that has no gradient."""
    return [
        (model, phase, way)
        for model, phase in SUBJECTS
        for way in WAYS
        if model in (plan.models or (model,))
        and way in (plan.ways or (way,))
        and not (phase == "train" and way in FORWARD_ONLY)
    ]


def _measured(
    plan: Plan, model: str, phase: str, way: str, folder: Path, writer: Future[GraphResult] | None
) -> GraphResult:
    """Return the result of one model in one way, after the way that writes its file."""
    result = GraphResult(model, phase, plan.dtype, way)
    file = folder / f"{model}-{phase}"
    if writer is not None:
        wait([writer])
    task = {
        **{"model": model, "phase": phase, "way": way, "dtype": plan.dtype, "batch": plan.batch},
        **{"tokens": plan.tokens, "tiny": plan.tiny, "rounds": plan.rounds, "file": str(file), "only_start": False},
        "turns": str(folder),
    }
    if way == "tritonite-file" and not file.exists():
        # Another process writes the file.
        with tempfile.TemporaryDirectory(prefix="tritonite-bench-") as caches:
            first = _answer(task | {"way": "tritonite-record"}, caches, plan.limit)
        if reason := first.get("failure"):
            return replace(result, failure=f"no file: {reason}")
    with tempfile.TemporaryDirectory(prefix="tritonite-bench-") as caches:
        found = _answer(task, caches, plan.limit)
        if not found.get("failure") and way in CACHED:
            found["cached"] = _answer(task | {"only_start": True}, caches, plan.limit).get("cold")
    return GraphResult.of_json({"model": model, "phase": phase, "dtype": plan.dtype, "way": way, **found})


def _answer(task: dict[str, Any], caches: str, limit: float) -> dict[str, Any]:
    """Run a process with folders of caches, and return its answer, or its failure."""
    folders = {name: os.path.join(caches, name) for name in _CACHES}
    return processes.answer("tritonite.bench.graphs.measure", task, Path(task["turns"]), limit, folders)
