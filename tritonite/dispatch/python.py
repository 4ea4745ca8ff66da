"""Calls through Python: the whole path where there is no native dispatcher, and what that asks when it has no plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tritonite import devices, launch, stats
from tritonite.catalog import Op
from tritonite.dispatch.plan import record
from tritonite.errors import Decline


def override(op: Op, kernel: Any) -> Callable[..., Any]:
    """The kernel to register for an operator: its host function, and `kernel`, ATen's, where that declines."""
    keyset = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, devices.current.dispatch_key))
    counts = stats.counts_of(op.overload)
    count_launch, count_decline = counts.count_launch, counts.count_decline
    interpreted = devices.current.interpreted
    tensor_arguments = [i for i, takes in enumerate(op.takes_tensors) if takes]
    inside_kernel = launch.inside_kernel

    def aten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for i in tensor_arguments:
            # The dispatcher hands numbers in tensor arguments to Python as numbers, and wants tensors back.
            if i < len(args) and type(args[i]) in (bool, int, float, complex):
                args = (*args[:i], _number_tensor(args[i], args), *args[i + 1 :])
        return kernel.call_boxed(keyset, *args, **kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        if interpreted and inside_kernel():
            return aten(args, kwargs)
        try:
            result = op(*args, **kwargs)
        except Decline as decline:
            count_decline(decline.reason)
            return aten(args, kwargs)
        count_launch()
        return result

    return call


def _number_tensor(number: Any, args: tuple[Any, ...]) -> torch.Tensor:
    """A 0-d tensor that promotes with the other arguments as the bare number does."""
    others = [value for value in args if isinstance(value, torch.Tensor)]
    # Among numbers alone it has the default dtype.
    tensor = torch.tensor(number, dtype=torch.float64 if others and type(number) is float else None)
    for other in others:
        as_number = torch.result_type(other, number)
        if as_number != torch.result_type(other, tensor):
            tensor = tensor.to(as_number)
    return tensor


def recording(op: Op) -> Callable[[list[Any]], tuple[Any, ...]]:
    """What the native dispatcher calls with all of an operator's arguments when it has no plan for them.

    Returns ("ran", results, plan or None) or ("declined", reason, whether for all calls of this key).
    """
    arguments = op.schema.arguments
    keywords = [i for i, argument in enumerate(arguments) if argument.kwarg_only]
    positional = len(arguments) - len(keywords)
    counts = stats.counts_of(op.overload)
    slots, watch = op.slots, op.declaration.hosted

    def call(values: list[Any]) -> tuple[Any, ...]:
        leaves: list[torch.Tensor | None] = []
        for takes, value in zip(op.takes_tensors, values, strict=True):
            if takes:
                for item in value if isinstance(value, (list, tuple)) else (value,):
                    leaves.append(item if isinstance(item, torch.Tensor) else None)
        args, kwargs = tuple(values[:positional]), {arguments[i].name: values[i] for i in keywords}
        try:
            results, plan, reason = record(lambda: tuple(op.results(args, kwargs)), leaves, slots, watch)
        except Decline as decline:
            return "declined", decline.reason, decline.lasting
        counts.count_launch()
        if reason:
            counts.count_unrecordable(reason)
        return "ran", results, plan

    return call
