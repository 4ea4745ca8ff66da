"""Orthogonal polynomials."""

from __future__ import annotations

import torch

from tritonite.testing.samples import facts

facts.NAN_UNDEFINED |= {
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


def _degree(tensor: torch.Tensor) -> torch.Tensor:
    """In place, for the layout's sake: ATen's CUDA kernels take 2^63 steps for an infinite degree."""
    return tensor.clamp_(max=1000) if tensor.is_floating_point() else tensor


facts.TENSORS["n"] = _degree
