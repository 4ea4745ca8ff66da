"""embedding_bag: the sum, mean or maximum of a table's rows that the indices of each bag select, and its gradients."""

import torch

from tritonite.dtypes import FLOATS, INTS
from tritonite.engine.indexing.bags import add_to_maxima, combine_bags, factor_gradients
from tritonite.engine.indexing.indices import IN_RANGE, Index
from tritonite.engine.indexing.segments import Bags, add_rows_at
from tritonite.engine.movement import fill_zero, move
from tritonite.engine.outputs import outputs
from tritonite.errors import Decline
from tritonite.ops import aten
from tritonite.ops.indexing import check_index
from tritonite.ops.scatter import refuse_if_deterministic
from tritonite.registry import operator
from tritonite.runtime.contract import empty, zeros

_MODES = ("sum", "mean", "max")
_ACCEPTED = FLOATS + INTS


def _check(table, *vectors, factors=None, mode=0):
    """Decline a table that is not a float matrix, and indices that are not contiguous vectors of one dtype."""
    if table.dim() != 2 or table.dtype not in FLOATS or mode not in (0, 1, 2):
        raise Decline(f"a table of {table.dtype} and {table.dim()} dimensions, or mode {mode}")
    for vector in vectors:
        check_index(vector)
        if vector.dim() != 1 or not vector.is_contiguous() or vector.dtype is not vectors[0].dtype:
            raise Decline("indices or offsets that are not contiguous vectors of one dtype")
    if factors is not None and (mode or factors.dtype is not table.dtype or factors.shape != vectors[0].shape):
        raise Decline(f"sample weights of {factors.dtype} and shape {tuple(factors.shape)}, in mode {_MODES[mode]}")
    outputs((table, *vectors, *(() if factors is None else (factors,))), [], [], (), accepts=_ACCEPTED)


def _check_served_on_gpus(grad):
    if grad.dtype is torch.bfloat16 and aten.on_gpu():
        raise Decline("bfloat16, for whose gradient ATen raises on GPUs")


def _bag_outputs_on_cpu(weight, offsets, mode, factors, padding, count, sized):
    """Return what ATen's CPU kernels write about bags.

    The tuple has: whether they write the bag of each index, the number of sizes, whether the sizes are counted.
    """
    plain = weight.dtype is not torch.float64 and weight.stride(1) == 1 and padding < 0
    fast = plain and (factors is None or factors.stride(0) == 1)
    return mode != 0 or not fast, count if mode or sized else len(offsets), mode != 0


def _embedding_bag(weight, indices, offsets, mode, factors, last, padding, outs, sized):
    _check(weight, indices, offsets, factors=factors, mode=mode)
    count = len(offsets) - last
    if not weight.numel() or count <= 0:
        raise Decline(f"{count} bags, or a table without elements")
    device, dtype = weight.device, indices.dtype
    writes_bags, n_sizes, counts = True, len(offsets), True
    if aten.on_cpu():
        writes_bags, n_sizes, counts = _bag_outputs_on_cpu(weight, offsets, mode, factors, padding, count, sized)
    shape = (count, weight.shape[1])
    shapes = [
        shape,
        (len(indices) * writes_bags,),
        (n_sizes,),
        shape if mode == 2 else (n_sizes if aten.on_cpu() else 0,),
    ]
    if outs:
        inputs = (weight, indices, offsets, *(() if factors is None else (factors,)))
        outs = outputs(inputs, shapes, [weight.dtype, dtype, dtype, dtype], outs, accepts=_ACCEPTED)
    out = empty(shape, weight.dtype, device)
    bags, sizes, maximum_rows = [empty(own, dtype, device) for own in shapes[1:]]
    combine_bags(
        _MODES[mode],
        out,
        bags if writes_bags else None,
        sizes if counts else None,
        maximum_rows if mode == 2 else None,
        weight,
        indices,
        offsets,
        factors,
        padding,
        0 if aten.on_cpu() else -1,
        last,
    )
    if not counts:
        fill_zero(sizes)
    if aten.on_cpu() and mode != 2:
        move(sizes, maximum_rows)
    results = (out, bags, sizes, maximum_rows)
    for given, found in zip(outs, results, strict=False):
        move(found, given)
    return outs or results


@operator("_embedding_bag", accepts=FLOATS)
def embedding_bag(
    weight,
    indices,
    offsets,
    scale_grad_by_freq=False,
    mode=0,
    sparse=False,
    per_sample_weights=None,
    include_last_offset=False,
    padding_idx=-1,
    outs=(),
):
    """Combine the rows of bags. `scale_grad_by_freq` and `sparse` concern the gradient only."""
    return _embedding_bag(
        weight, indices, offsets, mode, per_sample_weights, include_last_offset, padding_idx, outs, True
    )


@operator("_embedding_bag_forward_only", accepts=FLOATS)
def embedding_bag_forward_only(
    weight,
    indices,
    offsets,
    scale_grad_by_freq=False,
    mode=0,
    sparse=False,
    per_sample_weights=None,
    include_last_offset=False,
    padding_idx=-1,
    outs=(),
):
    return _embedding_bag(
        weight, indices, offsets, mode, per_sample_weights, include_last_offset, padding_idx, outs, False
    )


@operator("_embedding_bag_dense_backward", accepts=FLOATS)
def embedding_bag_dense_backward(
    grad,
    indices,
    offset2bag,
    bag_size,
    maximum_indices,
    num_weights,
    scale_grad_by_freq,
    mode,
    per_sample_weights,
    padding_idx=-1,
    outs=(),
):
    """Add up the gradients of each row in the order of the indices, those of maxima in no order."""
    _check(grad, indices, offset2bag, bag_size, factors=per_sample_weights, mode=mode)
    outs = outputs((grad,), [(num_weights, grad.shape[1])] * len(outs), [grad.dtype] * len(outs), outs) if outs else ()
    if len(bag_size) < len(grad) or num_weights <= 0:
        raise Decline(f"{len(bag_size)} sizes for {len(grad)} bags, or {num_weights} rows")
    if mode == 2:
        _check_served_on_gpus(grad)
        refuse_if_deterministic()
        check_index(maximum_indices)
        if maximum_indices.shape != grad.shape:
            raise Decline(
                f"maximum indices of shape {tuple(maximum_indices.shape)} for gradients of {tuple(grad.shape)}"
            )
        sizes = bag_size if aten.on_cpu() else None
        result = add_to_maxima(grad, maximum_indices, sizes, num_weights, -1 if aten.on_cpu() else padding_idx)
    else:
        if offset2bag.shape != indices.shape or (per_sample_weights is not None and per_sample_weights.stride(0) != 1):
            raise Decline("no bag for each index, or sample weights that are not contiguous")
        result = zeros((num_weights, grad.shape[1]), grad.dtype, grad.device)
        add_rows_at(
            result,
            (len(indices), grad.shape[1]),
            (0,),
            (0, 1),
            [Index(indices, (1, 0), num_weights, (grad.shape[1],))],
            grad,
            grad.stride(),
            overwrite="mean" if scale_grad_by_freq else "sum",
            skipped=padding_idx if padding_idx >= 0 else -(2**31),
            message=IN_RANGE,
            bags=Bags(offset2bag, per_sample_weights, bag_size if mode == 1 else None),
        )
    for out in outs:
        move(result, out)
    return outs or (result,)


@operator("_embedding_bag_per_sample_weights_backward", accepts=FLOATS)
def embedding_bag_per_sample_weights_backward(
    grad, weight, indices, offsets, offset2bag, mode, padding_idx=-1, outs=()
):
    _check(grad, indices, offsets, offset2bag, mode=mode)
    _check_served_on_gpus(grad)
    if mode or weight.dtype is not grad.dtype or weight.dim() != 2 or weight.shape[1] != grad.shape[1]:
        raise Decline(f"a table of {weight.dtype} and shape {tuple(weight.shape)}, or mode {_MODES[mode]}, not sum")
    if offset2bag.shape != indices.shape or not grad.numel() or not weight.numel():
        raise Decline("no bag for each index, or no elements")
    outs = outputs((grad, weight, indices), [indices.shape], [grad.dtype], outs, accepts=_ACCEPTED)
    direct = outs[0].is_contiguous()
    out = outs[0] if direct else empty(indices.shape, grad.dtype, grad.device)
    if len(indices):
        factor_gradients(out, grad, weight, indices, offset2bag, padding_idx)
    if not direct:
        move(out, outs[0])
    return outs
