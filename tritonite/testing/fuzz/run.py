"""Fuzzing in several processes. If a call ends its process, the call is a finding and a new process goes on."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import multiprocessing.connection
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch

import tritonite
from tritonite.install.override import select, unknown
from tritonite.registry import overloads
from tritonite.runtime.stats import counts, totals
from tritonite.testing.bounds import checked_bounds
from tritonite.testing.fuzz.check import Finding, check, run_by_aten, synchronize
from tritonite.testing.fuzz.draw import Call, draw
from tritonite.testing.fuzz.fused import PREFIX, FusedCall, check_fused, compositions, draw_fused, named_fused
from tritonite.testing.judge import without_tf32
from tritonite.testing.processes import start

# Seconds, compilation included, after which a call counts as hanging.
_PATIENCE = 120.0
# One of this number of calls is of a fused operator, if both kinds are chosen.
_FUSED_SHARE = 5
# In the interpreter the kernels of one of this number of calls have their bounds checked.
_BOUNDS_CHECKED = 4
# Variables with which glibc ends a process whose heap was overwritten.
_HEAP_CHECK = {"LD_PRELOAD": "libc_malloc_debug.so.0", "GLIBC_TUNABLES": "glibc.malloc.check=3"}
# Calls of one operator of which a kernel serves some, if the drawn arguments fit each other often enough.
_ENOUGH = 200


@dataclass
class Tally:
    """Counts of drawn and of served calls, `fused` among both and by name, and the calls in which ATen crashed."""

    calls: int = 0
    served: int = 0
    fused: int = 0
    aten_crashes: list[str] = field(default_factory=list)
    calls_of: Counter[str] = field(default_factory=Counter)
    served_of: Counter[str] = field(default_factory=Counter)

    def never_served(self) -> list[str]:
        """Return the names with at least `_ENOUGH` calls, none of which a kernel has served."""
        return sorted(name for name, calls in self.calls_of.items() if calls >= _ENOUGH and not self.served_of[name])


@without_tf32()
def fuzz_one(overload: str, seed: int, number: int) -> Finding | None:
    """Check the call of an overload or a fused operator, a seed and a number."""
    call = _drawn(overload, seed, number)
    found = _difference(call, number)
    return None if found is None else Finding(found[0], overload, seed, number, str(call), found[1])


def _difference(
    call: Call | FusedCall, number: int, begin: Callable[[str], None] = lambda _: None
) -> tuple[str, str] | None:
    """Return (kind, detail) of the first difference of a call, or None. Some calls' kernels have their bounds checked.

    `begin` is called with "aten" or "tritonite" before each of the two runs.
    """
    checked = tritonite.backend.interpreted and number % _BOUNDS_CHECKED == 0
    with checked_bounds() if checked else contextlib.nullcontext():
        return check_fused(call, begin) if isinstance(call, FusedCall) else check(call, begin)


def _drawn(name: str, seed: int, number: int) -> Call | FusedCall:
    return draw_fused(name, seed, number) if name.startswith(PREFIX) else draw(overloads()[name], seed, number)


def chosen_names(names: str | Iterable[str] | None) -> Chosen:
    """Return the overloads and the fused operators that patterns name, all without patterns.

    A pattern names fused operators if it begins with "tritonite::", otherwise overloads.
    """
    if names is None:
        return Chosen(sorted(select(None)), named_fused(None))
    patterns = [names] if isinstance(names, str) else list(names)
    fused = named_fused(patterns)
    others = [each for each in patterns if not each.startswith(PREFIX)]
    if len(others) < len(patterns) and not fused:
        raise unknown(next(each for each in patterns if each.startswith(PREFIX)))
    return Chosen(sorted(select(others)) if others else [], fused)


@dataclass
class Chosen:
    """Names of overloads and of fused operators, whose calls take turns."""

    overloads: list[str]
    fused: list[str]

    def shuffled(self, seed: int) -> Chosen:
        source = random.Random(seed)
        return Chosen(*[source.sample(each, len(each)) for each in (self.overloads, self.fused)])

    def turn(self, total: int) -> tuple[str, int]:
        """Return the name of the call with the index `total`, and the number of earlier calls of this name."""
        names = self.overloads or self.fused
        if self.overloads and self.fused:
            turns, rest = divmod(total, _FUSED_SHARE)
            is_fused = rest == _FUSED_SHARE - 1
            names = self.fused if is_fused else self.overloads
            total = turns if is_fused else turns * (_FUSED_SHARE - 1) + rest
        number, which = divmod(total, len(names))
        return names[which], number


def fuzz(
    seconds: float,
    names: str | Iterable[str] | None,
    seed: int,
    processes: int,
    tally: Tally,
    turns: int | None = None,
) -> Generator[Finding, None, None]:
    """Draw calls of the named overloads and fused operators for a time, yield findings, and count in `tally`.

    `names` are patterns as in `chosen_names`. Without names one call in five is of a fused operator, and the others are
    of all overloads that `enable()` overrides. With `turns` each process ends after this number of calls.
    """
    chosen = chosen_names(names).shuffled(seed)
    end = time.monotonic() + seconds
    workers = {i: _Worker(chosen, seed, i, (processes, turns), _Task(0)) for i in range(processes)}
    try:
        while workers:
            ready = multiprocessing.connection.wait([worker.connection for worker in workers.values()], 1.0)
            late = time.monotonic() > end
            for i, worker in list(workers.items()):
                finding = None
                if worker.connection in ready:
                    finding = worker.receive(tally)
                elif time.monotonic() - worker.heard > _PATIENCE:
                    finding = worker.stopped("hang", tally)
                if finding is not None:
                    yield finding
                if worker.ended or (late and worker.task.way == "check"):
                    worker.end()
                    del workers[i]
                    task = worker.next
                    if task is not None and (task.way != "check" or not (late or task.turn == turns)):
                        workers[i] = _Worker(chosen, seed, i, (processes, turns), task, worker.unstarted)
    finally:
        for worker in workers.values():
            worker.end()


class _Task(NamedTuple):
    """The work of a process from `turn` on: to check calls, or to make ATen's runs `until` the turn of a call.

    way: "check"; "alone", ATen's run of the call that ended a process; or "aten", ATen's runs of all calls that this
        process had made, `since` its first turn.
    ended: how that process ended, such as "exit code -11".
    """

    turn: int
    way: str = "check"
    since: int = 0
    until: int = 0
    ended: str = ""


class _Worker:
    """A process with a task, and the call that it last reported.

    If a process ends in a call, earlier ones may have written beyond memory, ATen's among them. The next process
    repeats ATen's run of this call alone, and a further one ATen's runs of all calls up to it, with a check of the
    heap. Only if neither ends is the end of the process a finding. A process that ends before its first call is started
    a `second` time.
    """

    def __init__(
        self,
        chosen: Chosen,
        seed: int,
        index: int,
        steps: tuple[int, int | None],
        task: _Task,
        second: bool = False,
    ) -> None:
        self.connection, theirs = multiprocessing.Pipe(duplex=False)
        self.task, self.second, self.unstarted, self.finished = task, second, False, False
        # The heap is checked by variables that a process reads when it begins.
        checked = task.way == "aten"
        with mock.patch.dict(os.environ, _HEAP_CHECK if checked else {}):
            self.process = start(_work, theirs, chosen, seed, index, *steps, task, anew=checked)
        theirs.close()
        self.seed, self.turn, self.heard, self.ended = seed, task.turn, time.monotonic(), False
        self.at: tuple[str, int, str, str] | None = None
        self.error = ""
        self.next: _Task | None = None

    def receive(self, tally: Tally) -> Finding | None:
        """Receive the next message, and return the finding in it or that follows from the end of the process."""
        self.heard = time.monotonic()
        try:
            kind, value = self.connection.recv()
        except EOFError:
            self.process.join()
            if self.process.exitcode == 0:
                self.ended = True
                return self.unexplained() if self.finished else None
            return self.stopped("crash", tally)
        if kind == "at":
            self.turn, self.at = value[0], value[1:]
        elif kind == "finished":
            self.finished = True
        elif kind == "error":
            self.error = value
        elif kind == "done":
            tally.calls += value[0]
            tally.served += value[1]
            tally.fused += value[2]
            if self.at is not None:
                tally.calls_of[self.at[0]] += value[0]
                tally.served_of[self.at[0]] += value[1]
        return value if kind == "finding" else None

    def unexplained(self) -> Finding | None:
        """Return the finding of a call whose end of a process ATen's runs do not explain, or None if some are left."""
        task = self.task
        if task.way == "alone" and task.since < task.until:
            self.next = task._replace(turn=task.since, way="aten")
            return None
        self.next = _Task(task.until + 1)
        assert self.at is not None
        overload, number, call, _ = self.at
        detail = f"{task.ended} after other calls, which ATen's runs alone do not end"
        return Finding("crash", overload, self.seed, number, call, detail)

    def stopped(self, kind: str, tally: Tally) -> Finding | None:
        """Return the finding for a process that crashed or hangs in a call, or None if ATen is or may be the cause."""
        self.ended = True
        if self.at is None and not self.second:
            self.unstarted, self.next = True, self.task
            return None
        self.next = _Task(self.turn + 1)
        if self.at is None:
            return Finding("start", "", self.seed, 0, "a process", f"ended with {self.process.exitcode}")
        overload, number, call, whose = self.at
        ended = self.error or f"exit code {self.process.exitcode}"
        detail = f"{whose}: {ended if kind == 'crash' else f'over {_PATIENCE:.0f} s'}"
        checks = self.task.way == "check"
        if checks and kind == "crash" and (whose == "aten" or self.task.turn < self.turn):
            way = "alone" if whose == "aten" else "aten"
            first = self.turn if way == "alone" else self.task.turn
            self.next = _Task(first, way, self.task.turn, self.turn, ended)
            return None
        if not checks:
            self.next = _Task(self.task.until + 1)
        if whose == "aten":
            tally.aten_crashes.append(f"{call}: {kind}, {detail} ({overload}, {number})")
            return None
        return Finding(kind, overload, self.seed, number, call, detail)

    def end(self) -> None:
        self.process.kill()
        self.process.join()


@without_tf32()
def _work(connection: Any, chosen: Chosen, seed: int, index: int, step: int, turns: int | None, task: _Task) -> None:
    """Do a task with the calls of this process, every `step`-th from `index` on, up to the turn `turns`."""
    torch.set_num_threads(1)
    # Every fourth process, or one of two or three, makes its calls through Python.
    os.environ["TRITONITE_NATIVE"] = str(int(index % min(step, 4) != 0 or step == 1))
    log = os.environ.get("TRITONITE_FUZZ_LOG", os.devnull)
    # BLAS prints errors of calls that ATen then raises for, and PyTorch prints warnings.
    for stream in (sys.stdout, sys.stderr):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), stream.fileno())
    turn, repeats = task.turn, task.way != "check"
    while turn != (task.until + 1 if repeats else turns):
        name, number = chosen.turn(turn * step + index)
        before = _launches(name)
        try:
            if repeats:
                _run_by_aten(connection, name, seed, number, turn)
            else:
                finding = _finding(connection, name, seed, number, turn)
                if finding is not None:
                    connection.send(("finding", finding))
        except Exception as error:  # noqa: BLE001 - an error of the fuzzer is a finding, too
            # An error of the device ends the process.
            if "CUDA error" in str(error) or "device-side assert" in str(error):
                connection.send(("error", str(error).splitlines()[0]))
                os._exit(3)
            detail = "".join(traceback.format_exception_only(error)).strip()
            if not repeats:
                connection.send(("finding", Finding("fuzzer", name, seed, number, name, detail)))
        if not repeats:
            connection.send(("done", (1, int(_launches(name) > before), int(name.startswith(PREFIX)))))
        turn += 1
    if repeats:
        connection.send(("finished", None))


def _launches(name: str) -> int:
    """Return the number of calls that kernels have served: of an overload, or for a fused operator of all operators."""
    served = totals() if name.startswith(PREFIX) else counts(name)
    return served.launched + served.replayed


def _run_by_aten(connection: Any, name: str, seed: int, number: int, turn: int) -> None:
    """Make ATen's runs of a call's check."""
    connection.send(("at", (turn, name, number, name, "aten")))
    call = _drawn(name, seed, number)
    connection.send(("at", (turn, name, number, str(call), "aten")))
    compositions(call) if isinstance(call, FusedCall) else run_by_aten(call)
    synchronize()


def _finding(connection: Any, name: str, seed: int, number: int, turn: int) -> Finding | None:
    """Check a call, and return the finding or None."""

    def at(call: str, whose: str) -> None:
        connection.send(("at", (turn, name, number, call, whose)))

    # Drawing calls ATen.
    at(name, "aten")
    call = _drawn(name, seed, number)
    shown = str(call)
    begin = functools.partial(at, shown)
    found = _difference(call, number, begin)
    synchronize()
    return None if found is None else Finding(found[0], name, seed, number, shown, found[1])
