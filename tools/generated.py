"""Files that are written from the code: each tool writes its own, or says with --check that it is stale."""

from __future__ import annotations

import sys
from pathlib import Path


def write(path: Path, text: str, name: str, command: str) -> int:
    """Write `text`, or with --check in the command line compare it: an exit status, 1 for a stale file.

    `name` is what the file is called where it is stale, and `command` what mends it.
    """
    if "--check" not in sys.argv:
        path.write_text(text)
        return 0
    if path.exists() and path.read_text() == text:
        return 0
    print(f"{name} is stale: run {command}")
    return 1
