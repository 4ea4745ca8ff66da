"""Lines on standard error about slow causes: waiting, compiling, interpreting.

A cause gets one line a process, after `PATIENCE` seconds in total. TRITONITE_QUIET=1 turns the lines off, as does a
level above WARNING of the logger "tritonite". A call whose kernel is compiled runs nothing of this module.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator

PATIENCE = 2.0
_log = logging.getLogger("tritonite")
_told: set[str] = set()
_seconds: dict[str, float] = {}


def tell(cause: str, line: str) -> None:
    """Write a line to standard error, once for each cause, unless the user turned lines off."""
    if cause in _told:
        return
    _told.add(cause)
    if not _quiet():
        sys.stderr.write(f"tritonite: {line}\n")
        sys.stderr.flush()


def _quiet() -> bool:
    return os.environ.get("TRITONITE_QUIET", "0") not in ("", "0") or not _log.isEnabledFor(logging.WARNING)


class Bar:
    """A line on standard error that shows how much of some work is done; nothing if that is not a terminal."""

    def __init__(self, label: str, total: int) -> None:
        self._label, self._total, self._done = label, total, 0
        self._shown = total > 0 and not _quiet() and sys.stderr.isatty()

    def __enter__(self) -> Bar:
        self._show("")
        return self

    def advance(self, name: str) -> None:
        """Count a piece of work as done, and show its name."""
        self._done += 1
        self._show(name)

    def __exit__(self, *_: object) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _show(self, name: str) -> None:
        if self._shown:
            filled = "#" * (30 * self._done // self._total)
            sys.stderr.write(f"\r\x1b[K{self._label} [{filled:30}] {self._done}/{self._total} {name[:40]}")
            sys.stderr.flush()


@contextlib.contextmanager
def timed(cause: str, line: str, watched: bool = False) -> Iterator[None]:
    """Add the duration of the with block to its cause, and write `line` once the total exceeds `PATIENCE` seconds.

    A `watched` block has a timer, which writes the line while the block still runs.
    """
    if cause in _told:
        yield
        return
    timer = None
    if watched:
        timer = threading.Timer(max(0.0, PATIENCE - _seconds.get(cause, 0.0)), tell, (cause, line))
        timer.daemon = True
        timer.start()
    begin = time.monotonic()
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()
        _seconds[cause] = _seconds.get(cause, 0.0) + time.monotonic() - begin
        if _seconds[cause] > PATIENCE:
            tell(cause, line)
