"""Tables as text, for whoever prints an object that has one."""

from __future__ import annotations

import io
import shutil
from typing import Any

_NARROWEST = 80


def text_of(table: Any) -> str:
    """A rich table without colours, as wide as the terminal at most."""
    from rich.console import Console

    width = max(_NARROWEST, shutil.get_terminal_size((120, 24)).columns)
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table)
    return console.file.getvalue().rstrip("\n")  # type: ignore[attr-defined]
