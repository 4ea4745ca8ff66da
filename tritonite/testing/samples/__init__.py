"""Inputs for every overload: made from its schema, and from what its family says besides.

`generate` makes them; `facts` holds what schemas do not tell; a module named after a family of operators adds that
family's, and is the one to open for a new operator of it.
"""

from __future__ import annotations

import importlib

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
    ROUNDED_TERMS,
    TERMS,
    UNWRITTEN,
    MayDecline,
    Sums,
    compares_zero_sign,
)
from tritonite.testing.samples.generate import Sample, calls, samples, values

# A family adds what it needs when it is imported.
for _family in (
    "activation",
    "arithmetic",
    "attention",
    "batch_norm",
    "bessel",
    "compaction",
    "conditional",
    "creation",
    "cross",
    "elementary",
    "embedding",
    "embedding_bag",
    "fused",
    "gamma",
    "histograms",
    "indexing",
    "jagged",
    "loss",
    "matmul",
    "movement",
    "nll_loss",
    "normalization",
    "polynomial",
    "random",
    "rearrangement",
    "reduction",
    "rounding",
    "sampling",
    "scan",
    "scatter",
    "searching",
    "segment",
    "sets",
    "softmax",
    "sorting",
    "sync_batch_norm",
):
    importlib.import_module(f"tritonite.testing.samples.{_family}")

__all__ = [
    "CANCELLING",
    "CHOSEN",
    "DEVICE_DEFINED",
    "DRAWN",
    "MAY_DECLINE",
    "NOT_REACHED",
    "RANDOM",
    "REFERENCES",
    "ROUNDED_TERMS",
    "TERMS",
    "UNWRITTEN",
    "MayDecline",
    "Sample",
    "Sums",
    "at_boundaries",
    "calls",
    "compares_zero_sign",
    "samples",
    "values",
]
