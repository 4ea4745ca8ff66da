"""Example calls of every overload, made from its schema and from facts that its family registers.

`generate` makes the calls, `boundaries` the operands at which formulas change, and `facts` is the registry. A module
named after a family registers that family's facts; a new operator of the family adds its own there.
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

# A module registers its family's facts when it is imported.
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
