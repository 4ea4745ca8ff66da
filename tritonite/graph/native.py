"""A graph's plan as the native dispatcher takes it, and the key of a graph's inputs."""

from __future__ import annotations

from collections.abc import Hashable
from types import SimpleNamespace
from typing import Any

import torch
from torch._ops import OpOverload

from tritonite.graph.operators import Served
from tritonite.graph.plan import CallStep, GraphBuffer, GraphPlan
from tritonite.install.override import native_dispatcher
from tritonite.registry.schema import in_schema_order
from tritonite.runtime.plan import Buffer


def compiled(plan: GraphPlan, inputs: int) -> Any:
    """Return a plan for `inputs` inputs and constants as an object of the native dispatcher, or None without one."""
    dispatcher = native_dispatcher()
    if dispatcher is None:
        return None
    described = SimpleNamespace(
        device=plan.device,
        numbers=plan.numbers,
        buffers=[None if each is None else Buffer(_like(each)) for each in plan.buffers],
        steps=[_call(step) if isinstance(step, CallStep) else step for step in plan.steps],
        results=[result[1] if result[0] == "value" else result for result in plan.results],
        written=[i in plan.written for i in range(inputs)],
    )
    return dispatcher.Graph(described)


def key(inputs: list[Any]) -> Hashable:
    """Return all facts about a graph's inputs that its plan depends on, or None without the native dispatcher."""
    dispatcher = native_dispatcher()
    found: Hashable = None if dispatcher is None else dispatcher.graph_key(inputs)
    return found


def _like(buffer: GraphBuffer) -> torch.Tensor:
    """Return a tensor of a buffer's dtype and layout. The dispatcher reads its layout and its allocator only."""
    return torch.empty_strided(buffer.sizes, buffer.strides, dtype=buffer.dtype, device=buffer.device)


def _call(step: CallStep) -> tuple[Any, ...]:
    """Return a call as the dispatcher takes it: by PyTorch's dispatcher where that suffices, else by Python."""
    function = step.function
    if step.numbers:
        return "python", function, step.args, step.kwargs, step.results
    if isinstance(function, Served):
        values = in_schema_order(function.op.schema, step.args, step.kwargs)
        return "boxed", function.op.overload, True, values, step.results
    if isinstance(function, OpOverload):
        values = in_schema_order(function._schema, step.args, step.kwargs)
        return "boxed", function.name().removeprefix("aten::"), False, values, step.results
    return "python", function, step.args, step.kwargs, step.results
