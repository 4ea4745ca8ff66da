"""Run the tests in calls of bounded length, each of which leaves out what has passed.

    PYTHONPATH=. python tools/suite_by_parts.py --record RECORD [--earlier FILE...] [--seconds 500] [ARGUMENTS...]

    PYTHONPATH=. python tools/suite_by_parts.py --record docs/benchmarks/gpu_suite.gz --merge RECORD...

RECORD gets a line for each test that ends, at once: its outcome, the commit, the device and its name. Lines follow
those of earlier calls. A test is left out if RECORD or an earlier file, which may be compressed by gzip, says that it
has passed; `--since COMMIT` counts only what has passed at that commit. Failures are written to RECORD.failures, too.
With `--gpus N` the processes of pytest's `-n` take the first N GPUs in turn.
Exits as pytest does: 0 if all remaining tests have passed, and 2 if time was up first. ARGUMENTS are pytest's.

The second form adds the last outcomes of other records to a compressed one, and prints the number of each outcome.
"""

from __future__ import annotations

import argparse
import gzip
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

# The variable that tells processes how many GPUs they share.
_GPUS = "TRITONITE_SUITE_GPUS"


def _lines(file: Path) -> list[str]:
    """Return the lines of a record, which may be compressed."""
    return (gzip.decompress(file.read_bytes()).decode() if file.suffix == ".gz" else file.read_text()).splitlines()


def merge(into: Path, records: list[Path]) -> Counter[str]:
    """Write the last line of each test, by name, to a compressed record. Return how many tests have each outcome."""
    last = {}
    for file in [*([into] if into.exists() else []), *records]:
        last.update({line.split("\t")[3]: line for line in _lines(file)})
    # Without a time, so that equal records are equal files.
    into.write_bytes(gzip.compress("".join(f"{last[name]}\n" for name in sorted(last)).encode(), mtime=0))
    return Counter(line.split("\t")[0] for line in last.values())


def passed_tests(files: list[Path], commit: str | None = None) -> set[str]:
    """Return the names of tests that have passed, by files of records, at a commit or at any."""
    passed = set()
    for file in files:
        for line in _lines(file):
            outcome, at, _, name = line.split("\t")
            if outcome == "passed" and commit in (None, at):
                passed.add(name)
            elif outcome == "failed":
                passed.discard(name)
    return passed


def pytest_addoption(parser):
    parser.addoption("--record", type=Path)
    parser.addoption("--earlier", type=Path, action="append", default=[])
    parser.addoption("--since")
    parser.addoption("--until", type=float)
    parser.addoption("--header")


def visible_gpu() -> str | None:
    """Return the GPU of this process of pytest's, or None if it may use all."""
    worker, gpus = os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get(_GPUS)
    return str(int(worker.removeprefix("gw")) % int(gpus)) if worker and gpus else None


# Before CUDA is initialised.
if (_own := visible_gpu()) is not None:
    os.environ["CUDA_VISIBLE_DEVICES"] = _own


def pytest_configure(config):
    # xdist's workers collect, and the process that started them records.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(config), "recorder")


def pytest_collection_modifyitems(config, items):
    files = [*config.getoption("--earlier"), config.getoption("--record")]
    passed = passed_tests([file for file in files if file.exists()], config.getoption("--since"))
    items[:] = [item for item in items if item.nodeid not in passed]


class _Recorder:
    """Write an outcome when a test ends, and stop the session when time is up."""

    def __init__(self, config):
        self.record, self.until = config.getoption("--record"), config.getoption("--until")
        self.header = config.getoption("--header")
        self.outcomes = {}

    def pytest_runtest_logreport(self, report):
        worst = max(
            self.outcomes.get(report.nodeid, "passed"), report.outcome, key=("passed", "skipped", "failed").index
        )
        self.outcomes[report.nodeid] = worst
        if report.failed:
            with self.record.with_suffix(".failures").open("a") as file:
                file.write(f"{report.nodeid} {report.when}\n{report.longreprtext}\n\n")
        if report.when == "teardown":
            with self.record.open("a") as file:
                file.write(f"{self.outcomes.pop(report.nodeid)}\t{self.header}\t{report.nodeid}\n")
            if time.time() > self.until:
                # xdist's workers finish their queues if a session is only asked to stop.
                pytest.exit("time is up", returncode=2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--earlier", type=Path, action="append", default=[])
    parser.add_argument("--merge", type=Path, nargs="+", metavar="RECORD")
    parser.add_argument("--since")
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--commit", default=_commit(), help="by default that of the working tree")
    options, arguments = parser.parse_known_args()
    if options.merge:
        print(
            ", ".join(f"{count} {outcome}" for outcome, count in sorted(merge(options.record, options.merge).items()))
        )
        return 0
    options.record.touch()
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "suite_by_parts", "-p", "no:cacheprovider"]
    command += [f"--record={options.record}", *[f"--earlier={file}" for file in options.earlier]]
    command += [f"--until={time.time() + options.seconds}", f"--header={options.commit}\t{device}"]
    command += [f"--since={options.since}"] if options.since else []
    tools = str(Path(__file__).parent)
    path = os.pathsep.join(filter(None, [tools, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"TRITONITE_TEST_FULL": "1", "PYTHONPATH": path}
    environment |= {_GPUS: str(options.gpus)} if options.gpus else {}
    return subprocess.run([*command, *arguments], env=environment, check=False).returncode


def _commit() -> str:
    """Return the commit of the working tree, or "unknown" in a copy without its history."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
