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
    if os.environ.get("TRITONITE_QUIET", "0") in ("", "0") and _log.isEnabledFor(logging.WARNING):
        sys.stderr.write(f"tritonite: {line}\n")
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
