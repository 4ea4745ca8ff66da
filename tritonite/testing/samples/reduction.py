"""Sums, products, extrema, norms and what else makes one element of many."""

from __future__ import annotations

from typing import Any

import torch

from tritonite.testing.samples import facts

# Of two tensors, as maximum and minimum.
facts.ZERO_SIGN_UNDEFINED |= {"max", "min"}
facts.may_decline(
    ("max.unary_out", "min.unary_out"),
    ("empty",),
    "reduction of an empty dimension*",
    "there is no largest of them: the functional form raises, this one gives what its loop began with",
)
facts.may_decline(
    ("prod.int_out", "sum.IntList_out"),
    ("*",),
    "torch.bool in torch.bool",
    "an output of bools makes ATen add up in bool, where kernels add integers",
    dtypes=(torch.bool,),
)


@facts.drawn("prod")
def _of_moderate_size(arguments: dict[str, Any]) -> dict[str, Any]:
    """Whether a product that overflows meets a 0 that another underflowed to depends on the order of its factors."""
    x = arguments["self"]
    if not (facts.real(x) and x.is_floating_point()):
        return arguments
    return arguments | {"self": x.nan_to_num(1.0, 1.0, -1.0).clamp(-1, 1)}
