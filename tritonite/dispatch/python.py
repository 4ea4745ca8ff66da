"""Calls through Python: the whole path where there is no native dispatcher, and what that asks when it has no plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tritonite import devices, launch, stats
from tritonite.catalog import Op
from tritonite.dispatch.call import Number, value_of
from tritonite.dispatch.plan import record
from tritonite.errors import Decline, Unsupported


class _InForce:
    names: frozenset[str] = frozenset()


def put_in_force(names: frozenset[str]) -> None:
    """Whose host functions run from now on; other overloads that are registered go to ATen."""
    _InForce.names = names


def override(op: Op, kernel: Any) -> Callable[..., Any]:
    """The kernel to register for an operator: its host function, and `kernel`, ATen's, where that declines.

    Where there is no such kernel, as of operators outside ATen, a call that is declined raises Unsupported.
    """
    keyset = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, devices.current.dispatch_key))
    counts = stats.counts_of(op.overload)
    count_launch, count_decline = counts.count_launch, counts.count_decline
    interpreted = devices.current.interpreted
    tensor_arguments = [i for i, takes in enumerate(op.takes_tensors) if takes]
    inside_kernel, name, in_force = launch.inside_kernel, op.overload, _InForce

    def aten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for i in tensor_arguments:
            # The dispatcher hands numbers in tensor arguments to Python as numbers, and wants tensors back.
            if i < len(args) and type(args[i]) in (bool, int, float, complex):
                args = (*args[:i], _number_tensor(args[i], args), *args[i + 1 :])
        return kernel.call_boxed(keyset, *args, **kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        if kernel is not None and (name not in in_force.names or (interpreted and inside_kernel())):
            return aten(args, kwargs)
        try:
            result = plain(op(*args, **kwargs))
        except Decline as decline:
            count_decline(decline.reason)
            if kernel is None:
                raise Unsupported(name=op.overload, reason=decline.reason) from None
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
    counts = stats.counts_of(op.overload)

    def call(values: list[Any]) -> tuple[Any, ...]:
        try:
            results, recorder = record(*recordable(op, values))
        except Decline as decline:
            return "declined", decline.reason, decline.lasting
        plan = recorder.plan(results)
        counts.count_launch()
        if recorder.reason:
            counts.count_unrecordable(recorder.reason)
        return "ran", tuple(map(plain, results)), plan

    return call


def recordable(
    op: Op, values: Sequence[Any]
) -> tuple[Callable[[], Sequence[Any]], list[torch.Tensor | None], dict[int, tuple[int, int]]]:
    """What `plan.record` takes of a call with all of an operator's arguments: what runs it, leaves, and numbers."""
    arguments = op.schema.arguments
    leaves: list[torch.Tensor | None] = []
    numbers: dict[int, tuple[int, int]] = {}
    given = list(values)
    for i, (takes, slot) in enumerate(zip(op.takes_tensors, op.slots, strict=True)):
        several = isinstance(values[i], (list, tuple))
        items = list(values[i]) if several else [values[i]]
        for j, item in enumerate(items):
            place = (i, j if several else -1)
            if takes:
                if slot and isinstance(item, torch.Tensor) and not item.dim() and item.device.type == "cpu":
                    numbers[len(leaves)] = place
                leaves.append(item if isinstance(item, torch.Tensor) else None)
            if slot and type(item) in (bool, int, float):
                items[j] = Number(item, *place, keyed=slot == 2)
        given[i] = items if several else items[0]
    positional = len(arguments) - sum(argument.kwarg_only for argument in arguments)
    args = tuple(given[:positional])
    kwargs = {argument.name: value for argument, value in zip(arguments, given, strict=True) if argument.kwarg_only}
    return lambda: op.results(args, kwargs), leaves, numbers


def plain(result: Any) -> Any:
    """A result, or each of a list, as a number where it is one that data decided."""
    return [value_of(item) for item in result] if isinstance(result, list) else value_of(result)
