"""Scale rows of a table to a maximum norm, each row once however often it is indexed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonite.dtypes import TRITON_DTYPES, opmath
from tritonite.engine.indexing.indices import row_major
from tritonite.engine.iteration import power_of_2
from tritonite.language.indices import strided_offset
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import zeros
from tritonite.runtime.launch import ASSERTING
from tritonite.runtime.libentry import libentry


@libentry()
@triton.jit
def _renormalize(
    weight,
    claimed,
    indices,
    shape,
    index_strides,
    strides,
    n_rows,
    n_columns,
    max_norm: tl.float64,
    SQUARED: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Scale the row of one index if its norm exceeds `max_norm`, unless another program has claimed the row.

    SQUARED selects the 2-norm, otherwise the 1-norm. `claimed` has a counter for each row.
    """
    wait_for_previous_launch()
    index = tl.load(indices + strided_offset(tl.program_id(0).to(tl.int64), shape, index_strides)).to(tl.int64)
    inside = (index >= 0) & (index < n_rows)
    tl.device_assert(inside, "index out of range in embedding_renorm_")
    if inside:
        claims = tl.atomic_add(claimed + index, 1)
        if claims == 0:
            row = weight + index * strides[0]
            column = tl.arange(0, BLOCK)
            total = tl.zeros((BLOCK,), COMPUTE)
            for begin in range(0, n_columns, BLOCK):
                offset = (begin + column).to(tl.int64) * strides[1]
                value = tl.load(row + offset, mask=begin + column < n_columns, other=0).to(COMPUTE)
                total += value * value if SQUARED else tl.abs(value)
            norm = tl.sum(total, axis=0)
            norm = (tl.sqrt(norm) if SQUARED else norm).to(tl.float64)
            if norm > max_norm:
                factor = (max_norm / (norm + 1e-7)).to(COMPUTE)
                for begin in range(0, n_columns, BLOCK):
                    offset = (begin + column).to(tl.int64) * strides[1]
                    mask = begin + column < n_columns
                    value = tl.load(row + offset, mask=mask, other=0).to(COMPUTE) * factor
                    tl.store(row + offset, value.to(weight.dtype.element_ty), mask=mask)


def renormalize_rows(weight: torch.Tensor, indices: torch.Tensor, max_norm: float, squared: bool) -> None:
    """Scale, in place, the indexed rows of a matrix whose 2-norm (`squared`) or 1-norm exceeds `max_norm`."""
    sizes, (strides,) = row_major(indices.shape, [indices.stride()])
    _renormalize[(indices.numel(),)](
        *(weight, zeros((len(weight),), torch.int32, weight.device), indices, tuple(sizes[:-1]), tuple(strides)),
        *(weight.stride(), *weight.shape, max_norm),
        SQUARED=squared,
        COMPUTE=TRITON_DTYPES[opmath(weight.dtype)],
        BLOCK=min(1024, max(128, power_of_2(weight.shape[1]))),
        **ASSERTING,
    )
