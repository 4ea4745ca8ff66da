"""Counters of the calls of each overridden overload: replayed, launched or declined."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tritonite.errors import ATEN_IS_FASTER
from tritonite.runtime.compilation import forget
from tritonite.runtime.locks import brief

_log = logging.getLogger("tritonite")
_MOST_REASONS = 64


@dataclass(frozen=True)
class Counts:
    """Calls of one overload.

    `replayed` counts calls that ran from a plan, `launched` those that ran through Python, `declined` those that fell
    back to ATen, by reason. `unrecordable` counts the launched calls that left no plan, by reason.
    """

    replayed: int = 0
    launched: int = 0
    declined: dict[str, int] = field(default_factory=dict)
    unrecordable: dict[str, int] = field(default_factory=dict)

    @property
    def faster_in_aten(self) -> int:
        """Number of declined calls that a kernel could have served, but more slowly than ATen."""
        return self.declined.get(ATEN_IS_FASTER, 0)


class _Counter:
    def __init__(self, overload: str) -> None:
        self.overload = overload
        self.launched = self.replayed = 0
        self.declined: Counter[str] = Counter()
        self.unrecordable: Counter[str] = Counter()
        self.logged: set[str] = set()

    def count_launch(self) -> None:
        with brief:
            self.launched += 1
            _used.add(self)

    def count_decline(self, reason: str) -> None:
        self._count(self.declined, reason)
        self.log(reason)

    def log(self, reason: str) -> None:
        """Log the reason of a decline, once until `reset_stats()`."""
        if reason not in self.logged and len(self.logged) < _MOST_REASONS:
            self.logged.add(reason)
            with brief:
                _used.add(self)
            _log.debug("%s is left to ATen: %s", self.overload, reason)

    def count_unrecordable(self, reason: str) -> None:
        self._count(self.unrecordable, reason)

    def _count(self, reasons: Counter[str], reason: str) -> None:
        with brief:
            if reason not in reasons and len(reasons) >= _MOST_REASONS:
                reason = "other reasons"
            reasons[reason] += 1
            _used.add(self)


def count_replays(calls: Mapping[str, int]) -> None:
    """Count the calls of each overload in a graph's plan that has been replayed."""
    with brief:
        for overload, count in calls.items():
            counter = _counters[overload]
            counter.replayed += count
            _used.add(counter)


_counters: dict[str, _Counter] = {}
# Counters of calls that Python counted or logged since `reset_stats()`. The native dispatcher has counts of its own.
_used: set[_Counter] = set()


def counts_of(overload: str) -> _Counter:
    # A counter is made where there is none: most calls find one.
    found = _counters.get(overload)
    if found is not None:
        return found
    with brief:
        return _counters.setdefault(overload, _Counter(overload))


# The native dispatcher, once in use.
_native: list[Any] = []


def read_native(dispatcher: Any) -> None:
    """Have `counts` and `totals` include the counts of the native dispatcher."""
    _native[:] = [dispatcher]


def counts(overload: str) -> Counts:
    """Return the counts of one overload since the process began or `reset_stats()`."""
    counter = counts_of(overload)
    replayed, declined = 0, dict[str, int]()
    for dispatcher in _native:
        more, declined, _ = dispatcher.counts(overload)
        replayed += more
    with brief:
        if counter.declined:
            declined = dict(Counter(declined) + counter.declined)
        return Counts(replayed + counter.replayed, counter.launched, declined, dict(counter.unrecordable))


def every_count() -> dict[str, Counts]:
    """Return the counts of every overload called since the process began or `reset_stats()`, by overload."""
    with brief:
        names = {counter.overload for counter in _used}
    for dispatcher in _native:
        names.update(dispatcher.counted())
    found = {name: counts(name) for name in sorted(names)}
    return {name: entry for name, entry in found.items() if entry != Counts()}


def totals() -> Counts:
    """Return the sum of all overloads' counts, with the overload before each reason."""
    replayed, launched = 0, 0
    declined, unrecordable = Counter[str](), Counter[str]()
    for name, entry in every_count().items():
        replayed += entry.replayed
        launched += entry.launched
        for reasons, into in ((entry.declined, declined), (entry.unrecordable, unrecordable)):
            into.update({f"{name}: {reason}": count for reason, count in reasons.items()})
    return Counts(replayed, launched, dict(declined), dict(unrecordable))


def reset_stats() -> None:
    """Set every count to zero, and empty the list of compiled kernels."""
    forget()
    with brief:
        for counter in _used:
            counter.logged.clear()
            counter.launched = counter.replayed = 0
            counter.declined.clear()
            counter.unrecordable.clear()
        _used.clear()
    for dispatcher in _native:
        for name in dispatcher.counted():
            dispatcher.reset_counts(name)
