"""Benchmark cases of fused operators, each with ATen's composition of the same function; a module a family."""

from __future__ import annotations

from tritonite.bench.fused import delta_rule, distillation, layers, losses, moe, norms, quantized, serving
from tritonite.bench.fused.pair import Pair

_FAMILIES = (delta_rule, distillation, layers, losses, moe, norms, quantized, serving)
PAIRS: dict[str, Pair] = {name: pair for family in _FAMILIES for name, pair in family.PAIRS.items()}
from tritonite.bench.fused import attention, layers
from tritonite.bench.fused.pair import Pair

PAIRS: dict[str, Pair] = {**attention.PAIRS, **layers.PAIRS}

__all__ = ["PAIRS", "Pair"]
