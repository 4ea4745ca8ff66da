"""Copies, conversions, concatenation, copies of views, and gradients of views."""

# Over 500 lines: many short operators over one `move`, copies of views and their gradients among them.

from __future__ import annotations

import functools
import inspect
import math

import torch
import triton.language as tl
from torch._prims_common import suggest_memory_format

from tritonite.dtypes import COMPLEX, FLOATS, MOVED, NUMBERS
from tritonite.engine.iteration import broadcast_shape, never_overlaps_itself, output_strides, span
from tritonite.engine.lists.pairs import move_each
from tritonite.engine.movement import (
    check_conversion,
    check_placement,
    fill_zero,
    move,
    result,
    strides_in,
    strides_like,
    through,
    words,
)
from tritonite.engine.pointwise.gathered import Gathered
from tritonite.errors import Decline
from tritonite.language.indices import read_at
from tritonite.language.math import pack_complex
from tritonite.ops import aten
from tritonite.registry import exclude, scalar_kernel
from tritonite.registry import operator as any_operator

operator = functools.partial(any_operator, tensors_only=True)


@operator("copy", accepts=MOVED)
def copy(self, src, non_blocking, outs=()):
    """Copy `src`, in the dtype of `self`; a fresh result has the strides of `self`."""
    check_conversion(src.dtype, self.dtype)
    if not outs:
        if not never_overlaps_itself(self.shape, self.stride()):
            raise Decline(f"a tensor with strides {self.stride()} that overlaps itself")
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


@operator("dequantize", accepts=MOVED)
def dequantize(self, outs=()):
    """Convert numbers to float32: a tensor without a quantised dtype stands for its own numbers."""
    if self.dtype is torch.float32 and not outs:
        raise Decline("a float32 tensor, which ATen returns itself")
    check_conversion(self.dtype, torch.float32)
    copied = result((self,), self.shape, torch.float32, outs, strides_like(self, None))
    move(self, copied)
    return (copied,)


def _promoted(tensors):
    """Return the promoted dtype of tensors. Decline dtypes that torch does not promote."""
    try:
        return functools.reduce(torch.promote_types, [x.dtype for x in tensors])
    except RuntimeError as error:
        raise Decline("unsigned integers of several widths") from error


def _concatenated(tensors, dim, outs):
    """Concatenate tensors along `dim`."""
    # Of a tensor of shape (0,) only the dtype counts.
    kept = [x for x in tensors if tuple(x.shape) != (0,)]
    if not kept or any(not x.dim() for x in kept):
        raise Decline("no tensors but empty ones of one dimension, or a 0-d one")
    first = kept[0]
    rank = first.dim()
    if not -rank <= dim < rank:
        raise Decline(f"dimension {dim} of {rank}-d tensors")
    dim %= rank
    if any(x.dim() != rank or _without(x.shape, dim) != _without(first.shape, dim) for x in kept):
        raise Decline("tensors whose shapes differ in another dimension")
    dtype = _promoted(tensors)
    if outs and torch.can_cast(dtype, outs[0].dtype):
        dtype = outs[0].dtype
    shape = list(first.shape)
    shape[dim] = sum(x.shape[dim] for x in kept)
    for x in tensors:
        check_conversion(x.dtype, dtype)
    out = result(tensors, shape, dtype, outs, _concatenated_strides(tensors, shape))
    sizes = [x.shape[dim] for x in kept]
    move_each(kept, out.split(sizes, dim))
    return out


def _without(shape, dim):
    return [size for d, size in enumerate(shape) if d != dim]


def _concatenated_strides(tensors, shape):
    """Strides of the memory format that all tensors share, or contiguous ones."""
    formats = {suggest_memory_format(x) for x in tensors}
    kept = formats.pop() if len(formats) == 1 else torch.contiguous_format
    return strides_in(shape, kept)


@operator("cat", accepts=MOVED)
def cat(tensors, dim, outs=()):
    return (_concatenated(tensors, dim, outs),)


def _check_alike(tensors):
    if not tensors or any(x.shape != tensors[0].shape for x in tensors):
        raise Decline("no tensors, or tensors of several shapes")


@operator("stack", accepts=MOVED)
def stack(tensors, dim, outs=()):
    _check_alike(tensors)
    rank = tensors[0].dim()
    if not -rank - 1 <= dim <= rank:
        raise Decline(f"dimension {dim} for {rank}-d tensors")
    dim %= rank + 1
    if outs or dim == rank:
        return (_concatenated([x.unsqueeze(dim) for x in tensors], dim, outs),)
    shape = list(tensors[0].shape)
    shape.insert(dim, len(tensors))
    return (_concatenated(tensors, dim, ()).view(shape),)


exclude("_stack.out", "ATen's GPU kernel gives its output the shape of a concatenation")


@operator("_stack", accepts=MOVED)
def _stack(tensors, dim, outs=()):
    _check_alike(tensors)
    if not -tensors[0].dim() - 1 <= dim <= tensors[0].dim():
        raise Decline(f"dimension {dim} for {tensors[0].dim()}-d tensors")
    dim %= tensors[0].dim() + 1
    return (_concatenated([x.unsqueeze(dim) for x in tensors], dim, outs),)


def _copy_of_view(view):
    """Make the host function that copies a view into a contiguous tensor. `view` takes the operator's arguments."""

    def copied(*values, outs=()):
        """A contiguous copy of a view."""
        check_conversion(values[0].dtype, values[0].dtype)
        viewed = through(view, *values)
        out = result((values[0],), viewed.shape, viewed.dtype, outs)
        move(viewed, out)
        return (out,)

    copied.__signature__ = inspect.signature(view)
    return copied


def _copies_of_views(view, misread=False):
    """Make the host function that copies a list of views, in one launch if possible.

    `misread` names an operator whose GPU kernel in ATen takes all tensors for contiguous.
    """

    def copied(*values, outs=()):
        """Contiguous copies of views."""
        self = values[0]
        check_conversion(self.dtype, self.dtype)
        views = through(view, *values)
        if not outs:
            made = [result((self,), x.shape, x.dtype) for x in views]
            move_each(views, made)
            return (made,)
        (given,) = outs
        if misread and aten.on_gpu() and not self.is_contiguous():
            raise Decline("a tensor that is not contiguous, which ATen's GPU kernel may misread")
        if misread and aten.on_gpu() and not all(out.is_contiguous() for out in given):
            raise Decline("outputs that are not contiguous, which ATen's GPU kernel may misplace")
        if len(given) != len(views):
            raise Decline(f"{len(given)} outputs for {len(views)} views")
        for i, (x, out) in enumerate(zip(views, given, strict=True)):
            result((self, *given[:i]), x.shape, x.dtype, (out,))
        move_each(views, given)
        return ()

    copied.__signature__ = inspect.signature(view)
    return copied


def _strided_view(self, size, stride, storage_offset):
    """View by strides within the tensor's own elements; what else its storage holds is not known."""
    if storage_offset is not None or len(size) != len(stride) or any(n < 0 for n in (*size, *stride)):
        raise Decline("a storage offset, or invalid sizes or strides")
    if math.prod(size) and (not self.numel() or span(size, stride) > span(self.shape, self.stride())):
        raise Decline(f"sizes {list(size)} and strides {list(stride)}, beyond the tensor's elements")
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
    "_reshape_alias_copy": lambda self, size, stride: _strided_view(self, size, stride, None),
    "_reshape_copy": lambda self, size: self.reshape(size),
    "alias_copy": _same,
    "as_strided_copy": _strided_view,
    "detach_copy": _same,
    "diagonal_copy": lambda self, offset, dim1, dim2: self.diagonal(offset, dim1, dim2),
    "expand_copy": lambda self, size, implicit: self.expand(size),
    "lift_fresh_copy": _same,
    "permute_copy": lambda self, dims: self.permute(dims),
    "select_copy": lambda self, dim, index: self.select(dim, index),
    "slice_copy": _sliced,
    "squeeze_copy": _squeezed,
    "t_copy": lambda self: self.t(),
    "transpose_copy": lambda self, dim0, dim1: self.transpose(dim0, dim1),
    "unfold_copy": lambda self, dimension, size, step: self.unfold(dimension, size, step),
    "unsqueeze_copy": lambda self, dim: self.unsqueeze(dim),
    "view_as_real_copy": lambda self: torch.view_as_real(self),
    "view_copy": _reshaped,
}.items():
    operator(_packet, accepts=MOVED)(_copy_of_view(_view))

_complex_copied = _copy_of_view(lambda self: torch.view_as_complex(self))


@operator("view_as_complex_copy", accepts=(torch.float16, torch.float32, torch.float64))
def view_as_complex_copy(self, outs=()):
    if not self.numel() or self.data_ptr() % 16:
        raise Decline("no elements, or memory that is not aligned to 16 bytes")
    return _complex_copied(self, outs=outs)


for _packet, _view in {
    "split_copy": lambda self, split_size, dim: torch.ops.aten.split.Tensor(self, split_size, dim),
    "split_with_sizes_copy": lambda self, split_sizes, dim: self.split_with_sizes(split_sizes, dim),
    "unbind_copy": lambda self, dim: self.unbind(dim),
}.items():
    operator(_packet, accepts=MOVED)(_copies_of_views(_view, misread=_packet == "split_with_sizes_copy"))


@operator("narrow_copy", accepts=MOVED)
def narrow_copy(self, dim, start, length, outs=()):
    """Copy a slice. ATen's CPU kernel takes every output for contiguous, so that others are declined."""
    if outs and not outs[0].is_contiguous():
        raise Decline("an output that is not contiguous")
    return _copy_of_view(lambda x: x.narrow(dim, start, length))(self, outs=outs)


def _scattered(self, src, view, outs):
    """Copy `self` with its strides, and write `src` into a view of the copy."""
    check_conversion(self.dtype, self.dtype)
    check_conversion(src.dtype, self.dtype)
    if not never_overlaps_itself(self.shape, self.stride()):
        raise Decline(f"a tensor with strides {self.stride()} that overlaps itself")
    if through(view, self).shape != src.shape:
        raise Decline(f"a source of shape {tuple(src.shape)}, which is not the view's")
    out = result((self, src), self.shape, self.dtype, outs, self.stride())
    written = view(out)
    if not never_overlaps_itself(written.shape, written.stride()):
        raise Decline("a view whose elements overlap")
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
    """Scatter into a copy with the strides of `self`, which give the strides their meaning; then copy to the output."""
    (scattered,) = _scattered(self, src, lambda x: _strided_view(x, size, stride, storage_offset), ())
    if not outs:
        return (scattered,)
    out = result((self, src), self.shape, self.dtype, outs)
    move(scattered, out)
    return (out,)


@scalar_kernel(pointer=("source",), integers=("start", "step", "size"), index=("at",))
def _gradient_by_slice(source, start, step, size, at):
    """Source elements at `start`, start + step, ...; 0 elsewhere."""
    offset = at - start
    inside = (offset >= 0) & (offset < size * step) & (offset % step == 0)
    return read_at(source, (offset // step,), inside, 0)


def _gradient_of_slice(grad_output, input_sizes, dim, start, step, outs):
    check_conversion(grad_output.dtype, grad_output.dtype)
    out = result((grad_output,), input_sizes, grad_output.dtype, outs)
    source = words(grad_output)
    _gradient_by_slice.run((Gathered(source, (dim,)), start, step, grad_output.shape[dim], dim), (words(out),))
    return (out,)


@operator("select_backward", accepts=MOVED)
def select_backward(grad_output, input_sizes, dim, index, outs=()):
    rank = len(input_sizes)
    if not -rank <= dim < rank or not -input_sizes[dim] <= index < input_sizes[dim]:
        raise Decline(f"index {index} of dimension {dim} for sizes {list(input_sizes)}")
    dim %= rank
    if list(grad_output.shape) != _without(input_sizes, dim):
        raise Decline(f"gradient of shape {tuple(grad_output.shape)} for sizes {list(input_sizes)}")
    index %= input_sizes[dim]
    return _gradient_of_slice(grad_output.unsqueeze(dim), input_sizes, dim, index, 1, outs)


@operator("slice_backward", accepts=MOVED)
def slice_backward(grad_output, input_sizes, dim, start, end, step, outs=()):
    rank = len(input_sizes)
    if not -rank <= dim < rank or step < 1 or min(input_sizes) < 0:
        raise Decline(f"step {step} along dimension {dim} of sizes {list(input_sizes)}")
    dim %= rank
    first, last, _ = slice(start, end, step).indices(input_sizes[dim])
    shape = list(input_sizes)
    shape[dim] = len(range(first, last, step))
    if list(grad_output.shape) != shape:
        raise Decline(f"gradient of shape {tuple(grad_output.shape)}, not {tuple(shape)}")
    return _gradient_of_slice(grad_output, input_sizes, dim, first, step, outs)


def _embed_in_zeros(source, shape, view, outs):
    """Fill a tensor with zeros, and write `source` into a view of the tensor."""
    check_conversion(source.dtype, source.dtype)
    out = result((source,), shape, source.dtype, outs)
    written = through(view, out)
    if written.shape != source.shape:
        raise Decline(f"a source of shape {tuple(source.shape)} for a view of {tuple(written.shape)}")
    fill_zero(out)
    move(source, written)
    return (out,)


@operator("diagonal_backward", accepts=MOVED)
def diagonal_backward(grad_output, input_sizes, offset, dim1, dim2, outs=()):
    return _embed_in_zeros(grad_output, input_sizes, lambda x: x.diagonal(offset, dim1, dim2), outs)


@operator("diag_embed", accepts=MOVED)
def diag_embed(self, offset, dim1, dim2, outs=()):
    rank = self.dim() + 1
    if not self.dim() or any(not -rank <= d < rank for d in (dim1, dim2)) or (dim1 - dim2) % rank == 0:
        raise Decline(f"a diagonal in dimensions {dim1} and {dim2} of {rank}")
    if abs(offset) >= 2**31:
        raise Decline(f"offset {offset}; less than 2**31 is served")
    dim1, dim2 = dim1 % rank, dim2 % rank
    shape = list(self.shape[:-1])
    size = self.shape[-1] + abs(offset)
    for d in sorted((dim1, dim2)):
        shape.insert(d, size)
    return _embed_in_zeros(self, shape, lambda x: x.diagonal(offset, dim1, dim2), outs)


@operator("repeat", accepts=MOVED)
def repeat(self, repeats, outs=()):
    """Repeat by one copy: each dimension of the result is viewed as (repeats, size)."""
    if len(repeats) < self.dim() or any(n < 0 for n in repeats):
        raise Decline(f"repeats {list(repeats)} for {self.dim()} dimensions")
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
        raise Decline("no tensors, or one of more than 2 dimensions")
    dtype = _promoted(tensors)
    if any(not x.dim() for x in tensors) and any(x.dtype is not dtype for x in tensors):
        raise Decline("a 0-d tensor of another dtype, which promotes otherwise")
    matrices = [x.reshape(1, -1) if x.dim() < 2 else x for x in tensors]
    for x in tensors:
        check_conversion(x.dtype, dtype)
    out = result(tensors, [sum(x.shape[d] for x in matrices) for d in (0, 1)], dtype, outs)
    fill_zero(out)
    blocks, row, column = [], 0, 0
    for x in matrices:
        blocks.append(out[row : row + x.shape[0], column : column + x.shape[1]])
        row, column = row + x.shape[0], column + x.shape[1]
    move_each(matrices, blocks)
    return (out,)


@operator("_chunk_cat", accepts=MOVED)
def _chunk_cat(tensors, dim, num_chunks, outs=()):
    """Cut each tensor into `num_chunks` chunks along `dim`, pad the last with zeros, and concatenate by chunk."""
    if not tensors or num_chunks < 1 or any(not x.numel() or x.dtype is not tensors[0].dtype for x in tensors):
        raise Decline(f"{num_chunks} chunks of {len(tensors)} tensors; elements and one dtype are required")
    if any(not 0 <= dim < x.dim() or x.shape[:dim] != tensors[0].shape[:dim] for x in tensors):
        raise Decline(f"dimension {dim} of tensors whose leading sizes differ, or that lack it")
    if outs and aten.on_gpu() and not outs[0].is_contiguous():
        raise Decline("an output that is not contiguous, which ATen's GPU kernel takes for contiguous")
    dtype = outs[0].dtype if outs else tensors[0].dtype
    if not torch.can_cast(tensors[0].dtype, dtype):
        raise Decline(f"an output of {dtype} for tensors of {tensors[0].dtype}")
    check_conversion(tensors[0].dtype, dtype)
    widths = [-(-x.shape[dim] // num_chunks) * math.prod(x.shape[dim + 1 :]) for x in tensors]
    out = result(tensors, (*tensors[0].shape[:dim], num_chunks, sum(widths)), dtype, outs)
    sources, targets = [], []
    for x, width, target in zip(tensors, widths, out.split(widths, -1), strict=True):
        flat = x.reshape(*x.shape[:dim], -1)
        whole, rest = divmod(flat.shape[-1], width)
        sources.append(flat[..., : whole * width].unflatten(-1, (whole, width)))
        targets.append(target[..., :whole, :])
        if rest:
            sources.append(flat[..., whole * width :])
            targets.append(target[..., whole, :rest])
    if sum(x.numel() for x in sources) < out.numel():
        fill_zero(out)
    move_each(sources, targets)
    return (out,)


_COMPLEX_OF = {torch.float16: torch.complex32, torch.float32: torch.complex64, torch.float64: torch.complex128}


@scalar_kernel(accepts=tuple(_COMPLEX_OF), output_dtypes=(None, None))
def _components(real, imag):
    return real, imag


@scalar_kernel(own=("real", "imag"), accepts=(torch.int32, torch.int64))
def _packed_components(real, imag):
    return pack_complex(real, imag)


@operator("complex", kernels=(_components,))
def complex_(real, imag, outs=()):
    """Store both components as one integer, or complex128 as two strided views."""
    if real.dtype is not imag.dtype or real.dtype not in _COMPLEX_OF:
        raise Decline(f"dtypes {real.dtype} and {imag.dtype}; fp16, float32 or float64 for both are served")
    shape = broadcast_shape((real.shape, imag.shape))
    strides = output_strides(shape, [(x.shape, x.stride()) for x in (real, imag)], False)
    out = result((real, imag), shape, _COMPLEX_OF[real.dtype], outs, strides)
    if real.dtype is not torch.float64:
        _packed_components.run((words(real), words(imag)), (words(out),))
    else:
        components = torch.view_as_real(out)
        _components.run((real, imag), (components[..., 0], components[..., 1]))
    return (out,)


@scalar_kernel(own=("self",), index=("component",), accepts=FLOATS)
def _conjugated(self, component):
    return tl.where(component == 1, self * -1, self)


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


for _packet, _overloads in {
    "_lazy_clone": ("",),
    "_unsafe_view": ("", ".out"),
    "lift": ("", ".out"),
    "unsafe_split": (".Tensor", ".Tensor_out"),
    "unsafe_split_with_sizes": ("", ".out"),
}.items():
    for _overload in _overloads:
        exclude(f"{_packet}{_overload}", "a view; the form with out= copies one, and nothing in PyTorch calls it")
