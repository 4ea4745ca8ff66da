"""Elementary functions."""

from __future__ import annotations

from tritonite.testing.samples import facts

facts.NAN_UNDEFINED.add("logit_backward")
