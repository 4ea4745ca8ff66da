"""Embeddings: rows of a table by their numbers, and the gradient of the table."""

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.dtypes import ALL, BITS, FLOATS, TRITON_DTYPES, opmath
from tritonite.engine.indexing.places import IN_RANGE, Index, row_major
from tritonite.engine.indexing.segments import add_rows_at
from tritonite.engine.iteration import power_of_2
from tritonite.engine.movement import strides_like
from tritonite.engine.outputs import outputs
from tritonite.engine.rows.kernels import strided_offset
from tritonite.errors import Decline
from tritonite.language.order import wait_for_previous_launch
from tritonite.ops.indexing import check_index, select
from tritonite.ops.scatter import destination
from tritonite.registry import operator
from tritonite.runtime.contract import zeros
from tritonite.runtime.launch import ASSERTING
from tritonite.runtime.libentry import libentry

_ON_CPU = devices.current.type == "cpu"


@operator("embedding", accepts=BITS)
def embedding(weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False, outs=()):
    """What concerns gradients alone is theirs."""
    if weight.dim() != 2:
        raise Decline("a weight that is no matrix")
    return select(weight, 0, indices, (*indices.shape, weight.shape[1]), outs)


@operator("embedding_dense_backward", accepts=FLOATS)
def embedding_dense_backward(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq, outs=()):
    """Gradients of one row are added up in their order."""
    check_index(indices)
    width, rows = grad_output.shape[-1] if grad_output.dim() else 0, tuple(indices.shape)
    if tuple(grad_output.shape) != (*rows, width) or grad_output.dtype not in FLOATS:
        raise Decline("a gradient of another shape or dtype")
    if not -(2**31) < padding_idx < 2**31:
        raise Decline("a padding index that ATen's kernels for GPUs cut to 32 bits")
    outputs((grad_output, indices), [(num_weights, width)] * len(outs), [grad_output.dtype] * len(outs), outs)
    result = zeros((num_weights, width), grad_output.dtype, grad_output.device)
    add_rows_at(
        result,
        grad_output.shape,
        range(len(rows)),
        (*[0] * len(rows), 1),
        [Index(indices, (*indices.stride(), 0), num_weights, (width,))],
        grad_output,
        grad_output.stride(),
        added=False,
        averaged=scale_grad_by_freq,
        skipped=padding_idx if padding_idx >= 0 else -(2**31),
        message=IN_RANGE,
    )
    for out in outs:
        out.copy_(result)
    return outs or (result,)


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
    """A program scales the row of an index whose norm is more than `max_norm`, if no other program has claimed it."""
    wait_for_previous_launch()
    place = tl.load(indices + strided_offset(tl.program_id(0).to(tl.int64), shape, index_strides)).to(tl.int64)
    inside = (place >= 0) & (place < n_rows)
    tl.device_assert(inside, "index out of range in embedding_renorm_")
    if inside:
        claims = tl.atomic_add(claimed + place, 1)
        if claims == 0:
            row = weight + place * strides[0]
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


def _has_rows_side_by_side(self, outs):
    """Whether rows follow each other without gaps in what ATen scales: the tensor itself in place, or else a copy."""
    rows, in_place = (self.shape[1], 1), bool(outs) and outs[0] is self
    return self.stride() == rows or (not in_place and strides_like(self, None) == rows)


@operator("embedding_renorm", accepts=FLOATS, pin=("norm_type",))
def embedding_renorm(self, indices, max_norm, norm_type, outs=()):
    """Rows that are asked for several times are scaled once."""
    check_index(indices)
    if self.dim() != 2 or norm_type not in (1.0, 2.0) or self.dtype not in FLOATS:
        raise Decline("no matrix, or another norm than those of 1 and 2")
    if not _ON_CPU and not indices.numel():
        raise Decline("no index, which ATen's launch is refused for")
    if not _ON_CPU and not _has_rows_side_by_side(self, outs):
        raise Decline("rows that are apart, of which ATen's kernel for GPUs reads as many elements as their stride")
    out = destination(self, (indices,), outs, ALL, like=True)
    if not indices.numel() or not self.numel():
        raise Decline("no indices, or an index into no elements, which ATen refuses on GPUs")
    indexed, (strides,) = row_major(indices.shape, [indices.stride()])
    _renormalize[(indices.numel(),)](
        *(out, zeros((len(out),), torch.int32, out.device), indices, tuple(indexed[:-1]), tuple(strides)),
        *(out.stride(), *out.shape, max_norm),
        SQUARED=norm_type == 2,
        COMPUTE=TRITON_DTYPES[opmath(out.dtype)],
        BLOCK=min(1024, max(128, power_of_2(out.shape[1]))),
        **ASSERTING,
    )
    return (out,)
