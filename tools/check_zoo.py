"""Check the zoo of models against ATen without timing, and write docs/benchmarks/zoo.json.

    python tools/check_zoo.py [--json FILE] [MODEL ...]

Results and all gradients are compared in float32, at the tiny sizes in the interpreter. Full sizes are measured on a
GPU, with times, by

    tritonite bench --zoo all --batch 8 --provider patched --provider compiled --json docs/benchmarks/zoo.json
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

import torch

import tritonite
from tritonite.bench import models, run, timing
from tritonite.bench.results import Run
from tritonite.cli.common import console

FILE = Path(__file__).parent.parent / "docs" / "benchmarks" / "zoo.json"
PROVIDERS = (timing.ATEN, timing.EVERY, timing.PATCHED)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=FILE)
    parser.add_argument("model", nargs="*")
    given = parser.parse_args()
    measured = Run(run.machine(shlex.join(["python", "tools/check_zoo.py", *sys.argv[1:]])), interrupted=True)
    # A contrastive loss of one pair is 0.
    workload = models.Workload(torch.float32, 2, 6, tritonite.backend.interpreted, every_gradient=True)
    for name in given.model or models.ZOOS["all"]:
        for train in (False, True):
            for result in models.agreements(models.ModelCase(name, workload, train), PROVIDERS):
                measured.models.append(result)
                console.print(f"{name} {result.phase} {result.similarities} {result.failure}", markup=False)
                measured.save(given.json)
    complete = Run(measured.machine, measured.results, measured.models)
    complete.save(given.json)
    return int(any(each.failure for each in complete.models))


if __name__ == "__main__":
    sys.exit(main())
