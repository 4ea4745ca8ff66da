"""A finding of a check."""

from __future__ import annotations

import dataclasses

# From harmless to fatal.
LEVELS = ("ok", "note", "warning", "error")


@dataclasses.dataclass(frozen=True)
class Finding:
    """A fact about the machine or the process.

    Attributes:
        check: the name of the check.
        level: "ok", "note" (works, and may surprise), "warning" (works, slowly or in part), "error" (does not work).
        message: the fact.
        advice: what to do about it; "" if nothing.
    """

    check: str
    level: str
    message: str
    advice: str = ""
