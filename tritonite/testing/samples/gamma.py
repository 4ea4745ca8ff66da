"""The gamma function and its kin."""

from __future__ import annotations

from tritonite.testing.samples import facts

# The order of polygamma, and of the multivariate function.
facts.INTEGERS |= {"n": 2, "p": 1}
