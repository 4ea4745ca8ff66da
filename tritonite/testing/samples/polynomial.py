"""Orthogonal polynomials."""

from __future__ import annotations

from typing import Any

import torch

from tritonite.testing.samples import facts

_POLYNOMIALS = {
    "special_chebyshev_polynomial_t",
    "special_chebyshev_polynomial_u",
    "special_chebyshev_polynomial_v",
    "special_chebyshev_polynomial_w",
    "special_hermite_polynomial_h",
    "special_hermite_polynomial_he",
    "special_laguerre_polynomial_l",
    "special_legendre_polynomial_p",
    "special_shifted_chebyshev_polynomial_t",
    "special_shifted_chebyshev_polynomial_u",
    "special_shifted_chebyshev_polynomial_v",
    "special_shifted_chebyshev_polynomial_w",
}
facts.NAN_UNDEFINED |= _POLYNOMIALS


@facts.drawn(*_POLYNOMIALS)
def _few_steps(arguments: dict[str, Any]) -> dict[str, Any]:
    """Limit the degree, which is a number of steps."""
    n = arguments["n"]
    if facts.real(n):
        return arguments | {"n": (n.nan_to_num(0, 9, -9) if n.is_floating_point() else n).clamp(max=9)}
    return arguments if isinstance(n, (torch.Tensor, complex)) else arguments | {"n": type(n)(3)}


def _degree(tensor: torch.Tensor) -> torch.Tensor:
    """Limit the degree to 600, in place to keep the layout: it is a number of steps, 2^63 for an infinite one.

    6 divides the limit, so that no Chebyshev polynomial of this degree has a zero at 0 or 1/2, which would be roundoff.
    """
    return tensor.clamp_(max=600) if tensor.is_floating_point() else tensor


facts.TENSORS["n"] = _degree
