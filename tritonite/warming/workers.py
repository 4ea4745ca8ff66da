"""Processes that compile kernels into Triton's disk cache."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.cache import triton_key

from tritonite import devices
from tritonite.runtime import compilation, contract
from tritonite.runtime.compilation import Needed
from tritonite.runtime.launch import prepare_cache

# Seconds after which workers that report nothing are given up.
_PATIENCE = 600.0
# A compiler takes a few hundred megabytes.
_MOST_WORKERS = 32


class Built(NamedTuple):
    """A kernel that a worker compiled: its number, the duration in seconds, and the error, "" if there is none."""

    number: int
    seconds: float
    error: str = ""


def usual_jobs() -> int:
    """Return the number of processes by default: one for each core that this process may use, 32 at most."""
    return min(len(os.sched_getaffinity(0)), _MOST_WORKERS)


def build(needed: Sequence[Needed], target: GPUTarget, jobs: int) -> Iterator[Built]:
    """Compile kernels in up to `jobs` processes, and yield each as it is done.

    The processes are forks of this one, because kernels are Python functions that need not be importable. They only
    compile, and leave the GPU alone. Kernels of a process that ends early are yielded with an error.
    """
    prepare_cache()
    # Hashed once here, not in each process.
    triton_key()
    todo = iter(range(len(needed)))
    # The number of the kernel that each worker compiles, by its connection.
    busy: dict[Connection, int] = {}
    processes = []
    try:
        for number in itertools.islice(todo, jobs):
            process, connection = _start(needed, target)
            processes.append(process)
            connection.send(number)
            busy[connection] = number
        while busy:
            ready = [each for each in wait(list(busy), _PATIENCE) if isinstance(each, Connection)]
            if not ready:
                yield from (Built(number, 0.0, "the process does not answer") for number in busy.values())
                break
            for connection in ready:
                number = busy.pop(connection)
                try:
                    yield connection.recv()
                except EOFError:
                    yield Built(number, 0.0, "the process ended early")
                    continue
                following = next(todo, None)
                # The end of a worker that ended meanwhile is seen above.
                with contextlib.suppress(BrokenPipeError):
                    connection.send(following)
                if following is not None:
                    busy[connection] = following
        # Kernels that no worker is left for.
        yield from (Built(number, 0.0, "no process is left") for number in todo)
    finally:
        for process in processes:
            process.join(0.0 if busy else 5.0)
            if process.is_alive():
                process.kill()
                process.join()


def _start(needed: Sequence[Needed], target: GPUTarget) -> tuple[Any, Connection]:
    """Start a worker. Returns (process, connection to it)."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, ours, needed, target), daemon=True)
    with warnings.catch_warnings():
        # Python warns of forks beside threads. Locks of this package are free in the fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    theirs.close()
    return process, ours


def _work(connection: Connection, parents: Connection, needed: Sequence[Needed], target: GPUTarget) -> None:
    """Compile the kernels whose numbers come, until None comes or the parent process ends."""
    parents.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    compilation.ignore_actions()
    with contextlib.suppress(EOFError, BrokenPipeError):
        while (number := connection.recv()) is not None:
            begin, error = time.perf_counter(), ""
            try:
                _compile(needed[number], target)
            except Exception as raised:  # noqa: BLE001 - whatever the compiler raises is what to report
                error = f"{type(raised).__name__}: {raised}"
            connection.send(Built(number, time.perf_counter() - begin, error))


def _compile(each: Needed, target: GPUTarget) -> None:
    with contract.serving(each.overload):
        kernel = compilation.compile_kernel(each.source, target, each.options)
    if not devices.current.interpreted and devices.current.dispatch_key:
        # Triton 3.6 builds a launcher for each signature with a C compiler, which goes into the disk cache, too.
        # An error is left to the first launch.
        with contextlib.suppress(Exception):
            driver.active.launcher_cls(each.source, kernel.metadata)
