"""Generated files: a tool writes its file, or with --check reports that the file is stale."""

from __future__ import annotations

import sys
from pathlib import Path


def write(path: Path, text: str, name: str, command: str) -> int:
    """Write `text` to `path`, or with --check on the command line compare them.

    Args:
        name: the file's name in the message about a stale file.
        command: the command that updates the file.

    Returns the exit status: 1 for a stale file, else 0.
    """
    if "--check" not in sys.argv:
        path.write_text(text)
        return 0
    if path.exists() and path.read_text() == text:
        return 0
    print(f"{name} is stale: run {command}")
    return 1
