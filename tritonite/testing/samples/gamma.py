"""The gamma function and related functions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tritonite.testing.samples import facts

# The orders of polygamma and of mvlgamma.
facts.INTEGERS |= {"n": 2, "p": 1}


@facts.drawn("polygamma", "mvlgamma")
def _low_order(arguments: dict[str, Any]) -> dict[str, Any]:
    """Limit the order, which is a number of steps or an exponent."""
    return {name: min(value, 9) if isinstance(value, int) else value for name, value in arguments.items()}


def _polygamma(*operands: Any, **named: Any) -> torch.Tensor:
    """Return polygamma, with the reflection formula for trigamma, where ATen's is inexact near poles."""
    # The tensor comes first if the call is in place or names the order.
    operands = (*operands, *named.values())
    n, self = operands if isinstance(operands[1], torch.Tensor) else operands[::-1]
    result = torch.polygamma(n, self)
    if n != 1 or not self.is_floating_point():
        return result
    sine = torch.sin(math.pi * (self - self.round()))
    return torch.where(
        (self < 0.5) & (self != self.round()), (math.pi / sine) ** 2 - torch.polygamma(1, 1 - self), result
    )


facts.REFERENCES["polygamma"] = _polygamma


@facts.terms("polygamma")
def _terms_between_poles(sums: facts.Sums) -> float:
    """Return the terms that cancel halfway between two poles in float64; narrower dtypes are computed in float64."""
    if sums.result.dtype is not torch.float64 or not any(bool((x < 0).any()) for x in sums.tensors):
        return sums.per_element()
    # Terms cancel for even orders alone.
    orders = [n for n in pytree.tree_leaves(sums.operands) if type(n) is int and n % 2 == 0 and n <= 8]
    order = max(orders, default=0)
    return (math.factorial(order) * 2.0 ** (order + 1)) ** 2 if order > 0 else 1.0


def _incomplete_gamma(upper: bool) -> Any:
    """Return a reference that asks mpmath where ATen is inexact in float64: for orders above 20 or below 1."""

    def reference(self: torch.Tensor, other: torch.Tensor, **_: Any) -> torch.Tensor:
        import mpmath

        result = (torch.special.gammaincc if upper else torch.special.gammainc)(self, other)
        orders, points = (x.expand(result.shape) for x in (self, other))
        unsure = (orders < 1) | ((orders > 20) & (orders < 1e6))
        for where in (unsure & (orders > 0) & (points > 0) & (points < 1e6)).nonzero()[:_LIMIT_OF_MPMATH]:
            a, x = float(orders[tuple(where)]), float(points[tuple(where)])
            bounds = (x, mpmath.inf) if upper else (0, x)
            result[tuple(where)] = float(mpmath.gammainc(a, *bounds, regularized=True))
        return result

    return reference


# Elements of a result that mpmath computes; it takes long.
_LIMIT_OF_MPMATH = 1000
facts.REFERENCES |= {"igamma": _incomplete_gamma(False), "igammac": _incomplete_gamma(True)}


@facts.drawn("special_zeta")
def _away_from_cancellation(arguments: dict[str, Any]) -> dict[str, Any]:
    """Avoid the middle between two poles, where terms of odd powers cancel and leave roundoff."""
    other = arguments["other"]
    if not isinstance(other, float) or not other < 0 or other % 1 != 0.5:
        return arguments
    return arguments | {"other": other + 0.25}
