"""What is there once: of elements of which many are equal."""

from __future__ import annotations

from typing import Any

import torch

from tritonite.testing.samples import facts

_SETS = ("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive")
# ATen's comparisons of nan depend on the order in which its sort meets them.
facts.NAN_UNDEFINED |= set(_SETS)
# Which of equal zeros stays is ATen's choice.
facts.ZERO_SIGN_OF_ROUNDOFF |= set(_SETS)


@facts.arguments(*_SETS)
def _equals(tensors: facts.Tensors) -> dict[str, Any]:
    """In place, for the layout's sake."""
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
    "ATen lays out results on GPUs by how many slices there are, which a plan knows of two dimensions alone",
    device="cuda",
)
facts.may_decline(
    ("_unique", "_unique2"),
    ("*",),
    "bools without both*",
    "ATen's kernel for them gives no tensor for an inverse that is not asked for, and counts that are not",
    dtypes=(torch.bool,),
    device="cuda",
)
