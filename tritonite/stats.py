"""What became of the calls of each overridden overload."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

_lock = threading.Lock()
_REASONS = 64


@dataclass(frozen=True)
class Counts:
    """Calls of one overload: replayed from a recorded plan, launched from Python, or declined, by reason."""

    replayed: int = 0
    launched: int = 0
    declined: dict[str, int] = field(default_factory=dict)


class _Counter:
    def __init__(self) -> None:
        self.launched = 0
        self.declined: Counter[str] = Counter()

    def count_launch(self) -> None:
        with _lock:
            self.launched += 1

    def count_decline(self, reason: str) -> None:
        with _lock:
            if reason not in self.declined and len(self.declined) >= _REASONS:
                reason = "other reasons"
            self.declined[reason] += 1


_counters: dict[str, _Counter] = {}


def counts_of(overload: str) -> _Counter:
    with _lock:
        return _counters.setdefault(overload, _Counter())


def stats() -> dict[str, Counts]:
    """Counts of every overload called since the process began or `reset_stats()`."""
    with _lock:
        return {
            name: Counts(launched=counter.launched, declined=dict(counter.declined))
            for name, counter in sorted(_counters.items())
            if counter.launched or counter.declined
        }


def reset_stats() -> None:
    """Set every count to zero."""
    with _lock:
        for counter in _counters.values():
            counter.launched = 0
            counter.declined.clear()
