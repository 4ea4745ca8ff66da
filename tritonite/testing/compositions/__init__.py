"""Fused operators as compositions of torch's operators, which take float64: references of the tests and the fuzzer.

A composition takes the arguments of the fused operator that affect its values, by the same names.
"""

from __future__ import annotations

from tritonite.testing.compositions import (
    attention,
    delta_rule,
    divergences,
    experts,
    layers,
    losses,
    preference,
    quantized,
)

__all__ = ["attention", "delta_rule", "divergences", "experts", "layers", "losses", "preference", "quantized"]
