"""A finding of an audit."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Finding:
    """A wrong or suspicious result of an overload's sampled calls.

    Attributes:
        check: "drift", "nan" or "bits".
        overload: the overload, such as "add.Tensor".
        detail: the first finding of this check and overload, in words.
        call: its number among the sampled calls, from 0 on. The lowest number of "nan" is where nan or inf began.
        error: the largest relative error, in eps of the dtype; 0 unless `check` is "drift".
        count: the number of calls.
    """

    check: str
    overload: str
    detail: str
    call: int
    error: float = 0.0
    count: int = 1

    def and_another(self, other: Finding) -> Finding:
        """Return the finding with another one of the same check and overload counted."""
        return dataclasses.replace(self, error=max(self.error, other.error), count=self.count + other.count)
