"""Device functions that declarations of reductions and the norm engine share."""

from __future__ import annotations

import triton


@triton.jit
def add_states(a, b):
    return a + b


@triton.jit
def add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def normalized_by(x, mean, rstd):
    return (x - mean) * rstd


@triton.jit
def gradient_of_normalized(weighted, normalized, mean_weighted, mean_product, rstd):
    """Return the gradient by x, from the output's gradient times the weight, and from x normalised.

    The two means over a row are those of `weighted` and of `weighted * normalized`.
    """
    return (weighted - mean_weighted - normalized * mean_product) * rstd
