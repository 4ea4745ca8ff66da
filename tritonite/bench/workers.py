"""Worker processes that check cases, and so compile their kernels, before one process times them.

Cases are checked in waves. After each wave the processes wait, so that they do not disturb the timing of its cases.
"""

from __future__ import annotations

import collections
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch

import tritonite
from tritonite.bench import timing
from tritonite.bench.cases import Case
from tritonite.bench.processes import memory_is_full
from tritonite.bench.run import Check, check, message, provider
from tritonite.testing import processes

# Seconds for a case, compilation included, after which its process counts as hung.
_PATIENCE = 600.0
# A process takes about as long to start as to compile the kernels of this many cases.
_CASES_A_PROCESS = 4
# Fraction of device memory for the tensors of all processes; their contexts need the rest.
_MEMORY = 0.7

Cases = Callable[[], Sequence[Case]]
# A case's index, and its check; None if it ran out of memory.
Found = tuple[int, Check | None]


def usual_jobs(count: int) -> int:
    """Return the number of processes worth starting for `count` cases, half of the cores at most."""
    return max(1, min((os.cpu_count() or 1) // 2, count // _CASES_A_PROCESS))


def waves(count: int, jobs: int) -> Iterator[range]:
    """Yield the indices of each wave of `count` cases: one case a process, then twice as many each time.

    The first results come soon, and few waves wait for their slowest case.
    """
    first, size = 0, jobs
    while first < count:
        yield range(first, min(first + size, count))
        first, size = first + size, 2 * size


def checks(cases: Cases, count: int, providers: Sequence[str], jobs: int) -> Generator[Found, None, None]:
    """Check the first `count` cases in `jobs` processes, and yield (index, check) as checks finish.

    The last check of a wave is yielded before a case of the next one begins: until then no process works.

    A Case holds functions and cannot be pickled. Every process calls `cases` to enumerate the same cases, and receives
    indices; `cases` itself has to be picklable. Results of Tritonite and of `providers` (texts for `run.provider`) are
    checked. A case that kills its process fails, and a new process continues. The check is None for a case that ran out
    of memory next to the others; the process that times cases will check it.
    """
    busy, idle = list[_Worker](), list[_Worker]()
    try:
        for wave in waves(count, jobs):
            # The process that times cases keeps memory of the wave before.
            _free_memory()
            waiting = collections.deque(wave)
            while waiting or busy:
                while waiting and len(busy) < jobs:
                    busy.append(idle.pop() if idle else _Worker((cases, tuple(providers), jobs)))
                    busy[-1].begin(waiting.popleft())
                ready = multiprocessing.connection.wait([worker.connection for worker in busy], 1.0)
                for worker in list(busy):
                    late = time.monotonic() - worker.began > _PATIENCE
                    if worker.connection not in ready and not late:
                        continue
                    found = worker.index, worker.answer(late)
                    busy.remove(worker)
                    if worker.usable:
                        idle.append(worker)
                    else:
                        worker.end()
                    yield found
    finally:
        for worker in (*busy, *idle):
            worker.end()


class _Worker:
    """A process that checks one case after the other; `index` is its current case, and `began` when it received it."""

    index: int
    began: float

    def __init__(self, of: tuple[Cases, tuple[str, ...], int]) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        self.process = processes.start(_work, theirs, *of)
        theirs.close()
        self.usable = True

    def begin(self, index: int) -> None:
        self.index, self.began = index, time.monotonic()
        # If the process has ended, `answer` reports it.
        with contextlib.suppress(BrokenPipeError):
            self.connection.send(index)

    def answer(self, late: bool) -> Check | None:
        """Receive the check of the current case, or return one that says how the process ended."""
        if late:
            self.usable = False
            return Check(failure=f"no answer within {_PATIENCE:.0f} s")
        try:
            checked: Check | None
            checked, self.usable = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            self.usable = False
            return Check(failure=f"it ended the process that checked it, with exit code {self.process.exitcode}")
        return checked

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def _work(connection: Any, cases: Cases, names: tuple[str, ...], jobs: int) -> None:
    """Receive indices of cases, check them, and send (check, whether the device is still usable) for each."""
    torch.set_num_threads(1)
    if tritonite.backend.profiled:
        torch.get_device_module(tritonite.device).set_per_process_memory_fraction(_MEMORY / jobs)
    every, providers = cases(), [timing.TRITONITE, *map(provider, names)]
    while True:
        try:
            index = connection.recv()
        except EOFError:
            # The parent process has ended.
            return
        checked: Check | None
        try:
            checked = check(every[index], providers)
        except torch.OutOfMemoryError:
            checked = None
        except Exception as error:  # noqa: BLE001 - a provider may raise what it likes, and the other cases go on
            # A kernel launch that finds no memory raises another class of error.
            checked = None if memory_is_full(str(error)) else Check(failure=message(error))
        connection.send((checked, _usable()))


def _free_memory() -> None:
    """Give memory of the device that this process caches to others."""
    if tritonite.backend.profiled:
        torch.get_device_module(tritonite.device).empty_cache()


def _usable() -> bool:
    """Free cached memory, and return whether the device still works in this process; after some errors it does not."""
    try:
        timing.synchronize()
        _free_memory()
    except RuntimeError:
        return False
    return True
