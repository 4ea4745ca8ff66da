"""A graph of torch.fx as a list of calls over numbered values."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from tritonite.errors import Unsupported
from tritonite.graph.fused import Fused
from tritonite.graph.operators import KNOWN, function_of
from tritonite.runtime.nested import retyped


@dataclass(frozen=True)
class Value:
    """The index of a value, in the place of the value itself in a call's arguments."""

    index: int


@dataclass(frozen=True)
class Call:
    """A call of a graph.

    Args:
        name: the name of the graph's node.
        target: the overload, or a function of Python over sizes and tuples.
        function: what runs the call.
        args, kwargs: the arguments, with a `Value` in the place of each result of an earlier call.
        result: the index of the result.
        last: indices of the values that no later call needs.
        data_dependent: whether the results are numbers that depend on data, or tensors with such sizes.
    """

    name: str
    target: Any
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: int
    last: tuple[int, ...]
    data_dependent: bool


@dataclass(frozen=True)
class Lowered:
    """The calls of a graph in order.

    Values 0 to `inputs` - 1 are the graph's inputs. `constants` are further values that are known before the first
    call: tensors and submodules. `outputs` has a `Value` for each output that is none.
    """

    inputs: int
    constants: dict[int, Any]
    calls: tuple[Call, ...]
    outputs: tuple[Any, ...]
    values: int
    single: bool

    @property
    def has_custom(self) -> bool:
        """True if the graph calls an operator of a user's library."""
        overloads = [call.target for call in self.calls if isinstance(call.target, OpOverload)]
        return any(overload.namespace not in KNOWN for overload in overloads)


@dataclass(frozen=True)
class FusedCalls:
    """The function of a fused part: it calls the fused operators, or the separate ones if a fused one declines.

    Args:
        name: the name of the pattern, or "pointwise_program".
        replaced: the names of the replaced nodes.
        fused, separate: the calls of the fused operators, and of those that they replace.
    """

    name: str
    replaced: tuple[str, ...]
    fused: Lowered
    separate: Lowered

    def __call__(self, *args: Any) -> list[Any]:
        from tritonite.graph.interpret import interpret

        try:
            return interpret(self.fused, list(args))
        except Unsupported:
            return interpret(self.separate, list(args))


def lower(module: fx.GraphModule, selected: frozenset[str]) -> Lowered:
    """Return the calls of a graph module whose nodes call overloads, higher-order operators and Python's operators.

    `selected` are the overloads of ATen that run Tritonite's kernels.
    """
    indices: dict[fx.Node, Value] = {}
    constants: dict[int, Any] = {}
    calls: list[Call] = []
    outputs: Any = ()
    nodes = [node for node in module.graph.nodes if node.op != "placeholder"]
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node in (*inputs, *nodes):
        indices[node] = Value(len(indices))
    last = _last_uses(module.graph)

    def argument(value: Any) -> Any:
        return fx.node.map_aggregate(value, lambda item: indices[item] if isinstance(item, fx.Node) else item)

    for node in nodes:
        index = indices[node].index
        if node.op == "get_attr":
            constants[index] = _attribute(module, node.target)
        elif node.op == "output":
            outputs = argument(node.args[0])
        else:
            target = node.target if node.op == "call_function" else operator.methodcaller(node.target)
            args, kwargs = _plain(argument(node.args)), _plain(argument(node.kwargs))
            ended = tuple(indices[each].index for each in last.get(node, ()))
            calls.append(
                Call(
                    node.name,
                    target,
                    _function(target, selected),
                    args,
                    kwargs,
                    index,
                    ended,
                    _is_data_dependent(node),
                )
            )
    single = not isinstance(outputs, (tuple, list))
    listed = (outputs,) if single else tuple(outputs)
    return Lowered(len(inputs), constants, tuple(calls), _plain(listed), len(indices), single)


def _function(target: Any, selected: frozenset[str]) -> Callable[..., Any]:
    if isinstance(target, Fused):
        parts = [lower(part, selected) for part in (target.fused, target.separate)]
        return FusedCalls(target.__name__, target.replaced, *parts)
    return function_of(target, selected)


def filled(argument: Any, values: list[Any]) -> Any:
    """Return an argument with each `Value` replaced by the item of `values`."""
    kind = type(argument)
    if kind is Value:
        return values[argument.index]
    if kind is tuple or kind is list:
        return kind([filled(item, values) for item in argument])
    if isinstance(argument, tuple):
        return retyped(argument, [filled(item, values) for item in argument])
    if kind is dict:
        return {name: filled(item, values) for name, item in argument.items()}
    if kind is slice:
        return slice(*(filled(item, values) for item in (argument.start, argument.stop, argument.step)))
    return argument


def _plain(argument: Any) -> Any:
    """Return an argument with torch.fx's immutable lists and dicts replaced by Python's."""
    if isinstance(argument, list):
        return [_plain(item) for item in argument]
    if isinstance(argument, dict):
        return {name: _plain(item) for name, item in argument.items()}
    if isinstance(argument, tuple):
        return retyped(argument, [_plain(item) for item in argument])
    return argument


def _attribute(module: torch.nn.Module, path: str) -> Any:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return the nodes that are used last by each node. A node without users is its own last user."""
    ended: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        for used in (*node.all_input_nodes, node):
            if used not in seen:
                seen.add(used)
                ended.setdefault(node, []).append(used)
    return ended


def _is_data_dependent(node: fx.Node) -> bool:
    """Return whether a node's results, or their sizes, are numbers that depend on data."""
    if "val" in node.meta:
        return bool(free_unbacked_symbols(node.meta["val"]))
    tags = getattr(node.target, "tags", ())
    return torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags
