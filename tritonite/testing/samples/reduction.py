"""Sums, products, extrema, norms and what else makes one element of many."""

from __future__ import annotations

from tritonite.testing.samples import facts

# Of two tensors, as maximum and minimum.
facts.ZERO_SIGN_UNDEFINED |= {"max", "min"}
