"""Fuzzing in several processes: one that a call ends is replaced by another, and the call is a finding."""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.connection
import os
import random
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from tritonite.install.override import select
from tritonite.registry import overloads
from tritonite.runtime.stats import counts
from tritonite.testing.fuzz.check import Finding, check, outcome, synchronize
from tritonite.testing.fuzz.draw import draw

# A call that takes longer than this many seconds, compilation included, hangs.
_PATIENCE = 120.0


@dataclass
class Tally:
    """How many calls were drawn and how many a kernel served; those that ended ATen's process, or kept it busy."""

    calls: int = 0
    served: int = 0
    aten_crashes: list[str] = field(default_factory=list)


def fuzz_one(overload: str, seed: int, number: int) -> Finding | None:
    """Check one call, by its overload, seed and number."""
    call = draw(overloads()[overload], seed, number)
    found = check(call)
    return None if found is None else Finding(found[0], overload, seed, number, str(call), found[1])


def fuzz(
    seconds: float,
    names: str | Iterable[str] | None,
    seed: int,
    processes: int,
    tally: Tally,
    turns: int | None = None,
) -> Iterator[Finding]:
    """Draw calls of the overloads named for so many seconds, yielding what is wrong; counts in `tally`.

    By default they are those that `select` gives: all that run without being named. With `turns` each process ends
    after so many calls.
    """
    chosen = sorted(select(names))
    random.Random(seed).shuffle(chosen)
    end = time.monotonic() + seconds
    context = multiprocessing.get_context("spawn")
    workers = {place: _Worker(context, chosen, seed, place, (processes, turns), 0) for place in range(processes)}
    try:
        while workers:
            ready = multiprocessing.connection.wait([worker.connection for worker in workers.values()], 1.0)
            late = time.monotonic() > end
            for place, worker in list(workers.items()):
                finding = None
                if worker.connection in ready:
                    finding = worker.receive(tally)
                elif time.monotonic() - worker.heard > _PATIENCE:
                    finding = worker.stopped("hang", tally)
                if finding is not None:
                    yield finding
                if worker.ended or (late and not worker.alone):
                    worker.end()
                    del workers[place]
                    if worker.again or not (late or worker.turn + 1 == turns):
                        steps, turn = (processes, turns), worker.turn + (not worker.again)
                        alone = worker.accused or (worker.unstarted and worker.alone)
                        workers[place] = _Worker(context, chosen, seed, place, steps, turn, alone, worker.unstarted)
    finally:
        for worker in workers.values():
            worker.end()


class _Worker:
    """A process that checks each of so many calls, from `turn` on until its last, and what it was last heard to do.

    Where ATen ended the process of a call, the next one begins with ATen's answer to it `alone`: what kernels before it
    had left could have ended it as well. Until then ATen is `accused`. One that ends before its first call is started
    a `second` time.
    """

    def __init__(
        self,
        context: Any,
        chosen: list[str],
        seed: int,
        place: int,
        steps: tuple[int, int | None],
        turn: int,
        alone: bool = False,
        second: bool = False,
    ) -> None:
        self.connection, theirs = context.Pipe(duplex=False)
        self.alone, self.accused, self.second, self.unstarted = alone, False, second, False
        arguments = theirs, chosen, seed, place, *steps, turn, alone
        self.process = context.Process(target=_work, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.seed, self.turn, self.heard, self.ended = seed, turn, time.monotonic(), False
        self.at: tuple[str, int, str, str] | None = None

    def receive(self, tally: Tally) -> Finding | None:
        """The next thing that the process says."""
        self.heard = time.monotonic()
        try:
            kind, value = self.connection.recv()
        except EOFError:
            self.process.join()
            if self.process.exitcode == 0:
                self.ended = True
                return None
            return self.stopped("crash", tally)
        if kind == "at":
            self.turn, self.at = value[0], value[1:]
        elif kind == "alone":
            self.alone = False
        elif kind == "done":
            tally.calls += value[0]
            tally.served += value[1]
        return value if kind == "finding" else None

    def stopped(self, kind: str, tally: Tally) -> Finding | None:
        """What to say of a process that ended in the middle of a call, or does not end it."""
        self.ended = True
        if self.at is None and not self.second:
            self.unstarted = True
            return None
        if self.at is None:
            return Finding("start", "", self.seed, 0, "a process", f"ended with {self.process.exitcode}")
        overload, number, call, whose = self.at
        detail = f"{whose}: {f'exit code {self.process.exitcode}' if kind == 'crash' else f'over {_PATIENCE:.0f} s'}"
        if whose == "aten" and kind == "crash" and not self.alone:
            self.accused = True
            return None
        if whose == "aten":
            tally.aten_crashes.append(f"{call}: {kind}, {detail} ({overload}, {number})")
            return None
        return Finding(kind, overload, self.seed, number, call, detail)

    @property
    def again(self) -> bool:
        """Whether another process begins with the same turn."""
        return self.accused or self.unstarted

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def _work(
    connection: Any, chosen: list[str], seed: int, place: int, step: int, turns: int | None, turn: int, alone: bool
) -> None:
    """Check the calls from `turn` on, of all turns those that are this process's; the first by ATen `alone`, or not."""
    torch.set_num_threads(1)
    # A quarter of the processes, or one of two, makes its calls through Python.
    os.environ["TRITONITE_NATIVE"] = str(int(place % min(step, 4) != 0 or step == 1))
    log = os.environ.get("TRITONITE_FUZZ_LOG", os.devnull)
    # BLAS writes what it says of calls that ATen then raises for to the one, PyTorch its warnings to the other.
    for stream in (sys.stdout, sys.stderr):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), stream.fileno())
    while turn != turns:
        total = turn * step + place
        number, which = divmod(total, len(chosen))
        name = chosen[which]
        before = counts(name)
        try:
            for finding in _findings(connection, name, seed, number, turn, alone):
                connection.send(("finding", finding))
        except Exception as error:  # noqa: BLE001 - what is wrong with the fuzzer must not pass for ATen's
            # What the device raises ends the process.
            if "CUDA error" in str(error) or "device-side assert" in str(error):
                os._exit(3)
            detail = "".join(traceback.format_exception_only(error)).strip()
            connection.send(("finding", Finding("fuzzer", name, seed, number, name, detail)))
        if alone:
            connection.send(("alone", None))
        after = counts(name)
        served = after.launched + after.replayed > before.launched + before.replayed
        connection.send(("done", (1, int(served))))
        turn, alone = turn + 1, False


def _findings(connection: Any, name: str, seed: int, number: int, turn: int, alone: bool) -> Iterator[Finding]:
    """What is wrong with a call; with ATen's answer `alone`, that it has one."""

    def at(call: str, whose: str) -> None:
        connection.send(("at", (turn, name, number, call, whose)))

    # Drawing asks ATen for results.
    at(name, "aten")
    call = draw(overloads()[name], seed, number)
    told = str(call)
    if alone:
        at(told, "aten")
        outcome(call)
        yield Finding("crash", name, seed, number, told, "ended ATen's process after other calls, and does not alone")
        return
    found = check(call, functools.partial(at, told))
    synchronize()
    if found is not None:
        yield Finding(found[0], name, seed, number, told, found[1])
