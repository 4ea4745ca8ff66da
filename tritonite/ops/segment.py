"""segment_reduce: reductions of segments of a tensor, given by lengths or offsets, and their gradients."""

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
    """Return the tensor, or a contiguous copy of it."""
    if tensor.is_contiguous():
        return tensor
    copy = empty(tensor.shape, tensor.dtype, tensor.device)
    move(tensor, copy)
    return copy


_REDUCTIONS = {"amax": "max", "amin": "min"} | {name: name for name in IDENTITIES}


def _check(data, reduce, lengths, offsets, axis, initial, *others):
    """Return (the lengths or offsets of segments, the dimension they split). Decline calls for which ATen raises."""
    given = lengths if offsets is None else offsets
    if given is None or reduce not in _REDUCTIONS or data.dtype not in FLOATS or not data.numel():
        raise Decline(f"no lengths or offsets, reduction {reduce!r}, dtype {data.dtype}, or no elements")
    check_index(given)
    (axis,) = dimensions(axis, data.dim()) or (None,)
    if axis is None or axis != given.dim() - 1 or tuple(given.shape[:-1]) != tuple(data.shape[:axis]):
        raise Decline(f"lengths or offsets of shape {tuple(given.shape)} for dimension {axis} of {tuple(data.shape)}")
    if not given.is_contiguous() or (offsets is not None and not given.shape[-1]):
        raise Decline("lengths or offsets that are not contiguous, or no offsets")
    if any(x.dtype is not data.dtype for x in others):
        raise Decline("gradients or results of another dtype than the data")
    if initial is not None:
        check_number(data, initial)
        if number_type(initial) is bool:
            raise Decline("a bool as the initial value")
    outputs((data, given, *others), [], [], (), accepts=FLOATS + INTS)
    return given, axis


def _segments(data, given, axis, cumulated):
    count = given.shape[-1] - (not cumulated)
    bounds = cumsum(given, -1, torch.int64)[0] if cumulated and given.numel() else given
    return Segments(
        *(bounds, cumulated, data.shape[:axis].numel(), data.shape[axis], data.shape[axis + 1 :].numel(), count)
    )


@operator("segment_reduce", accepts=FLOATS)
def segment_reduce(data, reduce, lengths=None, indices=None, offsets=None, axis=0, unsafe=False, initial=None, outs=()):
    if indices is not None or (offsets is None and not unsafe):
        raise Decline("indices, or lengths whose sum the host checks (unsafe=False)")
    given, axis = _check(data, reduce, lengths, offsets, axis, initial)
    segments = _segments(data, given, axis, offsets is None)
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
    given, axis = _check(data, reduce, lengths, offsets, axis, initial, grad, output)
    segments = _segments(data, given, axis, offsets is None)
    shape = (*data.shape[:axis], segments.n, *data.shape[axis + 1 :])
    if tuple(grad.shape) != shape or tuple(output.shape) != shape:
        raise Decline("gradients or results of another shape than the segments'")
    outs = outputs((grad, output, data), [data.shape] * len(outs), [data.dtype] * len(outs), outs) if outs else ()
    result = zeros(data.shape, data.dtype, data.device)
    tensors = (result, _contiguous(grad), _contiguous(output), _contiguous(data))
    segments.launch(segment_gradients, tensors, initial, _REDUCTIONS[reduce])
    for out in outs:
        move(result, out)
    return outs or (result,)
