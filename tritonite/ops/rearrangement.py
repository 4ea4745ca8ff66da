"""Flips, rolls, padding, sliding windows and shuffles, and gradients of those that repeat elements."""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch._prims_common import suggest_memory_format

from tritonite.dtypes import ALL, COMPLEX, FLOATS, MOVED
from tritonite.engine.iteration import has_channels_last
from tritonite.engine.movement import check_conversion, move, result, strides_in, strides_like, through, words
from tritonite.engine.pointwise.gathered import Gathered
from tritonite.errors import Decline
from tritonite.language.indices import read_at
from tritonite.ops import aten
from tritonite.registry import operator as any_operator
from tritonite.registry import scalar_kernel
from tritonite.runtime.symbols import is_negative_zero, zero_or_one

operator = functools.partial(any_operator, tensors_only=True)
_COMMON = (*ALL, *COMPLEX)
# Largest window of col2im that is unrolled, so that all its loads are in flight at once; a compile for each size.
_MAX_UNROLLED = 16
_EXTENDED = (*FLOATS, *COMPLEX)


@scalar_kernel(pointer=("source",), integers=("sizes",), index=("at",))
def _flipped(source, sizes, at):
    """Read each dimension from its end."""
    indices = ()
    for d in tl.static_range(len(at)):
        indices = indices + (sizes[d] - 1 - at[d],)
    return read_at(source, indices, at[0] >= 0, 0)


@scalar_kernel(pointer=("source",), integers=("shifts", "sizes"), index=("at",))
def _rolled(source, shifts, sizes, at):
    """Read at the index minus the shift, modulo the size; shifts are in [0, size)."""
    indices = ()
    for d in tl.static_range(len(at)):
        index = at[d] - shifts[d]
        indices = indices + (tl.where(index < 0, index + sizes[d], index),)
    return read_at(source, indices, at[0] >= 0, 0)


def _gather(kernel, source, out, dims, *integers):
    """Launch a kernel that reads `source` at computed indices of `dims`; `integers` have a value for each dimension."""
    kernel.run((Gathered(words(source), dims), *integers, dims), (words(out),))


def _check_common(dtype):
    """Decline rare dtypes: which of them ATen takes differs from device to device."""
    if dtype not in _COMMON:
        raise Decline(f"dtype {dtype}")


@operator("flip", accepts=_COMMON)
def flip(self, dims, outs=()):
    _check_common(self.dtype)
    rank = max(self.dim(), 1)
    if any(not -rank <= d < rank for d in dims) or len({d % rank for d in dims}) < len(dims):
        raise Decline(f"dimensions {list(dims)} of {self.dim()}")
    out = result((self,), self.shape, self.dtype, outs, strides_like(self, None))
    turned = tuple(sorted(d % rank for d in dims if self.dim() and self.shape[d] > 1))
    if turned:
        _gather(_flipped, self, out, turned, tuple([self.shape[d] for d in turned]))
    else:
        move(self, out)
    return (out,)


@operator("roll", accepts=_COMMON)
def roll(self, shifts, dims, outs=()):
    """Roll along `dims`, or along all elements of a contiguous tensor if there are no dims."""
    _check_common(self.dtype)
    # ATen's CPU result is a concatenation, which keeps the memory format.
    channels_last = not self.is_contiguous() and suggest_memory_format(self) != torch.contiguous_format
    if aten.on_cpu() and not outs and channels_last:
        raise Decline("channels-last input")
    if not dims:
        if len(shifts) != 1:
            raise Decline(f"{len(shifts)} shifts without dimensions; 1 is served")
        flat = self.reshape(-1) if self.is_contiguous() else None
        if flat is None or outs or not self.numel():
            raise Decline("a roll without dimensions of a tensor that is empty or not contiguous, or with out=")
        out = result((self,), self.shape, self.dtype)
        _gather(_rolled, flat, out.view(-1), (0,), (shifts[0] % flat.numel(),), (flat.numel(),))
        return (out,)
    rank = self.dim()
    if len(shifts) != len(dims) or any(not -rank <= d < rank for d in dims):
        raise Decline(f"{len(shifts)} shifts along dimensions {list(dims)} of {rank}")
    out = result((self,), self.shape, self.dtype, outs)
    if not self.numel():
        return (out,)
    total = dict.fromkeys(sorted({d % rank for d in dims}), 0)
    for d, shift in zip(dims, shifts, strict=True):
        total[d % rank] = (total[d % rank] + shift) % self.shape[d]
    moved = tuple([d for d, shift in total.items() if shift])
    if moved:
        sizes = tuple([self.shape[d] for d in moved])
        _gather(_rolled, self, out, moved, tuple([total[d] for d in moved]), sizes)
    else:
        move(self, out)
    return (out,)


@operator("rot90", accepts=_COMMON)
def rot90(self, k, dims, outs=()):
    """Rotate by k quarter turns: a flip, a transposition, or both. Without a turn the result is a contiguous copy."""
    rank = self.dim()
    if rank < 2 or len(dims) != 2 or any(not -rank <= d < rank for d in dims) or (dims[0] - dims[1]) % rank == 0:
        raise Decline(f"dimensions {list(dims)} of {rank}; two different ones are served")
    _check_common(self.dtype)
    if outs and outs[0].dim() != rank:
        raise Decline(f"an output of {outs[0].dim()} dimensions, not {rank}")
    first, second = dims[0] % rank, dims[1] % rank
    k %= 4
    if k == 0 and not outs:
        copied = result((self,), self.shape, self.dtype)
        move(self, copied)
        return (copied,)
    turned = {0: (), 1: (second,), 2: (first, second), 3: (first,)}[k]
    (copied,) = flip(self, turned) if not outs else flip(self, turned, (_turned(outs[0], k, first, second),))
    return outs or (_turned(copied, k, first, second),)


def _turned(x, k, first, second):
    return x.transpose(first, second) if k % 2 else x


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


@operator("constant_pad_nd", accepts=MOVED, pin_zero_or_one=("value",))
def constant_pad_nd(self, pad, value, outs=()):
    check_conversion(self.dtype, self.dtype)
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
    if self.dtype not in _EXTENDED or 0 in self.shape or any(n < 0 for n in padding):
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


@operator("reflection_pad1d", accepts=_EXTENDED)
def reflection_pad1d(self, padding, outs=()):
    return _extend(_reflected, 1, self, padding, outs)


@operator("reflection_pad2d", accepts=_EXTENDED)
def reflection_pad2d(self, padding, outs=()):
    return _extend(_reflected, 2, self, padding, outs)


@operator("reflection_pad3d", accepts=_EXTENDED)
def reflection_pad3d(self, padding, outs=()):
    return _extend(_reflected, 3, self, padding, outs)


@operator("replication_pad1d", accepts=_EXTENDED)
def replication_pad1d(self, padding, outs=()):
    return _extend(_nearest, 1, self, padding, outs)


@operator("replication_pad2d", accepts=_EXTENDED)
def replication_pad2d(self, padding, outs=()):
    return _extend(_nearest, 2, self, padding, outs)


@operator("replication_pad3d", accepts=_EXTENDED)
def replication_pad3d(self, padding, outs=()):
    return _extend(_nearest, 3, self, padding, outs)


def _check_shuffled(self):
    """Decline dtypes that ATen's CPU kernels lack. On GPUs ATen copies views, in any dtype."""
    if aten.on_cpu() and self.dtype not in _COMMON:
        raise Decline(f"dtype {self.dtype} on a CPU")


@operator("pixel_shuffle", accepts=MOVED)
def pixel_shuffle(self, upscale_factor, outs=()):
    _check_shuffled(self)
    r = upscale_factor
    if self.dim() < 3 or r < 1 or not self.numel() or self.shape[-3] % (r * r) or has_channels_last(self):
        raise Decline(f"factor {r} for shape {list(self.shape)}, or a channels-last input")
    *batch, channels, height, width = self.shape
    out = result((self,), (*batch, channels // (r * r), height * r, width * r), self.dtype, outs)
    n = len(batch)
    source = self.unflatten(n, (channels // (r * r), r, r))
    move(source.permute(*range(n + 1), n + 3, n + 1, n + 4, n + 2), _view_squares(out, r))
    return (out,)


@operator("pixel_unshuffle", accepts=MOVED)
def pixel_unshuffle(self, downscale_factor, outs=()):
    _check_shuffled(self)
    r = downscale_factor
    if (
        self.dim() < 3
        or r < 1
        or not self.numel()
        or self.shape[-1] % r
        or self.shape[-2] % r
        or has_channels_last(self)
    ):
        raise Decline(f"factor {r} for shape {list(self.shape)}, or a channels-last input")
    *batch, channels, height, width = self.shape
    out = result((self,), (*batch, channels * r * r, height // r, width // r), self.dtype, outs)
    n = len(batch)
    written = out.unflatten(n, (channels, r, r))
    move(_view_squares(self, r), written.permute(*range(n + 1), n + 3, n + 1, n + 4, n + 2))
    return (out,)


def _view_squares(image, r):
    """View (..., height * r, width * r) as (..., height, r, width, r)."""
    return image.unflatten(-1, (-1, r)).unflatten(-3, (-1, r))


@operator("channel_shuffle", accepts=MOVED)
def channel_shuffle(self, groups, outs=()):
    _check_shuffled(self)
    if self.dim() < 3 or groups < 1 or not self.numel() or self.shape[1] % groups or has_channels_last(self):
        raise Decline(f"{groups} groups for shape {list(self.shape)}, or a channels-last input")
    if aten.on_gpu():
        if 1 in (groups, self.shape[1] // groups):
            raise Decline(
                f"{groups} groups of {self.shape[1]} channels: nothing moves, and ATen returns the tensor itself"
            )
        # ATen's GPU function raises for a tensor that cannot be viewed like this.
        through(self.view, self.shape[0], groups, self.shape[1] // groups, -1)
    check_conversion(self.dtype, self.dtype)
    out = result((self,), self.shape, self.dtype, outs)
    move(self.unflatten(1, (groups, -1)).transpose(1, 2), out.unflatten(1, (-1, groups)))
    return (out,)


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


@scalar_kernel(pointer=("source",), integers=("sizes", "strides", "dilations", "pads"), index=("at",))
def _in_windows(source, sizes, strides, dilations, pads, at):
    """Element of the image, or 0 in the padding. `at` is (row, column) in the window, then that of the window."""
    indices, inside = (), at[0] >= 0
    for d in tl.static_range(2):
        index = at[d] * dilations[d] + at[d + 2] * strides[d] - pads[d]
        indices = indices + (index,)
        inside = inside & (index >= 0) & (index < sizes[d])
    return read_at(source, indices, inside, 0)


def _check_contiguous(outs):
    if outs and not outs[0].is_contiguous():
        raise Decline("an output that is not contiguous, which ATen takes for contiguous")


def _windows(sizes, kernel_size, dilation, padding, stride):
    """Return the number of windows along the two dimensions of an image."""
    if any(len(numbers) != 2 for numbers in (sizes, kernel_size, dilation, padding, stride)):
        raise Decline("a kernel size, dilation, padding or stride that is not a pair")
    every = zip(sizes, kernel_size, dilation, padding, stride, strict=True)
    if any(min(kernel, spread, step) < 1 or pad < 0 for _, kernel, spread, pad, step in every):
        raise Decline(f"kernel {kernel_size}, dilation {dilation}, padding {padding}, stride {stride}")
    every = zip(sizes, kernel_size, dilation, padding, stride, strict=True)
    found = [(size + 2 * pad - spread * (kernel - 1) - 1) // step + 1 for size, kernel, spread, pad, step in every]
    if any(n < 1 for n in found):
        raise Decline(f"kernel {kernel_size} with dilation {dilation} in a padded image of {list(sizes)}")
    return found


@operator("im2col", accepts=_EXTENDED)
def im2col(self, kernel_size, dilation, padding, stride, outs=()):
    if self.dim() not in (3, 4) or 0 in self.shape[-3:] or self.dtype not in _EXTENDED:
        raise Decline(f"shape {list(self.shape)} of dtype {self.dtype}; images are served")
    _check_contiguous(outs)
    images = self if self.dim() == 4 else self.unsqueeze(0)
    batch, channels, *sizes = images.shape
    windows = _windows(sizes, kernel_size, dilation, padding, stride)
    shape = (batch, channels * math.prod(kernel_size), math.prod(windows))
    out = result((self,), shape if self.dim() == 4 else shape[1:], self.dtype, outs)
    # (batch, channels, height and width of a window, rows and columns of windows)
    written = (out if self.dim() == 4 else out.unsqueeze(0)).unflatten(-1, windows)
    written = words(written.unflatten(1, (channels, *kernel_size)))
    source = words(images)
    source = source.reshape(*source.shape[:4], 1, 1, *source.shape[4:])
    numbers = map(tuple, (sizes, stride, dilation, padding))
    _in_windows.run((Gathered(source, (2, 3)), *numbers, (2, 3, 4, 5)), (written,))
    return (out,)


@triton.jit
def _entry_in_window(columns, within, windows, strides, dilations, pads, at, UNIT: tl.constexpr):
    """Column entry of the window that has the element `at` at position `within`; 0 if none. UNIT: strides are 1."""
    indices, inside = within, at[0] >= 0
    for d in tl.static_range(2):
        start = at[d] + pads[d] - within[d] * dilations[d]
        window = start if UNIT else start // strides[d]
        indices = indices + (window,)
        inside = inside & (start >= 0) & (window < windows[d])
        if not UNIT:
            inside = inside & (window * strides[d] == start)
    return read_at(columns, indices, inside, 0.0)


@scalar_kernel(
    pointer=("columns",),
    integers=("kernel_size", "windows", "strides", "dilations", "pads"),
    static=("height", "width", "unit"),
    index=("at",),
    accepts=FLOATS,
)
def _sum_of_windows(columns, kernel_size, windows, strides, dilations, pads, at, height, width, unit):
    """Sum over the windows that contain an element. `height` and `width` unroll the loop, 0 keeps it."""
    element = columns[0].dtype.element_ty
    total = tl.zeros(columns[0].shape, tl.float64 if element == tl.float64 else tl.float32)
    if height > 0:
        for y in tl.static_range(height):
            for x in tl.static_range(width):
                value = _entry_in_window(columns, (y, x), windows, strides, dilations, pads, at, unit)
                total += value.to(total.dtype)
    else:
        for n in range(kernel_size[0] * kernel_size[1]):
            within = (n // kernel_size[1], n % kernel_size[1])
            value = _entry_in_window(columns, within, windows, strides, dilations, pads, at, unit)
            total += value.to(total.dtype)
    return total


@operator("col2im", accepts=FLOATS)
def col2im(self, output_size, kernel_size, dilation, padding, stride, outs=()):
    if self.dim() not in (2, 3) or 0 in self.shape[-2:] or self.dtype not in FLOATS:
        raise Decline(f"shape {list(self.shape)} of dtype {self.dtype}; columns are served")
    _check_contiguous(outs)
    columns = self if self.dim() == 3 else self.unsqueeze(0)
    windows = _windows(output_size, kernel_size, dilation, padding, stride)
    elements = math.prod(kernel_size)
    if columns.shape[1] % elements or columns.shape[2] != math.prod(windows):
        raise Decline(f"columns of shape {list(columns.shape)} for {math.prod(windows)} windows of {elements} elements")
    shape = (columns.shape[0], columns.shape[1] // elements, *output_size)
    out = result((self,), shape if self.dim() == 3 else shape[1:], self.dtype, outs)
    written = (out if self.dim() == 3 else out.unsqueeze(0)).unsqueeze(-1).unsqueeze(-1)
    source = columns.unflatten(-1, windows).unflatten(1, (shape[1], *kernel_size))
    numbers = map(tuple, (kernel_size, windows, stride, dilation, padding))
    height, width = kernel_size if elements <= _MAX_UNROLLED else (0, 0)
    unit = all(step == 1 for step in stride)
    _sum_of_windows.run((Gathered(source, (2, 3, 4, 5)), *numbers, (2, 3), height, width, unit), (written,))
    return (out,)


@scalar_kernel(pointer=("grad",), integers=("size", "step", "windows"), index=("at",), accepts=FLOATS)
def _sum_of_unfolded(grad, size, step, windows, at):
    """Sum over the windows that contain the element `at`: at most size / step, rounded up."""
    element = grad[0].dtype.element_ty
    total = tl.zeros(grad[0].shape, tl.float64 if element == tl.float64 else tl.float32)
    for n in range(tl.cdiv(size, step)):
        window = at // step - n
        within = at - window * step
        inside = (window >= 0) & (window < windows) & (within < size)
        total += read_at(grad, (window, within), inside, 0.0).to(total.dtype)
    return total


@operator("unfold_backward", accepts=FLOATS)
def unfold_backward(grad_in, input_sizes, dim, size, step, outs=()):
    rank = len(input_sizes)
    if grad_in.dtype not in FLOATS or not rank or not -rank <= dim < rank or size < 1 or step < 1:
        raise Decline(f"size {size}, step {step} and dimension {dim} of {list(input_sizes)}, {grad_in.dtype}")
    dim %= rank
    shape = list(input_sizes)
    shape[dim] = (input_sizes[dim] - size) // step + 1
    if size > input_sizes[dim] or list(grad_in.shape) != [*shape, size]:
        raise Decline(f"gradient of shape {list(grad_in.shape)} for sizes {list(input_sizes)}")
    out = result((grad_in,), input_sizes, grad_in.dtype, outs)
    # The kernel counts in int32, and a step beyond the end is never taken.
    step = min(step, input_sizes[dim])
    _sum_of_unfolded.run((Gathered(grad_in, (dim, rank)), size, step, shape[dim], dim), (out.unsqueeze(-1),))
    return (out,)
