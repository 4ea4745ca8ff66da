"""Embeddings: rows of a table by their numbers, and the gradient of the table."""

from tritonite.catalog import operator
from tritonite.dispatch.call import zeros
from tritonite.dtypes import BITS, FLOATS
from tritonite.engine.indexing.places import IN_RANGE, Index
from tritonite.engine.indexing.segments import add_rows_at
from tritonite.engine.rows.declare import outputs
from tritonite.errors import Decline
from tritonite.ops.indexing import check_index, select


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
