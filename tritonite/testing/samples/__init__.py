"""Inputs for every overload: made from its schema, and from what its family says besides.

`generate` makes them; `facts` holds what schemas do not tell; a module named after a family of operators adds that
family's, and is the one to open for a new operator of it.
"""

from __future__ import annotations

import importlib
import importlib.util

from tritonite.ops.families import FAMILIES
from tritonite.testing.samples.boundaries import at_boundaries
from tritonite.testing.samples.facts import (
    CHOSEN,
    DEVICE_DEFINED,
    DRAWN,
    MAY_DECLINE,
    NOT_REACHED,
    RANDOM,
    REFERENCES,
    UNWRITTEN,
    MayDecline,
    compares_zero_sign,
)
from tritonite.testing.samples.generate import Sample, calls, samples, values

# A family's module adds its samples when it is imported; schemas say all of a family without one.
for _family in (*FAMILIES, "fused"):
    if importlib.util.find_spec(f"{__name__}.{_family}"):
        importlib.import_module(f"{__name__}.{_family}")

__all__ = [
    "CHOSEN",
    "DEVICE_DEFINED",
    "DRAWN",
    "MAY_DECLINE",
    "NOT_REACHED",
    "RANDOM",
    "REFERENCES",
    "UNWRITTEN",
    "MayDecline",
    "Sample",
    "at_boundaries",
    "calls",
    "compares_zero_sign",
    "samples",
    "values",
]
