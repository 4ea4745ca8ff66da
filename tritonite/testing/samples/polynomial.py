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
    """A degree is a number of steps of ATen's loops."""
    n = arguments["n"]
    if facts.real(n):
        return arguments | {"n": (n.nan_to_num(0, 9, -9) if n.is_floating_point() else n).clamp(max=9)}
    return arguments if isinstance(n, (torch.Tensor, complex)) else arguments | {"n": type(n)(3)}


def _degree(tensor: torch.Tensor) -> torch.Tensor:
    """In place, for the layout's sake: ATen's CUDA kernels take 2^63 steps for an infinite degree.

    Where 6 divides the degree, no Chebyshev polynomial has a zero at 0 or 1/2, which would show all of its roundoff.
    """
    return tensor.clamp_(max=600) if tensor.is_floating_point() else tensor


facts.TENSORS["n"] = _degree
