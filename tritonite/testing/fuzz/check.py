"""Comparison of a call's outcomes: values, layout, aliasing, bytes outside the elements, exceptions."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

import tritonite
from tritonite.dtypes import FLOATS, FLOATS_OF_16_BITS
from tritonite.install.override import native_dispatcher, use_gems
from tritonite.runtime.stats import counts
from tritonite.testing.fuzz.draw import SUMS, Call
from tritonite.testing.judge import (
    Comparable,
    comparable,
    judge,
    judge_residuals,
    may_cancel,
    poisoned,
    terms,
    to_reference,
)
from tritonite.testing.samples import compares_zero_sign, reference_of

# oneDNN's message for 16-bit operands that it has no kernel for and that ATen does not check.
_NO_KERNEL = "could not create a primitive"
# cuDNN's message for operands that it has no kernel for.
_NO_ENGINE = "unable to find an engine"
# A failed assertion is a defect, and says nothing about the call.
_DEFECT = "INTERNAL ASSERT FAILED"
# ATen launches a kernel without programs, for an empty tensor.
_NOTHING_LAUNCHED = "CUDA error: invalid argument"


class Finding(NamedTuple):
    """A difference between a call's outcomes. `kind` is a word for its class; seed and number reproduce the call."""

    kind: str
    overload: str
    seed: int
    number: int
    call: str
    detail: str

    def __str__(self) -> str:
        again = f"tritonite verify --op {self.overload} --seed {self.seed} --case {self.number}"
        return f"{self.kind}: {self.call}: {self.detail}\n    {again}"


class Outcome(NamedTuple):
    """The result or the exception of a call, and the call with its arguments afterwards."""

    result: Any
    call: Call

    @property
    def raised(self) -> bool:
        return isinstance(self.result, Exception)


def synchronize() -> None:
    """Wait for the device, so that its errors are raised at the call that causes them."""
    tritonite.backend.runtime.synchronize(tritonite.backend)


class Copies:
    """Copies of a call's tensors, with gaps, that share memory as the originals do."""

    def __init__(self) -> None:
        self._storages: dict[int, Any] = {}

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        plain = value.detach()
        negative, conjugate = plain.is_neg(), plain.is_conj()
        plain = torch._neg_view(plain) if negative else plain
        plain = plain.conj() if conjugate else plain
        storage = plain.untyped_storage()
        copied = self._storages.setdefault(storage._cdata, None) or _copied(storage)
        self._storages[storage._cdata] = copied
        made = torch.empty(0, dtype=plain.dtype, device=plain.device)
        made.set_(copied, plain.storage_offset(), plain.size(), plain.stride())
        made = made.conj() if conjugate else made
        return torch._neg_view(made) if negative else made


def _copied(storage: Any) -> Any:
    """Copy a storage by ATen's own kernel."""
    with use_gems(include=()):
        return storage.clone()


def outcome(call: Call) -> Outcome:
    """Make a call on copies of its arguments. An exception is the result, except one that the device raises later."""
    own = call.map(Copies())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = own.run()
        except Exception as error:  # noqa: BLE001 - it is what is compared
            result = error
    synchronize()
    return Outcome(result, own)


def check(call: Call, begin: Callable[[str], None] = lambda _: None) -> tuple[str, str] | None:
    """Return (kind, detail) of the first difference between ATen's outcome and ours, recorded and replayed, or None.

    `begin` is called with "aten" or "tritonite" before each of the runs, and with "aten" before their comparison, which
    makes ATen's runs in float64.
    """
    begin("aten")
    # Nothing is registered for ATen: torch converts numbers for kernels in Python, even for those that are off.
    tritonite.disable()
    expected = outcome(call)
    with use_gems(include=_alone(call), faster_only=False), poisoned():
        for _ in range(2):
            begin("tritonite")
            before = counts(call.op.overload)
            actual = outcome(call)
            after = counts(call.op.overload)
            served = after.launched + after.replayed > before.launched + before.replayed
            begin("aten")
            with use_gems(include=()):
                found = difference(call, expected, actual, served)
            if found is not None:
                return found
    return None


def run_by_aten(call: Call) -> None:
    """Make ATen's runs of a check: of the call, and in float64."""
    outcome(call)
    outcome_in_float64(call)


def _alone(call: Call) -> str:
    """Return the pattern that matches a call's overload alone."""
    return call.op.overload if "." in call.op.overload else f"{call.op.overload}.default"


def difference(call: Call, expected: Outcome, actual: Outcome, served: bool) -> tuple[str, str] | None:
    """Return (kind, detail) of the difference between an outcome and ATen's, or None."""
    if actual.raised and isinstance(actual.result, (OverflowError, ValueError)) and _unpackable(call):
        return None
    if isinstance(expected.result, torch.OutOfMemoryError):
        # It depends on what else is in memory.
        return None
    if expected.raised and actual.raised:
        if type(actual.result) is type(expected.result):
            return None
        return "exception", f"{_summary(actual.result)} where ATen raises {_summary(expected.result)}"
    if expected.raised:
        empty = _NOTHING_LAUNCHED in str(expected.result) and not all(x.numel() for x in _tensors(call))
        unsupported = any(each in str(expected.result) for each in (_NO_KERNEL, _DEFECT))
        if empty or unsupported or _is_right_alone(call, expected, actual):
            return None
        return "answers", f"where ATen raises {_summary(expected.result)}"
    if actual.raised:
        return "raises", _summary(actual.result)
    if not served:
        return None
    ours, aten = _flat(actual), _flat(expected)
    if [type(x) for x in ours] != [type(x) for x in aten]:
        return "results", f"{ours} where ATen gives {aten}"
    exact: Any = None
    for i, (own, theirs) in enumerate(zip(_comparable(actual, ours), _comparable(expected, aten), strict=True)):
        a, b = own.value, theirs.value
        if not isinstance(b, torch.Tensor):
            if a is not b and a != b:
                return "value", f"{a} where ATen gives {b}"
            continue
        for name in ("dtype", "shape", "device"):
            if getattr(a, name) != getattr(b, name):
                return name, f"result {i} has {getattr(a, name)} where ATen gives {getattr(b, name)}"
        if theirs.extent == "kind":
            continue
        if b.numel() and any(size > 1 and x != y for size, x, y in zip(b.shape, a.stride(), b.stride(), strict=True)):
            return "strides", f"result {i} of shape {tuple(b.shape)} has {a.stride()} where ATen gives {b.stride()}"
        if _memory(a, actual.call) != _memory(b, expected.call):
            return "alias", f"result {i} shares memory with other arguments than ATen's result does"
        if theirs.extent == "layout" or torch.equal(_bits(a), _bits(b)):
            continue
        if exact is None:
            exact = _flat(outcome_in_float64(call)) or [None] * len(aten)
            if _reference_of(call) is not None:
                # References do not update running statistics.
                exact = [x if k < len(aten) - len(_untold(call)) else None for k, x in enumerate(exact)]
        failure = _judged(call, a, b, exact[i] if i < len(exact) else None)
        if failure is not None:
            return "value", f"result {i}: {failure}"
    given = {name: x for name, x in call.arguments.items() if name not in call.op.out_names}
    failure = judge_residuals(call.op.packet, ((), given), ours, aten)
    if failure is not None:
        return "value", failure
    return _stray_writes(call, expected, actual)


def _is_right_alone(call: Call, expected: Outcome, actual: Outcome) -> bool:
    """Return whether ATen has no kernel for the call, and our results are right.

    Where ATen lacks the call's 16-bit dtype, its results in float32 decide, and where cuDNN lacks a kernel, those in
    float64.
    """
    error = expected.result
    if isinstance(error, NotImplementedError) and "not implemented for" in str(error):
        wide = outcome(call.map(_as_float32))
    elif _NO_ENGINE in str(error):
        wide = outcome_in_float64(call)
    else:
        return False
    ours, exact = (_comparable(each, _flat(each)) for each in (actual, wide))
    return len(ours) == len(exact) and all(
        own.value.shape == other.value.shape
        and _judged(call, own.value, _converted(other.value, own.value.dtype), other.value) is None
        for own, other in zip(ours, exact, strict=True)
        if isinstance(own.value, torch.Tensor)
    )


def _as_float32(value: Any) -> Any:
    """Convert a tensor of 16-bit floats to float32; return anything else as it is."""
    if not isinstance(value, torch.Tensor) or value.dtype not in FLOATS_OF_16_BITS:
        return value
    return _converted(value, torch.float32)


def _converted(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in another dtype with its strides, which may make elements overlap."""
    elements = value.untyped_storage().nbytes() // value.dtype.itemsize
    whole = value.as_strided((elements,), (1,), 0).to(dtype)
    return whole.as_strided(value.shape, value.stride(), value.storage_offset())


# The numbers of float16, float32 and bfloat16 among PyTorch's dtypes, and that of float64.
_FLOAT_NUMBERS, _FLOAT64_NUMBER = (5, 6, 15), 7


def outcome_in_float64(call: Call) -> Outcome:
    """Return ATen's outcome with all floating-point tensors in float64."""
    found = _outcome_of_wide(call, integers=True)
    # Integers that are indices must stay integers.
    found = _outcome_of_wide(call, integers=False) if found.raised else found
    if found.raised and call.op.takes_lists:
        # ATen computes functions of bool tensors in float32, and refuses outputs in float64 for them.
        found = _outcome_of_wide(call.map(_flags_as_floats), integers=True)
    return found


def _flags_as_floats(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.dtype is torch.bool else value


def _outcome_of_wide(call: Call, integers: bool) -> Outcome:
    wide = call.map(functools.partial(to_reference, integers=integers))
    if type(number := wide.arguments.get("dtype")) is int and number in _FLOAT_NUMBERS:
        wide = Call(wide.op, {**wide.arguments, "dtype": _FLOAT64_NUMBER})
    function = _reference_of(call)
    if function is None:
        return outcome(wide)
    # The conversion copies no float64 tensor, and references write running statistics.
    wide = wide.map(Copies())
    try:
        given = {name: x for name, x in wide.arguments.items() if name not in call.op.out_names}
        result = function(*[given.pop(name) for name in call.op.names[: call.op.positional]], **given)
        if call.op.schema.returns:
            return Outcome(result, wide)
        # The reference of an overload without results writes arguments, and returns outputs by name.
        return Outcome(None, Call(call.op, wide.arguments | result[1]))
    except Exception as error:  # noqa: BLE001 - without a reference ATen's result is used
        return Outcome(error, wide)


def _reference_of(call: Call) -> Callable[..., Any] | None:
    return reference_of(call.op.overload, call.op.packet)


def _flat(outcome: Outcome) -> list[Any]:
    """Return a call's results, or the arguments that it has written if it returns nothing.

    Running statistics, whose writes are not in the schema, come last.
    """
    if outcome.raised:
        return []
    if outcome.call.op.schema.returns:
        untold = [outcome.call.arguments[name] for name in _untold(outcome.call)]
        return pytree.tree_leaves(outcome.result) + [x for x in untold if isinstance(x, torch.Tensor)]
    return pytree.tree_leaves([outcome.call.arguments[name] for name in _written(outcome.call)])


def _comparable(outcome: Outcome, results: list[Any]) -> list[Comparable]:
    given = {name: x for name, x in outcome.call.arguments.items() if name not in outcome.call.op.out_names}
    return comparable(outcome.call.op.packet, results, ((), given))


def _written(call: Call) -> list[str]:
    """Return the names of arguments that a call writes: by the schema, and running statistics."""
    return [call.op.schema.arguments[i].name for i in call.op.written] + _untold(call)


def _untold(call: Call) -> list[str]:
    """Return the names of running statistics whose writes are not in the schema."""
    if call.op.family not in ("batch_norm", "sync_batch_norm"):
        return []
    written = [call.op.schema.arguments[i].name for i in call.op.written]
    return [name for name in ("running_mean", "running_var") if name in call.arguments and name not in written]


def _unpackable(call: Call) -> bool:
    """Return whether a call has integers beyond 64 bits, which PyTorch does not pass to kernels in Python."""
    numbers = [value for value in call.arguments.values() if type(value) is int]
    return native_dispatcher() is None and any(not -(2**63) <= number < 2**63 for number in numbers)


def _tensors(call: Call) -> list[torch.Tensor]:
    every = [item for value in call.arguments.values() for item in (value if isinstance(value, list) else [value])]
    return [value for value in every if isinstance(value, torch.Tensor)]


def _memory(tensor: torch.Tensor, call: Call) -> list[bool]:
    own = tensor.untyped_storage()._cdata
    return [own == value.untyped_storage()._cdata for value in _tensors(call)]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().flatten()
    return plain.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _judged(call: Call, ours: torch.Tensor, aten: torch.Tensor, exact: Any) -> str | None:
    if not isinstance(exact, torch.Tensor) or exact.shape != aten.shape:
        exact = None
    if exact is None and aten.is_floating_point():
        exact = aten
    packet = call.op.packet
    factor = call.arguments.get("alpha", 1)
    alpha = float(factor) if type(factor) in (int, float) else 1.0
    roundoff = terms(packet, list(call.arguments.values()), aten, exact, alpha)
    summed = call.op.family == "rearrangement" and packet.endswith("backward")
    if call.op.family in SUMS or summed or packet == "mvlgamma":
        # Terms may exceed 1 and cancel.
        floats = [x for x in _tensors(call) if x.dtype in FLOATS]
        largest = max([float(x.nan_to_num(0, 0, 0).abs().max()) for x in floats if x.numel()], default=1.0)
        # A softmax's gradient is a sum of products, times an element.
        factors = 2 if packet.endswith("softmax_backward_data") else 1
        # If the power overflows float64, all may be roundoff.
        size = max(1.0, largest) ** (2 * factors) if largest < 1e77 else math.inf
        roundoff = max(roundoff, *aten.shape, 1) * size
    zero_sign = compares_zero_sign(packet)
    return judge(ours, aten, exact, zero_sign, terms=roundoff, cancels=may_cancel(packet, gradient=True)).failure


def _stray_writes(call: Call, expected: Outcome, actual: Outcome) -> tuple[str, str] | None:
    """Return a finding if bytes outside all written views have changed that ATen did not change, or None."""
    seen = set[int]()
    for given, own, aten in zip(_tensors(call), _tensors(actual.call), _tensors(expected.call), strict=True):
        storages = [x.untyped_storage() for x in (given, own, aten)]
        if storages[0]._cdata in seen or len({storage.nbytes() for storage in storages}) > 1:
            continue
        first, ours, theirs = (bytes_of(storage) for storage in storages)
        seen.add(storages[0]._cdata)
        free = torch.ones(len(first), dtype=torch.bool)
        for name in _written(call):
            for target in pytree.tree_leaves(actual.call.arguments[name]):
                if isinstance(target, torch.Tensor) and target.untyped_storage()._cdata == storages[1]._cdata:
                    free[byte_indices(target, len(first))] = False
        stray = free & (ours != first) & (theirs == first)
        if bool(stray.any()):
            return "stray", f"{int(stray.sum())} bytes outside the elements were written"
    return None


def bytes_of(storage: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).cpu()


def byte_indices(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Return the indices of a tensor's bytes in its storage of `size` bytes."""
    width = tensor.element_size()
    elements = torch.arange(size // width).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return (elements.reshape(-1, 1) * width + torch.arange(width)).flatten()


def _summary(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
