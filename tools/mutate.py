"""Put the faults of tools/mutants.py into a copy of the package, one at a time, and see whether tests find them.

    python tools/mutate.py [--family F ...] [--name GLOB] [--list] [--clean] [--calls N] [--seed S]

--docs writes the section "Mutants" of docs/correctness.md, with the faults that nothing finds; --check reports whether
it is stale.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import generated
from mutants import MUTANTS, Mutant

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs" / "correctness.md"
_BEGIN, _END = "## Mutants\n", "## Where an answer differs on purpose\n"
# Overloads of a packet to test and draw, and most seconds of a step.
_OVERLOADS, _PATIENCE = 3, 900
_WIDTH = 120
# Does what `test_overload` of tests/test_accuracy.py does, without collecting all of its cases.
_SAMPLES = """
import sys, torch, tritonite
from tritonite.testing.verify import check_overload
labels = [f"{layout}*" for layout in ("transposed", "broadcast", "zero_dim", "boundaries", "extreme")]
for name in sys.argv[1:]:
    report = check_overload(tritonite.overloads()[name], torch.float32, labels=labels)
    if report.failures:
        print(name, *report.failures[:3], sep="\\n")
        sys.exit(1)
"""
_FUZZ = """
import sys, tritonite
from tritonite.testing.fuzz import fuzz_one
seed, calls, names = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
for number in range(calls):
    for name in names:
        finding = fuzz_one(name, seed, number)
        if finding is not None:
            print(finding)
            sys.exit(1)
"""


class Step(NamedTuple):
    """A command that exits with 1 if it finds a fault."""

    name: str
    command: list[str]


class Outcome(NamedTuple):
    """Outcome of a mutant: the step that found it ("" for none), the end of its output, and the seconds it took."""

    found_by: str
    said: str
    seconds: float


class Stale(Exception):
    """Raised when the text that a mutant replaces does not occur exactly once, or a step cannot run."""


def applied(mutant: Mutant, source: str) -> str:
    """Return a file's source with a mutant's fault. Raises Stale unless the text to replace occurs once."""
    if source.count(mutant.old) != 1:
        raise Stale(f"{mutant.name}: its text occurs {source.count(mutant.old)} times in {mutant.file}, not once")
    return source.replace(mutant.old, mutant.new)


def _overloads_of(packets: Sequence[str]) -> list[str]:
    """Return the first overloads of each packet: functional ones, then in-place ones, then those with outputs."""
    from tritonite.registry import overloads

    chosen = []
    for packet in packets:
        own = [op for op in overloads().values() if op.packet == packet and op.has_place]
        if not own:
            raise Stale(f"no operator {packet}")
        own.sort(key=lambda op: (bool(op.out_names), op.inplace))
        chosen += [op.overload for op in own[:_OVERLOADS]]
    return chosen


def steps_of(mutant: Mutant, calls: int, seed: int) -> Iterator[Step]:
    """Yield the commands that may find a mutant, to be run in the folder of a copy."""
    names = _overloads_of(mutant.packets)
    script = [sys.executable, "-W", "ignore", "-c"]
    if names:
        yield Step("samples", [*script, _SAMPLES, *names])
    if names and calls:
        yield Step("fuzz", [*script, _FUZZ, str(seed), str(calls), *names])
    if mutant.tests:
        pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        yield Step("tests", [*pytest, *shlex.split(mutant.tests)])


def copied(to: Path) -> None:
    """Copy the parts of the project that tests need."""
    for name in ("tritonite", "tests", "tools", "docs", "examples"):
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", to)


def finds(step: Step, folder: Path) -> tuple[bool, str]:
    """Return whether a step finds a fault in a copy, and the end of its output. Raises Stale if it runs no test.

    A process that dies or hangs counts as a find.
    """
    environment = os.environ | {"PYTHONPATH": str(folder), "TRITONITE_CACHE": str(folder / "cache")}
    try:
        done = subprocess.run(
            step.command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_PATIENCE
        )
    except subprocess.TimeoutExpired:
        return True, f"over {_PATIENCE} s"
    said = (done.stdout + done.stderr).strip()[-2000:]
    if step.name == "tests" and done.returncode in (2, 3, 4, 5):
        raise Stale(f"{step.name} did not run:\n{said}")
    return done.returncode != 0, said


def tried(mutant: Mutant, folder: Path, steps: Sequence[Step], clean: bool = False) -> Outcome:
    """Put a mutant into the copy, unless `clean`, run the steps until one finds it, and take it out again."""
    path, began = folder / "tritonite" / mutant.file, time.monotonic()
    source = path.read_text()
    path.write_text(source if clean else applied(mutant, source))
    try:
        for step in steps:
            found, said = finds(step, folder)
            if found:
                return Outcome(step.name, said, time.monotonic() - began)
    finally:
        path.write_text(source)
    return Outcome("", "", time.monotonic() - began)


def section() -> str:
    """Return the section on mutants of docs/correctness.md."""
    families = Counter(mutant.family for mutant in MUTANTS)
    every = ", ".join(f"{family} {count}" for family, count in families.items())
    about = (
        f"`python tools/mutate.py` puts {len(MUTANTS)} faults into a copy of the package, one at a time ({every})."
        " It runs samples, fuzzed calls and tests of the operators concerned. One of these must find the fault,"
        " except for:"
    )
    survivors = [f"- **{mutant.name}** ({mutant.family}). {mutant.survives}" for mutant in MUTANTS if mutant.survives]
    lines = [*textwrap.wrap(about, _WIDTH), ""]
    for survivor in survivors:
        lines += textwrap.wrap(survivor, _WIDTH, subsequent_indent="  ")
    return "\n".join([_BEGIN, *lines, "", ""])


def documented() -> str:
    """Return docs/correctness.md with the section as it should be."""
    text = DOCS.read_text()
    before, _, rest = text.partition(_BEGIN) if _BEGIN in text else text.partition(_END)
    after = rest.partition(_END)[2] if _BEGIN in text else rest
    return before + section() + _END + after


def chosen(families: Sequence[str], name: str) -> list[Mutant]:
    """Return the mutants of the families (all if empty) whose names match a glob."""
    wanted = families or {mutant.family for mutant in MUTANTS}
    return [mutant for mutant in MUTANTS if mutant.family in wanted and fnmatch.fnmatchcase(mutant.name, name)]


def run(mutants: Sequence[Mutant], calls: int, seed: int, clean: bool) -> int:
    """Try mutants one after the other. Return the exit status: 1 if an outcome is not the declared one."""
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        copied(Path(name))
        for mutant in mutants:
            try:
                outcome = tried(mutant, Path(name), list(steps_of(mutant, calls, seed)), clean)
            except Stale as stale:
                outcome = Outcome("stale", str(stale), 0.0)
            expected = outcome.found_by == "" if clean or mutant.survives else outcome.found_by not in ("", "stale")
            wrong += not expected
            word = f"found by {outcome.found_by}" if outcome.found_by else "survives"
            mark = "" if expected else "  <- unexpected"
            print(f"{mutant.family:10} {word:20} {outcome.seconds:4.0f} s  {mutant.name}{mark}", flush=True)
            if not expected and outcome.said:
                print(outcome.said, flush=True)
    print(f"{len(mutants)} mutants, {wrong} not as declared")
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    families = sorted({mutant.family for mutant in MUTANTS})
    parser.add_argument("--family", action="append", default=[], choices=families, help="family of mutants; repeatable")
    parser.add_argument("--name", default="*", help="glob of mutants' names")
    parser.add_argument("--list", action="store_true", help="print names and run nothing")
    parser.add_argument("--clean", action="store_true", help="run without the faults; nothing may be found")
    parser.add_argument("--calls", type=int, default=60, help="fuzzed calls of each overload")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--docs", action="store_true", help="write the section of docs/correctness.md")
    parser.add_argument("--check", action="store_true", help="exit with 1 if that section is stale")
    given = parser.parse_args()
    if given.docs or given.check:
        return generated.write(DOCS, documented(), "docs/correctness.md", "python tools/mutate.py --docs")
    mutants = chosen(given.family, given.name)
    if given.list:
        for mutant in mutants:
            print(f"{mutant.family:10} {mutant.name}{'  (survives)' if mutant.survives else ''}")
        return 0
    return run(mutants, given.calls, given.seed, given.clean)


if __name__ == "__main__":
    sys.exit(main())
