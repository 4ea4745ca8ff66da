"""Comparison of a result with ATen's, and with ATen's in float64 on the same rounded inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from tritonite.report.tolerances import ATOL, RTOL


@dataclass(frozen=True)
class Verdict:
    """The outcome of a comparison: None or a `failure`, and the largest relative errors, ours and ATen's, in eps."""

    failure: str | None = None
    error: float = 0.0
    aten_error: float = 0.0


def judge(
    actual: torch.Tensor,
    aten: torch.Tensor,
    reference: torch.Tensor | None = None,
    zero_sign: bool = True,
    device: str = "cpu",
    terms: float = 1.0,
    cancels: bool = False,
    sided: bool = True,
) -> Verdict:
    """Compare a result with ATen's, and a floating-point result also with the float64 `reference`.

    Shape, dtype and the strides of dimensions larger than 1 must equal ATen's. An element passes if one of these holds:

    - It has ATen's bits. Any nan equals any nan, and -0.0 differs from 0.0.
    - It is the reference rounded to the dtype, which may be infinite where ATen's is the largest finite number.
    - It is within `rtol * |reference| + atol * sqrt(terms)`. `terms` is the number of terms of an element.
    - It is within twice ATen's own error in this element.
    - Its relative error is at most twice ATen's largest among elements of its binary exponent or the two next to it.
    - The result `cancels`, and the error is at most twice ATen's largest error.
    - In 16 bits, neither it nor ATen's is finite, though the reference is: intermediate values overflow the dtype.

    A zero must have the sign that ATen and the reference agree on, unless `zero_sign` is false. A 16-bit result also
    fails if most of its elements are rounded to one side, unless `sided` is false. The comparison runs on `device`; on
    the CPU it is faster for small tensors, because each step on a GPU waits for the device.
    """
    for name in ("dtype", "shape"):
        if getattr(actual, name) != getattr(aten, name):
            return Verdict(f"{name} {getattr(actual, name)} where ATen gives {getattr(aten, name)}")
    if not same_layout(actual, aten):
        return Verdict(f"strides {actual.stride()} where ATen gives {aten.stride()}")
    if actual.is_complex():
        pairs = [torch.view_as_real(t.resolve_conj()) if t is not None else None for t in (actual, aten, reference)]
        return judge(pairs[0], pairs[1], pairs[2], zero_sign, device, terms, cancels, sided)
    actual, aten = actual.to(device), aten.to(device)
    reference = None if reference is None else reference.to(device)
    same = _identical(actual, aten)
    if not actual.is_floating_point() or reference is None:
        return Verdict(None if bool(same.all()) else _describe(~same, actual, aten, aten))
    dtype = actual.dtype
    eps = torch.finfo(dtype).eps
    wide, wide_aten, exact = actual.double(), aten.double(), reference.double()
    # A reference that overflows the dtype counts as infinite.
    exact = torch.where(exact.to(dtype).isinf() & ~wide_aten.isfinite(), exact.to(dtype).double(), exact)
    error, aten_error = (wide - exact).abs(), (wide_aten - exact).abs()
    scale = exact.abs().clamp_min(torch.finfo(dtype).tiny)
    finite = exact.isfinite() & wide_aten.isfinite()
    aten_relative = (aten_error / scale).where(finite, 0)
    aten_worst = float(aten_relative.max()) if aten_relative.numel() else 0.0
    excused = 2 * _worst_of_magnitude(aten_relative, exact) * exact.abs()
    allowed = torch.maximum(RTOL[dtype] * exact.abs() + ATOL[dtype] * terms**0.5, excused)
    own_error = aten_error.where(finite, 0)
    if cancels and own_error.numel():
        # In float64 the reference is ATen's own result, whose error is unknown.
        own_error = own_error.max().clamp_min(256 * eps if dtype is torch.float64 else 0.0)
    allowed = torch.maximum(allowed, 2 * own_error)
    if cancels and exact.numel():
        # ATen's error is unknown where it alone has nan. Terms are taken to be as large as the largest result.
        lost = wide_aten.isnan() & exact.isfinite()
        allowed = torch.where(
            lost, torch.maximum(allowed, RTOL[dtype] * exact.nan_to_num(0, 0, 0).abs().max()), allowed
        )
    signed = (not zero_sign) | (wide != 0) | (wide_aten != 0) | (exact != 0) | (aten.signbit() != exact.signbit())
    near = (exact.isfinite() & (error <= allowed)) | ((wide == exact) & ~finite) | (wide.isnan() & exact.isnan())
    near |= wide == exact.to(dtype).double()
    if dtype.itemsize == 2:
        near |= ~wide.isfinite() & ~wide_aten.isfinite() & exact.isfinite()
    good = same | (signed & near)
    ours_relative = (error / scale)[finite & wide.isfinite()]
    worst = float(ours_relative.max()) if ours_relative.numel() else 0.0
    failure = None if bool(good.all()) else _describe(~good, actual, aten, exact)
    if failure is None and sided:
        failure = _bias(actual, aten, exact)
    return Verdict(failure, worst / eps, aten_worst / eps)


def to_reference(value: Any, integers: bool = False, device: str | None = None) -> Any:
    """Convert a tensor of floats, with `integers` also of integers, or a floating-point dtype to float64.

    Complex tensors become complex128. Anything else is returned as it is.
    """
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().to(device or value.device)
    if value.is_floating_point() or (integers and value.dtype is not torch.bool and not value.is_complex()):
        return value.double()
    return value.to(torch.complex128) if value.is_complex() else value


# A 16-bit result is biased if the votes of `_bias` for one side exceed those for the other by more than chance:
# by this share of the votes more than ATen's, and by this number of standard deviations.
_BIAS, _DEVIATIONS = 0.25, 4.3
# Truncation gives one side half of the votes. If ATen's give one side more than this fraction, errors are correlated.
_CORRELATED = 0.75


def _bias(actual: torch.Tensor, aten: torch.Tensor, exact: torch.Tensor) -> str | None:
    """Describe one-sided rounding of a 16-bit result: towards 0, away from 0, down or up. Return None without it.

    Each distinct value of `exact` that the dtype cannot represent has one vote: the sign of the result's distance from
    that value rounded to nearest. Truncation makes half of the votes negative. Repeated values are not independent, and
    results that are further away have errors of other causes, which they may share. Errors are correlated,
    too, if nearly all of ATen's have one sign, as in products of a few rounded weights with many vectors.
    """
    dtype = actual.dtype
    if dtype.itemsize != 2:
        return None
    near, least = exact.to(dtype), 2 * torch.finfo(dtype).smallest_normal
    counted = (near.double() != exact) & (near.abs() >= least)
    for each in (near, actual, aten):
        counted &= each.isfinite()
    counted &= (actual.double() - near.double()).abs() <= torch.finfo(dtype).eps * near.double().abs()
    if int(counted.sum()) <= _DEVIATIONS**2:
        return None
    values, order = exact[counted].sort()
    distinct = torch.cat([values.new_ones(1, dtype=torch.bool), values[1:] != values[:-1]])
    values = values[distinct]
    ours, theirs = ((x.double() - near.double())[counted][order][distinct].sign() for x in (actual, aten))
    for direction, sides in ((values.sign(), ("towards 0", "away from 0")), (values.new_ones(()), ("down", "up"))):
        total, own = float((ours * direction).sum()), float((theirs * direction).sum())
        if abs(own) > _CORRELATED * len(values):
            continue
        excess = (total - own) * math.copysign(1.0, total) / len(values)
        if abs(total) > _DEVIATIONS * float(ours.abs().sum()) ** 0.5 and excess > _BIAS:
            where = f"{abs(total):.0f} of {len(values)} distinct inexact results, ATen {abs(own):.0f}"
            return f"rounded {sides[total > 0]}: {where}"
    return None


# Bins for the exponents of float64 by `frexp`, -1073 to 1024, with one more at either end.
_LOWEST, _MAGNITUDES = -1074, 2100


def _worst_of_magnitude(relative: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return by element the largest `relative` error among elements whose exponent in `exact` differs by 1 at most."""
    bins = (torch.frexp(exact).exponent.long() - _LOWEST).clamp_(1, _MAGNITUDES - 2)
    # `frexp` gives 0 an exponent like that of 0.5, but 0 has no relative error.
    counted = relative.where(exact != 0, 0)
    worst = relative.new_zeros(_MAGNITUDES).scatter_reduce_(0, bins.flatten(), counted.flatten(), "amax")
    worst[1:-1] = torch.maximum(torch.maximum(worst[:-2], worst[2:]), worst[1:-1])
    return worst[bins]


def _identical(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if not a.is_floating_point():
        return a == b
    return ((a == b) & (a.signbit() == b.signbit())) | (a.isnan() & b.isnan())


def same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    return not a.numel() or all(size == 1 or x == y for size, x, y in zip(a.shape, a.stride(), b.stride(), strict=True))


def _describe(bad: torch.Tensor, actual: torch.Tensor, aten: torch.Tensor, exact: torch.Tensor) -> str:
    where = tuple(bad.nonzero()[0].tolist())
    return (
        f"{int(bad.sum())} of {bad.numel()} elements differ, the first at {list(where)}: "
        f"{actual[where].item()!r}, ATen {aten[where].item()!r}, float64 {exact[where].item()!r}"
    )
