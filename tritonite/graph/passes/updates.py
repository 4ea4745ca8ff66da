"""Updates in place: a call that changes some elements of a tensor writes them there, where nothing reads the old ones.

AOTAutograd traces `cache.index_copy_(...)` to `index_copy`, which copies the whole cache, and copies its result back at
the end of the graph. The bits of all results stay the same.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from tritonite.graph.operators import KNOWN, is_view

aten = torch.ops.aten
# Operators with a form in place, whose result is like their first argument.
_PACKETS = (
    *("index_copy", "index_put", "index_add", "index_fill", "index_reduce", "put"),
    *("scatter", "scatter_add", "scatter_reduce"),
)
_IN_PLACE: dict[OpOverload, OpOverload] = {
    getattr(getattr(aten, name), overload): getattr(getattr(aten, f"{name}_"), overload)
    for name in _PACKETS
    for overload in getattr(aten, f"{name}_").overloads()
    if overload in getattr(aten, name).overloads()
}
# Operators that write a second tensor to a view of the first, and the view.
_TO_VIEW = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
}


def update_in_place(module: fx.GraphModule) -> None:
    """Update tensors in place in a graph by AOTAutograd, in which no two inputs share memory if one is written."""
    if not any(map(_is_update, module.graph.nodes)):
        return
    memory = _Memory(module.graph)
    for copy in [node for node in module.graph.nodes if node.target is aten.copy_.default]:
        target, value = copy.args[:2]
        chain = _chain(target, value)
        if target.op == "placeholder" and chain and memory.may_write(target, chain, copy):
            memory = _written(chain, memory)
            copy.replace_all_uses_with(copy.args[1])
            module.graph.erase_node(copy)
    for update in [node for node in module.graph.nodes if _is_update(node)]:
        if memory.is_fresh(update.args[0]) and memory.may_write(update.args[0], [update]):
            memory = _written([update], memory)
    module.graph.lint()
    module.recompile()


def _is_update(node: Any) -> bool:
    return isinstance(node, fx.Node) and (node.target in _IN_PLACE or node.target in _TO_VIEW)


def _chain(target: fx.Node, value: Any) -> list[fx.Node]:
    """Return the updates, the first one first, that make a value of a target; [] if anything else does."""
    chain: list[fx.Node] = []
    while _is_update(value):
        chain.insert(0, value)
        value = value.args[0]
    return chain if value is target else []


def _written(chain: list[fx.Node], memory: _Memory) -> _Memory:
    """Write a chain of updates in place. Returns the graph's memory, which is the given one unless nodes are new."""
    graph, adds_nodes = chain[0].graph, any(update.target in _TO_VIEW for update in chain)
    for update in chain:
        _write(update)
    return _Memory(graph) if adds_nodes else memory


def _within(update: fx.Node) -> fx.Node | None:
    """Return the update of a view that another update writes back, as of cache[0] in cache[0].index_copy_(...)."""
    if update.target not in _TO_VIEW:
        return None
    target, inner, *where = update.args
    if not _is_update(inner) or len(inner.users) > 1:  # type: ignore[union-attr]
        return None
    view: Any = inner.args[0]  # type: ignore[union-attr]
    same = view.target is _TO_VIEW[update.target] and _are_same(view.args, (target, *where))
    return inner if same and view.kwargs == update.kwargs else None  # type: ignore[return-value]


def _are_same(a: Any, b: Any) -> bool:
    """Return whether two arguments are equal, or equal views of the same tensor."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_are_same, a, b))
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or a is b:
        return a is b or (type(a) is type(b) and a == b)
    return a.target is b.target and a.target in _TO_VIEW.values() and _are_same(a.args, b.args) and a.kwargs == b.kwargs


def _write(update: fx.Node) -> None:
    """Replace an update by its form in place."""
    if update.target in _IN_PLACE:
        update.target = _IN_PLACE[update.target]
        return
    target, source, *where = update.args
    if (inner := _within(update)) is not None:
        _write(inner)
    else:
        with update.graph.inserting_before(update):
            view = update.graph.call_function(_TO_VIEW[update.target], (target, *where), update.kwargs)
            written = update.graph.call_function(aten.copy_.default, (view, source))
        with _disable_current_modes():
            args, kwargs = fx.node.map_arg((view.args, view.kwargs), lambda node: node.meta["val"])
            view.meta["val"] = written.meta["val"] = view.target(*args, **kwargs)
    update.replace_all_uses_with(target)
    update.graph.erase_node(update)


class _Memory:
    """The nodes of a graph in order, and which of them may share memory."""

    def __init__(self, graph: fx.Graph) -> None:
        self._order = {node: i for i, node in enumerate(graph.nodes)}
        # A set for each group of nodes that may share memory.
        self._groups: dict[fx.Node, set[fx.Node]] = {node: {node} for node in graph.nodes}
        for node in graph.nodes:
            for other in _sharing(node):
                if (group := self._groups[other]) is not self._groups[node]:
                    group |= self._groups[node]
                    for member in self._groups[node]:
                        self._groups[member] = group

    def is_fresh(self, node: fx.Node) -> bool:
        """Return whether the graph has allocated a tensor, which is not returned and may have been updated since."""
        while node.target in _IN_PLACE.values():
            node = node.args[0]  # type: ignore[assignment]
        known = isinstance(node.target, OpOverload) and node.target.namespace in KNOWN
        return known and not _sharing(node) and not any(user.op == "output" for user in self._users(node))

    def may_write(self, target: fx.Node, chain: list[fx.Node], copy: fx.Node | None = None) -> bool:
        """Return whether a chain of updates of a target may be made in place.

        No node may read a tensor after the update that takes it, except `copy`, which writes the last result to the
        target. That result may then be no output of the graph, which has memory of its own.
        """
        for before, update in itertools.pairwise((target, *chain)):
            # From the outermost to the innermost, which is the first to write.
            nested = [update]
            while (inner := _within(nested[-1])) is not None:
                nested.append(inner)
            others = [node for each in nested for node in each.all_input_nodes if node not in (each.args[0], *nested)]
            if any(node in self._groups[before] for node in others):
                return False
            # Views read nothing; those that read them are among the users, too.
            readers = [
                user
                for user in self._users(before)
                if user not in (copy, *nested) and user.target not in _TO_VIEW.values()
            ]
            if any(self._order[user] > self._order[nested[-1]] for user in readers):
                return False
        if copy is not None and any(user.op == "output" for user in self._users(chain[-1])):
            return False
        return not _overlaps(target)

    def _users(self, node: fx.Node) -> Iterator[fx.Node]:
        for member in self._groups[node]:
            yield from member.users


def _sharing(node: fx.Node) -> list[fx.Node]:
    """Return the nodes among a node's arguments with which its result may share memory."""
    target = node.target
    if node.op in ("placeholder", "get_attr", "output"):
        return []
    if not isinstance(target, OpOverload) or target.namespace not in KNOWN:
        return [node.args[0]] if target is operator.getitem else list(node.all_input_nodes)  # type: ignore[list-item]
    if not any(each.alias_info is not None for each in target._schema.returns):
        return [node.args[0]] if is_view(target) else []  # type: ignore[list-item]
    found: list[fx.Node] = []
    for i, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None:
            fx.node.map_arg(node.args[i] if i < len(node.args) else node.kwargs.get(argument.name), found.append)
    return found


def _overlaps(node: fx.Node) -> bool:
    """Return whether elements of a tensor may share a place in memory."""
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or torch._debug_has_internal_overlap(value) != 0
