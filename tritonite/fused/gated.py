"""Gated activations, which the feed-forward layers of transformers have: an activation of one half times the other."""

from __future__ import annotations

import torch
import triton.language as tl

from tritonite.catalog import library_operator, scalar_kernel
from tritonite.dtypes import FLOATS
from tritonite.errors import Decline
from tritonite.language.math import true_divide


def silu_and_mul(x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
    """silu(x) * y, or, of one tensor, silu of the first half of its last dimension times the second half."""
    return torch.ops.tritonite.silu_and_mul(x, y)


@scalar_kernel(accepts=FLOATS)
def _silu_and_mul(x, y):
    return true_divide(x, 1.0 + tl.exp(-x)) * y


def _halves(x, y):
    if y is None:
        if not x.dim() or x.shape[-1] % 2:
            raise Decline("a last dimension that has no halves")
        return x.chunk(2, dim=-1)
    return x, y


def _gated_shape(x, y):
    return x.shape if y is not None else (*x.shape[:-1], x.shape[-1] // 2)


@library_operator(
    "silu_and_mul(Tensor x, Tensor? y=None) -> Tensor",
    fake=lambda x, y=None: torch.empty_like(
        x if y is not None else x.chunk(2, dim=-1)[0], memory_format=torch.contiguous_format
    ),
    accepts=FLOATS,
)
def silu_and_mul_host(x, y=None):
    return _silu_and_mul.run(_halves(x, y))
