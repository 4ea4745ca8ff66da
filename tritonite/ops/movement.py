"""Copies, conversions, and rearrangements of elements."""

from __future__ import annotations

import torch

from tritonite.catalog import operator
from tritonite.dtypes import MOVED
from tritonite.engine.iteration import never_overlaps_itself
from tritonite.engine.movement import check_conversion, check_placement, move, result, strides_like
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
