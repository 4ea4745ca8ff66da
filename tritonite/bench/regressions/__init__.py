"""Choices that a timing decided, each measured against its alternative: `tritonite bench --regressions`.

- cases: the form of a case, the registry, and the measurement of one case
- rows, gemm, pointwise, ...: the cases of an engine

A comment that explains such a choice names its case: `regressions: softmax_misaligned`. A case that no longer pays
names code that may be deleted.
"""

from tritonite.bench.regressions.cases import Measured, Regression, cases, measure, regression

__all__ = ["Measured", "Regression", "cases", "measure", "regression"]
