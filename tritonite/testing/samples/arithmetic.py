"""Arithmetic."""

from __future__ import annotations

import math
from typing import Any

import torch

from tritonite import devices
from tritonite.dtypes import FLOATS_OF_16_BITS, INTS
from tritonite.testing.samples import facts

facts.CHOICES["rounding_mode"] = (None, "trunc", "floor")
facts.ZERO_SIGN_UNDEFINED |= {"_add_relu", "fmax", "fmin", "lerp", "maximum", "minimum"}
facts.NAN_UNDEFINED.add("_add_relu")
facts.may_decline(
    ("div.Scalar_mode*", "div.Tensor_mode", "div.out_mode"),
    ("* None",),
    "rounding_mode None for integers",
    "the result is floating point only if the mode is None, and a plan's dtype does not depend on the mode",
    dtypes=INTS,
)
facts.may_decline(
    ("polar",),
    ("gradient",),
    ("*: dtype torch.complex*", "*: a tensor that is conjugated or negated when it is read"),
    "its gradient multiplies complex numbers and conjugates, which no kernel does",
    dtypes=(torch.float32, torch.float64),
)


@facts.drawn("mul", "_foreach_mul", "_foreach_div")
def _of_few_digits(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return factors of one element that 16-bit floats represent: ATen multiplies by a rounded one on a GPU alone."""
    own, other = arguments["self"], arguments.get("other")
    if isinstance(other, list):
        pairs = zip(own, other, strict=False)
        return arguments | {"other": [*[_rounded([x], y) for x, y in pairs], *other[len(own) :]]}
    return arguments | {"other": _rounded(own if isinstance(own, list) else [own], other)}


def _rounded(operands: list[Any], number: Any) -> Any:
    """Truncate a tensor of one element for 16-bit floats among the operands; return anything else as it is."""
    floats = [x.dtype for x in operands if facts.real(x) and x.dtype in FLOATS_OF_16_BITS]
    if devices.current.aten != "cpu" or not floats or not facts.real(number) or number.numel() != 1:
        return number
    value = number.double()
    for dtype in floats:
        # Rounding towards 0 leaves integers in the range of their dtype.
        digits = torch.frexp(value.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max))
        value = torch.ldexp((digits.mantissa * 2**8).trunc() / 2**8, digits.exponent).to(dtype).double()
    return number if number.double().equal(value) or bool(value.isnan()) else torch.full_like(number, value.item())


@facts.drawn("div", "floor_divide", "fmod", "remainder")
def _divisors(arguments: dict[str, Any]) -> dict[str, Any]:
    """Avoid quotients without a defined result: integers by 0 on a GPU, and large floats on a CPU."""
    arguments = _of_few_digits(arguments)
    dividend, divisor = arguments["self"], arguments["other"]
    if devices.current.aten == "cpu" and isinstance(dividend, float):
        # If the quotient has more digits than the dtype, ATen's vector loop returns nan.
        return arguments | {"self": math.fmod(dividend, 1024.0) if math.isfinite(dividend) else dividend}
    if devices.current.aten == "cpu" and facts.real(dividend) and dividend.is_floating_point():
        # The limit leaves digits for a divisor of 0.001.
        large = dividend.double().abs().nan_to_num(0, 0, 0) > 2.0**20
        return arguments | {"self": dividend.masked_fill(large, 1024.0)} if large.any() else arguments
    if devices.current.aten != "cpu" and type(divisor) in (bool, int) and divisor == 0:
        return arguments | {"other": 1}
    flags = isinstance(divisor, torch.Tensor) and divisor.dtype is torch.bool
    if devices.current.aten == "cpu" or not (flags or (facts.real(divisor) and not divisor.is_floating_point())):
        return arguments
    return arguments | {"other": divisor.masked_fill(divisor == 0, 1)}


@facts.drawn("pow")
def _known_parity(arguments: dict[str, Any]) -> dict[str, Any]:
    """Limit an exponent to numbers whose parity every dtype keeps: ATen rounds it in its vector loop alone."""
    exponent = arguments["exponent"]
    if devices.current.aten != "cpu" or type(exponent) not in (int, float) or not 2**7 < abs(exponent) < math.inf:
        return arguments
    return arguments | {"exponent": type(exponent)(math.copysign(128, exponent))}


@facts.drawn("_add_relu")
def _finite_sums(arguments: dict[str, Any]) -> dict[str, Any]:
    """Avoid sums that are nan, whose results differ between ATen's vector and scalar loops."""

    def finite(value: Any) -> Any:
        if facts.real(value) and value.is_floating_point():
            return value.nan_to_num(1.0, 2.0, -2.0)
        return math.copysign(2.0, value) if isinstance(value, float) and math.isinf(value) else value

    return {name: finite(value) for name, value in arguments.items()}


@facts.drawn("ldexp")
def _exponents(arguments: dict[str, Any]) -> dict[str, Any]:
    """Limit the exponent: if 2^exponent overflows, versions of ATen differ in the result for 0."""
    exponent = arguments["other"]
    if not facts.real(exponent) or exponent.dtype is torch.bool:
        return arguments
    return arguments | {"other": exponent.clamp(-14, 14)}
