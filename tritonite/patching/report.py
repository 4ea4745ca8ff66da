"""The report of `patch`: modules with a new forward, and modules that keep theirs, with reasons."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from tritonite.text_table import text_of


class Replaced(NamedTuple):
    """A module with a new forward: its name in the model, its kind, and the operator that it calls."""

    name: str
    kind: str
    operator: str


class Kept(NamedTuple):
    """A module that looks like a kind but keeps its forward: its name in the model, the kind, and the reason."""

    name: str
    kind: str
    reason: str


class KeepError(Exception):
    """Raised, with the reason, for a module that looks like a kind but has to keep its forward."""


@dataclass
class PatchReport:
    """Modules that `patch` replaced and modules that it kept. `str` is a table with a line for equal layers."""

    replaced: list[Replaced] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of replaced modules of each kind."""
        return dict(Counter(each.kind for each in self.replaced))

    def __str__(self) -> str:
        from rich.table import Table

        counts = ", ".join(f"{count} {kind}" for kind, count in self.counts.items()) or "nothing"
        table = Table(title=f"replaced: {counts}", title_justify="left")
        for column in ("kind", "modules", "count", "now, or why not"):
            table.add_column(column, overflow="fold")
        for kind, name, text, count in _grouped(self.replaced):
            table.add_row(kind, name, str(count), text)
        for kind, name, text, count in _grouped(self.kept):
            table.add_row(kind, name, str(count), f"kept: {text}")
        return text_of(table)


def _grouped(entries: Iterable[tuple[str, str, str]]) -> list[tuple[str, str, str, int]]:
    """Return (kind, name, text, count) of entries whose names differ in numbers alone, with "*" for the numbers."""
    groups = Counter((kind, re.sub(r"\d+", "*", name) or "the model", text) for name, kind, text in entries)
    return [(*group, count) for group, count in groups.items()]
