"""The process that measures one model in one way.

    python -m tritonite.bench.graphs.measure '{"model": "bert", "phase": "prefill", "way": "inductor", ...}'

It prints times as JSON in the last line of its output. What it takes to import libraries and to make the model does not
count.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tritonite
from tritonite.bench import timing
from tritonite.bench.graphs.subjects import Subject, gradients, subject
from tritonite.bench.graphs.ways import WAYS
from tritonite.bench.models.passes import MINIMUM_SIMILARITY, disagreement
from tritonite.bench.models.workload import Workload
from tritonite.bench.results import Timing
from tritonite.bench.turns import Turns

_WARM_CALLS = 3
# A result, microseconds until the call returned, and until the device was done.
_Ran = tuple[torch.Tensor, float, float]


def measured(task: dict[str, Any]) -> dict[str, Any]:
    """Return the times of a task, or its failure."""
    dtype = getattr(torch, task["dtype"])
    workload = Workload(dtype, task["batch"], task["tokens"], task["tiny"])
    made = subject(task["model"], task["phase"], workload)
    forward, file, way = made.forward, Path(task["file"]), task["way"]
    inputs = [made.inputs(shape) for shape in range(3)]
    # The device's libraries start outside what is measured.
    _ = torch.ones(16, 16, device=tritonite.device) @ torch.ones(16, 16, device=tritonite.device)
    timing.synchronize()
    turns = Turns(Path(task["turns"]))
    with torch.set_grad_enabled(made.trains):
        begin = time.perf_counter()
        function = WAYS[way](forward, made.module, file)
        _run(made, function, inputs[0])
        end = time.perf_counter()
        cold = end - begin - turns.stopped(begin, end)
        if task["only_start"]:
            return {"cold": cold}
        for _ in range(_WARM_CALLS):
            _run(made, function, inputs[0])
        with turns.alone():
            passes = _steady(lambda: _run(made, function, inputs[0]), task["rounds"])
        # A file has the shapes that were saved.
        shapes = [_first(made, function, given, turns) for given in inputs[1:] if way != "tritonite-file"]
        for _ in inputs:
            result = _run(made, function, inputs[0])[0]
        if way == "tritonite-record":
            tritonite.save(function, file, made.module)
        tritonite.disable()
        torch.compiler.set_stance("force_eager")
        expected = _run(made, forward, inputs[0])[0]
    failure = disagreement(result, expected, MINIMUM_SIMILARITY[dtype])
    return {
        "shape": " ".join("x".join(map(str, each.shape)) for each in inputs[0]),
        "cold": cold,
        "new_shape": shapes[0] if shapes else None,
        "later_shape": shapes[1] if shapes else None,
        "steady": Timing.of([done for done, _ in passes]).__dict__,
        "host": Timing.of([returned for _, returned in passes]).__dict__,
        "failure": failure,
    }


def _run(made: Subject, function: Callable[..., Any], given: tuple[torch.Tensor, ...]) -> _Ran:
    """Run a call. Return (its result, microseconds until the call returned, and until the device was done)."""
    timing.synchronize()
    begin = time.perf_counter()
    result = function(*given)
    if made.trains:
        result.backward()
    returned = time.perf_counter()
    timing.synchronize()
    done = time.perf_counter()
    result = gradients(made.module) if made.trains else result.detach().clone()
    if result.dim() == 2:
        result = result.unsqueeze(1)
    return result, (returned - begin) * 1e6, (done - begin) * 1e6


def _first(made: Subject, function: Callable[..., Any], given: tuple[torch.Tensor, ...], turns: Turns) -> float:
    """Return milliseconds of the first call with a shape, without those for which this process was stopped."""
    begin = time.perf_counter()
    taken = _run(made, function, given)[2] / 1e3
    return taken - turns.stopped(begin, time.perf_counter()) * 1e3


def _steady(run: Callable[[], _Ran], rounds: int) -> list[tuple[float, float]]:
    """Return (microseconds until the device was done, and until the call returned) of some calls."""
    return [(done, returned) for _, returned, done in (run() for _ in range(rounds))]


if __name__ == "__main__":
    sys.stdout.write(f"{json.dumps(measured(json.loads(sys.argv[1])))}\n")
