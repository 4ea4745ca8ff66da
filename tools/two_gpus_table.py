"""The table of tools/two_gpus.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass
class Row:
    """Errors of the loss and of the worst gradient of a way to share a step, and its calls on all processes."""

    way: str
    tritonite: bool
    status: str
    loss_error: float = 0.0
    gradient_error: float = 0.0
    worst: str = ""
    served: int = 0
    declined: int = 0

    @property
    def is_right(self) -> bool:
        return self.status == "equal" or self.status.startswith("not run: ")

    def line(self) -> str:
        ran = self.status in ("equal", "differs")
        errors = f"{self.loss_error:.1e} | {self.gradient_error:.1e}" if ran else " | "
        calls = f"{self.served:,} of {self.served + self.declined:,}" if ran and self.tritonite else ""
        return f"| {self.way} | {'on' if self.tritonite else 'off'} | {self.status} | {errors} | {calls} |"


def table(rows: Sequence[Row]) -> str:
    """Return rows as a table in Markdown."""
    head = "| way | Tritonite | step | error of the loss | error of the worst gradient | calls of kernels |"
    return "\n".join([head, "| --- | --- | --- | --- | --- | --- |", *(row.line() for row in rows)])
