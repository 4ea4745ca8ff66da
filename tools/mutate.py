"""Put one fault after another into a copy of the package, and see whether tests or fuzzed calls find it.

    python tools/mutate.py [--family F ...] [--name GLOB] [--list] [--clean] [--calls N] [--seed S]

The faults are those of tools/mutants.py. The section "Mutants" of docs/correctness.md is written by --docs from those
that nothing finds, and --check says whether it is stale.
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
# Of each packet the overloads that are tested and drawn, and the seconds that a step may take.
_OVERLOADS, _PATIENCE = 3, 900
_WIDTH = 120
# What `test_overload` of tests/test_accuracy.py does, without collecting all of its cases.
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
    """A command that ends with 1 where it finds a fault."""

    name: str
    command: list[str]


class Outcome(NamedTuple):
    """What became of a mutant: the step that found it, or "" for none, and the end of what that said."""

    found_by: str
    said: str
    seconds: float


class Stale(Exception):
    """The text that a mutant replaces is not there once, or a step could not run at all."""


def applied(mutant: Mutant, source: str) -> str:
    """The source of a file with a mutant's fault. Raises Stale unless its text is there once."""
    if source.count(mutant.old) != 1:
        raise Stale(f"{mutant.name}: its text is {source.count(mutant.old)} times in {mutant.file}")
    return source.replace(mutant.old, mutant.new)


def _overloads_of(packets: Sequence[str]) -> list[str]:
    """The first overloads of each packet: those that allocate results, then in place, then with outputs."""
    from tritonite.registry import overloads

    found = []
    for packet in packets:
        own = [op for op in overloads().values() if op.packet == packet and op.has_place]
        if not own:
            raise Stale(f"no operator {packet}")
        own.sort(key=lambda op: (bool(op.out_names), op.inplace))
        found += [op.overload for op in own[:_OVERLOADS]]
    return found


def steps_of(mutant: Mutant, calls: int, seed: int) -> Iterator[Step]:
    """The commands that may find a mutant, to be run in the folder of a copy."""
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
    """Copy what tests need of the project."""
    for name in ("tritonite", "tests", "tools", "docs", "examples"):
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", to)


def finds(step: Step, folder: Path) -> tuple[bool, str]:
    """Whether a step finds a fault in a copy, and the end of what it says. Raises Stale where it runs no test.

    A process that dies or hangs has found one.
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
    """Run the steps until one finds the mutant, which is in the copy for as long; a `clean` copy stays as it is."""
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
    """The text on mutants in the docs."""
    families = Counter(mutant.family for mutant in MUTANTS)
    every = ", ".join(f"{family} {count}" for family, count in families.items())
    about = (
        f"`python tools/mutate.py` puts {len(MUTANTS)} faults into a copy of the package, one at a time ({every})."
        " It runs samples, fuzzed calls and tests of the operators that a fault concerns. One of these must find the"
        " fault, except for:"
    )
    survivors = [f"- **{mutant.name}** ({mutant.family}). {mutant.survives}" for mutant in MUTANTS if mutant.survives]
    lines = [*textwrap.wrap(about, _WIDTH), ""]
    for survivor in survivors:
        lines += textwrap.wrap(survivor, _WIDTH, subsequent_indent="  ")
    return "\n".join([_BEGIN, *lines, "", ""])


def documented() -> str:
    """The page with the section as it should be."""
    text = DOCS.read_text()
    before, _, rest = text.partition(_BEGIN) if _BEGIN in text else text.partition(_END)
    after = rest.partition(_END)[2] if _BEGIN in text else rest
    return before + section() + _END + after


def chosen(families: Sequence[str], name: str) -> list[Mutant]:
    """The mutants of some families, or of all, whose names match a glob."""
    wanted = families or {mutant.family for mutant in MUTANTS}
    return [mutant for mutant in MUTANTS if mutant.family in wanted and fnmatch.fnmatchcase(mutant.name, name)]


def run(mutants: Sequence[Mutant], calls: int, seed: int, clean: bool) -> int:
    """Try mutants one after the other: an exit status, 1 where one is not what its declaration says."""
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
    parser.add_argument("--family", action="append", default=[], choices=families, help="several allowed")
    parser.add_argument("--name", default="*", help="glob of mutants' names")
    parser.add_argument("--list", action="store_true", help="names, and nothing is run")
    parser.add_argument("--clean", action="store_true", help="run without the faults, where nothing must be found")
    parser.add_argument("--calls", type=int, default=60, help="calls drawn of each overload")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--docs", action="store_true", help="write the section of docs/correctness.md")
    parser.add_argument("--check", action="store_true", help="exit with 1 if that is stale")
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
