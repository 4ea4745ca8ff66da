"""Search in sorted boundaries, and membership in a set."""

from __future__ import annotations

from typing import Any

from tritonite.registry import Op
from tritonite.testing.samples import facts


@facts.arguments("isin")
def _may_repeat(tensors: facts.Tensors) -> dict[str, Any]:
    """Do not assume unique elements: with repeated ones ATen's answer would depend on its order."""
    return {"assume_unique": False}


@facts.arguments("searchsorted")
def _unaided(tensors: facts.Tensors) -> dict[str, Any]:
    return {"side": None, "sorter": None}


@facts.operands("searchsorted", "bucketize")
def _in_order(op: Op, tensors: facts.Tensors, choice: Any) -> facts.Tensors | None:
    """Return sorted boundaries, a vector or as many rows as the values have, and the values."""
    x = tensors[0]
    vector = x.flatten().sort().values
    if op.packet == "bucketize":
        return [tensors[1], vector] if "self" in _tensors_of(op) else [vector]
    if "self" not in _tensors_of(op) or not x.dim():
        return [vector, x][: len(_tensors_of(op))]
    return [x.sort(-1).values, tensors[1].expand(x.shape)]


def _tensors_of(op: Op) -> list[str]:
    return [name for name, takes in zip(op.names, op.takes_tensors, strict=False) if takes and name != "sorter"]


@facts.drawn("isin")
def _not_unique(arguments: dict[str, Any]) -> dict[str, Any]:
    return arguments | {"assume_unique": False}
