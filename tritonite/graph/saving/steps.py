"""Plans as JSON: launches with the names or binaries of kernels, and calls with the names of operators."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload

from tritonite.errors import UnsavableGraph
from tritonite.graph.fused_call import fused_call
from tritonite.graph.operators import KNOWN, Scoped, Served, function_of
from tritonite.graph.plan import CallStep, GraphPlan
from tritonite.graph.program import pointwise_program
from tritonite.graph.saving.values import PYTHON, Hole, decoded, encoded
from tritonite.runtime.interpreted import InterpretedCall, InterpretedLaunch, Remade
from tritonite.runtime.nested import retyped
from tritonite.runtime.plan import LaunchStep

# Fields of a launch that belong to one process: the driver's handle and its owner.
_OWN = ("function", "owner")
# Modules that register operators outside ATen, by namespace.
_LIBRARIES = {"tritonite": "tritonite.fused", "tritonite_optim": "tritonite.optim"}
_PYTHON_NAMES = {function: name for name, function in PYTHON.items()}


def plan_as_json(plan: GraphPlan) -> dict[str, Any]:
    """Return a plan as JSON. Raises UnsavableGraph for a step that has no name."""
    fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan) if field.name != "steps"}
    return {
        "steps": [_step_as_json(step) for step in plan.steps],
        **{name: encoded(value) for name, value in fields.items()},
    }


def plan_of(described: dict[str, Any], owner_of: Callable[[str], Any]) -> GraphPlan:
    """Return the plan of `plan_as_json`. `owner_of` loads a kernel by Triton's hash; the owner has its handle."""
    fields = {name: decoded(value) for name, value in described.items() if name != "steps"}
    fields["unshared"] = set(fields["unshared"])
    return GraphPlan(**fields, steps=[_step_of(step, owner_of) for step in described["steps"]])


def hashes(plan: GraphPlan) -> set[str]:
    """Return Triton's hashes of the kernels that a plan launches on a GPU."""
    return {step.owner.hash for step in plan.steps if isinstance(step, LaunchStep) and step.function is not None}


def calls_by_key(plan: GraphPlan) -> bool:
    """Return whether a step calls an operator that launches kernels of its own choice."""
    return any(isinstance(step, CallStep) and isinstance(step.function, (Served, Scoped)) for step in plan.steps)


def devices_of(plan: GraphPlan) -> set[torch.device]:
    """Return the devices of a plan's buffers and of its calls' arguments."""
    found = {plan.device} | {buffer.device for buffer in plan.buffers if buffer is not None}
    for step in plan.steps:
        if isinstance(step, CallStep):
            found |= set(_devices_in([step.args, step.kwargs]))
    return found


def _devices_in(value: Any) -> Iterator[torch.device]:
    if isinstance(value, torch.device):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _devices_in(item)
    elif isinstance(value, dict):
        yield from _devices_in(list(value.values()))


def _step_as_json(step: Any) -> Any:
    if isinstance(step, LaunchStep):
        fields = {name: encoded(value) for name, value in step._asdict().items() if name not in _OWN}
        return {"launch": fields, "kernel": _kernel_as_json(step)}
    if isinstance(step, CallStep):
        fields = {name: encoded(value) for name, value in step._asdict().items() if name != "function"}
        return {"call": fields, "function": _function_as_json(step.function)}
    return encoded(step)


def _step_of(described: Any, owner_of: Callable[[str], Any]) -> Any:
    if "launch" in described:
        fields = {name: decoded(value) for name, value in described["launch"].items()}
        kernel = described["kernel"]
        if "hash" in kernel:
            owner = owner_of(kernel["hash"])
            return LaunchStep(**fields, function=owner.function, owner=owner)
        return LaunchStep(**fields, owner=_interpreted(kernel))
    if "call" in described:
        fields = {name: decoded(value) for name, value in described["call"].items()}
        return CallStep(function=_function(described["function"]), **fields)
    return decoded(described)


def _kernel_as_json(step: LaunchStep) -> dict[str, Any]:
    """Return the hash of a binary, or in the interpreter a kernel's name and its arguments."""
    if step.function is not None:
        return {"hash": step.owner.hash}
    launch: InterpretedLaunch = step.owner
    leaves = list(launch.template)
    for place, (i, remade) in enumerate(launch.holes.items()):
        leaves[i] = Hole(place, None if remade is None else remade.fields)
    arguments = launch.call.arguments(leaves)
    return {
        "name": encoded(launch.call.kernel),
        "arguments": {name: encoded(value) for name, value in arguments.items()},
    }


def _interpreted(kernel: dict[str, Any]) -> InterpretedLaunch:
    arguments = {name: decoded(value) for name, value in kernel["arguments"].items()}
    values = tuple(arguments.values())
    # Constants are in `values`, so all leaves are holes, in order.
    holes = {hole.place: None if hole.descriptor is None else Remade(hole.descriptor) for hole in _holes(values)}
    kinds = tuple([_kind(value) for value in values])
    call = InterpretedCall(decoded(kernel["name"]), tuple(arguments), kinds, values)
    return InterpretedLaunch([None] * len(holes), holes, call)


def _holes(value: Any) -> Iterator[Hole]:
    if isinstance(value, Hole):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _holes(item)


def _kind(value: Any) -> Any:
    if isinstance(value, Hole):
        return "*"
    return retyped(value, [_kind(item) for item in value]) if isinstance(value, tuple) else "constexpr"


def _function_as_json(function: Any) -> dict[str, Any]:
    if isinstance(function, Served):
        return {"served": function.target.name()}
    if isinstance(function, Scoped) and isinstance(function.target, OpOverload):
        return {"scoped": function.target.name(), "selected": sorted(function._selected)}
    if isinstance(function, OpOverload):
        return {"aten": function.name()}
    if name := _PYTHON_NAMES.get(function) if callable(function) and function.__hash__ else None:
        return {"python": name}
    target = getattr(function, "target", function)
    name = getattr(function, "name", None) or getattr(target, "__name__", None) or str(target)
    raise UnsavableGraph(name=str(name), reason="saved are calls of operators by their names, and functions over sizes")


def _function(described: dict[str, Any]) -> Callable[..., Any]:
    ((kind, name),) = [item for item in described.items() if item[0] != "selected"]
    if kind == "python":
        return PYTHON[name]
    overload = _overload(name)
    if kind == "served":
        return function_of(overload, frozenset({name.removeprefix("aten::")}))
    if kind == "scoped":
        return Scoped(overload, frozenset(described["selected"]))
    return overload


def _overload(qualified: str) -> OpOverload:
    """Return an operator by the name of its schema, such as "aten::add.Tensor"."""
    namespace, _, rest = qualified.partition("::")
    packet, _, overload = rest.partition(".")
    if namespace in _LIBRARIES:
        # The import registers the operators, and so do these functions.
        importlib.import_module(_LIBRARIES[namespace])
        pointwise_program()
        fused_call()
    try:
        found: OpOverload = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    except AttributeError:
        hint = "" if namespace in KNOWN else "; import the library that defines it first"
        raise ValueError(f"there is no operator {qualified}{hint}") from None
    return found
