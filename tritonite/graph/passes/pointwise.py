"""Fusion of pointwise operators: connected ones of one shape become one call of `tritonite::pointwise_program`.

Every operator that is declared by a formula can be part of a region, and so can conversions of dtype. A region's
results have the bits of its operators called one by one (`engine/pointwise/program.py`), so the pass is exact. It reads
shapes and dtypes from the fake tensors in `node.meta["val"]`; sizes may be symbolic, and no guard is added.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from tritonite import devices, registry
from tritonite.dtypes import TRITON_DTYPES
from tritonite.engine.pointwise.program import Slot, Step
from tritonite.engine.pointwise.promotion import ConstantKind, Kind, TensorKind, types_of
from tritonite.errors import Decline
from tritonite.graph.effects import writes
from tritonite.graph.fused import insert, may_fuse
from tritonite.graph.passes.regions import Regions, replace
from tritonite.graph.program import NAME, pointwise_program
from tritonite.registry.programs import Formula, as_text, conversion_of, formula_of
from tritonite.runtime.symbols import Symbol, number_type

# Formulas of a region, and tensors that it reads or writes. More would take registers that loads in flight need.
_MOST_STEPS, _MOST_TENSORS = 64, 24
# The distance in the graph of two operators that share an input and become one program. A larger one would keep the
# results of the first in memory for long.
_MOST_APART = 32
# Formulas of a smaller shape that are computed again for each element that they broadcast to.
_MOST_REPEATED = 4
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)
_STAND_INS: dict[type, Any] = {torch.SymBool: True, torch.SymInt: 1, torch.SymFloat: 1.0}


@dataclass(frozen=True)
class PointwiseCall:
    """A node's formula, with a node or a number of the graph in the place of each value, or a `ConstantKind`."""

    formula: Formula
    arguments: tuple[Any, ...]


def fuse_pointwise(module: fx.GraphModule, selected: frozenset[str] | None = None) -> None:
    """Replace regions of pointwise operators by programs, if the operators are in `selected`."""
    among = [node for node in module.graph.nodes if may_fuse([node], selected)]
    calls = {node: call for node in among if (call := call_of(node)) is not None}
    if len(calls) < 2:
        return
    _repeat_conversions(module.graph, calls)
    regions = Regions(module.graph)
    edges = [
        (source, node) for node in regions.nodes if node in calls for source in node.all_input_nodes if source in calls
    ]
    # A conversion to a wider dtype joins what reads it before it joins what it reads, so that the narrow tensor is
    # stored if they stay apart.
    for source, node in sorted(edges, key=lambda edge: widens(edge[1], calls)):
        if _may_join(regions, source, node):
            regions.merge(source, node)
    for a, b in _siblings(regions, calls):
        if _may_join(regions, a, b):
            regions.merge(a, b)
    made: dict[fx.Node, fx.Node] = {}

    def make(region: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
        results = _program(module.graph, calls, region, made)
        made.update(results)
        return results

    replace(module.graph, regions, make)
    module.recompile()


def _siblings(regions: Regions, calls: dict[fx.Node, PointwiseCall]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield pairs of operators that read one tensor of their own shape, which one program would read once."""
    for source in regions.nodes:
        if not isinstance(source.meta.get("val"), torch.Tensor):
            continue
        shape = source.meta["val"].shape
        readers = [user for user in source.users if user in calls and same_shape(user.meta["val"].shape, shape)]
        readers.sort(key=regions.index.__getitem__)
        for a, b in itertools.pairwise(readers):
            if regions.index[b] - regions.index[a] <= _MOST_APART:
                yield a, b


def _repeat_conversions(graph: fx.Graph, calls: dict[fx.Node, PointwiseCall]) -> None:
    """Give each program that reads a tensor converted to a wider dtype a conversion of its own.

    Reading the narrow tensor again takes less memory traffic than the converted one. A converted tensor that may be
    written before it is read is left as it is.
    """
    epochs = epochs_of(graph)
    for node in list(calls):
        if not widens(node, calls):
            continue
        users = [user for user in node.users if user in calls and epochs[user] == epochs[node]]
        for user in users[len(users) == len(node.users) :]:
            with graph.inserting_after(node):
                own = graph.node_copy(node)
            user.replace_input_with(node, own)
            calls[own] = calls[node]
            calls[user] = PointwiseCall(
                calls[user].formula, tuple([own if given is node else given for given in calls[user].arguments])
            )


def epochs_of(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return the number of nodes before each that write memory."""
    found: dict[fx.Node, int] = {}
    count = 0
    for node in graph.nodes:
        found[node] = count
        count += writes(node)
    return found


def widens(node: fx.Node, calls: dict[fx.Node, PointwiseCall]) -> bool:
    """Return whether a node converts a tensor to a wider dtype."""
    (source, *_) = calls[node].arguments
    return (
        calls[node].formula.to is not None
        and isinstance(source, fx.Node)
        and source.meta["val"].dtype.itemsize < node.meta["val"].dtype.itemsize
    )


def call_of(node: fx.Node) -> PointwiseCall | None:
    """Return the formula of a node, or None for a node that no program computes."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or not _is_plain(value):
        return None
    if any("val" not in each.meta for each in node.all_input_nodes):
        return None
    inputs = [each for each in node.all_input_nodes if isinstance(each.meta["val"], torch.Tensor)]
    if not inputs or any(not _is_plain(each.meta["val"]) or each.meta["val"].device != value.device for each in inputs):
        return None
    try:
        return _typed_call(node, value)
    except Decline:
        return None


def _is_plain(value: Any) -> bool:
    """Return whether a value is a strided tensor of the device with a dtype that kernels compute."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and value.device.type == devices.current.type
        and value.dtype in TRITON_DTYPES
        and value.dim() < 60
    )


def _typed_call(node: fx.Node, result: torch.Tensor) -> PointwiseCall:
    """Return the formula of a node. Raises Decline for a node without one, or of other dtypes than the formula's."""
    origin: dict[int, fx.Node] = {}

    def example(each: fx.Node) -> Any:
        value = each.meta["val"]
        if type(value) in _STAND_INS:
            value = Symbol(_STAND_INS[type(value)])
        origin[id(value)] = each
        return value

    args, kwargs = fx.map_arg(node.args, example), fx.map_arg(node.kwargs, example)
    formula = _formula(node, args, kwargs)
    arguments: list[Any] = []
    kinds: list[Kind] = []
    for value, role in zip(formula.values, formula.kernel.parameters.values(), strict=True):
        if isinstance(value, (torch.Tensor, Symbol)):
            if id(value) not in origin or (isinstance(value, Symbol) and role == "static"):
                raise Decline("a tensor that is made before the kernel is launched, or a size as a constant")
            arguments.append(origin[id(value)])
            own = value
            kinds.append(
                TensorKind(own.dtype, not own.dim(), False) if isinstance(own, torch.Tensor) else number_type(own)
            )
        elif role == "static" or type(value) not in (bool, int, float):
            kinds.append(ConstantKind(type(value), value))
            arguments.append(kinds[-1])
        else:
            kinds.append(type(value))
            arguments.append(value)
    to = () if formula.to is None else (formula.to,)
    typed = types_of(formula.kernel, tuple(kinds), to, torch.get_default_dtype())
    if typed.results != (result.dtype,):
        raise Decline(f"a result of {result.dtype}, which is {typed.results} by the formula")
    for i, limits in typed.limits:
        if isinstance(arguments[i], fx.Node) or not limits.hold(arguments[i]):
            raise Decline("a number that may be out of range")
    return PointwiseCall(formula, tuple(arguments))


def _formula(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Formula:
    """Return the formula that computes a node from these arguments. Raises Decline for a node without one."""
    target, value = node.target, node.meta["val"]
    assert isinstance(target, OpOverload)
    if target is torch.ops.prims.convert_element_type.default or target in _COPIES:
        source = args[0]
        if kwargs.get("memory_format") not in (None, torch.preserve_format) or kwargs.get("pin_memory"):
            raise Decline("a copy in a given layout")
        return conversion_of(source, value.dtype)
    op = registry.overloads().get(target.name().removeprefix("aten::"))
    if op is None:
        raise Decline("no kernel")
    try:
        return formula_of(op, args, kwargs)
    except Decline:
        raise
    except Exception as error:  # noqa: BLE001 - a check that reads data, or that a fake tensor does not support
        raise Decline(f"{error!r}") from None


def _may_join(regions: Regions, source: fx.Node, node: fx.Node) -> bool:
    """Return whether the regions of a node and of one of its inputs may become one, apart from cycles."""
    producers, consumers = regions.region(source), regions.region(node)
    if source in consumers:
        return False
    shape = _shape_of(consumers)
    both = {*producers, *consumers}
    if not same_shape(_shape_of(producers), shape):
        inside = all(user in both for own in producers for user in own.users)
        repeated = len(producers) <= _MOST_REPEATED and all(broadcasts(own, shape) for own in producers)
        if not inside or not repeated:
            return False
    if len(both) > _MOST_STEPS:
        return False
    read = {each for own in both for each in own.all_input_nodes if each not in both}
    written = [own for own in both if any(user not in both for user in own.users)]
    return len(read) + len(written) <= _MOST_TENSORS


def _shape_of(region: Sequence[fx.Node]) -> Sequence[Any]:
    """Return the shape of a region's results, which is the last node's."""
    shape: Sequence[Any] = region[-1].meta["val"].shape
    return shape


def same_shape(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Return whether two shapes are equal for all values of their symbols."""
    return len(a) == len(b) and all(_same_size(x, y) for x, y in zip(a, b, strict=True))


def _same_size(a: Any, b: Any) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    if isinstance(a, int) or isinstance(b, int):
        return False
    return a.node.expr == b.node.expr


def broadcasts(node: fx.Node, shape: Sequence[Any]) -> bool:
    """Return whether a node's result broadcasts to a shape, for all values of their symbols."""
    own = node.meta["val"].shape
    lead = len(shape) - len(own)
    return lead >= 0 and all(
        (isinstance(x, int) and x == 1) or _same_size(x, y) for x, y in zip(own, shape[lead:], strict=True)
    )


def _program(
    graph: fx.Graph, calls: dict[fx.Node, PointwiseCall], region: Sequence[fx.Node], made: dict[fx.Node, fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Insert the program of a region, and return the node of each result. `made` has those of earlier regions."""
    members = set(region)
    stored = [node for node in region if any(user not in members for user in node.users)]
    tensors, numbers, text = program_of(calls, region, stored)
    call = graph.call_function(pointwise_program(), ([made.get(node, node) for node in tensors], numbers, text))
    items = [graph.call_function(operator.getitem, (call, i)) for i in range(len(stored))]
    return insert(graph, NAME.partition("::")[2], dict(zip(stored, items, strict=True)), [call, *items], region)


def program_of(
    calls: dict[fx.Node, PointwiseCall],
    region: Sequence[fx.Node],
    stored: Sequence[fx.Node],
    leading: Sequence[fx.Node] = (),
) -> tuple[list[fx.Node], list[Any], str]:
    """Return the tensors that a region reads, the `leading` ones first, its numbers, and its program as text.

    The program stores the results of the nodes `stored`.
    """
    members = set(region)
    tensors: dict[fx.Node, int] = {node: i for i, node in enumerate(leading)}
    numbers: list[Any] = []
    for node in region:
        for given in calls[node].arguments:
            if is_number(given):
                numbers.append(given)
            elif isinstance(given, fx.Node) and given not in members:
                tensors.setdefault(given, len(tensors))
    slots = dict(tensors)
    first = len(tensors) + len(numbers)
    following_number = len(tensors)
    steps = []
    for i, node in enumerate(region):
        arguments: list[Any] = []
        for given in calls[node].arguments:
            if is_number(given):
                arguments.append(Slot(following_number))
                following_number += 1
            else:
                arguments.append(Slot(slots[given]) if isinstance(given, fx.Node) else given)
        to = calls[node].formula.to
        steps.append(Step(calls[node].formula.kernel, tuple(arguments), () if to is None else (to,)))
        slots[node] = first + i
    text = as_text(len(tensors), len(numbers), steps, [slots[node] for node in stored])
    return list(tensors), numbers, text


def is_number(given: Any) -> bool:
    """Return whether an argument is a number, or a node whose value is one."""
    if isinstance(given, fx.Node):
        return not isinstance(given.meta["val"], torch.Tensor)
    return type(given) in (bool, int, float)
