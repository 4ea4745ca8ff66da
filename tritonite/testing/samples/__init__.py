"""Example calls of every overload, made from its schema and from facts that its family registers.

`generate` makes the calls, `boundaries` the operands at which formulas change, and `facts` is the registry. A module
named after a family registers that family's facts; a new operator of the family adds its own there.
"""

from __future__ import annotations

import importlib
import importlib.util

from tritonite.ops.families import FAMILIES
from tritonite.registry.results import UNWRITTEN
from tritonite.testing.samples.boundaries import at_boundaries
from tritonite.testing.samples.facts import (
    CANCELLING,
    CHOSEN,
    DEVICE_DEFINED,
    DRAWN,
    MAY_DECLINE,
    NOT_REACHED,
    RANDOM,
    REFERENCES,
    RESIDUALS,
    ROUNDED_TERMS,
    TERMS,
    MayDecline,
    Sums,
    compares_zero_sign,
    reference_of,
)
from tritonite.testing.samples.generate import Sample, calls, samples, values

# A family's module adds its samples when it is imported; schemas say all of a family without one.
for _family in (*FAMILIES, "fused", "linalg_eigen", "linalg_ldl", "linalg_least_squares"):
    if importlib.util.find_spec(f"{__name__}.{_family}"):
        importlib.import_module(f"{__name__}.{_family}")

__all__ = [
    "CANCELLING",
    "CHOSEN",
    "DEVICE_DEFINED",
    "DRAWN",
    "MAY_DECLINE",
    "NOT_REACHED",
    "RANDOM",
    "REFERENCES",
    "RESIDUALS",
    "ROUNDED_TERMS",
    "TERMS",
    "UNWRITTEN",
    "MayDecline",
    "Sample",
    "Sums",
    "at_boundaries",
    "calls",
    "compares_zero_sign",
    "reference_of",
    "samples",
    "values",
]
