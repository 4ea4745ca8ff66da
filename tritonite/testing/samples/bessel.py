"""Bessel functions."""

from __future__ import annotations

from typing import Any

from tritonite import registry
from tritonite.testing.samples import facts


@facts.drawn(*{op.packet for op in registry.overloads().values() if op.family == "bessel"})
def _moderate(arguments: dict[str, Any]) -> dict[str, Any]:
    """Limit arguments: ATen reduces large ones by a rounded pi / 4, also in float64."""
    return {
        name: value.clamp(-1000, 1000) if facts.real(value) and value.dtype.itemsize > 2 else value
        for name, value in arguments.items()
    }
