"""The interpreter of a graph: calls one after another, for graphs and calls that have no plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tritonite.graph.fused import Fused
from tritonite.graph.lowered import Call, Lowered, filled


def interpret(lowered: Lowered, inputs: list[Any], overloads: bool = False) -> list[Any]:
    """Run the calls of a graph, and return the list of its outputs. Takes the inputs out of the list.

    With `overloads`, every call goes through PyTorch's dispatcher, for tensors that kernels cannot read directly, and
    nothing is fused.
    """

    def run(call: Call, args: Any, kwargs: Any) -> Any:
        return (_overload(call) if overloads else call.function)(*args, **kwargs)

    return run_calls(lowered, inputs, run)


def run_calls(lowered: Lowered, inputs: list[Any], run: Callable[[Call, Any, Any], Any]) -> list[Any]:
    """Return a graph's outputs, where `run` gives the result of a call from its arguments. Empties `inputs`."""
    values = started(lowered, inputs)
    for call in lowered.calls:
        args, kwargs = arguments(call, values)
        values[call.result] = run(call, args, kwargs)
        del args, kwargs
        for index in call.last:
            values[index] = None
    return [filled(output, values) for output in lowered.outputs]


def _overload(call: Call) -> Any:
    """Return a call's function without kernels, the separate operators for a fused part."""
    return call.target.separate if isinstance(call.target, Fused) else call.target


def started(lowered: Lowered, inputs: list[Any]) -> list[Any]:
    """Return the graph's values before the first call: inputs, constants, and None for results."""
    values = [*inputs, *[None] * (lowered.values - len(inputs))]
    inputs.clear()
    for index, constant in lowered.constants.items():
        values[index] = constant
    return values


def arguments(call: Call, values: list[Any]) -> tuple[Any, Any]:
    """Return the positional and keyword arguments of a call."""
    return [filled(item, values) for item in call.args], {
        name: filled(item, values) for name, item in call.kwargs.items()
    }
