"""The counts of overridden overloads, as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tritonite import text_table
from tritonite.errors import ATEN_IS_FASTER
from tritonite.runtime.compilation import Compilation, compilations, summary
from tritonite.runtime.stats import Counts, every_count

_CAPTION = "Operators without a kernel here are not counted: tritonite.report(function, ...) lists their calls."


class Stats(dict[str, Counts]):
    """Counts by overload, which print as a table.

    Attributes:
        compiled: the kernels that this process compiled or loaded from Triton's disk cache, as `Compilation`s.
    """

    def __init__(self, counts: dict[str, Counts], compiled: Sequence[Compilation] = ()) -> None:
        super().__init__(counts)
        self.compiled = tuple(compiled)

    def __rich__(self) -> Any:
        from rich.table import Column, Table

        # A column of its own only if a call was declined for speed.
        faster = any(entry.faster_in_aten for entry in self.values())
        names = ["replayed", "launched", *(["ATen faster"] if faster else []), "declined"]
        numbers = (Column(name, justify="right") for name in names)
        table = Table(
            Column("operator", overflow="fold"),
            *numbers,
            "why declined, or not recorded",
            caption="\n".join(filter(None, (summary(self.compiled), _CAPTION))),
            caption_justify="left",
        )
        for name, entry in self.items():
            declined = sum(entry.declined.values()) - entry.faster_in_aten
            counts = (entry.replayed, entry.launched, *([entry.faster_in_aten] if faster else []), declined)
            reasons = [*(reason for reason in entry.declined if reason != ATEN_IS_FASTER), *entry.unrecordable]
            table.add_row(name, *(str(count or "") for count in counts), "; ".join(reasons))
        return table

    def __str__(self) -> str:
        return text_table.text_of(self)

    def _repr_html_(self) -> str:
        return text_table.html_of(self.__rich__())


def stats() -> Stats:
    """Return the counts of every overload called since the process began or `reset_stats()`; they print as a table.

    Only overloads with a kernel of Tritonite's are counted. `tritonite.report(function, ...)` also counts calls of
    operators without one, such as convolutions. The kernels compiled since then are in the attribute `compiled`.
    """
    return Stats(every_count(), compilations())
