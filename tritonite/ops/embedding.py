"""Embeddings: the rows of a table that indices select, the gradient of the table, and its renormalization."""

from tritonite.dtypes import ALL, BITS, FLOATS
from tritonite.engine.indexing.indices import IN_RANGE, Index
from tritonite.engine.indexing.renorm import renormalize_rows
from tritonite.engine.indexing.segments import add_rows_at
from tritonite.engine.movement import strides_like
from tritonite.engine.outputs import outputs
from tritonite.errors import Decline
from tritonite.ops import aten
from tritonite.ops.indexing import check_index, select
from tritonite.ops.scatter import destination
from tritonite.registry import operator
from tritonite.runtime.contract import zeros


@operator("embedding", accepts=BITS)
def embedding(weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False, outs=()):
    """Select rows. `padding_idx`, `scale_grad_by_freq` and `sparse` concern the gradient only."""
    if weight.dim() != 2:
        raise Decline(f"a weight of {weight.dim()} dimensions, not 2")
    return select(weight, 0, indices, (*indices.shape, weight.shape[1]), outs)


@operator("embedding_dense_backward", accepts=FLOATS)
def embedding_dense_backward(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq, outs=()):
    """Add up the gradients of each row in the order of the indices."""
    check_index(indices)
    width, rows = grad_output.shape[-1] if grad_output.dim() else 0, tuple(indices.shape)
    if tuple(grad_output.shape) != (*rows, width) or grad_output.dtype not in FLOATS:
        raise Decline(f"a gradient of {grad_output.dtype} and shape {tuple(grad_output.shape)} for indices of {rows}")
    if not -(2**31) < padding_idx < 2**31:
        raise Decline(f"padding index {padding_idx}, which ATen truncates to 32 bits on GPUs")
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
        overwrite="mean" if scale_grad_by_freq else "sum",
        skipped=padding_idx if padding_idx >= 0 else -(2**31),
        message=IN_RANGE,
    )
    for out in outs:
        out.copy_(result)
    return outs or (result,)


def _has_contiguous_rows(self, outs):
    """Return whether rows have no gaps in the tensor that ATen scales: `self` in place, otherwise a copy."""
    rows, in_place = (self.shape[1], 1), bool(outs) and outs[0] is self
    return self.stride() == rows or (not in_place and strides_like(self, None) == rows)


@operator("embedding_renorm", accepts=FLOATS, pin=("norm_type",))
def embedding_renorm(self, indices, max_norm, norm_type, outs=()):
    """Scale rows to a maximum norm, each once."""
    check_index(indices)
    if self.dim() != 2 or norm_type not in (1.0, 2.0) or self.dtype not in FLOATS:
        raise Decline(f"{self.dim()} dimensions of {self.dtype} and norm {norm_type}, not a matrix and norm 1 or 2")
    if aten.on_gpu() and not indices.numel():
        raise Decline("no indices, for which ATen's launch fails on GPUs")
    if aten.on_gpu() and not _has_contiguous_rows(self, outs):
        raise Decline("rows that are not contiguous, for which ATen reads as many elements as the row stride on GPUs")
    out = destination(self, (indices,), outs, ALL, like=True)
    if not indices.numel() or not self.numel():
        raise Decline("no indices, or a table without elements")
    # On a CPU ATen takes the absolute value of a single element, whose square may overflow.
    squares = norm_type == 2 and not (aten.on_cpu() and self.shape[1] == 1)
    renormalize_rows(out, indices, max_norm, squares)
    return (out,)
