"""Judgement of a fused operator's call: values, gradients, layout, and bytes outside the results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

import tritonite
from tritonite.dtypes import FLOATS
from tritonite.errors import Unsupported
from tritonite.install.override import use_gems
from tritonite.testing.fuzz.check import Copies, byte_indices, bytes_of, synchronize
from tritonite.testing.fuzz.fused.drawing import FusedCall
from tritonite.testing.judge import judge, poisoned
from tritonite.testing.tolerances import RTOL

# Half a step between neighbours of float8_e4m3fn, relative and near 0, and of int8.
_STEPS = {torch.float8_e4m3fn: (2.0**-4, 2.0**-10), torch.int8: (0.0, 0.5)}
# Evaluations of a composition with changed operands.
_CHANGES = 4
# Largest number of a quantised dtype, whose roundoff moves a value over a midpoint.
_LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


class Evaluated(NamedTuple):
    """Results of a call, flattened, and gradients by the arguments that require one; None for those without."""

    results: list[Any]
    gradients: list[Any]


Found = tuple[str, str] | None
Moved = Callable[[], list[Evaluated]]


def check_fused(call: FusedCall, begin: Callable[[str], None] = lambda _: None) -> Found:
    """Return (kind, detail) of the first difference between a call and its composition, or None.

    The call is made twice, recorded and replayed, on operands whose memory has other elements around them. `begin` is
    called with "aten" or "tritonite" before the composition and the operator run.
    """
    begin("aten")
    tritonite.disable()
    exact, near = compositions(call) if call.served else (None, None)
    synchronize()
    moved = functools.cache(lambda: _of_changed_operands(call))
    with poisoned(), use_gems(include=()):
        for _ in range(2):
            begin("tritonite")
            own = call.map(Copies())
            _require_gradients(call, own)
            try:
                results = own.run()
                found = _compared(call, own, results, exact, near, moved)
            except Unsupported as error:
                found = ("declines", str(error)) if call.served else None
            except Exception as error:  # noqa: BLE001 - an operator raises Unsupported, and nothing else
                found = "raises", f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            synchronize()
            found = found or _stray_writes(call, own)
            if found is not None:
                return found
    return None


def compositions(call: FusedCall) -> tuple[Evaluated, Evaluated]:
    """Evaluate a call's composition in float64, and in the operands' dtypes."""
    exact = _of_reference(call, lambda _: torch.float64)
    return exact, _of_reference(call, lambda dtype: dtype if dtype in FLOATS else torch.float32, torch.float32)


def _leaves(call: FusedCall) -> list[torch.Tensor]:
    return [each for each in call.tensors if each.requires_grad]


def _require_gradients(call: FusedCall, own: FusedCall) -> None:
    for given, copy in zip(call.tensors, own.tensors, strict=True):
        copy.requires_grad_(given.requires_grad)


def _of_reference(
    call: FusedCall, wanted: Callable[[torch.dtype], torch.dtype], otherwise: torch.dtype | None = None
) -> Evaluated:
    """Evaluate the composition with floats in the dtype `wanted`; in `otherwise` where that raises."""

    def converted(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        plain = value.detach()
        plain = plain.to(wanted(plain.dtype)) if plain.dtype.is_floating_point else plain
        return plain.clone(memory_format=torch.contiguous_format).requires_grad_(value.requires_grad)

    wide = call.map(converted)
    try:
        results = pytree.tree_leaves(wide.compose())
        return Evaluated(results, _gradients(results, results, _leaves(wide)))
    except (NotImplementedError, RuntimeError, ValueError):
        # ATen has no kernel for a dtype, or for two dtypes at once.
        if otherwise is None:
            raise
    return _of_reference(call, lambda _: otherwise)


def _of_changed_operands(call: FusedCall) -> list[Evaluated]:
    """Evaluate the composition in float64, several times, with floats changed by up to half a unit in their last place.

    A rounding changes a float as much.
    """
    generator = torch.Generator().manual_seed(1)

    def changed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype not in FLOATS:
            return value
        shares = torch.rand(value.shape, generator=generator, dtype=torch.float64) - 0.5
        factors = 1 + torch.finfo(value.dtype).eps * shares.to(value.device)
        return (value.detach().double() * factors).requires_grad_(value.requires_grad)

    return [_of_reference(call.map(changed), lambda _: torch.float64) for _ in range(_CHANGES)]


def _each(moved: Moved, field: str, index: int) -> list[torch.Tensor]:
    """Return one of the results or gradients of all evaluations."""
    return [getattr(each, field)[index] for each in moved()]


def _gradients(results: list[Any], pattern: list[Any], leaves: list[torch.Tensor]) -> list[Any]:
    """Return gradients by leaves through the results that require one where `pattern` does, too.

    The gradients of results depend on their number and shapes only, and are exact in every dtype.
    """
    pairs = list(zip(results, pattern, strict=False))
    used = [own for own, other in pairs if _is_differentiable(own) and _is_differentiable(other)]
    if not used or not leaves:
        return [None] * len(leaves)
    generator = torch.Generator().manual_seed(len(used))
    grads = [torch.randn(each.shape, generator=generator).mul(64).round().div(64).to(each) for each in used]
    return list(torch.autograd.grad(used, leaves, grads, allow_unused=True))


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _compared(
    call: FusedCall, own: FusedCall, results: Any, exact: Evaluated | None, near: Evaluated | None, moved: Moved
) -> Found:
    """Compare results, written arguments and gradients; of a call that need not be served, only compute them."""
    flat = pytree.tree_leaves(results)
    if exact is None or near is None:
        _gradients(flat, flat, _leaves(own))
        return None
    returned = 0 if results is None else len(flat)
    given = flat[:returned] + [own.arguments[name] for name in call.written]
    if len(given) != len(exact.results):
        return "results", f"{len(flat)} results where the composition has {len(exact.results) - len(call.written)}"
    for i, (value, wide, rounded) in enumerate(zip(given, exact.results, near.results, strict=True)):
        if (value is None) != (wide is None):
            return "results", f"result {i} is {value} where the composition gives {wide}"
        if value is None:
            continue
        if i < returned and call.contiguous and not value.is_contiguous():
            return "strides", f"result {i} of shape {tuple(value.shape)} has {value.stride()}"
        if wide.requires_grad and not value.requires_grad:
            return "gradient", f"result {i} has no gradient"
        if failure := _judged(call, value, wide, rounded, functools.partial(_each, moved, "results", i)):
            return "value", f"result {i}: {failure}"
    found = _gradients(given, exact.results, _leaves(own))
    names = [str(k) for k, each in enumerate(call.tensors) if each.requires_grad]
    for i, (name, value, wide, rounded) in enumerate(zip(names, found, exact.gradients, near.gradients, strict=True)):
        if value is None or wide is None:
            present = value if wide is None else wide
            if present is not None and bool(present.any()):
                return "gradient", f"by tensor {name}: {value} where the composition gives {wide}"
            continue
        if failure := _judged(call, value, wide, rounded, functools.partial(_each, moved, "gradients", i)):
            return "gradient", f"by tensor {name}: {failure}"
    return None


def _judged(
    call: FusedCall,
    own: torch.Tensor,
    exact: torch.Tensor,
    near: torch.Tensor | None,
    moved: Callable[[], list[torch.Tensor]],
) -> str | None:
    """Return the failure of a result, or None.

    `near` is the composition's result in the operands' dtypes. `moved` returns its results in float64 for operands that
    are changed by roundings.
    """
    # Where elements lie is compared elsewhere, or was given.
    own, exact = own.detach().contiguous(), exact.detach()
    if own.shape != exact.shape:
        return f"shape {tuple(own.shape)} where the composition gives {tuple(exact.shape)}"
    if own.dtype in _STEPS:
        return _of_steps(call, own, exact)
    # Integers, such as the experts of a token, must be those of float64.
    near = exact if near is None or not own.is_floating_point() else near.detach()
    aten = torch.empty_like(own).copy_(near)
    tensors = [each for each in call.tensors if each.dtype in FLOATS and each.numel()]
    largest = max([float(each.detach().abs().nan_to_num(0, 0, 0).max()) for each in tensors], default=1.0)
    longest = max([*(size for each in call.tensors for size in each.shape), 1])
    terms = longest * max(1.0, largest) ** 4
    verdict = judge(own, aten, exact, zero_sign=False, terms=terms, cancels=True)
    if verdict.failure is None or not call.slack or not exact.numel() or not own.is_floating_point():
        return verdict.failure
    # The largest error of sums of products is relative to their largest result, or to what a rounding of the operands
    # changes, where all sums cancel.
    largest_change = torch.stack([each.detach() - exact for each in moved()]).abs().nan_to_num(0, 0, 0).max()
    relative = RTOL[call.resolution] * exact.abs().nan_to_num(0, 0, 0).max().clamp(min=call.size)
    allowed = call.slack * torch.maximum(relative, largest_change)
    error = (own.double() - exact).abs()
    passed = (error <= allowed) | (own.double() == exact) | (own.isnan() & exact.isnan())
    return None if bool(passed.all()) else verdict.failure


def _of_steps(call: FusedCall, own: torch.Tensor, exact: torch.Tensor) -> str | None:
    """Return the failure of quantised values, each of which may be rounded from a value with an error, or None."""
    relative, absolute = _STEPS[own.dtype]
    if call.resolution is torch.float16 and own.dtype.is_floating_point:
        # A value that is subnormal in fp16 is rounded by a step of the smallest float8 numbers, too.
        absolute *= 2
    resolution = 2 * RTOL[call.resolution]
    exact = exact.nan_to_num()
    error = (own.double() - exact).abs()
    allowed = torch.maximum(relative * exact.abs(), torch.full_like(exact, absolute))
    bad = error > allowed * (1 + resolution) + resolution * exact.abs() + 1e-6 * _LARGEST[own.dtype]
    if not bool(bad.any()):
        return None
    first = int(bad.flatten().nonzero()[0])
    return f"{own.flatten()[first].item()} where the composition gives {exact.flatten()[first].item()}"


def _stray_writes(call: FusedCall, own: FusedCall) -> Found:
    """Return a finding if bytes of arguments have changed that the call does not write, or None."""
    written = [own.arguments[name] for name in call.written]
    for i, (given, copy) in enumerate(zip(call.tensors, own.tensors, strict=True)):
        before, after = (bytes_of(each.untyped_storage()) for each in (given, copy))
        changed = before != after
        for target in written:
            if target.untyped_storage()._cdata == copy.untyped_storage()._cdata:
                changed[byte_indices(target, len(before))] = False
        if bool(changed.any()):
            return "stray", f"{int(changed.sum())} bytes of tensor {i} or beside it were written"
    return None
