"""Calls drawn from the schemas, ATen's answer beside ours."""

from __future__ import annotations

from tritonite.testing.fuzz.check import Finding, check
from tritonite.testing.fuzz.draw import Call, draw
from tritonite.testing.fuzz.run import Tally, fuzz, fuzz_one

__all__ = ["Call", "Finding", "Tally", "check", "draw", "fuzz", "fuzz_one"]
