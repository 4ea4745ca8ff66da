"""Unique elements, and unique slices along a dimension: by a bitmap, or by sorting and comparing neighbours.

The host waits once, for the number of unique elements, which is the size of the results.
"""

import math

import torch

from tritonite import devices
from tritonite.dtypes import ALL
from tritonite.engine.iteration import contiguous_strides
from tritonite.engine.outputs import dimensions, outputs
from tritonite.engine.sorting.dense import Dense, serves
from tritonite.engine.sorting.keys import Keys
from tritonite.engine.sorting.lexicographic import differences, order_of, take_rows
from tritonite.engine.sorting.radix import sort_long_rows
from tritonite.engine.sorting.runs import Distinct, Runs, write_runs
from tritonite.engine.sorting.table import slower
from tritonite.errors import ATEN_IS_FASTER, Decline
from tritonite.ops import aten
from tritonite.ops.sorting import sort_into
from tritonite.registry import exclude, operator
from tritonite.runtime.contract import decline_if_slower, empty, empty_strided, refuse_if_negative, settings

for _name in ("_unique", "_unique2", "unique_consecutive", "unique_dim", "unique_dim_consecutive"):
    exclude(f"{_name}.out", "ATen makes it of the overload without outputs, which has a kernel, and resizes them")


def _nothing(self):
    return empty((0,), torch.int64, self.device)


def _unique(self, inverse, counts):
    """Return (unique values, each element's index among them, counts of equal elements), by a bitmap or one sort."""
    outputs((self,), [], [], ())
    if not self.numel():
        return _of_nothing(self, inverse)
    if self.dtype is torch.bool and not ((inverse and counts) or aten.on_cpu()):
        raise Decline("bools without both inverse and counts, where ATen returns others than asked for on GPUs")
    x = self.reshape(-1)
    slow = slower(devices.current.kind).sets and (not (inverse or counts) or self.dtype.itemsize == 8)
    dense = Dense(x, counts) if serves(x) else None
    sorts = dense is None or not dense.never
    if dense is None:
        decline_if_slower(slow)
    elif sorts and slow and settings().faster_only:
        refuse_if_negative(dense.flag, ATEN_IS_FASTER, lasting=True)
        sorts = False
    out = Distinct.of(x, _inverse(self) if inverse else None, counts)
    if dense is not None:
        dense.write(out)
    if sorts:
        ordered = empty(x.shape, x.dtype, x.device)
        # int32 is enough, since longer rows than it can number are declined.
        order = empty(x.shape, torch.int32, x.device) if inverse else None
        if dense is None:
            sort_into(x, 0, False, ordered, order)
        else:
            sort_long_rows(x, 0, Keys.of(x.dtype), ordered, order, skip_flag=dense.flag)
        write_runs(out, ordered, order, None if dense is None else dense.flag)
    return _results(self, out)


def _results(self, out):
    values, lengths = out.results()
    return values, _nothing(self) if out.ranks is None else out.ranks, _nothing(self) if lengths is None else lengths


def _of_nothing(self, inverse):
    """Return the results for a tensor without elements. On GPUs ATen always returns an inverse of the shape."""
    indices = _inverse(self) if inverse or aten.on_gpu() else _nothing(self)
    return empty((0,), self.dtype, self.device), indices, _nothing(self)


def _inverse(self):
    return empty(self.shape, torch.int64, self.device)


@operator("_unique2", accepts=ALL)
def unique2(self, sorted=True, return_inverse=False, return_counts=False, outs=()):
    """Return unique elements in order, whatever `sorted` says."""
    return _unique(self, return_inverse, return_counts)


@operator("_unique", accepts=ALL)
def unique(self, sorted=True, return_inverse=False, outs=()):
    return _unique(self, return_inverse, False)[:2]


def _unique_slices(self, dim, sorts, inverse, counts):
    """Return (unique slices along a dimension, each slice's index among them, counts of equal slices)."""
    outputs((self,), [], [], ())
    if not self.dim():
        raise Decline("a tensor without dimensions")
    (dim,) = dimensions(dim, self.dim())
    others = (*self.shape[:dim], *self.shape[dim + 1 :])
    if not self.numel():
        raise Decline("a tensor without elements")
    # ATen's CPU kernel always returns inverse and counts, and keeps every slice contiguous in the result.
    always = aten.on_cpu()
    if dim and self.dim() > 2 and not always:
        raise Decline(f"slices along dimension {dim} of {self.dim()}, where data decides the result's strides on GPUs")
    n = self.shape[dim]
    x = self.movedim(dim, 0).reshape(n, -1).contiguous()
    order = order_of(x) if sorts else None
    runs = Runs(differences(x, order))
    starts = runs.starts()
    kept = starts
    if order is not None:
        kept = empty((runs.count,), torch.int64, self.device)
        runs.found.move(kept, order, (1,), gathers=True)
    shape = (*self.shape[:dim], runs.count, *self.shape[dim + 1 :])
    if always:
        own = contiguous_strides((1, *others))
        strides = (*own[1 : dim + 1], own[0], *own[dim + 1 :])
        values = empty_strided(shape, strides, self.dtype, self.device)
    elif dim:
        values = empty_strided(shape, (runs.count, 1), self.dtype, self.device)
    else:
        values = empty(shape, self.dtype, self.device)
    take_rows(values, x, kept, runs.count, x.shape[1] if always else math.prod(self.shape[dim + 1 :]))
    indices, lengths = _nothing(self), _nothing(self)
    if inverse or always:
        indices = empty((n,), torch.int64, self.device)
        runs.found.write_ranks(indices, order)
    if counts or always:
        lengths = runs.lengths(starts)
    return values, indices, lengths


@operator("unique_dim", accepts=ALL)
def unique_dim(self, dim, sorted=True, return_inverse=False, return_counts=False, outs=()):
    return _unique_slices(self, dim, True, return_inverse, return_counts)


@operator("unique_dim_consecutive", accepts=ALL)
def unique_dim_consecutive(self, dim, return_inverse=False, return_counts=False, outs=()):
    return _unique_slices(self, dim, False, return_inverse, return_counts)


@operator("unique_consecutive", accepts=ALL)
def unique_consecutive(self, return_inverse=False, return_counts=False, dim=None, outs=()):
    if dim is not None and not (self.dim() == 1 and dim == 0):
        return _unique_slices(self, dim, False, return_inverse, return_counts)
    outputs((self,), [], [], ())
    if not self.numel():
        return _of_nothing(self, return_inverse)
    decline_if_slower(slower(devices.current.kind).sets)
    x = self.reshape(-1)
    out = Distinct.of(x, _inverse(self) if return_inverse else None, return_counts)
    write_runs(out, x, None)
    return _results(self, out)
