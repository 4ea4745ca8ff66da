"""What is not 0: its places, and what stands there. Data decides how much that is.

Where its amount is the size of a result, the host waits for it once.
"""

import torch
import triton
import triton.language as tl

from tritonite.dtypes import ALL, WITH_COMPLEX
from tritonite.engine.indexing.compact import Found, fill_rest
from tritonite.engine.iteration import broadcast_shape, expand_strides
from tritonite.engine.outputs import outputs
from tritonite.errors import Decline
from tritonite.language.order import wait_for_previous_launch
from tritonite.ops.indexing import check_index
from tritonite.ops.scan import cumsum
from tritonite.ops.scatter import destination
from tritonite.registry import exclude, operator
from tritonite.runtime.contract import empty, empty_strided, read, zeros
from tritonite.runtime.launch import ASSERTING
from tritonite.runtime.libentry import libentry

for _name in ("masked_select.out", "nonzero.out", "repeat_interleave.Tensor_out"):
    exclude(_name, "data decides the size of its output, which ATen resizes then")


@operator("nonzero", accepts=ALL)
def nonzero(self, outs=()):
    """Places lie in rows of one coordinate each, as ATen has them."""
    outputs((self,), [], [], ())
    found = Found(self, self.shape, self.stride())
    (count,) = read(found.total)
    result = empty_strided((count, self.dim()), (1, count), torch.int64, self.device)
    found.write_coordinates(result, 1, count)
    return (result,)


@operator("nonzero_static", accepts=ALL)
def nonzero_static(self, size, fill_value=-1, outs=()):
    if size < 0:
        raise Decline("a negative size")
    # ATen's kernel for a GPU transposes what it has found, as nonzero does.
    strides = (self.dim(), 1) if self.device.type == "cpu" else (1, size)
    (out,) = outputs((self,), [(size, self.dim())], [torch.int64], outs, strides=strides)
    found = Found(self, self.shape, self.stride())
    found.write_coordinates(out, *out.stride(), size)
    fill_rest(out, found.total, fill_value)
    return (out,)


def _under_mask(self: torch.Tensor, mask: torch.Tensor) -> tuple[Found, list[int]]:
    """What a mask finds where it and a tensor are broadcast to one shape, and the tensor's strides over that."""
    if mask.dtype is not torch.bool:
        raise Decline("a mask that is not of bools")
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
    """A fresh result is contiguous, and has the shape that self and mask are broadcast to."""
    if source.dtype is not self.dtype:
        raise Decline("a source of another dtype")
    shape = broadcast_shape((self.shape, mask.shape))
    if outs and shape != tuple(self.shape):
        raise Decline("a mask of a larger shape")
    out = destination(self.expand(shape) if shape != tuple(self.shape) else self, (mask, source), outs, WITH_COMPLEX)
    found, strides = _under_mask(out, mask)
    found.move(out, source, strides, gathers=False, limit=source.numel(), message=_TOO_FEW)
    return (out,)


_TOO_FEW = "masked_scatter_size_check: totalElements <= srcSize"


@operator("masked_scatter_backward", accepts=WITH_COMPLEX)
def masked_scatter_backward(grad_output, mask, sizes, outs=()):
    """The gradient of what has been taken of the source; of the rest 0."""
    outputs((grad_output, mask), [], [], (), accepts=WITH_COMPLEX)
    if outs or any(size < 0 for size in sizes):
        raise Decline("a size that is to be found out")
    found, strides = _under_mask(grad_output, mask)
    if torch.Size(sizes).numel() < found.n:
        raise Decline("a source that may be too small, for which ATen raises and a kernel ends the process")
    result = zeros(tuple(sizes), grad_output.dtype, grad_output.device)
    found.move(result, grad_output, strides, gathers=True)
    return (result,)


_BLOCK = 1024


@libentry()
@triton.jit(do_not_specialize=["n", "total"])
def _repeat(out, ends, n, total: tl.int64, BLOCK: tl.constexpr):
    """A program finds, for each place of its block, the first number whose repetitions end behind it."""
    wait_for_previous_launch()
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros((BLOCK,), tl.int64)
    high = low + n
    steps = n
    while steps > 0:
        middle = (low + high) // 2
        before = tl.load(ends + middle, mask=low < high, other=0) <= place
        low = tl.where(before & (low < high), middle + 1, low)
        high = tl.where(before, high, middle)
        steps = steps // 2
    tl.store(out + place, low.to(out.dtype.element_ty), mask=place < total)


@libentry()
@triton.jit(do_not_specialize=["n", "size"])
def _check_repeats(repeats, ends, stride, n, size, BLOCK: tl.constexpr):
    """A program looks whether something in its block is repeated less than 0 times, and all as often as `size` says.

    Where `size` is known that is an assertion, as ATen's kernel has it. Else the last of `ends`, which the host reads,
    becomes negative.
    """
    wait_for_previous_launch()
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    repeat = tl.load(repeats + place.to(tl.int64) * stride, mask=place < n, other=0)
    if size >= 0:
        tl.device_assert(repeat >= 0, "repeats can not be negative")
        tl.device_assert(tl.load(ends + n - 1) == size, "Invalid input! In `repeat_interleave`, output_size is no sum")
    else:
        tl.atomic_min(ends + n - 1, -(1 << 62), mask=tl.min(repeat, 0) < 0)


@operator("repeat_interleave", accepts=(torch.int32, torch.int64))
def repeat_interleave(repeats, output_size=None, outs=()):
    """By binary search in the sums so far, whose last is the size of the result unless that is given."""
    check_index(repeats)
    if repeats.dim() != 1 or not repeats.numel() or (output_size is not None and output_size < 0):
        raise Decline("no repeats, or not in one dimension")
    n = repeats.numel()
    (ends,) = cumsum(repeats, 0, torch.int64)
    grid = (-(-n // _BLOCK),)
    size = -1 if output_size is None else output_size
    _check_repeats[grid](repeats, ends, repeats.stride(0), n, size, BLOCK=_BLOCK, **ASSERTING)
    total = read(ends[-1:])[0] if output_size is None else output_size
    if output_size is None and total.value < 0:
        raise Decline("a negative number of repeats", lasting=False)
    result = empty((total,), repeats.dtype, repeats.device)
    blocks = total.blocks(_BLOCK) if output_size is None else -(-output_size // _BLOCK)
    _repeat[(blocks,)](result, ends, n, total, BLOCK=_BLOCK)
    return (result,)
