"""The effects of a graph's nodes that no edge of the graph shows, and that passes must not reorder."""

from __future__ import annotations

from torch import Tag, fx
from torch._ops import HigherOrderOperator, OpOverload

from tritonite.graph.operators import KNOWN


def writes(node: fx.Node) -> bool:
    """Return whether a node may write memory that it has not allocated, or has an effect besides its results."""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    if isinstance(node.target, OpOverload):
        return node.target._schema.is_mutable
    return isinstance(node.target, HigherOrderOperator) or node.op != "call_function" or node.is_impure()


def draws(node: fx.Node) -> bool:
    """Return whether a node's place among its kind is part of the result.

    Such nodes draw random numbers, communicate with other processes, or call a user's operator.
    """
    if not isinstance(node.target, OpOverload):
        return False
    return (
        Tag.nondeterministic_seeded in node.target.tags
        or node.target.namespace == "_c10d_functional"
        or node.target.namespace not in KNOWN
    )
