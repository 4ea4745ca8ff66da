"""Reductions: sums, means, extrema and their indices, logic, variances, norms, log-sum-exp.

    sums.py          sums, means, products; leaves and projections that all use
    extrema.py       minima and maxima, and their indices
    logic.py         any, all, equality, counts of nonzero elements
    moments.py       variances and deviations
    norms.py         vector norms, sums of powers
    hashes.py        exclusive or of all bits
    exponentials.py  log-sum-exp, and the reduction of the online softmax

Each is a `Reduction(init, leaf, combine, project)`. Errors of sums and variances grow with the logarithm of the count.
"""

import importlib

for _kind in ("sums", "extrema", "logic", "moments", "norms", "hashes", "exponentials"):
    importlib.import_module(f"tritonite.ops.reduction.{_kind}")
