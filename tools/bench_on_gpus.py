"""Run `tritonite bench` with a shard of the cases on each GPU of this machine, and write the results as one run.

    python tools/bench_on_gpus.py --rounds 5 --json results.json

Takes the options of `tritonite bench`; --json is required, and --charts shows all shards. The output of a shard is
printed if it fails.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from tritonite.bench.results import Run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--charts", type=Path)
    known, options = parser.parse_known_args()
    count = max(1, torch.cuda.device_count())
    if not any(option.startswith("--jobs") for option in options):
        options = [*options, "--jobs", str(max(1, (os.cpu_count() or 1) // count))]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.json" for i in range(count)]
        started = [_start(i, count, options, file) for i, file in enumerate(files)]
        for process, file in zip(started, files, strict=True):
            if process.wait():
                print(file.with_suffix(".txt").read_text())
        runs = [Run.load(file) for file in files]
    merged = Run.of_shards(runs, shlex.join(["python", "tools/bench_on_gpus.py", *sys.argv[1:]]))
    merged.save(known.json)
    if known.charts:
        from tritonite.bench.charts import save

        save(merged, known.charts)
    return max(process.returncode for process in started)


def _start(index: int, count: int, options: list[str], file: Path) -> subprocess.Popen[bytes]:
    """Start the measurement of one shard on one of the visible GPUs."""
    shard = ["--part", f"{index}/{count}", "--json", str(file)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": visible.split(",")[index]}
    # A full pipe would block the process until this one reads it.
    with file.with_suffix(".txt").open("wb") as output:
        command = [sys.executable, "-m", "tritonite", "bench", *options, *shard]
        return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)


if __name__ == "__main__":
    sys.exit(main())
