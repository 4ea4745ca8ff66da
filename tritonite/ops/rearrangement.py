"""Flips, rolls, pads, windows and shuffles of elements, and the gradients of those that show elements twice."""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch._prims_common import suggest_memory_format

from tritonite import devices
from tritonite.dtypes import ALL, COMPLEX, FLOATS, MOVED
from tritonite.engine.iteration import has_channels_last
from tritonite.engine.movement import check_conversion, move, result, strides_in, strides_like, through, words
from tritonite.engine.pointwise.placed import Placed
from tritonite.errors import Decline
from tritonite.language.indices import read_at
from tritonite.registry import operator as any_operator
from tritonite.registry import scalar_kernel
from tritonite.runtime.contract import is_negative_zero, zero_or_one

operator = functools.partial(any_operator, tensors_only=True)
_ON_CPU = devices.current.type == "cpu"
_USUAL = (*ALL, *COMPLEX)
# The elements of windows for each size of which a kernel is compiled, which has all of them on their way at once.
_UNROLLED = 16
_EXTENDED = (*FLOATS, *COMPLEX)


@scalar_kernel(pointer=("source",), integers=("sizes",), index=("at",))
def _flipped(source, sizes, at):
    places = ()
    for d in tl.static_range(len(at)):
        places = places + (sizes[d] - 1 - at[d],)
    return read_at(source, places, at[0] >= 0, 0)


@scalar_kernel(pointer=("source",), integers=("shifts", "sizes"), index=("at",))
def _rolled(source, shifts, sizes, at):
    """Shifts are from 0 to below the size."""
    places = ()
    for d in tl.static_range(len(at)):
        place = at[d] - shifts[d]
        places = places + (tl.where(place < 0, place + sizes[d], place),)
    return read_at(source, places, at[0] >= 0, 0)


def _replaced(kernel, source, out, dims, *integers):
    """Launch a kernel that reads `source` at places along `dims`; `integers` are a tuple for each dimension of them."""
    kernel.run((Placed(words(source), dims), *integers, dims), (words(out),))


def _check_usual(dtype):
    """Of dtypes that few kernels take, ATen's takes some on one kind of device and some on another."""
    if dtype not in _USUAL:
        raise Decline(f"dtype {dtype}")


@operator("flip", accepts=_USUAL)
def flip(self, dims, outs=()):
    _check_usual(self.dtype)
    rank = max(self.dim(), 1)
    if any(not -rank <= d < rank for d in dims) or len({d % rank for d in dims}) < len(dims):
        raise Decline("no such dimensions")
    out = result((self,), self.shape, self.dtype, outs, strides_like(self, None))
    turned = tuple(sorted(d % rank for d in dims if self.dim() and self.shape[d] > 1))
    if turned:
        _replaced(_flipped, self, out, turned, tuple([self.shape[d] for d in turned]))
    else:
        move(self, out)
    return (out,)


@operator("roll", accepts=_USUAL)
def roll(self, shifts, dims, outs=()):
    """On a CPU the result of images with channels last has them last, too, by cat's rule for the parts."""
    _check_usual(self.dtype)
    if _ON_CPU and not outs and not self.is_contiguous() and suggest_memory_format(self) != torch.contiguous_format:
        raise Decline("channels last")
    if not dims:
        if len(shifts) != 1:
            raise Decline("several shifts of no dimension")
        flat = self.reshape(-1) if self.is_contiguous() else None
        if flat is None or outs or not self.numel():
            raise Decline("a roll over all dimensions of what is not contiguous")
        out = result((self,), self.shape, self.dtype)
        _replaced(_rolled, flat, out.view(-1), (0,), (shifts[0] % flat.numel(),), (flat.numel(),))
        return (out,)
    rank = self.dim()
    if len(shifts) != len(dims) or any(not -rank <= d < rank for d in dims):
        raise Decline("no such dimensions")
    out = result((self,), self.shape, self.dtype, outs)
    if not self.numel():
        return (out,)
    by = dict.fromkeys(sorted({d % rank for d in dims}), 0)
    for d, shift in zip(dims, shifts, strict=True):
        by[d % rank] = (by[d % rank] + shift) % self.shape[d]
    moved = tuple([d for d, shift in by.items() if shift])
    if moved:
        sizes = tuple([self.shape[d] for d in moved])
        _replaced(_rolled, self, out, moved, tuple([by[d] for d in moved]), sizes)
    else:
        move(self, out)
    return (out,)


@operator("rot90", accepts=_USUAL)
def rot90(self, k, dims, outs=()):
    """A flip, a transposition or both; flips lie as ATen's do, and what does not turn is contiguous."""
    rank = self.dim()
    if rank < 2 or len(dims) != 2 or any(not -rank <= d < rank for d in dims) or (dims[0] - dims[1]) % rank == 0:
        raise Decline("no such dimensions")
    _check_usual(self.dtype)
    if outs and outs[0].dim() != rank:
        raise Decline("output has another shape or dtype")
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
    """The source from `starts` on, and a value around it."""
    inside = at[0] >= starts[0]
    places = ()
    for d in tl.static_range(len(at)):
        place = at[d] - starts[d]
        inside = inside & (place >= 0) & (place < sizes[d])
        places = places + (place,)
    found = read_at(source, places, inside, 0)
    return tl.where(inside, found, value.to(found.dtype))


@operator("constant_pad_nd", accepts=MOVED, pin_zero_or_one=("value",))
def constant_pad_nd(self, pad, value, outs=()):
    check_conversion(self.dtype, self.dtype)
    rank = self.dim()
    if len(pad) % 2 or len(pad) > 2 * rank:
        raise Decline("pads of no dimension")
    before, after = [0] * rank, [0] * rank
    for i in range(len(pad) // 2):
        before[~i], after[~i] = pad[2 * i], pad[2 * i + 1]
    shape = [size + b + a for size, b, a in zip(self.shape, before, after, strict=True)]
    if any(size < 0 for size in shape) or any(
        -min(b, 0) - min(a, 0) > size for size, b, a in zip(self.shape, before, after, strict=True)
    ):
        raise Decline("more is cut off than there is")
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
        _padded.run((Placed(self, dims), *numbers, dims, value), (out,))
    elif zero_or_one(value) == 0 and not is_negative_zero(value):
        _padded.run((Placed(words(self), dims), *numbers, dims, 0), (words(out),))
    else:
        raise Decline(f"dtype {self.dtype}")
    return (out,)


@triton.jit
def _reflected(place, size):
    """The place within that a mirror at either edge shows."""
    return size - 1 - tl.abs(size - 1 - tl.abs(place))


@triton.jit
def _nearest(place, size):
    return tl.minimum(tl.maximum(place, 0), size - 1)


@scalar_kernel(pointer=("source",), integers=("starts", "sizes"), index=("at",), static=("place_of",))
def _extended(source, starts, sizes, at, place_of):
    places = ()
    for d in tl.static_range(len(at)):
        places = places + (place_of(at[d] - starts[d], sizes[d]),)
    return read_at(source, places, at[0] >= 0, 0)


def _extend(place_of, dimensions, self, padding, outs):
    """Reflection and replication, of the last dimensions of a tensor with or without a batch."""
    check_conversion(self.dtype, self.dtype)
    rank = self.dim()
    if rank not in (dimensions + 1, dimensions + 2) or len(padding) != 2 * dimensions:
        raise Decline("no image of such a padding")
    if has_channels_last(self):
        raise Decline("channels last")
    if outs and not outs[0].is_contiguous():
        raise Decline("an output that ATen lays out anew")
    if self.dtype not in _EXTENDED or 0 in self.shape or any(n < 0 for n in padding):
        raise Decline(f"dtype {self.dtype}, no elements or a negative padding")
    dims = tuple(range(rank - dimensions, rank))
    starts, ends = padding[::2][::-1], padding[1::2][::-1]
    sizes = tuple([self.shape[d] for d in dims])
    if place_of is _reflected and any(max(pad) >= size for *pad, size in zip(starts, ends, sizes, strict=True)):
        raise Decline("a padding wider than what is reflected")
    shape = list(self.shape)
    for d, size, *pad in zip(dims, sizes, starts, ends, strict=True):
        shape[d] = size + sum(pad)
    out = result((self,), shape, self.dtype, outs)
    source, written = words(self), words(out)
    _extended.run((Placed(source, dims), tuple(starts), sizes, dims, place_of), (written,))
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
    """Decline dtypes that ATen's kernels for CPUs lack; on GPUs it makes views, and copies them."""
    if _ON_CPU and self.dtype not in _USUAL:
        raise Decline(f"dtype {self.dtype}, which ATen has not on CPUs")


@operator("pixel_shuffle", accepts=MOVED)
def pixel_shuffle(self, upscale_factor, outs=()):
    _check_shuffled(self)
    r = upscale_factor
    if self.dim() < 3 or r < 1 or not self.numel() or self.shape[-3] % (r * r) or has_channels_last(self):
        raise Decline("no image of such a factor")
    *batch, channels, height, width = self.shape
    out = result((self,), (*batch, channels // (r * r), height * r, width * r), self.dtype, outs)
    n = len(batch)
    source = self.unflatten(n, (channels // (r * r), r, r))
    move(source.permute(*range(n + 1), n + 3, n + 1, n + 4, n + 2), _in_squares(out, r))
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
        raise Decline("no image of such a factor")
    *batch, channels, height, width = self.shape
    out = result((self,), (*batch, channels * r * r, height // r, width // r), self.dtype, outs)
    n = len(batch)
    written = out.unflatten(n, (channels, r, r))
    move(_in_squares(self, r), written.permute(*range(n + 1), n + 3, n + 1, n + 4, n + 2))
    return (out,)


def _in_squares(image, r):
    """A view of (channels, height, r, width, r)."""
    return image.unflatten(-1, (-1, r)).unflatten(-3, (-1, r))


@operator("channel_shuffle", accepts=MOVED)
def channel_shuffle(self, groups, outs=()):
    _check_shuffled(self)
    if self.dim() < 3 or groups < 1 or not self.numel() or self.shape[1] % groups or has_channels_last(self):
        raise Decline("no image of such groups")
    if self.device.type != "cpu":
        if 1 in (groups, self.shape[1] // groups):
            raise Decline("nothing moves, and ATen's function for GPUs gives the tensor itself")
        # It asks for such a view.
        through(self.view, self.shape[0], groups, self.shape[1] // groups, -1)
    check_conversion(self.dtype, self.dtype)
    out = result((self,), self.shape, self.dtype, outs)
    move(self.unflatten(1, (groups, -1)).transpose(1, 2), out.unflatten(1, (-1, groups)))
    return (out,)


@triton.jit
def _shown_at(x, start, size, end, WAY: tl.constexpr):
    """Where in the padded dimension an element is shown: as itself, before the first one or behind the last."""
    if WAY == 0:
        place, inside = x + start, x >= 0
    elif WAY == 1:
        place, inside = start - x, (x >= 1) & (x <= start)
    else:
        place, inside = start + 2 * (size - 1) - x, (x <= size - 2) & (x >= size - 1 - end)
    return place, inside


@scalar_kernel(pointer=("grad",), integers=("starts", "sizes", "ends"), index=("at",), accepts=FLOATS)
def _sum_of_reflected(grad, starts, sizes, ends, at):
    total = 0.0
    for ways in tl.static_range(3 ** len(at)):
        places, inside = (), at[0] >= 0
        for d in tl.static_range(len(at)):
            place, shown = _shown_at(at[d], starts[d], sizes[d], ends[d], ways // 3**d % 3)
            places = places + (place,)
            inside = inside & shown
        found = read_at(grad, places, inside, 0.0)
        total += found.to(tl.float64 if found.dtype == tl.float64 else tl.float32)
    return total


@scalar_kernel(pointer=("grad",), integers=("starts", "sizes", "ends", "most"), index=("at",), accepts=FLOATS)
def _sum_of_replicated(grad, starts, sizes, ends, most, at):
    """`most` are how many places of a dimension show one element, at most."""
    count = most[0]
    for d in tl.static_range(1, len(at)):
        count = count * most[d]
    element = grad[0].dtype.element_ty
    total = tl.zeros(grad[0].shape, tl.float64 if element == tl.float64 else tl.float32)
    for n in range(count):
        places, inside, rest = (), at[0] >= 0, n
        for d in tl.static_range(len(at)):
            first = tl.where(at[d] == 0, 0, at[d] + starts[d])
            last = at[d] + starts[d] + tl.where(at[d] == sizes[d] - 1, ends[d], 0)
            place = first + rest % most[d]
            rest = rest // most[d]
            places = places + (place,)
            inside = inside & (place <= last)
        total += read_at(grad, places, inside, 0.0).to(total.dtype)
    return total


def _gradient_of_padding(kernel, dimensions, grad_output, self, padding, outs):
    rank = self.dim()
    if rank not in (dimensions + 1, dimensions + 2) or len(padding) != 2 * dimensions:
        raise Decline("no image of such a padding")
    if torch.are_deterministic_algorithms_enabled():
        raise Decline("deterministic algorithms, of which ATen has none on GPUs")
    if has_channels_last(self) or has_channels_last(grad_output):
        raise Decline("channels last")
    if outs and not outs[0].is_contiguous():
        raise Decline("an output that ATen lays out anew")
    if self.dtype not in FLOATS or self.dtype is not grad_output.dtype:
        raise Decline(f"dtypes {self.dtype} and {grad_output.dtype}")
    if 0 in self.shape or any(n < 0 for n in padding):
        raise Decline("no elements, or a negative padding")
    dims = tuple(range(rank - dimensions, rank))
    starts, ends = tuple(padding[::2][::-1]), tuple(padding[1::2][::-1])
    sizes = tuple([self.shape[d] for d in dims])
    reflected = kernel is _sum_of_reflected
    if reflected and any(max(pad) >= size for *pad, size in zip(starts, ends, sizes, strict=True)):
        raise Decline("a padding wider than what is reflected")
    grown = [size + start + end for size, start, end in zip(sizes, starts, ends, strict=True)]
    if list(grad_output.shape) != [*self.shape[: rank - dimensions], *grown]:
        raise Decline("a gradient of another shape")
    out = result((grad_output,), self.shape, self.dtype, outs)
    most = [tuple([max(s, e) + 1 if n > 1 else s + e + 1 for s, e, n in zip(starts, ends, sizes, strict=True)])]
    kernel.run((Placed(grad_output, dims), starts, sizes, ends, *(() if reflected else most), dims), (out,))
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
    """Of two places within a window and two places of the window itself, the element that is there, or 0."""
    places, inside = (), at[0] >= 0
    for d in tl.static_range(2):
        place = at[d] * dilations[d] + at[d + 2] * strides[d] - pads[d]
        places = places + (place,)
        inside = inside & (place >= 0) & (place < sizes[d])
    return read_at(source, places, inside, 0)


def _check_contiguous(outs):
    if outs and not outs[0].is_contiguous():
        raise Decline("an output that is not contiguous, into which ATen writes as though it were")


def _windows(sizes, kernel_size, dilation, padding, stride):
    """How many windows there are along the two dimensions of an image."""
    if any(len(numbers) != 2 for numbers in (sizes, kernel_size, dilation, padding, stride)):
        raise Decline("no such windows")
    every = zip(sizes, kernel_size, dilation, padding, stride, strict=True)
    if any(min(kernel, spread, step) < 1 or pad < 0 for _, kernel, spread, pad, step in every):
        raise Decline("no such windows")
    every = zip(sizes, kernel_size, dilation, padding, stride, strict=True)
    found = [(size + 2 * pad - spread * (kernel - 1) - 1) // step + 1 for size, kernel, spread, pad, step in every]
    if any(n < 1 for n in found):
        raise Decline("no window fits")
    return found


@operator("im2col", accepts=_EXTENDED)
def im2col(self, kernel_size, dilation, padding, stride, outs=()):
    if self.dim() not in (3, 4) or 0 in self.shape[-3:] or self.dtype not in _EXTENDED:
        raise Decline(f"no images, or dtype {self.dtype}")
    _check_contiguous(outs)
    images = self if self.dim() == 4 else self.unsqueeze(0)
    batch, channels, *sizes = images.shape
    windows = _windows(sizes, kernel_size, dilation, padding, stride)
    shape = (batch, channels * math.prod(kernel_size), math.prod(windows))
    out = result((self,), shape if self.dim() == 4 else shape[1:], self.dtype, outs)
    # (batch, channels, places in a window, windows)
    written = (out if self.dim() == 4 else out.unsqueeze(0)).unflatten(-1, windows)
    written = words(written.unflatten(1, (channels, *kernel_size)))
    source = words(images)
    source = source.reshape(*source.shape[:4], 1, 1, *source.shape[4:])
    numbers = map(tuple, (sizes, stride, dilation, padding))
    _in_windows.run((Placed(source, (2, 3)), *numbers, (2, 3, 4, 5)), (written,))
    return (out,)


@triton.jit
def _shown_in_window(columns, within, windows, strides, dilations, pads, at, UNIT: tl.constexpr):
    """What the window has of an element that shows it at a place; 0 where none does. UNIT strides need no division."""
    places, inside = within, at[0] >= 0
    for d in tl.static_range(2):
        start = at[d] + pads[d] - within[d] * dilations[d]
        window = start if UNIT else start // strides[d]
        places = places + (window,)
        inside = inside & (start >= 0) & (window < windows[d])
        if not UNIT:
            inside = inside & (window * strides[d] == start)
    return read_at(columns, places, inside, 0.0)


@scalar_kernel(
    pointer=("columns",),
    integers=("kernel_size", "windows", "strides", "dilations", "pads"),
    static=("height", "width", "unit"),
    index=("at",),
    accepts=FLOATS,
)
def _sum_of_windows(columns, kernel_size, windows, strides, dilations, pads, at, height, width, unit):
    """The sum of what all windows have of an element; of small ones, of `height` and `width`, all are read at once."""
    element = columns[0].dtype.element_ty
    total = tl.zeros(columns[0].shape, tl.float64 if element == tl.float64 else tl.float32)
    if height > 0:
        for y in tl.static_range(height):
            for x in tl.static_range(width):
                value = _shown_in_window(columns, (y, x), windows, strides, dilations, pads, at, unit)
                total += value.to(total.dtype)
    else:
        for n in range(kernel_size[0] * kernel_size[1]):
            within = (n // kernel_size[1], n % kernel_size[1])
            value = _shown_in_window(columns, within, windows, strides, dilations, pads, at, unit)
            total += value.to(total.dtype)
    return total


@operator("col2im", accepts=FLOATS)
def col2im(self, output_size, kernel_size, dilation, padding, stride, outs=()):
    if self.dim() not in (2, 3) or 0 in self.shape[-2:] or self.dtype not in FLOATS:
        raise Decline(f"no columns, or dtype {self.dtype}")
    _check_contiguous(outs)
    columns = self if self.dim() == 3 else self.unsqueeze(0)
    windows = _windows(output_size, kernel_size, dilation, padding, stride)
    elements = math.prod(kernel_size)
    if columns.shape[1] % elements or columns.shape[2] != math.prod(windows):
        raise Decline("columns of other windows")
    shape = (columns.shape[0], columns.shape[1] // elements, *output_size)
    out = result((self,), shape if self.dim() == 3 else shape[1:], self.dtype, outs)
    written = (out if self.dim() == 3 else out.unsqueeze(0)).unsqueeze(-1).unsqueeze(-1)
    source = columns.unflatten(-1, windows).unflatten(1, (shape[1], *kernel_size))
    numbers = map(tuple, (kernel_size, windows, stride, dilation, padding))
    height, width = kernel_size if elements <= _UNROLLED else (0, 0)
    unit = all(step == 1 for step in stride)
    _sum_of_windows.run((Placed(source, (2, 3, 4, 5)), *numbers, (2, 3), height, width, unit), (written,))
    return (out,)


@scalar_kernel(pointer=("grad",), integers=("size", "step", "windows"), index=("at",), accepts=FLOATS)
def _sum_of_unfolded(grad, size, step, windows, at):
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
        raise Decline(f"no windows, or dtype {grad_in.dtype}")
    dim %= rank
    shape = list(input_sizes)
    shape[dim] = (input_sizes[dim] - size) // step + 1
    if size > input_sizes[dim] or list(grad_in.shape) != [*shape, size]:
        raise Decline("a gradient of another shape")
    out = result((grad_in,), input_sizes, grad_in.dtype, outs)
    # A step that leads beyond the end is never taken, and the kernel counts in int32.
    step = min(step, input_sizes[dim])
    _sum_of_unfolded.run((Placed(grad_in, (dim, rank)), size, step, shape[dim], dim), (out.unsqueeze(-1),))
    return (out,)
