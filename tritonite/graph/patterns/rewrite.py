"""Replacement of what a pattern matches."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from tritonite import devices
from tritonite.errors import Decline, Unsupported
from tritonite.graph import fused
from tritonite.graph.effects import draws, writes

_MOST_REPLACED = 64


class NotReplaced(Exception):
    """Raised by a rule for a match that it does not replace."""


# A function from a graph and one of its nodes, the last of an expression, to the nodes that take the place of others.
Rule = Callable[["Rewriter", fx.Node], dict[fx.Node, fx.Node] | None]


class Rewriter:
    """A graph in which rules replace nodes.

    A replacement is the node of a fused part (`graph/fused.py`), which keeps the replaced nodes.

    Args:
        selected: the overloads of ATen that may be replaced, or None for all.
    """

    def __init__(self, graph: fx.Graph, selected: frozenset[str] | None = None) -> None:
        self.graph, self._selected = graph, selected
        self._anchor: fx.Node | None = None
        self._made: list[fx.Node] = []

    def apply(self, rules: Sequence[Rule]) -> int:
        """Apply the rules to all nodes, the last ones first, and return the number of replacements."""
        count = 0
        for node in reversed(list(self.graph.nodes)):
            if node.op != "call_function" or node._erased or not node.users:
                continue
            for rule in rules:
                self._made = []
                try:
                    made = rule(self, node)
                    if made:
                        self._replace(rule.__name__, made)
                except (Decline, NotReplaced, Unsupported):
                    made = None
                self._erase(reversed(self._made))
                if made:
                    count += 1
                    break
        return count

    def _replace(self, name: str, made: dict[fx.Node, fx.Node]) -> None:
        """Put a fused part in the place of nodes. Raises NotReplaced if other values would be read."""
        assert self._anchor is not None
        self._erase([each for each in reversed(self._made) if each not in made.values()])
        new = [each for each in self._made if not each._erased]
        index = {node: i for i, node in enumerate(self.graph.nodes)}
        given = {each for node in new for each in node.all_input_nodes} - set(new)
        old = sorted(_between(given, made), key=index.__getitem__)
        outside = {each for node in old for each in node.all_input_nodes} - set(old)
        first, last = index[old[0]], max(index[old[-1]], index[self._anchor])
        if any(index[each] >= index[self._anchor] for each in outside) or not fused.may_fuse(old, self._selected):
            raise NotReplaced
        # Between a read of the separate operators and of the fused ones, memory must not change.
        if any(first < index[node] < last and writes(node) for node in self.graph.nodes):
            raise NotReplaced
        with self.graph.inserting_before(self._anchor):
            results = fused.insert(self.graph, name, made, new, old)
        for before, after in results.items():
            before.replace_all_uses_with(after)
        self._erase(made)

    def _erase(self, nodes: Iterable[fx.Node]) -> None:
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
        assert self._anchor is not None
        values = fx.map_arg((args, kwargs), _value)
        tensors = [value for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]
        if not tensors or not all(map(_is_plain, tensors)):
            raise NotReplaced
        try:
            with tensors[0].fake_mode, torch.no_grad():  # type: ignore[attr-defined]
                result = target(*values[0], **values[1])
        except (Decline, Unsupported):
            raise
        except Exception:  # noqa: BLE001 - a check that depends on data, or an error that the call itself will raise
            raise NotReplaced from None
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


def _value(node: fx.Node) -> Any:
    """Return the fake value of a node. Raises NotReplaced for a node without one, as of a higher-order operator."""
    if "val" not in node.meta:
        raise NotReplaced
    return node.meta["val"]


def _is_plain(value: torch.Tensor) -> bool:
    """Return whether a value is a strided fake tensor of the device whose kernels run."""
    return isinstance(value, FakeTensor) and value.layout is torch.strided and value.device.type == devices.current.type


def _between(given: set[fx.Node], results: Collection[fx.Node]) -> set[fx.Node]:
    """Return the nodes that compute the results from given values, sizes, and values that no pattern replaces.

    Raises NotReplaced if these are too many nodes for a pattern.
    """
    found: set[fx.Node] = set()
    waiting = list(results)
    while waiting:
        node = waiting.pop()
        if node not in given and node not in found and _is_replaceable(node):
            found.add(node)
            waiting += node.all_input_nodes
    if len(found) > _MOST_REPLACED or not found.issuperset(results):
        raise NotReplaced
    return found


def _is_replaceable(node: fx.Node) -> bool:
    """Return whether a node computes a tensor, or several, without an effect besides."""
    computes = isinstance(node.target, OpOverload) or node.target is operator.getitem
    return (
        computes and isinstance(node.meta.get("val"), torch.Tensor | tuple | list) and not (draws(node) or writes(node))
    )


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
