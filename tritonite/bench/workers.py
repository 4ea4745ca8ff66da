"""Worker processes that check cases, and so compile their kernels, before one process times them."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

import tritonite
from tritonite.bench import timing
from tritonite.bench.cases import Case
from tritonite.bench.run import Check, check, message, provider
from tritonite.testing import processes

# Seconds for a case, compilation included, after which its process counts as hung.
_PATIENCE = 600.0
# A process takes about as long to start as to check this many cases.
_CASES_A_PROCESS = 16
# Fraction of device memory for the tensors of all processes; their contexts need the rest.
_MEMORY = 0.7

Cases = Callable[[], Sequence[Case]]
# A case's index, and its check; None if it ran out of memory.
Found = tuple[int, Check | None]


def usual_jobs(count: int) -> int:
    """Return the number of processes worth starting for `count` cases, half of the cores at most."""
    return max(1, min((os.cpu_count() or 1) // 2, count // _CASES_A_PROCESS))


def checks(cases: Cases, count: int, providers: Sequence[str], jobs: int) -> Generator[Found, None, None]:
    """Check the first `count` cases in `jobs` processes, and yield (index, check) as checks finish.

    A Case holds functions and cannot be pickled. Every process calls `cases` to enumerate the same cases, and receives
    indices; `cases` itself has to be picklable. Results of Tritonite and of `providers` (texts for `run.provider`) are
    checked. A case that kills its process fails, and a new process continues. The check is None for a case that ran out
    of memory next to the others; the process that times cases will check it.
    """
    context = multiprocessing.get_context("spawn")
    waiting = iter(range(count))
    workers = list[_Worker]()
    try:
        for _, index in zip(range(jobs), waiting, strict=False):
            workers.append(_Worker(context, (cases, tuple(providers), jobs), index))
        while workers:
            ready = multiprocessing.connection.wait([worker.connection for worker in workers], 1.0)
            for worker in list(workers):
                late = time.monotonic() - worker.began > _PATIENCE
                if worker.connection not in ready and not late:
                    continue
                yield worker.index, worker.answer(late)
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
    """A process that checks one case after the other; `index` is its current case."""

    def __init__(self, context: Any, of: tuple[Cases, tuple[str, ...], int], index: int) -> None:
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, *of), daemon=True)
        processes.start(self.process)
        theirs.close()
        self.usable = True
        self.begin(index)

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
            checked = None if "out of memory" in str(error) else Check(failure=message(error))
        connection.send((checked, _usable()))


def _usable() -> bool:
    """Return whether the device still works in this process; after some errors it does not."""
    try:
        timing.synchronize()
    except RuntimeError:
        return False
    return True
