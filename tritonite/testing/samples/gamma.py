"""The gamma function and its kin."""

from __future__ import annotations

from typing import Any

from tritonite.testing.samples import facts

# The order of polygamma, and of the multivariate function.
facts.INTEGERS |= {"n": 2, "p": 1}


@facts.drawn("polygamma", "mvlgamma")
def _low_order(arguments: dict[str, Any]) -> dict[str, Any]:
    """An order is a number of steps, or an exponent."""
    return {name: min(value, 9) if isinstance(value, int) else value for name, value in arguments.items()}
