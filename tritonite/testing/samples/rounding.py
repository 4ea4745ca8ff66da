"""Rounding."""

from __future__ import annotations

from tritonite.testing.samples import facts

facts.INTEGERS["decimals"] = 1
