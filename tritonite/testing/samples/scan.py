"""Scans."""

from __future__ import annotations

from typing import Any

import torch

from tritonite.testing.samples import facts

# The logarithm of a sum of 1 is 0.0, but ATen copies a first element of -0.0.
facts.ZERO_SIGN_OF_ROUNDOFF |= {"logcumsumexp", "_logcumsumexp"}
facts.CANCELLING.add("cumprod")


@facts.terms(
    *("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"),
    *("_cummax_helper", "_cummin_helper", "_logcumsumexp"),
)
def _terms_of_prefixes(sums: facts.Sums) -> float:
    """Return the length of the longest prefix along any dimension."""
    return max(sums.per_element(), *sums.result.shape, 1.0)


@facts.arguments("_cummax_helper", "_cummin_helper")
def _along_the_last(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return the last dimension, counted from 0, as ATen does for these helpers; it calls them for elements alone."""
    x = tensors[0]
    return {"dim": x.dim() - 1} if x.dim() and x.numel() else None


facts.may_decline(
    ("cumprod.out", "cumprod_", "cumsum.out", "cumsum_"),
    ("empty", "zero_dim"),
    "torch.bool in torch.bool",
    "ATen has no such scan of bools, but raises only for two elements or more",
    dtypes=(torch.bool,),
)
