"""Turns of processes that measure side by side: while one measures its steady state, the others are stopped.

The processes share a folder. `running` has a file for each, named by its process group. `lock` is held by the one that
runs alone, `alone` lists when one did, and `ended` says that no more may run.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

# Seconds in which a device finishes what stopped processes have launched.
_DRAINED = 0.2


class Turns:
    """A folder of processes that take turns. Times are of time.perf_counter, which processes of Linux share."""

    def __init__(self, folder: Path):
        self._running, self._lock, self._alone = folder / "running", folder / "lock", folder / "alone"
        self._ended = folder / "ended"
        self._running.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def joined(self, group: int) -> Iterator[None]:
        """Have a process group take part. If it ends while it runs alone, the others go on."""
        file = self._running / str(group)
        file.touch()
        if self._ended.exists():
            self.end()
        try:
            yield
        finally:
            file.unlink()
            with self._lock.open("w") as lock, contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._send(signal.SIGCONT)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Stop the other processes while this one runs."""
        with self._lock.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            begin = time.perf_counter()
            try:
                self._send(signal.SIGSTOP)
                time.sleep(_DRAINED)
                yield
            finally:
                self._send(signal.SIGCONT)
                with self._alone.open("a") as file:
                    file.write(f"{begin} {time.perf_counter()}\n")

    def end(self) -> None:
        """End all processes, and those that join later."""
        self._ended.touch()
        self._send(signal.SIGKILL)

    def stopped(self, begin: float, end: float) -> float:
        """Return the seconds between two times for which another process ran alone."""
        if not self._alone.exists():
            return 0.0
        times = [tuple(map(float, line.split())) for line in self._alone.read_text().splitlines()]
        return sum(max(0.0, min(end, last) - max(begin, first)) for first, last in times)

    def _send(self, number: signal.Signals) -> None:
        """Send a signal to all process groups but this process's own."""
        for file in self._running.iterdir():
            if int(file.name) != os.getpgid(0):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(int(file.name), number)
