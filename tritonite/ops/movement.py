"""Copies, conversions, and rearrangements of elements."""

from __future__ import annotations

import functools

import torch
from torch._prims_common import suggest_memory_format

from tritonite.catalog import operator
from tritonite.dtypes import MOVED
from tritonite.engine.iteration import never_overlaps_itself
from tritonite.engine.lists import move_each
from tritonite.engine.movement import check_conversion, check_placement, move, result, strides_in, strides_like
from tritonite.errors import Decline


def _check_source(src):
    if not isinstance(src, torch.Tensor):
        raise Decline("a number for a tensor")


@operator("copy", accepts=MOVED)
def copy(self, src, non_blocking, outs=()):
    """A fresh result lies as `self` does."""
    _check_source(src)
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
