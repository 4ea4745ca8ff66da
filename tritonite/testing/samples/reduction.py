"""Sums, products, extrema, norms and what else makes one element of many."""

from __future__ import annotations

import torch

from tritonite.testing.samples import facts

# Of two tensors, as maximum and minimum.
facts.ZERO_SIGN_UNDEFINED |= {"max", "min"}
facts.may_decline(
    ("max.unary_out", "min.unary_out"),
    ("empty",),
    "a set of no elements",
    "there is no largest of them: the functional form raises, this one gives what its loop began with",
)
facts.may_decline(
    ("prod.int_out", "sum.IntList_out"),
    ("*",),
    "torch.bool in torch.bool",
    "an output of bools makes ATen add up in bool, where kernels add integers",
    dtypes=(torch.bool,),
)
