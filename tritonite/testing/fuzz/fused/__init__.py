"""The fuzzer of fused operators: calls drawn by a function for each, judged against a composition in float64.

`experts`, `layers`, `losses`, `quantized`, `sequences` and `serving` have the draws. `drawing` makes their tensors, and
`check` judges a call.
"""

from __future__ import annotations

from tritonite.testing.fuzz.fused import experts, layers, losses, quantized, sequences, serving
from tritonite.testing.fuzz.fused.check import check_fused, compositions
from tritonite.testing.fuzz.fused.drawing import DRAWS, PREFIX, FusedCall, draw_fused, named_fused

__all__ = [
    "DRAWS",
    "PREFIX",
    "FusedCall",
    "check_fused",
    "compositions",
    "draw_fused",
    "experts",
    "layers",
    "losses",
    "named_fused",
    "quantized",
    "sequences",
    "serving",
]
