"""Replacement of what a pattern matches."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from tritonite.errors import Decline, Unsupported


class NotReplaced(Exception):
    """Raised by a rule for a match that it does not replace."""


# A function from a graph and one of its nodes, the last of an expression, to the nodes that take the place of others.
Rule = Callable[["Rewriter", fx.Node], dict[fx.Node, fx.Node] | None]


class Rewriter:
    """A graph in which rules replace nodes."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self._anchor: fx.Node | None = None
        self._made: list[fx.Node] = []

    def apply(self, rules: Sequence[Rule]) -> int:
        """Apply the rules to all nodes, the last ones first, and return the number of replacements."""
        count = 0
        for node in reversed(list(self.graph.nodes)):
            if node.op != "call_function" or not node.users:
                continue
            self._made = []
            for rule in rules:
                try:
                    made = rule(self, node)
                except (Decline, NotReplaced, Unsupported):
                    made = None
                for old, new in (made or {}).items():
                    old.replace_all_uses_with(new)
                self._erase([*(made or {}), *reversed(self._made)])
                self._made = []
                if made:
                    count += 1
                    break
        return count

    def _erase(self, nodes: Sequence[fx.Node]) -> None:
        """Erase nodes without users, and what only they have used."""
        waiting = list(nodes)
        while waiting:
            node = waiting.pop()
            if node.op == "call_function" and not node.users and node.graph is self.graph and not node._erased:
                inputs = node.all_input_nodes
                self.graph.erase_node(node)
                waiting += inputs

    def at(self, anchor: fx.Node, inputs: Iterable[Any]) -> None:
        """Insert further nodes before `anchor`. Raises NotReplaced if an input comes after it."""
        index = {node: i for i, node in enumerate(self.graph.nodes)}
        if any(index[value] >= index[anchor] for value in inputs if isinstance(value, fx.Node)):
            raise NotReplaced
        self._anchor = anchor

    def first(self, nodes: Iterable[fx.Node]) -> fx.Node:
        """Return the node that comes first in the graph."""
        among = set(nodes)
        return next(node for node in self.graph.nodes if node in among)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call. Raises Unsupported for arguments that an operator outside ATen does not serve."""
        values = fx.map_arg((args, kwargs), lambda node: node.meta["val"])
        mode = next(value.fake_mode for value in pytree.tree_leaves(values) if isinstance(value, FakeTensor))
        with mode, torch.no_grad():
            result = target(*values[0], **values[1])
        assert self._anchor is not None
        with self.graph.inserting_before(self._anchor):
            node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = result
        self._made.append(node)
        return node

    def item(self, call: fx.Node, i: int) -> fx.Node:
        """Insert the item of a call with several results."""
        assert self._anchor is not None
        with self.graph.inserting_before(self._anchor):
            node = self.graph.call_function(operator.getitem, (call, i))
        node.meta["val"] = call.meta["val"][i]
        self._made.append(node)
        return node


def is_used_inside(nodes: Iterable[fx.Node], results: Iterable[fx.Node]) -> bool:
    """Return whether only the results have users outside the nodes."""
    inside, kept = set(nodes), set(results)
    return all(user in inside for node in inside - kept for user in node.users)


def used_inside(nodes: Iterable[fx.Node], results: Iterable[fx.Node]) -> None:
    """Raise NotReplaced if a node that is no result has a user outside the nodes."""
    if not is_used_inside(nodes, results):
        raise NotReplaced


def like(new: fx.Node, old: fx.Node, strides: bool = True) -> fx.Node:
    """Return the new node. Raises NotReplaced if its dtype, shape or strides are not the old node's."""
    a, b = new.meta["val"], old.meta["val"]
    if a.dtype is not b.dtype or a.device != b.device or not _alike(a.shape, b.shape):
        raise NotReplaced
    if strides and not _alike(_kept(a), _kept(b)):
        raise NotReplaced
    return new


def _kept(value: torch.Tensor) -> list[Any]:
    """Return the strides of the dimensions that have more than one element."""
    return [stride for size, stride in zip(value.shape, value.stride(), strict=True) if not _is(size, 1)]


def _is(a: Any, b: Any) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    if isinstance(a, int) or isinstance(b, int):
        return False
    return bool(a.node.expr == b.node.expr)


def _alike(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(_is, a, b))


same_shape = _alike
