"""Benchmark cases of fused operators, each with ATen's composition of the same function; a module a family."""

from __future__ import annotations

from tritonite.bench.fused import (
    attention,
    convolution,
    delta_rule,
    distillation,
    layers,
    losses,
    moe,
    norms,
    quantized,
    serving,
)
from tritonite.bench.fused.pair import Pair

_FAMILIES = (attention, convolution, delta_rule, distillation, layers, losses, moe, norms, quantized, serving)
PAIRS: dict[str, Pair] = {name: pair for family in _FAMILIES for name, pair in family.PAIRS.items()}

__all__ = ["PAIRS", "Pair"]
