"""Parts of a graph that passes have fused: one node, which keeps the separate operators that it replaces.

A fused operator declines some calls, as every operator does: by strides, alignment or sizes that only a call has. The
separate operators run then.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from tritonite.errors import Unsupported


class Fused:
    """The target of a fused part's node. A call takes the values that the part reads, and returns its results.

    Args:
        name: the name of the pattern, or "pointwise_program".
        fused: the fused operators.
        separate: the replaced operators, with the same arguments and results.
        replaced: the names of the replaced nodes.
    """

    def __init__(self, name: str, fused: fx.GraphModule, separate: fx.GraphModule, replaced: tuple[str, ...]) -> None:
        # torch.fx writes a target's name into the code of a graph.
        self.__name__ = self.__qualname__ = name
        self.__module__ = __name__
        self.fused, self.separate, self.replaced = fused, separate, replaced

    def __call__(self, *args: Any) -> Any:
        try:
            return self.fused(*args)
        except Unsupported:
            return self.separate(*args)


def insert(
    graph: fx.Graph, name: str, made: Mapping[fx.Node, fx.Node], fused: Sequence[fx.Node], separate: Sequence[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Insert the node of a fused part at the graph's insertion point, and return the node of each result.

    Args:
        made: for each node that is replaced, the node among `fused` that computes it.
        fused: the nodes of the fused operators, in order. They leave the graph.
        separate: the nodes of the replaced operators, in order. They stay in the graph.
    """
    inputs = list(dict.fromkeys([*_inputs(fused), *_inputs(separate)]))
    new, old = _module(inputs, fused, made.values()), _module(inputs, separate, made.keys())
    node = graph.call_function(Fused(name, new, old, tuple([each.name for each in separate])), tuple(inputs))
    node.meta["val"] = [old.meta["val"] for old in made]
    results = {}
    for i, old in enumerate(made):
        results[old] = graph.call_function(operator.getitem, (node, i))
        results[old].meta = dict(old.meta)
    for each in reversed(fused):
        graph.erase_node(each)
    return results


def calls_of(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that call functions, with the fused operators' in the place of fused parts."""
    found = []
    for node in graph.nodes:
        if isinstance(node.target, Fused):
            found += calls_of(node.target.fused.graph)
        elif node.op == "call_function":
            found.append(node)
    return found


def may_fuse(nodes: Iterable[fx.Node], selected: frozenset[str] | None) -> bool:
    """Return whether all operators that compute something are in `selected`; with None, every operator is."""
    return selected is None or all(_is_selected(node.target, selected) for node in nodes)


def _is_selected(target: Any, selected: frozenset[str]) -> bool:
    if not isinstance(target, OpOverload) or target.is_view or target is torch.ops.aten._unsafe_view.default:
        return True
    if target is torch.ops.prims.convert_element_type.default:
        target = torch.ops.aten._to_copy.default
    return target.namespace != "aten" or target.name().removeprefix("aten::") in selected


def _inputs(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return what nodes read from outside, each once."""
    inside = set(nodes)
    return list(dict.fromkeys([each for node in nodes for each in node.all_input_nodes if each not in inside]))


def _module(inputs: Sequence[fx.Node], nodes: Sequence[fx.Node], results: Iterable[fx.Node]) -> fx.GraphModule:
    """Return a graph module of copies of nodes."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    copied: Callable[[fx.Node], fx.Node] = copies.__getitem__
    for node in nodes:
        copies[node] = graph.node_copy(node, copied)
    graph.output(tuple([copies[each] for each in results]))
    return fx.GraphModule(torch.nn.Module(), graph)
