"""The checks of a sampled call: drift from float64, the origin of nan and inf, bits that change from run to run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tritonite.registry.results import CHOSEN_INDICES, UNORDERED, UNWRITTEN
from tritonite.report.audit.call import SampledCall, tensors
from tritonite.report.judge import judge
from tritonite.report.tolerances import RTOL

# (what was found, the relative error in eps)
Found = tuple[str, float]
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def drift(call: SampledCall) -> Found | None:
    """Compare the results with ATen's and with float64, by the tolerances of the judge.

    The judge takes terms to cancel in every operator, because an audit knows less of operators than the tests do.
    """
    packet = call.op.packet
    if call.aten is None or call.exact is None:
        return None
    worst: Found | None = None
    for (index, own), (_, aten), (_, exact) in zip(call.own, call.aten, call.exact, strict=True):
        if index in UNWRITTEN.get(packet, ()):
            continue
        if not isinstance(own, torch.Tensor):
            if isinstance(own, (bool, int)) and own != aten:
                return f"result {index} is {own}, and ATen's {aten}", math.inf
            continue
        if packet in CHOSEN_INDICES and not own.is_floating_point():
            continue
        reference = exact if isinstance(exact, torch.Tensor) and exact.shape == aten.shape else None
        if own.is_floating_point() and (reference is None or own.dtype not in RTOL):
            continue
        verdict = judge(own, aten, reference, False, str(own.device), _terms(call, own), cancels=True)
        if verdict.failure and (worst is None or verdict.error > worst[1]):
            worst = f"result {index}: {verdict.failure}", verdict.error
    return worst


def _terms(call: SampledCall, result: torch.Tensor) -> float:
    """Return the elements read for each element of a result."""
    read = max((x.numel() for x in tensors(call.inputs())), default=1)
    return max(1.0, read / max(1, result.numel()))


def nan(call: SampledCall) -> Found | None:
    """Find nan and inf in the results of finite arguments, and say whether ATen makes them, too."""
    if not all(map(_finite, call.inputs())):
        return None
    for position, (index, own) in enumerate(call.own):
        if index in UNWRITTEN.get(call.op.packet, ()) or _finite(own):
            continue
        wrong = ~_wide(own).isfinite()
        kind = "nan" if bool(_wide(own).isnan().any()) else "inf"
        found = f"result {index}: {int(wrong.sum())} of {own.numel()} elements are {kind}, of finite arguments"
        if call.aten is None:
            return found, 0.0
        also = torch.equal(wrong, ~_wide(call.aten[position][1]).isfinite())
        return f"{found}; ATen's {'are, too: the data is the cause' if also else 'are not: the kernel is wrong'}", 0.0
    return None


def _finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return True
    return bool(_wide(value).isfinite().all())


def _wide(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor in a dtype that ATen's tests of elements take; they take no float8."""
    return value.float() if value.itemsize == 1 else value


def bits(call: SampledCall) -> Found | None:
    """Run the kernel once more on the same arguments, and compare bits."""
    if call.op.packet in UNORDERED and not torch.are_deterministic_algorithms_enabled():
        return None
    for (index, own), (_, again) in zip(call.own, call.repeated(), strict=True):
        if index in UNWRITTEN.get(call.op.packet, ()) or not isinstance(own, torch.Tensor):
            continue
        different = _as_integers(own) != _as_integers(again)
        if bool(different.any()):
            where = tuple(different.nonzero()[0].tolist())
            count = f"{int(different.sum())} of {different.numel()} elements differ between two runs"
            return f"result {index}: {count}, the first at {list(where)}", 0.0
    return None


def _as_integers(value: torch.Tensor) -> torch.Tensor:
    if value.is_complex():
        value = torch.view_as_real(value)
    return value.view(_BITS[value.itemsize]) if value.is_floating_point() else value


CHECKS: dict[str, Callable[[SampledCall], Found | None]] = {"drift": drift, "nan": nan, "bits": bits}


def found_in(call: SampledCall, names: tuple[str, ...]) -> Iterator[tuple[str, Found]]:
    """Yield (check, what was found) for each named check that finds something."""
    for name in names:
        found = CHECKS[name](call)
        if found is not None:
            yield name, found
