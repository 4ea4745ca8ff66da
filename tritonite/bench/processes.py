"""Processes that measure one task each, and answer with JSON in the last line of their output."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tritonite.bench.turns import Turns

_LONGEST_REASON = 200
# What errors of CUDA, PyTorch and cuBLAS say where a device's memory is full.
_FULL = ("out of memory", "ALLOC_FAILED")
# A frame of a traceback within the package.
_FRAME = re.compile(r'^ *File ".*?/(tritonite/[^"]*)", line (\d+), in (\S+)', re.MULTILINE)


def answer(
    module: str, task: dict[str, Any], turns: Path, limit: float, variables: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a module in a process, and return its answer, or `{"failure": reason}`.

    Args:
        module: run with the task, as JSON, as its argument.
        turns: the folder of the processes that take turns with this one.
        limit: seconds that the process may take.
        variables: environment variables that differ from this process's.
    """
    command = [sys.executable, "-W", "ignore", "-m", module, json.dumps(task)]
    # A group of its own, because Inductor starts processes that compile.
    process = subprocess.Popen(
        command,
        env=os.environ | dict(variables or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with Turns(turns).joined(process.pid):
        try:
            output, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return {"failure": f"no answer within {limit:.0f} s"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        return {"failure": _reason(errors) or f"it ended with exit code {process.returncode}"}
    return parsed(output)


def memory_is_full(reason: str) -> bool:
    """Return whether the text of an error says that a device's memory is full."""
    return any(text in reason for text in _FULL)


def parsed(output: str) -> dict[str, Any]:
    """Return the answer in the last line of a process's output, or a failure."""
    lines = output.strip().splitlines()
    try:
        found = json.loads(lines[-1])
    except (IndexError, ValueError):
        found = None
    return found if isinstance(found, dict) else {"failure": "the process gave no answer"}


def _reason(errors: str) -> str:
    """Return the first line of the last error's message, and where in this package it was raised.

    Messages of CUDA's errors have several lines, and the last ones are hints.
    """
    lines = [line for line in errors.strip().splitlines() if line]
    indented = [line.startswith((" ", "\t")) for line in lines]
    plain = [i for i, each in enumerate(indented) if not each]
    if not plain:
        return ""
    # A message follows the indented frames of a traceback.
    start = next((i for i in reversed(plain) if i and indented[i - 1]), plain[-1])
    places = [f"{path}:{line}, in {name}" for path, line, name in _FRAME.findall(errors)]
    return lines[start][:_LONGEST_REASON] + (f" ({places[-1]})" if places else "")
