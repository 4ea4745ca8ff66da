"""Padding with a number, by reflection and by replication, and the gradients of the last two."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch._prims_common import suggest_memory_format

from tritonite.dtypes import ALL, BOOL, COMPLEX, FLOATS, INTS, MOVED
from tritonite.engine.iteration import has_channels_last
from tritonite.engine.movement import check_conversion, move, result, strides_in, strides_like, words
from tritonite.engine.pointwise.gathered import Gathered
from tritonite.errors import Decline
from tritonite.language.indices import read_at
from tritonite.ops.rearrangement.order import operator
from tritonite.registry import scalar_kernel
from tritonite.runtime.symbols import is_negative_zero, zero_or_one

EXTENDED = (*FLOATS, *COMPLEX)


@scalar_kernel(pointer=("source",), integers=("starts", "sizes"), index=("at",), cast=("value",))
def _padded(source, starts, sizes, at, value):
    """The source from index `starts` on, and `value` around it."""
    inside = at[0] >= starts[0]
    indices = ()
    for d in tl.static_range(len(at)):
        index = at[d] - starts[d]
        inside = inside & (index >= 0) & (index < sizes[d])
        indices = indices + (index,)
    loaded = read_at(source, indices, inside, 0)
    return tl.where(inside, loaded, value.to(loaded.dtype))


def _truncated(value, dtype):
    """Return a float as ATen converts it to an integral dtype. Declines one out of range, for which ATen raises."""
    if dtype is torch.bool:
        return bool(value)
    limits = torch.iinfo(dtype)
    if not limits.min <= value <= limits.max:
        raise Decline(f"{value} around elements of {dtype}")
    return int(value)


@operator("constant_pad_nd", accepts=MOVED, pin=("value",))
def constant_pad_nd(self, pad, value, outs=()):
    check_conversion(self.dtype, self.dtype)
    if isinstance(value, float) and self.dtype in (*INTS, *BOOL):
        value = _truncated(value, self.dtype)
    rank = self.dim()
    if len(pad) % 2 or len(pad) > 2 * rank:
        raise Decline(f"{len(pad)} pads for {rank} dimensions")
    before, after = [0] * rank, [0] * rank
    for i in range(len(pad) // 2):
        before[~i], after[~i] = pad[2 * i], pad[2 * i + 1]
    shape = [size + b + a for size, b, a in zip(self.shape, before, after, strict=True)]
    if any(size < 0 for size in shape) or any(
        -min(b, 0) - min(a, 0) > size for size, b, a in zip(self.shape, before, after, strict=True)
    ):
        raise Decline(f"negative padding {list(pad)} that exceeds the shape {list(self.shape)}")
    if all(n <= 0 for n in pad):
        kept = self
        for d, (b, a) in enumerate(zip(before, after, strict=True)):
            kept = kept.narrow(d, -b, self.shape[d] + b + a)
        out = result((self,), shape, self.dtype, outs, strides_like(kept, None))
        move(kept, out)
        return (out,)
    out = result((self,), shape, self.dtype, outs, strides_in(shape, suggest_memory_format(self)))
    dims = tuple([d for d in range(rank) if before[d] or after[d]])
    numbers = tuple([before[d] for d in dims]), tuple([self.shape[d] for d in dims])
    if self.dtype in ALL:
        _padded.run((Gathered(self, dims), *numbers, dims, value), (out,))
    elif zero_or_one(value) == 0 and not is_negative_zero(value):
        _padded.run((Gathered(words(self), dims), *numbers, dims, 0), (words(out),))
    else:
        raise Decline(f"dtype {self.dtype} padded with another value than 0")
    return (out,)


@triton.jit
def _reflected(index, size):
    """Index of the element that a mirror at the first or last element shows."""
    return size - 1 - tl.abs(size - 1 - tl.abs(index))


@triton.jit
def _nearest(index, size):
    return tl.minimum(tl.maximum(index, 0), size - 1)


@scalar_kernel(pointer=("source",), integers=("starts", "sizes"), index=("at",), static=("index_of",))
def _extended(source, starts, sizes, at, index_of):
    indices = ()
    for d in tl.static_range(len(at)):
        indices = indices + (index_of(at[d] - starts[d], sizes[d]),)
    return read_at(source, indices, at[0] >= 0, 0)


def _extend(index_of, dimensions, self, padding, outs):
    """Pad the last `dimensions` by reflection or replication; a batch dimension is optional."""
    check_conversion(self.dtype, self.dtype)
    rank = self.dim()
    if rank not in (dimensions + 1, dimensions + 2) or len(padding) != 2 * dimensions:
        raise Decline(f"padding {list(padding)} for a tensor of {rank} dimensions")
    if has_channels_last(self):
        raise Decline("channels-last input")
    if outs and not outs[0].is_contiguous():
        raise Decline("an output that is not contiguous, which ATen restrides")
    if self.dtype not in EXTENDED or 0 in self.shape or any(n < 0 for n in padding):
        raise Decline(f"dtype {self.dtype}, shape {list(self.shape)} and padding {list(padding)}")
    dims = tuple(range(rank - dimensions, rank))
    starts, ends = padding[::2][::-1], padding[1::2][::-1]
    sizes = tuple([self.shape[d] for d in dims])
    if index_of is _reflected and any(max(pad) >= size for *pad, size in zip(starts, ends, sizes, strict=True)):
        raise Decline(f"reflection padding {list(padding)} that is not below the sizes {list(sizes)}")
    shape = list(self.shape)
    for d, size, *pad in zip(dims, sizes, starts, ends, strict=True):
        shape[d] = size + sum(pad)
    out = result((self,), shape, self.dtype, outs)
    source, written = words(self), words(out)
    _extended.run((Gathered(source, dims), tuple(starts), sizes, dims, index_of), (written,))
    return (out,)


@operator("reflection_pad1d", accepts=EXTENDED)
def reflection_pad1d(self, padding, outs=()):
    return _extend(_reflected, 1, self, padding, outs)


@operator("reflection_pad2d", accepts=EXTENDED)
def reflection_pad2d(self, padding, outs=()):
    return _extend(_reflected, 2, self, padding, outs)


@operator("reflection_pad3d", accepts=EXTENDED)
def reflection_pad3d(self, padding, outs=()):
    return _extend(_reflected, 3, self, padding, outs)


@operator("replication_pad1d", accepts=EXTENDED)
def replication_pad1d(self, padding, outs=()):
    return _extend(_nearest, 1, self, padding, outs)


@operator("replication_pad2d", accepts=EXTENDED)
def replication_pad2d(self, padding, outs=()):
    return _extend(_nearest, 2, self, padding, outs)


@operator("replication_pad3d", accepts=EXTENDED)
def replication_pad3d(self, padding, outs=()):
    return _extend(_nearest, 3, self, padding, outs)


@triton.jit
def _padded_index(x, start, size, end, IMAGE: tl.constexpr):
    """Index in the padded dimension of element x (IMAGE 0), or of its mirror image before (1) or after (2) it."""
    if IMAGE == 0:
        index, exists = x + start, x >= 0
    elif IMAGE == 1:
        index, exists = start - x, (x >= 1) & (x <= start)
    else:
        index, exists = start + 2 * (size - 1) - x, (x <= size - 2) & (x >= size - 1 - end)
    return index, exists


@scalar_kernel(pointer=("grad",), integers=("starts", "sizes", "ends"), index=("at",), accepts=FLOATS)
def _sum_of_reflected(grad, starts, sizes, ends, at):
    """Sum of the gradients of an element and its mirror images: 3 an axis, in every combination."""
    total = 0.0
    for images in tl.static_range(3 ** len(at)):
        indices, inside = (), at[0] >= 0
        for d in tl.static_range(len(at)):
            index, exists = _padded_index(at[d], starts[d], sizes[d], ends[d], images // 3**d % 3)
            indices = indices + (index,)
            inside = inside & exists
        loaded = read_at(grad, indices, inside, 0.0)
        total += loaded.to(tl.float64 if loaded.dtype == tl.float64 else tl.float32)
    return total


@scalar_kernel(pointer=("grad",), integers=("starts", "sizes", "ends", "copies"), index=("at",), accepts=FLOATS)
def _sum_of_replicated(grad, starts, sizes, ends, copies, at):
    """Sum of the gradients of an element and its replicas; `copies` bounds their number in each dimension."""
    count = copies[0]
    for d in tl.static_range(1, len(at)):
        count = count * copies[d]
    element = grad[0].dtype.element_ty
    total = tl.zeros(grad[0].shape, tl.float64 if element == tl.float64 else tl.float32)
    for n in range(count):
        indices, inside, rest = (), at[0] >= 0, n
        for d in tl.static_range(len(at)):
            first = tl.where(at[d] == 0, 0, at[d] + starts[d])
            last = at[d] + starts[d] + tl.where(at[d] == sizes[d] - 1, ends[d], 0)
            index = first + rest % copies[d]
            rest = rest // copies[d]
            indices = indices + (index,)
            inside = inside & (index <= last)
        total += read_at(grad, indices, inside, 0.0).to(total.dtype)
    return total


def _gradient_of_padding(kernel, dimensions, grad_output, self, padding, outs):
    rank = self.dim()
    if rank not in (dimensions + 1, dimensions + 2) or len(padding) != 2 * dimensions:
        raise Decline(f"padding {list(padding)} for a tensor of {rank} dimensions")
    if torch.are_deterministic_algorithms_enabled():
        raise Decline("deterministic algorithms, for which ATen raises or warns on GPUs")
    if has_channels_last(self) or has_channels_last(grad_output):
        raise Decline("channels-last operands")
    if outs and not outs[0].is_contiguous():
        raise Decline("an output that is not contiguous, which ATen restrides")
    if self.dtype not in FLOATS or self.dtype is not grad_output.dtype:
        raise Decline(f"dtypes {self.dtype} and {grad_output.dtype}")
    if 0 in self.shape or any(n < 0 for n in padding):
        raise Decline(f"shape {list(self.shape)} and padding {list(padding)}")
    dims = tuple(range(rank - dimensions, rank))
    starts, ends = tuple(padding[::2][::-1]), tuple(padding[1::2][::-1])
    sizes = tuple([self.shape[d] for d in dims])
    reflected = kernel is _sum_of_reflected
    if reflected and any(max(pad) >= size for *pad, size in zip(starts, ends, sizes, strict=True)):
        raise Decline(f"reflection padding {list(padding)} that is not below the sizes {list(sizes)}")
    padded = [size + start + end for size, start, end in zip(sizes, starts, ends, strict=True)]
    if list(grad_output.shape) != [*self.shape[: rank - dimensions], *padded]:
        raise Decline(f"gradient of shape {list(grad_output.shape)} for an input of {list(self.shape)}")
    out = result((grad_output,), self.shape, self.dtype, outs)
    copies = [tuple([max(s, e) + 1 if n > 1 else s + e + 1 for s, e, n in zip(starts, ends, sizes, strict=True)])]
    kernel.run((Gathered(grad_output, dims), starts, sizes, ends, *(() if reflected else copies), dims), (out,))
    return (out,)


@operator("reflection_pad1d_backward", accepts=FLOATS)
def reflection_pad1d_backward(grad_output, self, padding, outs=()):
    return _gradient_of_padding(_sum_of_reflected, 1, grad_output, self, padding, outs)


@operator("reflection_pad2d_backward", accepts=FLOATS)
def reflection_pad2d_backward(grad_output, self, padding, outs=()):
    return _gradient_of_padding(_sum_of_reflected, 2, grad_output, self, padding, outs)


@operator("reflection_pad3d_backward", accepts=FLOATS)
def reflection_pad3d_backward(grad_output, self, padding, outs=()):
    return _gradient_of_padding(_sum_of_reflected, 3, grad_output, self, padding, outs)


@operator("replication_pad1d_backward", accepts=FLOATS)
def replication_pad1d_backward(grad_output, self, padding, outs=()):
    return _gradient_of_padding(_sum_of_replicated, 1, grad_output, self, padding, outs)


@operator("replication_pad2d_backward", accepts=FLOATS)
def replication_pad2d_backward(grad_output, self, padding, outs=()):
    return _gradient_of_padding(_sum_of_replicated, 2, grad_output, self, padding, outs)


@operator("replication_pad3d_backward", accepts=FLOATS)
def replication_pad3d_backward(grad_output, self, padding, outs=()):
    return _gradient_of_padding(_sum_of_replicated, 3, grad_output, self, padding, outs)
