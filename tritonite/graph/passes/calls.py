"""Fusion of pointwise operators into the call whose operand they make, or whose result they read.

A reduction or a row operator, such as a softmax or a norm, computes the pointwise operators that make its input alone
(the prologue). A reduction, a row operator, a product or a convolution computes those that alone read its result (the
epilogue). Each becomes a program within the kernel, so that the value between the two is never in memory. That value
is rounded as in memory. Sums of a reduction may be added in another order, because blocks depend on all operands.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from tritonite import registry
from tritonite.errors import Decline
from tritonite.graph.fused import insert, may_fuse
from tritonite.graph.fused_call import NAME, Placed, call_text, fused_call
from tritonite.graph.passes.pointwise import (
    PointwiseCall,
    broadcasts,
    call_of,
    epochs_of,
    fuse_pointwise,
    is_number,
    program_of,
    same_shape,
    widens,
)
from tritonite.graph.passes.regions import Regions, replace

# Operators whose first argument a prologue may make, since their host functions read it by `Reduction` and
# `RowTransform`. A call that reads it otherwise declines (`engine/fusing.py`).
_REDUCTIONS = frozenset(
    ("sum", "mean", "amax", "amin", "argmax", "argmin", "prod", "nansum", "any", "all", "linalg_vector_norm")
    + ("logsumexp", "var", "std", "var_mean", "std_mean", "count_nonzero", "aminmax")
)
# Operators whose first argument no prologue makes: tiles would compute it again, and descriptors could not load it.
_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "_addmm_activation", "_int_mm", "convolution"))
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
_ROW_OPERATORS = frozenset(("_softmax", "_log_softmax", "_safe_softmax", "native_layer_norm", "_fused_rms_norm"))
# Formulas of a program within a kernel, and tensors that it reads or writes. Some are read twice for one result.
_MOST_STEPS, _MOST_TENSORS = 24, 6
# Formulas of a smaller shape that are computed again for each element that they broadcast to.
_MOST_REPEATED = 4


@dataclass
class _Kernel:
    """A call with the pointwise nodes before and after it.

    Attributes:
        node: the call.
        result: the node of its first result, which is the call, an item of it, or the view of a product.
        items: the nodes of the items of a call with several results, by their index.
        before, after: the nodes of the programs, in the graph's order.
    """

    node: fx.Node
    result: fx.Node | None
    items: dict[int, fx.Node]
    before: list[fx.Node] = field(default_factory=list)
    after: list[fx.Node] = field(default_factory=list)


def fuse_calls(module: fx.GraphModule, selected: frozenset[str] | None = None) -> None:
    """Fuse pointwise operators into the calls beside them, if all of these operators are in `selected`."""
    graph = module.graph
    calls = {node: call for node in graph.nodes if may_fuse([node], selected) and (call := call_of(node)) is not None}
    kernels = [kernel for node in graph.nodes if may_fuse([node], selected) and (kernel := _kernel_of(node))]
    # What is between a product and a row operator joins the row operator, since fast kernels of products have no
    # programs.
    kernels.sort(key=lambda kernel: _packet(kernel.node) in _PRODUCTS)
    if not calls or not kernels:
        return
    _repeat_conversions(graph, calls, kernels)
    regions = Regions(graph)
    found: dict[fx.Node, _Kernel] = {}
    for kernel in kernels:
        for grow in (_grow_before, _grow_after):
            trial = regions.copy()
            for item in (*kernel.items.values(), kernel.result):
                if item is not None and item is not kernel.node:
                    trial.merge(item, kernel.node)
            if grow(trial, calls, kernel):
                regions = trial
                found[kernel.node] = kernel
    if not found:
        return
    owners = {each: kernel for kernel in found.values() for each in (kernel.node, *kernel.before, *kernel.after)}

    made: dict[fx.Node, fx.Node] = {}

    def make(region: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
        results = _fused(graph, calls, region, next(owners[node] for node in region if node in owners), made)
        made.update(results)
        return results

    replace(graph, regions, make)
    module.recompile()


def _kernel_of(node: fx.Node) -> _Kernel | None:
    """Return the kernel of a call that programs may be fused into, without them, else None."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or "val" not in node.meta:
        return None
    if node.target.namespace != "aten" or _packet(node) not in _REDUCTIONS | _ROW_OPERATORS | _PRODUCTS:
        return None
    if _name(node) not in registry.overloads() or not all(map(_is_tensor, node.all_input_nodes)):
        return None
    try:
        _call_text(node, lambda _: Placed(0))
    except Decline:
        return None
    if isinstance(node.meta["val"], torch.Tensor):
        (view, *others) = node.users or (None,)
        viewed = _packet(node) in _PRODUCTS and view is not None and view.target in _VIEWS and not others
        return _Kernel(node, view if viewed else node, {})
    items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    if len(items) < len(node.users):
        return None
    return _Kernel(node, items.get(0), items)


def _call_text(node: fx.Node, placed: Callable[[fx.Node], Placed]) -> str:
    """Return a node's call as text. Raises Decline for an argument that no text has."""
    value = node.meta["val"]
    results = [each.dtype for each in (value if isinstance(value, (tuple, list)) else (value,))]
    args, kwargs = fx.map_arg(node.args, placed), fx.map_arg(node.kwargs, placed)
    return call_text(_name(node), args, kwargs, results)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _name(node: fx.Node) -> str:
    return node.target.name().removeprefix("aten::")  # type: ignore[union-attr]


def _packet(node: fx.Node) -> str:
    return node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]


def _repeat_conversions(graph: fx.Graph, calls: dict[fx.Node, PointwiseCall], kernels: Sequence[_Kernel]) -> None:
    """Give a kernel or a pointwise operator that reads a tensor converted to a wider dtype a conversion of its own.

    A converted tensor that may be written before it is read is left as it is.
    """
    epochs = epochs_of(graph)
    reading = {kernel.node for kernel in kernels}
    for node in list(calls):
        if not widens(node, calls) or not any(_leads_to(user, reading, calls) for user in node.users):
            continue
        for user in [each for each in node.users if each in reading or each in calls]:
            if len(node.users) == 1 or epochs[user] != epochs[node]:
                continue
            with graph.inserting_after(node):
                own = graph.node_copy(node)
            user.replace_input_with(node, own)
            calls[own] = calls[node]
            if user in calls:
                arguments = tuple([own if given is node else given for given in calls[user].arguments])
                calls[user] = PointwiseCall(calls[user].formula, arguments)


def _leads_to(node: fx.Node, reading: set[fx.Node], calls: dict[fx.Node, PointwiseCall]) -> bool:
    """Return whether a kernel reads a node by a chain of pointwise operators, each with one user."""
    while node in calls and len(node.users) == 1:
        node = next(iter(node.users))
    return node in reading


def _grow_before(regions: Regions, calls: dict[fx.Node, PointwiseCall], kernel: _Kernel) -> bool:
    """Merge the pointwise operators that make a kernel's operand with it. Returns whether there are some."""
    source = kernel.node.args[0] if kernel.node.args else None
    if _packet(kernel.node) in _PRODUCTS:
        return False
    if not isinstance(source, fx.Node) or source not in calls or kernel.node.all_input_nodes.count(source) != 1:
        return False
    if sum(given is source for given in kernel.node.args) != 1 or list(source.users) != [kernel.node]:
        return False
    members = _producers(regions, calls, kernel.node, [source], source.meta["val"].shape)
    if not members or not _fits(members, calls, 1):
        return False
    # The first operand of a kernel varies along all dimensions.
    shape = source.meta["val"].shape
    read = [each for own in members for each in calls[own].arguments if isinstance(each, fx.Node)]
    if not any(each not in members and same_shape(each.meta["val"].shape, shape) for each in read):
        return False
    kernel.before = sorted(members, key=regions.index.__getitem__)
    return True


def _producers(
    regions: Regions,
    calls: dict[fx.Node, PointwiseCall],
    node: fx.Node,
    sources: Sequence[fx.Node],
    shape: Sequence[Any],
    inside: Sequence[fx.Node] = (),
) -> list[fx.Node]:
    """Merge with a node the sources, and the pointwise operators that only they and nodes `inside` read."""
    members: list[fx.Node] = []
    repeated = 0
    waiting = list(sources)
    while waiting:
        own = waiting.pop(0)
        if own in members or own not in calls or _has_symbols(calls[own]):
            continue
        known = {node, *members, *inside}
        smaller = not same_shape(own.meta["val"].shape, shape)
        if any(user not in known for user in own.users) or (smaller and not broadcasts(own, shape)):
            continue
        if len(members) + len(inside) == _MOST_STEPS or (smaller and repeated == _MOST_REPEATED):
            continue
        if len(regions.region(own)) > 1 or not regions.merge(own, node):
            continue
        repeated += smaller
        members.append(own)
        waiting += own.all_input_nodes
    return members


def _grow_after(regions: Regions, calls: dict[fx.Node, PointwiseCall], kernel: _Kernel) -> bool:
    """Merge the pointwise operators that read a kernel's result with it. Returns whether there are some.

    All of the result's readers have to be among them.
    """
    result = kernel.result
    if result is None:
        return False
    most_stored = 1 if _packet(kernel.node) in _PRODUCTS else 2
    shape = result.meta["val"].shape
    if not result.users or any(not _follows(user, calls, shape) for user in result.users):
        return False
    members: list[fx.Node] = []
    waiting = list(result.users)
    while waiting:
        own = waiting.pop(0)
        if own in members or not _follows(own, calls, shape) or len(members) == _MOST_STEPS:
            continue
        trial = [*members, own]
        if members and not _fits(trial, calls, most_stored):
            continue
        if len(regions.region(own)) > 1 or not regions.merge(own, kernel.node):
            continue
        members.append(own)
        waiting += own.users
    if any(user not in members for user in result.users):
        return False
    sources = [each for own in members for each in own.all_input_nodes if each not in members and each is not result]
    members += _producers(regions, calls, kernel.node, [each for each in sources if each in calls], shape, members)
    if not _fits(members, calls, most_stored):
        return False
    kernel.after = sorted(members, key=regions.index.__getitem__)
    return True


def _follows(node: fx.Node, calls: dict[fx.Node, PointwiseCall], shape: Sequence[Any]) -> bool:
    return node in calls and not _has_symbols(calls[node]) and same_shape(node.meta["val"].shape, shape)


def _has_symbols(call: PointwiseCall) -> bool:
    """Return whether a number of a call is symbolic. A kernel has numbers as constants."""
    return any(isinstance(given, fx.Node) and is_number(given) for given in call.arguments)


def _fits(members: Sequence[fx.Node], calls: dict[fx.Node, PointwiseCall], most_stored: int) -> bool:
    """Return whether a program reads and writes few tensors."""
    inside = set(members)
    read = {each for own in members for each in _tensors(calls[own]) if each not in inside}
    stored = [own for own in members if any(user not in inside for user in own.users)]
    return len(members) <= _MOST_STEPS and len(read) <= _MOST_TENSORS and len(stored) <= most_stored


def _tensors(call: PointwiseCall) -> Iterator[fx.Node]:
    return (given for given in call.arguments if isinstance(given, fx.Node) and not is_number(given))


def _fused(
    graph: fx.Graph,
    calls: dict[fx.Node, PointwiseCall],
    region: Sequence[fx.Node],
    kernel: _Kernel,
    made: dict[fx.Node, fx.Node],
) -> dict[fx.Node, fx.Node]:
    """Insert the fused call of a region, and return the node of each result. `made` has those of earlier regions."""
    before: tuple[list[fx.Node], list[Any], str] = [], [], ""
    after: tuple[list[fx.Node], list[Any], str] = [], [], ""
    if kernel.before:
        read, numbers, program = program_of(calls, kernel.before, kernel.before[-1:])
        before = [made.get(each, each) for each in read], numbers, program
    operands: list[fx.Node] = []

    def placed(value: fx.Node) -> Placed:
        if kernel.before and value is kernel.before[-1]:
            return Placed(-1)
        if value not in operands:
            operands.append(value)
        return Placed(operands.index(value))

    text = _call_text(kernel.node, placed)
    stored: list[fx.Node] = []
    if kernel.after:
        members = set(kernel.after)
        stored = [own for own in kernel.after if any(user not in members for user in own.users)]
        assert kernel.result is not None
        (_, *tensors), numbers, program = program_of(calls, kernel.after, stored, [kernel.result])
        after = [made.get(each, each) for each in tensors], numbers, program
    view = kernel.result.args[1] if kernel.result is not None and kernel.result.target in _VIEWS else []
    call = graph.call_function(fused_call(), (*before, operands, text, view, *after))
    results: dict[fx.Node, fx.Node] = {}
    first = 1
    if kernel.after:
        first = len(stored)
        results = {own: graph.call_function(operator.getitem, (call, i)) for i, own in enumerate(stored)}
    elif not kernel.items:
        results[kernel.node] = graph.call_function(operator.getitem, (call, 0))
    elif 0 in kernel.items:
        results[kernel.items[0]] = graph.call_function(operator.getitem, (call, 0))
    for i, item in kernel.items.items():
        if i:
            results[item] = graph.call_function(operator.getitem, (call, first + i - 1))
    found = insert(graph, NAME.partition("::")[2], results, [call, *results.values()], region)
    # A kernel may decline, and the separate operators are then a call and programs before and after it.
    for item in list(found.values())[:1]:
        fuse_pointwise(item.args[0].target.separate)  # type: ignore[union-attr]
    return found
