"""Tolerances of the judge: by dtype, which tests share with `tritonite.audit`, and of equations."""

from __future__ import annotations

from tritonite.report.tolerances import ATOL, RTOL

__all__ = ["ATOL", "RESIDUAL", "RTOL"]

# The threshold of LAPACK's own tests, in units of n * eps * norm.
RESIDUAL = 30.0
