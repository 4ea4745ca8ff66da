"""The fuzzer: calls drawn from schemas, with ATen's results compared with ours, and calls of fused operators.

`draw` makes the call of a seed and number, `check` compares its outcomes, and `run` does both in several processes.
`fused` draws and judges calls of fused operators.
"""

from __future__ import annotations

from tritonite.testing.fuzz.check import Finding, check
from tritonite.testing.fuzz.draw import Call, draw
from tritonite.testing.fuzz.run import Tally, chosen_names, fuzz, fuzz_one

__all__ = ["Call", "Finding", "Tally", "check", "chosen_names", "draw", "fuzz", "fuzz_one"]
