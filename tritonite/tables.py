"""Tables as text, for whoever prints an object that has one."""

from __future__ import annotations

import io
import shutil
import sys
from typing import Any

_NARROWEST = 80


class _Text(io.StringIO):
    """Text for a terminal whose `encoding` rich asks for, to draw lines that the terminal has."""

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:
        return self._encoding


def text_of(table: Any) -> str:
    """Return a rich table as text that standard output can encode, without colours, as wide as the terminal at most."""
    from rich.console import Console

    width = max(_NARROWEST, shutil.get_terminal_size((120, 24)).columns)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    text = _Text(encoding)
    Console(file=text, width=width, color_system=None).print(table)
    return text.getvalue().rstrip("\n").encode(encoding, "replace").decode(encoding)
