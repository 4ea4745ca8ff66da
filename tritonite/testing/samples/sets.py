"""Unique elements, of tensors with many equal elements."""

from __future__ import annotations

from typing import Any

import torch

from tritonite.testing.samples import facts

_SETS = ("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive")
# ATen's treatment of nan depends on the order in which its sort compares elements.
facts.NAN_UNDEFINED |= set(_SETS)
# ATen keeps either of two equal zeros.
facts.ZERO_SIGN_OF_ROUNDOFF |= set(_SETS)


@facts.arguments(*_SETS)
def _equals(tensors: facts.Tensors) -> dict[str, Any]:
    """Round elements, so that many are equal, in place to keep the layout."""
    x = facts.without_signed_nan(tensors[0])
    if x.is_floating_point() and x.numel():
        x.copy_(x.round())
    return {"self": x}


@facts.drawn(*_SETS)
def _numbers(arguments: dict[str, Any]) -> dict[str, Any]:
    x = arguments["self"]
    return arguments | {"self": x.nan_to_num(0.0)} if facts.real(x) and x.is_floating_point() else arguments


facts.may_decline(
    ("unique_dim*", "unique_consecutive"),
    ("*",),
    "slices along dimension*",
    "ATen's layout on GPUs depends on how many slices there are; a plan knows this for two dimensions alone",
    device="cuda",
)
facts.may_decline(
    ("_unique", "_unique2"),
    ("*",),
    "bools without both*",
    "ATen's kernel for bools returns no inverse unless asked for, and counts even if not asked for",
    dtypes=(torch.bool,),
    device="cuda",
)
