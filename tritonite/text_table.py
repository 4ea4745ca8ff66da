"""Rich tables as plain text and as HTML, for objects that print as a table in terminals and notebooks."""

from __future__ import annotations

import html
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


# Colours are the notebook's own, so that a table is readable on light and dark backgrounds.
_CELL = "text-align:{side};vertical-align:top;padding:0.1em 0.6em;border-bottom:1px solid currentColor"


def html_of(table: Any) -> str:
    """Return a rich table of text as an HTML table for notebooks, without scripts, with everything escaped."""
    columns = list(table.columns)
    sides = ["right" if column.justify == "right" else "left" for column in columns]
    cells = [[column.header for column in columns], *zip(*(column.cells for column in columns), strict=True)]
    rows = [
        "".join(
            f'<{tag} style="{_CELL.format(side=side)}">{html.escape(str(cell))}</{tag}>'
            for side, cell in zip(sides, row, strict=True)
        )
        for tag, row in zip(("th", *("td",) * (len(cells) - 1)), cells, strict=True)
    ]
    above, below = (_paragraph(text) for text in (table.title, table.caption))
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div>{above}<table style="border-collapse:collapse">{body}</table>{below}</div>'


def html_text(text: str) -> str:
    """Return text of several lines as HTML for notebooks."""
    return f'<pre style="white-space:pre-wrap">{html.escape(text)}</pre>'


def _paragraph(text: Any) -> str:
    return f"<p>{html.escape(str(text)).replace(chr(10), '<br>')}</p>" if text else ""
