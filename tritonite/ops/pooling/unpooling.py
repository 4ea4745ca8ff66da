"""Maxima written back to the positions that they were pooled from."""

from __future__ import annotations

import torch

from tritonite.dtypes import FLOATS, NUMBERS
from tritonite.engine.indexing.indices import linear_index
from tritonite.engine.indexing.write import write_at
from tritonite.engine.iteration import contiguous_strides
from tritonite.engine.movement import fill_zero, result
from tritonite.engine.outputs import check_layout
from tritonite.errors import Decline
from tritonite.ops import aten
from tritonite.ops.pooling.images import batched, strides_for
from tritonite.registry import operator

# ATen's kernels for CPUs have no integers.
_SERVED = FLOATS if aten.on_cpu() else NUMBERS
# The text of the assertion in ATen's kernels for GPUs.
_IN_RANGE = "maxind >= 0 && maxind < outputImageSize"


def _unpooled(rank, self, indices, output_size, outs):
    """Return zeros with the elements of `self` at their row-major indices. Of several equal indices one remains."""
    if torch.are_deterministic_algorithms_enabled():
        raise Decline("deterministic algorithms, for which ATen raises")
    if self.dim() not in (rank + 1, rank + 2) or 0 in self.shape[1:]:
        raise Decline(f"shape {tuple(self.shape)}; images of {rank} dimensions with channels are served")
    if self.dtype not in _SERVED or indices.dtype is not torch.int64 or indices.shape != self.shape:
        raise Decline(f"{self.dtype} with indices of {indices.dtype} and shape {tuple(indices.shape)}")
    if len(output_size) != rank or min(output_size) < 0 or (self.numel() and 0 in output_size):
        raise Decline(f"output size {list(output_size)} for {rank} dimensions")
    if outs and not outs[0].is_contiguous():
        raise Decline("an output that is not contiguous, for which ATen raises")
    shape = (*self.shape[:-rank], *output_size)
    # ATen's kernel for GPUs has row-major results. That for CPUs gives an output the memory format of the images.
    strides = strides_for(self, shape, rank) if aten.on_cpu() else contiguous_strides(shape)
    check_layout(outs, strides)
    out = result((self, indices), shape, self.dtype, outs, strides)
    fill_zero(out)
    if self.numel():
        values, chosen, written = batched(self, rank), batched(indices, rank), batched(out, rank)
        steps = (*written.stride()[:2], *[0] * rank)
        index = linear_index(chosen, chosen.stride(), written[0, 0])
        write_at(written, tuple(values.shape), steps, [index], values, values.stride(), message=_IN_RANGE)
    return (out,)


@operator("max_unpool2d", accepts=_SERVED)
def max_unpool2d(self, indices, output_size, outs=()):
    return _unpooled(2, self, indices, output_size, outs)


@operator("max_unpool3d", accepts=_SERVED)
def max_unpool3d(self, indices, output_size, stride, padding, outs=()):
    if len(stride) != 3 or len(padding) != 3 or min(stride) < 1:
        raise Decline(f"stride {list(stride)} and padding {list(padding)}; three numbers are served")
    return _unpooled(3, self, indices, output_size, outs)
