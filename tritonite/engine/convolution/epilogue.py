"""The end of convolutions: a residual, an activation, and the sums before it, which the gradient may need."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl


class Epilogue(NamedTuple):
    """Operations on a convolution before it is stored: activation(convolution + bias + residual)."""

    # A `triton.jit` function of a block in the dtype of the sums, or None.
    activation: Any = None
    # Tensors of the shape and strides of the result, or None: an addend, and where to store the activation's operand.
    residual: torch.Tensor | None = None
    sums: torch.Tensor | None = None


NO_EPILOGUE = Epilogue()


@triton.jit
def store_results(total, out, residual, sums, offset, mask, ACTIVATION: tl.constexpr):
    """Store ACTIVATION(total + residual) in `out`, and its operand in `sums`, at the same offsets.

    Args:
        total: a block of the convolution plus the bias.
        out, residual, sums: addresses of the tensors; the last two may be None.
        offset, mask: of the block's elements.
        ACTIVATION: a device function of a block, or None.
    """
    if residual is not None:
        total += tl.load(residual + offset, mask=mask, other=0.0).to(total.dtype)
    if sums is not None:
        tl.store(sums + offset, total.to(sums.dtype.element_ty), mask=mask)
    if ACTIVATION is not None:
        total = ACTIVATION(total)
    tl.store(out + offset, total.to(out.dtype.element_ty), mask=mask)
