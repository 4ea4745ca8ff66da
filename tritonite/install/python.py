"""Calls through Python: the whole path where there is no native dispatcher, and what that asks when it has no plan."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast as _ProfiledRange
from torch.autograd import profiler

from tritonite import devices
from tritonite.errors import Decline, Unsupported
from tritonite.registry import Op
from tritonite.runtime import contract, stats
from tritonite.runtime.contract import Settings, is_capturing, under
from tritonite.runtime.opaque import opaque
from tritonite.runtime.recorder import record
from tritonite.runtime.symbols import Number

_NUMBERS = (bool, int, float)
_FIRST_IN_CAPTURE = "a first call that writes into its arguments while a CUDA graph is captured"


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
    inside_kernel, name, in_force = contract.inside_kernel, op.overload, _InForce
    # In a profile a range of our own within that of ATen's operator.
    label = f"tritonite::{name}"

    def aten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for i in tensor_arguments:
            # The dispatcher hands numbers in tensor arguments to Python as numbers, and wants tensors back.
            if i < len(args) and type(args[i]) in (bool, int, float, complex):
                args = (*args[:i], _number_tensor(args[i], args), *args[i + 1 :])
        return kernel.call_boxed(keyset, *args, **kwargs)

    @opaque
    def call(*args: Any, **kwargs: Any) -> Any:
        if kernel is not None and (name not in in_force.names or (interpreted and inside_kernel())):
            return aten(args, kwargs)
        try:
            if kernel is not None and profiler._is_profiler_enabled:
                with _ProfiledRange(label):
                    result = op(*args, **kwargs)
            else:
                result = op(*args, **kwargs)
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
        if other.dtype.itemsize == 1 and other.is_floating_point():
            # Beside a tensor with dimensions any number is of its dtype. With another 0-d tensor it does not promote.
            tensor = tensor if other.dim() or type(number) is complex else tensor.to(other.dtype)
            continue
        # The wider unsigned integers promote with few dtypes: an operator that needs to says so itself.
        with contextlib.suppress(RuntimeError):
            as_number = torch.result_type(other, number)
            if as_number != torch.result_type(other, tensor):
                tensor = tensor.to(as_number)
    return tensor


def recording(op: Op) -> Callable[[list[Any], int], tuple[Any, ...]]:
    """What the native dispatcher calls when it has no plan, with all of an operator's arguments and a word of settings.

    Returns ("ran", results, plan or None) or ("declined", reason, whether for all calls of this key). Where an operator
    outside ATen declines, it raises Unsupported.
    """
    counts = stats.counts_of(op.overload)

    # A part of such a call may be captured before a kernel is met that is not compiled, and ATen would do that again.
    writes = op.writes and op.declaration.library is None

    @opaque
    def call(values: list[Any], settings: int) -> tuple[Any, ...]:
        if writes and is_capturing():
            counts.log(_FIRST_IN_CAPTURE)
            return "declined", _FIRST_IN_CAPTURE, False
        try:
            # Those of the key: another thread may have put others in force since.
            with under(Settings.of_bits(settings)):
                results, recorder = record(*recordable(op, values), watch=op.declaration.watched)
        except Decline as decline:
            if op.declaration.library is not None:
                counts.count_decline(decline.reason)
                raise Unsupported(name=op.overload, reason=decline.reason) from None
            counts.log(decline.reason)
            return "declined", decline.reason, decline.lasting
        plan = recorder.plan(results)
        counts.count_launch()
        if recorder.reason:
            counts.count_unrecordable(recorder.reason)
        return "ran", op.plain(results), plan

    return call


def recordable(
    op: Op, values: Sequence[Any]
) -> tuple[Callable[[], Sequence[Any]], list[torch.Tensor | None], dict[int, tuple[int, int]]]:
    """What `plan.record` takes of a call with all of an operator's arguments: what runs it, leaves, and numbers."""
    leaves: list[torch.Tensor | None] = []
    numbers: dict[int, tuple[int, int]] = {}
    given = list(values)

    def take(value: Any, takes: bool, slot: int, place: tuple[int, int]) -> Any:
        if isinstance(value, torch.Tensor):
            if slot and not value.dim() and value.device.type == "cpu":
                numbers[len(leaves)] = place
            leaves.append(value)
            return value
        if takes:
            leaves.append(None)
        return Number(value, *place, keyed=slot == 2) if slot and type(value) in _NUMBERS else value

    for i, (takes, slot) in enumerate(zip(op.takes_tensors, op.slots, strict=True)):
        if takes or slot:
            value = values[i]
            if isinstance(value, (list, tuple)):
                given[i] = [take(item, takes, slot, (i, j)) for j, item in enumerate(value)]
            else:
                given[i] = take(value, takes, slot, (i, -1))
    args = tuple(given[: op.positional])
    kwargs = dict(zip(op.keywords, given[op.positional :], strict=True))
    return lambda: op.results(args, kwargs), leaves, numbers
