"""Rich tables as plain text, for objects whose `str` is a table."""

from __future__ import annotations

import io
import shutil
import sys
from typing import Any

_NARROWEST = 80


def text_of(table: Any) -> str:
    """Return a rich table as text that standard output can encode, without colours, as wide as the terminal at most."""
    from rich.console import Console

    width = max(_NARROWEST, shutil.get_terminal_size((120, 24)).columns)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    # Rich draws box lines only if its file's encoding has them.
    written = io.BytesIO()
    file = io.TextIOWrapper(written, encoding=encoding, errors="replace", newline="")
    Console(file=file, width=width, color_system=None).print(table)
    file.flush()
    return written.getvalue().decode(encoding).rstrip("\n")
