"""The plans of a compiled function as text, and the search for its graphs."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tritonite.graph.backend import graphs_behind
from tritonite.graph.compiled import CompiledGraph
from tritonite.graph.lowered import FusedCalls
from tritonite.graph.plan import GraphPlan, Note
from tritonite.graph.record import Recorded


def graphs_of(function: Any) -> list[CompiledGraph] | None:
    """Return the graphs of a compiled graph, of a recorded function, or of what torch.compile returned, else None."""
    if isinstance(function, CompiledGraph):
        return [function]
    if isinstance(function, Recorded):
        return function.graphs
    original = getattr(function, "_orig_mod", None) or getattr(function, "_torchdynamo_orig_callable", None)
    if original is None:
        return None
    found: list[CompiledGraph] = []
    # A module of torch's own is compiled by a wrapper, which all such modules share.
    wrapper = getattr(getattr(function, "forward", None), "_torchdynamo_orig_callable", None)
    for each in (*_functions(original), wrapper):
        _collect(each, found, set())
    return found


def described(graphs: list[CompiledGraph]) -> str:
    """Return a paragraph for each graph and for each of its plans."""
    if not graphs:
        return "no graph of this function has been compiled; call it once"
    return "\n\n".join("\n".join(_graph(i, graph)) for i, graph in enumerate(graphs, 1))


def _graph(number: int, graph: CompiledGraph) -> Iterator[str]:
    yield f"graph {number} ({graph.kind}): {len(graph.lowered.calls)} calls"
    yield f"ran        {graph.replayed} replayed, {graph.recorded} recorded, {graph.interpreted} interpreted"
    for reason in graph.reasons:
        yield f"no plan    {reason}"
    if graph.uncaptured:
        yield f"no capture {graph.uncaptured}"
    for call in graph.lowered.calls:
        if isinstance(call.function, FusedCalls):
            yield f"fused      {call.function.name}: {', '.join(call.function.replaced)}"
    for plan in graph.plans:
        yield from _plan(plan)


def _plan(plan: GraphPlan) -> Iterator[str]:
    views = sum(note.view for note in plan.notes)
    own = sum(buffer is not None for buffer in plan.buffers) - 1
    yield f"plan       {plan.launches} launches, {plan.calls} calls without a plan, {views} views"
    yield f"memory     arena of {plan.arena} bytes for {plan.unplanned} bytes of buffers; {own} buffers of their own"
    for note in plan.notes:
        yield f"  {note.name:<28} {note.operator:<36} {_how(note)}"


def _how(note: Note) -> str:
    if note.view:
        return "view"
    if note.separate:
        return f"not fused: {note.reason}"
    if note.reason:
        return f"ATen: {note.reason}" if note.aten else f"by its key: {note.reason}"
    return f"{note.launches} launch{'es' * (note.launches != 1)}"


def _functions(original: Any) -> Iterator[Callable[..., Any]]:
    """Yield the Python functions whose frames Dynamo compiles for a call of `original`."""
    if isinstance(original, torch.nn.Module):
        for module in original.modules():
            yield type(module).forward
    elif isinstance(original, types.MethodType):
        yield original.__func__
    elif isinstance(original, types.FunctionType):
        yield original


def _collect(function: Any, found: list[CompiledGraph], seen: set[Any]) -> None:
    """Add the graphs that Dynamo has compiled for a function's code, and for the code after its graph breaks."""
    code = getattr(function, "__code__", None)
    if code is None or code in seen:
        return
    seen.add(code)
    for entry in torch._dynamo.eval_frame._debug_get_cache_entry_list(code):
        for name in entry.code.co_names:
            value = function.__globals__.get(name)
            if name.startswith("__compiled_fn"):
                found += [graph for graph in graphs_behind(value) if graph not in found]
            elif name.startswith("__resume_at"):
                _collect(value, found, seen)
