"""Worker processes that Ctrl-C does not reach, so that their parent ends them and reports what they found."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

import tritonite


def start(function: Callable[..., None], *args: Any, anew: bool = False) -> Any:
    """Start a process that calls a function, and ignores Ctrl-C, which a terminal sends to every process of a command.

    In the interpreter it is forked from a process that has imported tritonite, because the import takes longer than
    many tasks. A GPU's driver does not survive a fork, so there a process begins `anew`, as it does if that is asked
    for. Arguments are pickled, and connections may be among them.

    Returns the process.
    """
    anew = anew or not tritonite.backend.interpreted
    context: Any = multiprocessing.get_context("spawn" if anew else "forkserver")
    if not anew:
        context.set_forkserver_preload([tritonite.__name__])
        function, args = _within, (dict(os.environ), function, args)
    process = context.Process(target=function, args=args, daemon=True)
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        # The process, or the one that it is forked from, inherits the blocked signal.
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
    return process


def _within(environment: dict[str, str], function: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Call a function in a forked process, with its parent's environment variables."""
    os.environ.clear()
    os.environ.update(environment)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    function(*args)
