"""Copies, conversions, and rearrangements of elements."""

from __future__ import annotations

import functools
import inspect
import math

import torch
import triton
import triton.language as tl
from torch._prims_common import suggest_memory_format

from tritonite import devices
from tritonite.catalog import operator as any_operator
from tritonite.catalog import scalar_kernel
from tritonite.dispatch.call import zero_or_one
from tritonite.dtypes import ALL, COMPLEX, FLOATS, MOVED, NUMBERS
from tritonite.engine.iteration import (
    broadcast_shape,
    has_channels_last,
    never_overlaps_itself,
    output_strides,
    span,
)
from tritonite.engine.lists import move_each
from tritonite.engine.movement import check_conversion, check_placement, fill_zero, move, result, strides_in, strides_like, words
from tritonite.engine.pointwise import Placed
from tritonite.errors import Decline
from tritonite.language.places import read_at


operator = functools.partial(any_operator, tensors_only=True)
_ON_CPU = devices.current.type == "cpu"
_USUAL = (*ALL, *COMPLEX)


@operator("copy", accepts=MOVED)
def copy(self, src, non_blocking, outs=()):
    """A fresh result lies as `self` does."""
    check_conversion(src.dtype, self.dtype)
    if not outs:
        if not never_overlaps_itself(self.shape, self.stride()):
            raise Decline("a tensor that overlaps itself")
        outs = (result((self, src), self.shape, self.dtype, strides=self.stride()),)
    elif outs[0] is not self:
        result((self, src), self.shape, self.dtype, outs)
    if src is not outs[0]:
        move(src, outs[0])
    return outs


@operator("clone", accepts=MOVED)
def clone(self, memory_format, outs=()):
    check_conversion(self.dtype, self.dtype)
    copied = result((self,), self.shape, self.dtype, outs, strides_like(self, memory_format))
    move(self, copied)
    return (copied,)


@operator("_to_copy", accepts=MOVED)
def _to_copy(self, non_blocking, memory_format, dtype=None, layout=None, device=None, pin_memory=None, outs=()):
    check_placement(self, layout, device, pin_memory)
    dtype = outs[0].dtype if outs else self.dtype if dtype is None else dtype
    check_conversion(self.dtype, dtype)
    copied = result((self,), self.shape, dtype, outs, strides_like(self, memory_format))
    move(self, copied)
    return (copied,)


def _concatenated(tensors, dim, outs):
    """What `cat` gives, of tensors along a dimension."""
    # Those of one dimension and no elements count for nothing but the dtype.
    kept = [x for x in tensors if tuple(x.shape) != (0,)]
    if not kept or any(not x.dim() for x in kept):
        raise Decline("nothing to put together")
    first = kept[0]
    rank = first.dim()
    if not -rank <= dim < rank:
        raise Decline("no such dimension")
    dim %= rank
    if any(x.dim() != rank or _without(x.shape, dim) != _without(first.shape, dim) for x in kept):
        raise Decline("sizes that differ")
    dtype = functools.reduce(torch.promote_types, [x.dtype for x in tensors])
    if outs and torch.can_cast(dtype, outs[0].dtype):
        dtype = outs[0].dtype
    shape = list(first.shape)
    shape[dim] = sum(x.shape[dim] for x in kept)
    for x in tensors:
        check_conversion(x.dtype, dtype)
    out = result(tensors, shape, dtype, outs, _strides_together(tensors, shape))
    sizes = [x.shape[dim] for x in kept]
    move_each(kept, out.split(sizes, dim))
    return out


def _without(shape, dim):
    return [size for d, size in enumerate(shape) if d != dim]


def _strides_together(tensors, shape):
    """A memory format that all tensors have is the result's."""
    formats = {suggest_memory_format(x) for x in tensors}
    kept = formats.pop() if len(formats) == 1 else torch.contiguous_format
    return strides_in(shape, kept)


@operator("cat", accepts=MOVED)
def cat(tensors, dim, outs=()):
    return (_concatenated(tensors, dim, outs),)


def _check_alike(tensors):
    if not tensors or any(x.shape != tensors[0].shape for x in tensors):
        raise Decline("tensors of several shapes, or none")


@operator("stack", accepts=MOVED)
def stack(tensors, dim, outs=()):
    _check_alike(tensors)
    rank = tensors[0].dim()
    if not -rank - 1 <= dim <= rank:
        raise Decline("no such dimension")
    dim %= rank + 1
    if outs or dim == rank:
        return (_concatenated([x.unsqueeze(dim) for x in tensors], dim, outs),)
    shape = list(tensors[0].shape)
    shape.insert(dim, len(tensors))
    return (_concatenated(tensors, dim, ()).view(shape),)


@operator("_stack", accepts=MOVED)
def _stack(tensors, dim, outs=()):
    _check_alike(tensors)
    if not -tensors[0].dim() - 1 <= dim <= tensors[0].dim():
        raise Decline("no such dimension")
    dim %= tensors[0].dim() + 1
    return (_concatenated([x.unsqueeze(dim) for x in tensors], dim, outs),)


def _through(view, *arguments):
    """What a view is. Raises Decline where ATen refuses it."""
    try:
        return view(*arguments)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise Decline(str(error)) from None


def _copy_of_view(view):
    """The host function of a copy of a view, contiguous; `view` has the operator's arguments."""

    def copied(*values, outs=()):
        """A contiguous copy of a view."""
        check_conversion(values[0].dtype, values[0].dtype)
        viewed = _through(view, *values)
        out = result((values[0],), viewed.shape, viewed.dtype, outs)
        move(viewed, out)
        return (out,)

    copied.__signature__ = inspect.signature(view)
    return copied


def _copies_of_views(view):
    """The same of a view that is a list; all copies are made together."""

    def copied(*values, outs=()):
        """Contiguous copies of views."""
        self = values[0]
        check_conversion(self.dtype, self.dtype)
        views = _through(view, *values)
        if not outs:
            made = [result((self,), x.shape, x.dtype) for x in views]
            move_each(views, made)
            return (made,)
        (given,) = outs
        if len(given) != len(views):
            raise Decline("another number of outputs")
        for i, (x, out) in enumerate(zip(views, given, strict=True)):
            result((self, *given[:i]), x.shape, x.dtype, (out,))
        move_each(views, given)
        return ()

    copied.__signature__ = inspect.signature(view)
    return copied


def _within(self, size, stride, storage_offset):
    """A view by strides, of elements that the tensor has itself: no more is known of its storage."""
    if storage_offset is not None or len(size) != len(stride) or any(n < 0 for n in (*size, *stride)):
        raise Decline("a place in the storage, or sizes that it has not")
    if math.prod(size) and (not self.numel() or span(size, stride) > span(self.shape, self.stride())):
        raise Decline("elements beyond the tensor's")
    return self.as_strided(size, stride)


def _reshaped(self, size=None, dtype=None):
    if dtype is not None:
        return self.view(dtype)
    return self.reshape(size)


def _squeezed(self, dim=None):
    return self.squeeze() if dim is None else self.squeeze(dim if isinstance(dim, int) else tuple(dim))


def _same(self):
    return self


def _sliced(self, dim, start, end, step):
    return torch.ops.aten.slice.Tensor(self, dim, start, end, step)


for _packet, _view in {
    "_reshape_alias_copy": lambda self, size, stride: _within(self, size, stride, None),
    "_reshape_copy": lambda self, size: self.reshape(size),
    "alias_copy": _same,
    "as_strided_copy": _within,
    "detach_copy": _same,
    "diagonal_copy": lambda self, offset, dim1, dim2: self.diagonal(offset, dim1, dim2),
    "expand_copy": lambda self, size, implicit: self.expand(size),
    "lift_fresh_copy": _same,
    "narrow_copy": lambda self, dim, start, length: self.narrow(dim, start, length),
    "permute_copy": lambda self, dims: self.permute(dims),
    "select_copy": lambda self, dim, index: self.select(dim, index),
    "slice_copy": _sliced,
    "squeeze_copy": _squeezed,
    "t_copy": lambda self: self.t(),
    "transpose_copy": lambda self, dim0, dim1: self.transpose(dim0, dim1),
    "unfold_copy": lambda self, dimension, size, step: self.unfold(dimension, size, step),
    "unsqueeze_copy": lambda self, dim: self.unsqueeze(dim),
    "view_as_complex_copy": lambda self: torch.view_as_complex(self),
    "view_as_real_copy": lambda self: torch.view_as_real(self),
    "view_copy": _reshaped,
}.items():
    operator(_packet, accepts=MOVED)(_copy_of_view(_view))

for _packet, _view in {
    "split_copy": lambda self, split_size, dim: torch.ops.aten.split.Tensor(self, split_size, dim),
    "split_with_sizes_copy": lambda self, split_sizes, dim: self.split_with_sizes(split_sizes, dim),
    "unbind_copy": lambda self, dim: self.unbind(dim),
}.items():
    operator(_packet, accepts=MOVED)(_copies_of_views(_view))


def _scattered(self, src, view, outs):
    """A copy of `self`, laid out as it is, into a view of which `src` is written."""
    check_conversion(self.dtype, self.dtype)
    check_conversion(src.dtype, self.dtype)
    if not never_overlaps_itself(self.shape, self.stride()):
        raise Decline("a tensor that overlaps itself")
    if _through(view, self).shape != src.shape:
        raise Decline("a source of another shape")
    out = result((self, src), self.shape, self.dtype, outs, self.stride())
    written = view(out)
    if not never_overlaps_itself(written.shape, written.stride()):
        raise Decline("places that overlap")
    move(self, out)
    move(src, written)
    return (out,)


@operator("select_scatter", accepts=MOVED)
def select_scatter(self, src, dim, index, outs=()):
    return _scattered(self, src, lambda x: x.select(dim, index), outs)


@operator("slice_scatter", accepts=MOVED)
def slice_scatter(self, src, dim, start, end, step, outs=()):
    return _scattered(self, src, lambda x: _sliced(x, dim, start, end, step), outs)


@operator("diagonal_scatter", accepts=MOVED)
def diagonal_scatter(self, src, offset, dim1, dim2, outs=()):
    return _scattered(self, src, lambda x: x.diagonal(offset, dim1, dim2), outs)


@operator("as_strided_scatter", accepts=MOVED)
def as_strided_scatter(self, src, size, stride, storage_offset, outs=()):
    if outs and outs[0].stride() != self.stride():
        raise Decline("an output that lies otherwise")
    return _scattered(self, src, lambda x: _within(x, size, stride, storage_offset), outs)


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


@scalar_kernel(pointer=("source",), integers=("start", "step", "size"), index=("at",))
def _apart(source, start, step, size, at):
    """The source from `start` on, an element every `step`, and 0 elsewhere."""
    place = at - start
    inside = (place >= 0) & (place < size * step) & (place % step == 0)
    return read_at(source, (place // step,), inside, 0)


def _gradient_of_slice(grad_output, input_sizes, dim, start, step, outs):
    check_conversion(grad_output.dtype, grad_output.dtype)
    out = result((grad_output,), input_sizes, grad_output.dtype, outs)
    source = words(grad_output)
    _apart.run((Placed(source, (dim,)), start, step, grad_output.shape[dim], dim), (words(out),))
    return (out,)


@operator("select_backward", accepts=MOVED)
def select_backward(grad_output, input_sizes, dim, index, outs=()):
    rank = len(input_sizes)
    if not -rank <= dim < rank or not -input_sizes[dim] <= index < input_sizes[dim]:
        raise Decline("no such element")
    dim %= rank
    if list(grad_output.shape) != _without(input_sizes, dim):
        raise Decline("a gradient of another shape")
    index %= input_sizes[dim]
    return _gradient_of_slice(grad_output.unsqueeze(dim), input_sizes, dim, index, 1, outs)


@operator("slice_backward", accepts=MOVED)
def slice_backward(grad_output, input_sizes, dim, start, end, step, outs=()):
    rank = len(input_sizes)
    if not -rank <= dim < rank or step < 1:
        raise Decline("no such slice")
    dim %= rank
    first, last, _ = slice(start, end, step).indices(input_sizes[dim])
    shape = list(input_sizes)
    shape[dim] = len(range(first, last, step))
    if list(grad_output.shape) != shape:
        raise Decline("a gradient of another shape")
    return _gradient_of_slice(grad_output, input_sizes, dim, first, step, outs)


def _in_zeros(source, shape, view, outs):
    """Zeros, into a view of which the source is written."""
    check_conversion(source.dtype, source.dtype)
    out = result((source,), shape, source.dtype, outs)
    written = _through(view, out)
    if written.shape != source.shape:
        raise Decline("a source of another shape")
    fill_zero(out)
    move(source, written)
    return (out,)


@operator("diagonal_backward", accepts=MOVED)
def diagonal_backward(grad_output, input_sizes, offset, dim1, dim2, outs=()):
    return _in_zeros(grad_output, input_sizes, lambda x: x.diagonal(offset, dim1, dim2), outs)


@operator("diag_embed", accepts=MOVED)
def diag_embed(self, offset, dim1, dim2, outs=()):
    rank = self.dim() + 1
    if not self.dim() or any(not -rank <= d < rank for d in (dim1, dim2)) or (dim1 - dim2) % rank == 0:
        raise Decline("no such diagonal")
    dim1, dim2 = dim1 % rank, dim2 % rank
    shape = list(self.shape[:-1])
    size = self.shape[-1] + abs(offset)
    for d in sorted((dim1, dim2)):
        shape.insert(d, size)
    return _in_zeros(self, shape, lambda x: x.diagonal(offset, dim1, dim2), outs)


@operator("repeat", accepts=MOVED)
def repeat(self, repeats, outs=()):
    """Every dimension of the result is two of a view: that of the repeats and the tensor's own."""
    if len(repeats) < self.dim() or any(n < 0 for n in repeats):
        raise Decline("fewer repeats than dimensions, or negative ones")
    sizes = (*[1] * (len(repeats) - self.dim()), *self.shape)
    check_conversion(self.dtype, self.dtype)
    out = result((self,), [n * size for n, size in zip(repeats, sizes, strict=True)], self.dtype, outs)
    if out.numel():
        split = out
        for d in reversed(range(len(sizes))):
            split = split.unflatten(d, (repeats[d], sizes[d]))
        source = self.reshape([n for size in sizes for n in (1, size)])
        move(source, split)
    return (out,)


@operator("block_diag", accepts=MOVED)
def block_diag(tensors, outs=()):
    if not tensors or any(x.dim() > 2 for x in tensors):
        raise Decline("no matrices")
    dtype = functools.reduce(torch.promote_types, [x.dtype for x in tensors])
    matrices = [x.reshape(1, -1) if x.dim() < 2 else x for x in tensors]
    for x in tensors:
        check_conversion(x.dtype, dtype)
    out = result(tensors, [sum(x.shape[d] for x in matrices) for d in (0, 1)], dtype, outs)
    fill_zero(out)
    places, row, column = [], 0, 0
    for x in matrices:
        places.append(out[row : row + x.shape[0], column : column + x.shape[1]])
        row, column = row + x.shape[0], column + x.shape[1]
    move_each(matrices, places)
    return (out,)


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
    """A flip, a transposition or both; flips lie as ATen's do."""
    rank = self.dim()
    if rank < 2 or len(dims) != 2 or any(not -rank <= d < rank for d in dims) or (dims[0] - dims[1]) % rank == 0:
        raise Decline("no such dimensions")
    _check_usual(self.dtype)
    first, second = dims[0] % rank, dims[1] % rank
    k %= 4
    turned = {0: (), 1: (second,), 2: (first, second), 3: (first,)}[k]
    (copied,) = flip(self, turned) if not outs else flip(self, turned, (_turned(outs[0], k, first, second),))
    return outs or (_turned(copied, k, first, second),)


def _turned(x, k, first, second):
    return x.transpose(first, second) if k % 2 else x


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
    elif zero_or_one(value) == 0:
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


_EXTENDED = (*FLOATS, *COMPLEX)


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


@operator("pixel_shuffle", accepts=MOVED)
def pixel_shuffle(self, upscale_factor, outs=()):
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
    r = downscale_factor
    if self.dim() < 3 or r < 1 or not self.numel() or self.shape[-1] % r or self.shape[-2] % r or has_channels_last(self):
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
    if self.dim() < 3 or groups < 1 or not self.numel() or self.shape[1] % groups or has_channels_last(self):
        raise Decline("no image of such groups")
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


@scalar_kernel(
    pointer=("columns",),
    integers=("kernel_size", "windows", "strides", "dilations", "pads"),
    index=("at",),
    accepts=FLOATS,
)
def _sum_of_windows(columns, kernel_size, windows, strides, dilations, pads, at):
    """The sum of what all windows have of an element."""
    element = columns[0].dtype.element_ty
    total = tl.zeros(columns[0].shape, tl.float64 if element == tl.float64 else tl.float32)
    for n in range(kernel_size[0] * kernel_size[1]):
        within = (n // kernel_size[1], n % kernel_size[1])
        places, inside = within, at[0] >= 0
        for d in tl.static_range(2):
            start = at[d] + pads[d] - within[d] * dilations[d]
            window = start // strides[d]
            places = places + (window,)
            inside = inside & (start >= 0) & (start % strides[d] == 0) & (window < windows[d])
        total += read_at(columns, places, inside, 0.0).to(total.dtype)
    return total


@operator("col2im", accepts=FLOATS)
def col2im(self, output_size, kernel_size, dilation, padding, stride, outs=()):
    if self.dim() not in (2, 3) or 0 in self.shape[-2:] or self.dtype not in FLOATS:
        raise Decline(f"no columns, or dtype {self.dtype}")
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
    _sum_of_windows.run((Placed(source, (2, 3, 4, 5)), *numbers, (2, 3)), (written,))
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
    _sum_of_unfolded.run((Placed(grad_in, (dim, rank)), size, step, shape[dim], dim), (out.unsqueeze(-1),))
    return (out,)


@operator("_chunk_cat", accepts=MOVED)
def _chunk_cat(tensors, dim, num_chunks, outs=()):
    """Each tensor in as many chunks along a dimension, the last of which zeros make as long; those side by side."""
    if not tensors or num_chunks < 1 or any(not x.numel() or x.dtype is not tensors[0].dtype for x in tensors):
        raise Decline("no chunks, no elements, or several dtypes")
    if any(not 0 <= dim < x.dim() or x.shape[:dim] != tensors[0].shape[:dim] for x in tensors):
        raise Decline("sizes that differ, or a dimension that there is not")
    dtype = outs[0].dtype if outs else tensors[0].dtype
    check_conversion(tensors[0].dtype, dtype)
    widths = [-(-x.shape[dim] // num_chunks) * math.prod(x.shape[dim + 1 :]) for x in tensors]
    out = result(tensors, (*tensors[0].shape[:dim], num_chunks, sum(widths)), dtype, outs)
    sources, places = [], []
    for x, width, place in zip(tensors, widths, out.split(widths, -1), strict=True):
        flat = x.reshape(*x.shape[:dim], -1)
        whole, rest = divmod(flat.shape[-1], width)
        sources.append(flat[..., : whole * width].unflatten(-1, (whole, width)))
        places.append(place[..., :whole, :])
        if rest:
            sources.append(flat[..., whole * width :])
            places.append(place[..., whole, :rest])
    if sum(x.numel() for x in sources) < out.numel():
        fill_zero(out)
    move_each(sources, places)
    return (out,)


@scalar_kernel(accepts=(torch.float16, torch.float32, torch.float64), output_dtypes=(None, None))
def _parts(real, imag):
    return real, imag


_COMPLEX_OF = {torch.float16: torch.complex32, torch.float32: torch.complex64, torch.float64: torch.complex128}


@operator("complex", kernels=(_parts,))
def complex_(real, imag, outs=()):
    """Writes the real and imaginary parts of the result through views of it."""
    if real.dtype is not imag.dtype or real.dtype not in _COMPLEX_OF:
        raise Decline(f"dtypes {real.dtype} and {imag.dtype}")
    shape = broadcast_shape((real.shape, imag.shape))
    strides = output_strides(shape, [(x.shape, x.stride()) for x in (real, imag)], False)
    out = result((real, imag), shape, _COMPLEX_OF[real.dtype], outs, strides)
    halves = torch.view_as_real(out)
    _parts.run((real, imag), (halves[..., 0], halves[..., 1]))
    return (out,)


@scalar_kernel(own=("self",), index=("part",), accepts=FLOATS)
def _conjugated(self, part):
    return tl.where(part == 1, self * -1, self)


def _conjugate(self, out):
    _conjugated.run((torch.view_as_real(self), self.dim()), (torch.view_as_real(out),))
    return (out,)


@operator("conj_physical", "_conj_physical", accepts=COMPLEX)
def conj_physical(self, outs=()):
    if self.dtype not in COMPLEX:
        raise Decline(f"dtype {self.dtype}")
    if outs and outs[0] is self:
        return _conjugate(self, self)
    return _conjugate(self, result((self,), self.shape, self.dtype, outs, strides_like(self, None)))


@operator("_conj_copy", accepts=COMPLEX)
def _conj_copy(self, outs=()):
    if self.dtype not in COMPLEX:
        raise Decline(f"dtype {self.dtype}")
    return _conjugate(self, result((self,), self.shape, self.dtype, outs))


@scalar_kernel(own=("self",), accepts=NUMBERS)
def _negated(self):
    return self * -1.0 if self.dtype.is_floating() else -self


@operator("_neg_view_copy", accepts=NUMBERS)
def _neg_view_copy(self, outs=()):
    if self.dtype not in NUMBERS:
        raise Decline(f"dtype {self.dtype}")
    out = result((self,), self.shape, self.dtype, outs)
    _negated.run((self,), (out,))
    return (out,)
