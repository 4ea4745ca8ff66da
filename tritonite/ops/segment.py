"""Reductions of segments of a tensor, which lengths or offsets tell, and their gradients."""

import torch

from tritonite.dtypes import FLOATS, INTS
from tritonite.engine.movement import move
from tritonite.engine.outputs import dimensions, outputs
from tritonite.engine.segmented import IDENTITIES, Segments, reduce_segments, segment_gradients
from tritonite.errors import Decline
from tritonite.ops.indexing import check_index
from tritonite.ops.scan import cumsum
from tritonite.ops.scatter import check_number
from tritonite.registry import operator
from tritonite.runtime.contract import empty, zeros
from tritonite.runtime.symbols import number_type


def _contiguous(tensor):
    """A tensor, or a contiguous copy of it."""
    if tensor.is_contiguous():
        return tensor
    copy = empty(tensor.shape, tensor.dtype, tensor.device)
    move(tensor, copy)
    return copy


_REDUCTIONS = {"amax": "max", "amin": "min"} | {name: name for name in IDENTITIES}


def _check(data, reduce, lengths, offsets, axis, initial, *others):
    """What tells of the segments, and the dimension they are in. Declines what ATen refuses."""
    told = lengths if offsets is None else offsets
    if told is None or reduce not in _REDUCTIONS or data.dtype not in FLOATS or not data.numel():
        raise Decline("no segments, an unknown reduction, or another dtype")
    check_index(told)
    (axis,) = dimensions(axis, data.dim()) or (None,)
    if axis is None or axis != told.dim() - 1 or tuple(told.shape[:-1]) != tuple(data.shape[:axis]):
        raise Decline("segments of another dimension")
    if not told.is_contiguous() or (offsets is not None and not told.shape[-1]):
        raise Decline("lengths or offsets that are not contiguous, or no offsets")
    if any(x.dtype is not data.dtype for x in others):
        raise Decline("tensors of several dtypes")
    if initial is not None:
        check_number(data, initial)
        if number_type(initial) is bool:
            raise Decline("a bool for a number")
    outputs((data, told, *others), [], [], (), accepts=FLOATS + INTS)
    return told, axis


def _segments(data, told, axis, cumulated):
    count = told.shape[-1] - (not cumulated)
    bounds = cumsum(told, -1, torch.int64)[0] if cumulated and told.numel() else told
    return Segments(
        *(bounds, cumulated, data.shape[:axis].numel(), data.shape[axis], data.shape[axis + 1 :].numel(), count)
    )


@operator("segment_reduce", accepts=FLOATS)
def segment_reduce(data, reduce, lengths=None, indices=None, offsets=None, axis=0, unsafe=False, initial=None, outs=()):
    if indices is not None or (offsets is None and not unsafe):
        raise Decline("lengths whose sum the host checks")
    told, axis = _check(data, reduce, lengths, offsets, axis, initial)
    segments = _segments(data, told, axis, offsets is None)
    shape = (*data.shape[:axis], segments.n, *data.shape[axis + 1 :])
    outs = outputs((data,), [shape], [data.dtype], outs)
    direct = outs[0].is_contiguous()
    out = outs[0] if direct else empty(shape, data.dtype, data.device)
    segments.launch(reduce_segments, (out, _contiguous(data)), initial, _REDUCTIONS[reduce])
    if not direct:
        move(out, outs[0])
    return outs


@operator("_segment_reduce_backward", accepts=FLOATS)
def segment_reduce_backward(grad, output, data, reduce, lengths=None, offsets=None, axis=0, initial=None, outs=()):
    told, axis = _check(data, reduce, lengths, offsets, axis, initial, grad, output)
    segments = _segments(data, told, axis, offsets is None)
    shape = (*data.shape[:axis], segments.n, *data.shape[axis + 1 :])
    if tuple(grad.shape) != shape or tuple(output.shape) != shape:
        raise Decline("gradients of another shape")
    outs = outputs((grad, output, data), [data.shape] * len(outs), [data.dtype] * len(outs), outs) if outs else ()
    result = zeros(data.shape, data.dtype, data.device)
    tensors = (result, _contiguous(grad), _contiguous(output), _contiguous(data))
    segments.launch(segment_gradients, tensors, initial, _REDUCTIONS[reduce])
    for out in outs:
        move(result, out)
    return outs or (result,)
