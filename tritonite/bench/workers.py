"""Cases checked, and so compiled, in several processes before one of them is timed."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

import tritonite
from tritonite.bench import timing
from tritonite.bench.cases import Case
from tritonite.bench.run import Check, check, message, provider

# A process that takes longer than this many seconds for a case, compilation included, hangs.
_PATIENCE = 600.0
# It takes a process about as long to start as to check so many cases.
_CASES_A_PROCESS = 16
# Of the device's memory, for the tensors of all processes; each needs some besides, for its context.
_MEMORY = 0.7

Cases = Callable[[], Sequence[Case]]
# A case's place, and what was found of it.
Found = tuple[int, Check | None]


def usual_jobs(count: int) -> int:
    """How many processes so many cases are worth: half of the cores at most."""
    return max(1, min((os.cpu_count() or 1) // 2, count // _CASES_A_PROCESS))


def checks(cases: Cases, count: int, providers: Sequence[str], jobs: int) -> Generator[Found, None, None]:
    """Check the first `count` cases in so many processes, yielding what is found when it is found.

    A case holds functions, which no process can send another. So each enumerates the cases by itself, by calling
    `cases`, and is sent their places; `cases` itself has to be picklable. Tritonite's answers are checked, and those of
    further `providers`, given as to `run.provider`. A case that ends its process fails, and another process goes on.
    None is found of a case that had too little memory beside the others: it is left to the process that times.
    """
    context = multiprocessing.get_context("spawn")
    waiting = iter(range(count))
    workers = list[_Worker]()
    try:
        for _, place in zip(range(jobs), waiting, strict=False):
            workers.append(_Worker(context, (cases, tuple(providers), jobs), place))
        while workers:
            ready = multiprocessing.connection.wait([worker.connection for worker in workers], 1.0)
            for worker in list(workers):
                late = time.monotonic() - worker.began > _PATIENCE
                if worker.connection not in ready and not late:
                    continue
                yield worker.place, worker.answer(late)
                following = next(waiting, None)
                if following is not None and worker.usable:
                    worker.begin(following)
                    continue
                worker.end()
                workers.remove(worker)
                if following is not None:
                    workers.append(_Worker(context, (cases, tuple(providers), jobs), following))
    finally:
        for worker in workers:
            worker.end()


class _Worker:
    """A process that checks one case after the other, and the place of the one that it is at."""

    def __init__(self, context: Any, of: tuple[Cases, tuple[str, ...], int], place: int) -> None:
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, *of), daemon=True)
        # Ctrl-C reaches every process of a terminal. This one ends the others, which inherit that it is held back.
        held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
        theirs.close()
        self.usable = True
        self.begin(place)

    def begin(self, place: int) -> None:
        self.place, self.began = place, time.monotonic()
        # That the process has ended its answer will tell.
        with contextlib.suppress(BrokenPipeError):
            self.connection.send(place)

    def answer(self, late: bool) -> Check | None:
        """What it found, or what became of it."""
        if late:
            self.usable = False
            return Check(failure=f"no answer within {_PATIENCE:.0f} s")
        try:
            found: Check | None
            found, self.usable = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            self.usable = False
            return Check(failure=f"it ended the process that checked it, with exit code {self.process.exitcode}")
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def _work(connection: Any, cases: Cases, names: tuple[str, ...], jobs: int) -> None:
    """Check the cases whose places arrive, and send of each what was found and whether the device can still be used."""
    torch.set_num_threads(1)
    if tritonite.device == "cuda":
        torch.cuda.set_per_process_memory_fraction(_MEMORY / jobs)
    every, providers = cases(), [timing.TRITONITE, *map(provider, names)]
    while True:
        try:
            place = connection.recv()
        except EOFError:
            # The process that asked is gone.
            return
        found: Check | None
        try:
            found = check(every[place], providers)
        except torch.OutOfMemoryError:
            found = None
        except Exception as error:  # noqa: BLE001 - a provider may raise what it likes, and the other cases go on
            # A kernel that finds no memory beside the other processes' tensors says so in another class.
            found = None if "out of memory" in str(error) else Check(failure=message(error))
        connection.send((found, _usable()))


def _usable() -> bool:
    """Whether the device can still be used: after some errors it cannot, in this process."""
    try:
        timing.synchronize()
    except RuntimeError:
        return False
    return True
