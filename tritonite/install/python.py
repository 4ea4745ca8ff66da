"""Calls through Python: the path without the native dispatcher, and the function that dispatcher calls for a plan."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast as _ProfiledRange
from torch.autograd import profiler

from tritonite import devices
from tritonite.errors import Decline, Unsupported
from tritonite.install import direct
from tritonite.registry import Op
from tritonite.runtime import contract, stats
from tritonite.runtime.contract import Settings, is_capturing, under
from tritonite.runtime.hollow import DataUnknown
from tritonite.runtime.opaque import opaque
from tritonite.runtime.recorder import Recorder, record
from tritonite.runtime.symbols import Number, SlotKind

_NUMBERS = (bool, int, float)
_FIRST_IN_CAPTURE = "a first call that writes into its arguments while a CUDA graph is captured"


# Takes an operator and the arguments of a call that is about to be served. Returns a function of the results, which is
# called if a kernel serves the call, or None to leave the call alone.
Auditor = Callable[[Op, tuple[Any, ...], dict[str, Any]], Callable[[Any], None] | None]


class _InForce:
    names: frozenset[str] = frozenset()
    audit: Auditor | None = None


def put_in_force(names: frozenset[str]) -> None:
    """Set the overloads whose host functions run; other registered overloads go to ATen."""
    _InForce.names = names


def audit_by(auditor: Auditor | None) -> None:
    """Show every call that goes through Python to an auditor; None ends that."""
    _InForce.audit = auditor


def override(op: Op, kernel: Any, device: devices.Device) -> Callable[..., Any]:
    """Return the kernel to register for an operator: its host function, and ATen's `kernel` if that declines.

    `kernel` is None for operators outside ATen, whose declined calls raise Unsupported. `device` is the kind of device
    at whose dispatch key the kernel is registered.
    """
    keyset = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device.dispatch_key))
    counts = stats.counts_of(op.overload)
    count_launch, count_decline = counts.count_launch, counts.count_decline
    interpreted = device.interpreted
    tensor_arguments = [i for i, takes in enumerate(op.takes_tensors) if takes]
    inside_kernel, name, in_force = contract.inside_kernel, op.overload, _InForce
    # The range in a profile, within the range of ATen's operator.
    label = f"tritonite::{name}"

    def aten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for i in tensor_arguments:
            # The dispatcher unwraps numbers in tensor arguments for Python, and ATen's kernel needs tensors again.
            if i < len(args) and type(args[i]) in (bool, int, float, complex):
                args = (*args[:i], _number_tensor(args[i], args), *args[i + 1 :])
        return kernel.call_boxed(keyset, *args, **kwargs)

    @opaque
    def call(*args: Any, **kwargs: Any) -> Any:
        audit = in_force.audit
        # An audit's own calls go to ATen, as calls do inside an interpreted kernel.
        if kernel is not None and (
            name not in in_force.names or ((interpreted or audit is not None) and inside_kernel())
        ):
            return aten(args, kwargs)
        check = None if audit is None else audit(op, args, kwargs)
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
        if op.versioned:
            direct.increment_versions_of_lists(op, args, kwargs)
        if check is not None:
            check(result)
        return result

    if len(devices.present) == 1:
        return call

    @opaque
    def call_on_device(*args: Any, **kwargs: Any) -> Any:
        with devices.serving(device):
            return call(*args, **kwargs)

    return call_on_device


def _result_type(tensor: torch.Tensor, other: torch.Tensor) -> torch.dtype | None:
    """Return the dtype that two tensors promote to, or None if they do not."""
    try:
        return torch.result_type(tensor, other)
    except RuntimeError:
        return None


def _number_tensor(number: Any, args: tuple[Any, ...]) -> torch.Tensor:
    """Return a 0-d tensor that promotes with the other arguments as the bare number does."""
    others = [value for value in args if isinstance(value, torch.Tensor)]
    # Without other tensors the number has the default dtype.
    tensor = torch.tensor(number, dtype=torch.float64 if others and type(number) is float else None)
    for other in others:
        if other.dtype.itemsize == 1 and other.is_floating_point():
            # A float8 tensor with dimensions gives any number its dtype. A 0-d one promotes with no other dtype.
            tensor = tensor if other.dim() or type(number) is complex else tensor.to(other.dtype)
            continue
        # result_type raises for most dtypes with wide unsigned integers; the operator raises its own error.
        with contextlib.suppress(RuntimeError):
            as_number = torch.result_type(other, number)
            if as_number != _result_type(other, tensor):
                tensor = tensor.to(as_number)
    return tensor


def recording(op: Op) -> Callable[[list[Any], int], tuple[Any, ...]]:
    """Return the function that the native dispatcher calls for a key without a plan.

    The function takes all of the operator's arguments, and the bits of `Settings`. It returns ("ran", results, plan or
    None) or ("declined", reason, whether for all calls with this key). A declined call of an operator outside ATen
    raises Unsupported.
    """
    counts = stats.counts_of(op.overload)

    # During a capture, a launch may be captured before a kernel that is not compiled declines. ATen would repeat it.
    writes = op.writes and op.declaration.library is None

    @opaque
    def call(values: list[Any], settings: int) -> tuple[Any, ...]:
        if writes and is_capturing():
            counts.log(_FIRST_IN_CAPTURE)
            return "declined", _FIRST_IN_CAPTURE, False
        try:
            # The settings of the key, because another thread may have changed those in force.
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
        if op.versioned:
            direct.increment_versions_of_lists(op, tuple(values), {})
        if recorder.reason:
            counts.count_unrecordable(recorder.reason)
        return "ran", op.plain(results), plan

    return call


def recordable(
    op: Op, values: Sequence[Any]
) -> tuple[Callable[[], Sequence[Any]], list[torch.Tensor | None], dict[int, tuple[int, int]]]:
    """Return the arguments (run, leaves, arguments) of `recorder.record` for a call with all arguments `values`."""
    leaves: list[torch.Tensor | None] = []
    numbers: dict[int, tuple[int, int]] = {}
    given = list(values)

    def as_symbol(value: Any, takes: bool, slot: SlotKind, index: tuple[int, int]) -> Any:
        if isinstance(value, torch.Tensor):
            if slot in (SlotKind.TYPE_ONLY, SlotKind.ZERO_OR_ONE) and not value.dim() and value.device.type == "cpu":
                numbers[len(leaves)] = index
            leaves.append(value)
            return value
        if takes:
            leaves.append(None)
        if slot is SlotKind.PINNED or type(value) not in _NUMBERS:
            return value
        return Number(value, *index, keyed=slot is SlotKind.ZERO_OR_ONE)

    for i, (takes, slot) in enumerate(zip(op.takes_tensors, op.slots, strict=True)):
        if takes or slot is not SlotKind.PINNED:
            value = values[i]
            if isinstance(value, (list, tuple)):
                given[i] = [as_symbol(item, takes, slot, (i, j)) for j, item in enumerate(value)]
            else:
                given[i] = as_symbol(value, takes, slot, (i, -1))
    args = tuple(given[: op.positional])
    kwargs = dict(zip(op.keywords, given[op.positional :], strict=True))
    return lambda: op.results(args, kwargs), leaves, numbers


def record_dry(op: Op, values: Sequence[Any]) -> tuple[Sequence[Any] | None, Recorder]:
    """Return a call's results, None if its data would decide them, and the recorder of its steps; run nothing."""
    recorder: Recorder | None = None
    run, leaves, numbers = recordable(op, values)

    def run_recorded() -> Sequence[Any]:
        nonlocal recorder
        recorder = contract.recorder()
        return run()

    results: Sequence[Any] | None = None
    # Below autograd, as in a real call; autograd would count writes as in-place changes.
    with contextlib.suppress(DataUnknown), torch._C._AutoDispatchBelowADInplaceOrView():
        results, _ = record(run_recorded, leaves, numbers, watch=op.declaration.watched, dry=True)
    assert recorder is not None
    return results, recorder
