"""Tolerances of the judge by dtype, which tests share with `tritonite.audit`."""

from __future__ import annotations

from tritonite.report.tolerances import ATOL, RTOL

__all__ = ["ATOL", "RTOL"]
