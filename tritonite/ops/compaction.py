"""nonzero, masked_select, masked_scatter, repeat_interleave: results whose number of elements data decides.

If that number is the size of a result, the host waits for it once.
"""

import torch

from tritonite.dtypes import ALL, WITH_COMPLEX
from tritonite.engine.indexing.compact import Found, fill_rest
from tritonite.engine.indexing.repeat import check_repeats, repeat
from tritonite.engine.iteration import broadcast_shape, expand_strides
from tritonite.engine.outputs import outputs
from tritonite.errors import Decline
from tritonite.ops.aten import on_cpu
from tritonite.ops.indexing import check_index
from tritonite.ops.scan import cumsum
from tritonite.ops.scatter import destination
from tritonite.registry import exclude, operator
from tritonite.runtime.contract import empty, empty_strided, read, zeros

# The most dimensions of a mask whose elements ATen finds.
_MOST_DIMS = 64 if on_cpu() else 25

for _name in ("masked_select.out", "nonzero.out", "repeat_interleave.Tensor_out"):
    exclude(_name, "data decides the size of its output, which ATen resizes then")


@operator("nonzero", accepts=ALL)
def nonzero(self, outs=()):
    """Return the coordinates of nonzero elements. One dimension's coordinates are contiguous, as in ATen's result."""
    outputs((self,), [], [], ())
    found = Found(self, self.shape, self.stride())
    (count,) = read(found.total)
    result = empty_strided((count, self.dim()), (1, count), torch.int64, self.device)
    found.write_coordinates(result, 1, count)
    return (result,)


@operator("nonzero_static", accepts=ALL)
def nonzero_static(self, size, fill_value=-1, outs=()):
    if size < 0 or self.dim() > _MOST_DIMS:
        raise Decline(f"size {size} and {self.dim()} dimensions; sizes from 0 and {_MOST_DIMS} dimensions are served")
    # On a GPU ATen returns a transposed tensor, as nonzero does.
    strides = (self.dim(), 1) if on_cpu() else (1, size)
    (out,) = outputs((self,), [(size, self.dim())], [torch.int64], outs, strides=strides)
    found = Found(self, self.shape, self.stride())
    found.write_coordinates(out, *out.stride(), size)
    fill_rest(out, found.total, fill_value)
    return (out,)


def _under_mask(self: torch.Tensor, mask: torch.Tensor) -> tuple[Found, list[int]]:
    """Broadcast a mask and a tensor; return (the set elements of the mask, the tensor's strides over the shape)."""
    if mask.dtype is not torch.bool:
        raise Decline(f"a mask of {mask.dtype}, not of bool")
    shape = broadcast_shape((self.shape, mask.shape))
    found = Found(mask, shape, expand_strides(mask.shape, mask.stride(), shape))
    return found, expand_strides(self.shape, self.stride(), shape)


@operator("masked_select", accepts=WITH_COMPLEX)
def masked_select(self, mask, outs=()):
    outputs((self, mask), [], [], (), accepts=WITH_COMPLEX)
    found, strides = _under_mask(self, mask)
    (count,) = read(found.total)
    result = empty((count,), self.dtype, self.device)
    found.move(result, self, strides, gathers=True)
    return (result,)


@operator("masked_scatter", accepts=WITH_COMPLEX)
def masked_scatter(self, mask, source, outs=()):
    """Return a contiguous result of the shape that self and mask broadcast to."""
    if source.dtype is not self.dtype:
        raise Decline(f"a source of {source.dtype} for {self.dtype}")
    shape = broadcast_shape((self.shape, mask.shape))
    if outs and shape != tuple(self.shape):
        raise Decline(f"a mask of shape {tuple(mask.shape)}, which broadcasts an output of shape {tuple(self.shape)}")
    out = destination(self.expand(shape) if shape != tuple(self.shape) else self, (mask, source), outs, WITH_COMPLEX)
    found, strides = _under_mask(out, mask)
    found.move(out, source, strides, gathers=False, limit=source.numel(), message=_TOO_FEW)
    return (out,)


_TOO_FEW = "masked_scatter_size_check: totalElements <= srcSize"


@operator("masked_scatter_backward", accepts=WITH_COMPLEX)
def masked_scatter_backward(grad_output, mask, sizes, outs=()):
    """Return the gradient of the source; elements that were not copied have 0."""
    outputs((grad_output, mask), [], [], (), accepts=WITH_COMPLEX)
    if outs or any(size < 0 for size in sizes):
        raise Decline("outputs, or a size of -1")
    if mask.dim() > _MOST_DIMS:
        raise Decline(f"a mask of {mask.dim()} dimensions; up to {_MOST_DIMS} are served")
    found, strides = _under_mask(grad_output, mask)
    if torch.Size(sizes).numel() < found.n:
        raise Decline(f"a source that may be too small for {found.n} elements, for which ATen raises an error")
    result = zeros(tuple(sizes), grad_output.dtype, grad_output.device)
    found.move(result, grad_output, strides, gathers=True)
    return (result,)


@operator("repeat_interleave", accepts=(torch.int32, torch.int64))
def repeat_interleave(repeats, output_size=None, outs=()):
    """Find each index's element by binary search in the cumulated repeats, the last of which is the result's size."""
    check_index(repeats)
    if repeats.dim() != 1 or not repeats.numel() or (output_size is not None and output_size < 0):
        raise Decline(f"repeats of shape {tuple(repeats.shape)} and output size {output_size}")
    (ends,) = cumsum(repeats, 0, torch.int64)
    check_repeats(repeats, ends, -1 if output_size is None else output_size)
    total = read(ends[-1:])[0] if output_size is None else output_size
    if output_size is None and total.value < 0:
        raise Decline("a negative number of repeats", lasting=False)
    result = empty((total,), repeats.dtype, repeats.device)
    repeat(result, ends, total)
    return (result,)
