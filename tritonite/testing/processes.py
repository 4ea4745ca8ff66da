"""Worker processes that Ctrl-C does not reach, so that their parent ends them and reports what they found."""

from __future__ import annotations

import signal
from typing import Any


def start(process: Any) -> None:
    """Start a process that ignores Ctrl-C, which a terminal sends to every process of a command."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        # The process inherits the blocked signal.
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
