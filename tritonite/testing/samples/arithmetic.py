"""Arithmetic."""

from __future__ import annotations

from tritonite.testing.samples import facts

facts.CHOICES["rounding_mode"] = (None, "trunc", "floor")
facts.ZERO_SIGN_UNDEFINED |= {"_add_relu", "fmax", "fmin", "lerp", "maximum", "minimum"}
