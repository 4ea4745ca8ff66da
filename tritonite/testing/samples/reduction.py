"""Sums, products, extrema, norms and other reductions."""

from __future__ import annotations

from typing import Any

import torch

from tritonite.testing.samples import facts

# With two tensors they are maximum and minimum.
facts.ZERO_SIGN_UNDEFINED |= {"max", "min"}
facts.may_decline(
    ("max.unary_out", "min.unary_out"),
    ("empty",),
    "reduction of an empty dimension*",
    "the functional form raises, and the out= form returns the initial value of its loop",
)
facts.may_decline(
    ("prod.int_out", "sum.IntList_out"),
    ("*",),
    "torch.bool in torch.bool",
    "with a bool output ATen accumulates in bool, and kernels accumulate integers",
    dtypes=(torch.bool,),
)
# The only mode of a hash is 0, the exclusive or.
facts.INTEGERS["mode"] = 0


@facts.drawn("prod")
def _without_overflow(arguments: dict[str, Any]) -> dict[str, Any]:
    """Limit factors to 1: whether an overflow meets an underflow depends on the order of the factors."""
    x = arguments["self"]
    if not (facts.real(x) and x.is_floating_point()):
        return arguments
    return arguments | {"self": x.nan_to_num(1.0, 1.0, -1.0).clamp(-1, 1)}
