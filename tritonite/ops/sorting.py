"""Sorting, and what is taken of rows by its rank: the largest elements, medians, the most frequent ones.

nan comes behind all numbers, and zeros of both signs are equal. Short rows are sorted in registers, longer ones by
radix. Elements are selected of rows that a program holds in registers too, and of longer ones by their digits.
"""

import math

import torch

from tritonite import devices
from tritonite.dtypes import ALL, NUMBERS, UNSIGNED
from tritonite.engine.iteration import strides_after_conversion
from tritonite.engine.movement import fill
from tritonite.engine.outputs import outputs
from tritonite.engine.sorting import topk as selection
from tritonite.engine.sorting.block import BY_RANK, MEDIAN, NANMEDIAN
from tritonite.engine.sorting.keys import Keys
from tritonite.engine.sorting.radix import route, sort_along
from tritonite.engine.sorting.runs import longest_runs
from tritonite.engine.sorting.select import select, sorts_few, take_smallest, write_few_smallest
from tritonite.engine.sorting.table import slower
from tritonite.errors import Decline
from tritonite.ops.indexing import only_dimension
from tritonite.registry import operator
from tritonite.runtime.contract import decline_if_slower, empty, empty_strided

_SORTED = (*ALL, *UNSIGNED)
# Which ATen selects of on this kind of device.
_FREQUENT = ALL
# So many of the largest elements of a row that a program holds take longer than all of it in order.
_MANY = 256
# More of a longer row are found by their digits.
_MANY_OF_LONG = 1024


def with_dimension(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a view of its only element."""
    return tensor if tensor.dim() else tensor.unsqueeze(0)


def sort_into(
    x: torch.Tensor, dim: int, descending: bool, values: torch.Tensor | None, indices: torch.Tensor | None
) -> None:
    """Sort along a dimension, stably, into tensors of the same shape."""
    x, every = with_dimension(x), [None if into is None else with_dimension(into) for into in (values, indices)]
    if x.numel():
        sort_along(x, dim, Keys.of(x.dtype, descending), *every)


@operator("sort", accepts=_SORTED)
def sort(self, dim=-1, descending=False, stable=None, outs=()):
    """Stably, whether that is asked for or not. Fresh results are laid out as the tensor is."""
    if self.dtype in UNSIGNED and self.device.type != "cpu":
        raise Decline(f"dtype {self.dtype}, which ATen refuses on GPUs")
    dim = only_dimension(dim, self.dim())
    if self.numel() and self.dim():
        alone = self.numel() == self.shape[dim] and route(self.shape[dim], Keys.of(self.dtype)) == "long"
        decline_if_slower(alone and slower(devices.current.kind).one_long_row)
    if outs:
        outs = outputs((self,), [self.shape] * 2, [self.dtype, torch.int64], outs, accepts=_SORTED)
    else:
        outputs((self,), [], [], (), accepts=_SORTED)
        strides = strides_after_conversion(self.shape, self.stride())
        outs = [empty_strided(self.shape, strides, dtype, self.device) for dtype in (self.dtype, torch.int64)]
    sort_into(self, dim, descending, *outs)
    return outs


@operator("topk", accepts=NUMBERS)
def topk(self, k, dim=-1, largest=True, sorted=True, outs=()):
    """Of equal elements those that come first."""
    dim = only_dimension(dim, self.dim())
    x = with_dimension(self)
    if not 0 <= k <= x.shape[dim]:
        raise Decline("more elements than there are")
    shape = (*self.shape[:dim], k, *self.shape[dim + 1 :]) if self.dim() else ()
    outs = outputs((self,), [shape] * 2, [self.dtype, torch.int64], outs, accepts=NUMBERS)
    if not self.dim() and not k:
        raise Decline("none of the only element")
    if not outs[0].numel():
        return outs
    values, indices = (with_dimension(out) for out in outs)
    keys, n = Keys.of(self.dtype, descending=largest), x.shape[dim]
    way = route(n, keys)
    few = way == "long" and _MANY_OF_LONG < k <= n // 2 and sorts_few(k, keys)
    decline_if_slower(way == "long" and not few and k > slower(devices.current.kind).taken)
    if few:
        write_few_smallest(x, dim, k, keys, values, indices)
    elif selection.serves(n, k, keys) and not (way == "held" and k > _MANY):
        selection.write_smallest(x, dim, k, keys, values, indices)
    elif way != "long" or k * 2 > n:
        sort_along(x, dim, keys, values, indices)
    elif not sorted:
        take_smallest(x, dim, k, keys, values, indices)
    else:
        taken = empty(values.shape, self.dtype, self.device)
        places = empty(values.shape, torch.int32, self.device)
        take_smallest(x, dim, k, keys, taken, places)
        sort_along(taken, dim, keys, values, indices, places)
    return outs


def _selected(self, dim, keepdim, rank, mode, outs):
    """One element of each row, and its place."""
    dim = only_dimension(dim, self.dim())
    x = with_dimension(self)
    if not x.shape[dim]:
        raise Decline("a row of no elements")
    if rank >= x.shape[dim]:
        raise Decline("a rank that there is not")
    kept = (*self.shape[:dim], *[1] * keepdim, *self.shape[dim + 1 :]) if self.dim() else ()
    keys = Keys.of(self.dtype)
    wide = keys.bits == 64 and selection.held(x.shape[dim], keys)
    decline_if_slower(wide and slower(devices.current.kind).wide_ranks)
    outs = outputs((self,), [kept] * 2, [self.dtype, torch.int64], outs, accepts=NUMBERS)
    if outs[0].numel():
        whole = self.dim() and keepdim
        values, indices = (out if whole else out.unsqueeze(dim) for out in outs)
        select(x, dim, rank, mode, values, indices)
    return outs


@operator("kthvalue", accepts=NUMBERS)
def kthvalue(self, k, dim=-1, keepdim=False, outs=()):
    if k < 1:
        raise Decline("a rank that there is not")
    return _selected(self, dim, keepdim, k - 1, BY_RANK, outs)


def _median(self, dim, keepdim, mode, outs):
    if dim is not None:
        return _selected(self, dim, keepdim, 0, mode, outs)
    if not (self.numel() or self.dtype.is_floating_point):
        raise Decline("no integers, whose median nan would be")
    outs = outputs((self,), [()], [self.dtype], outs, accepts=NUMBERS)
    if not self.numel():
        fill(outs[0], math.nan)
        return outs
    x = self.reshape(-1)
    select(x, 0, 0, mode, outs[0].unsqueeze(0), None)
    return outs


@operator("median", accepts=NUMBERS)
def median(self, dim=None, keepdim=False, outs=()):
    """The lower of two in the middle; nan where there is one."""
    return _median(self, dim, keepdim, MEDIAN, outs)


@operator("nanmedian", accepts=NUMBERS)
def nanmedian(self, dim=None, keepdim=False, outs=()):
    """The lower of two in the middle of all that are numbers."""
    return _median(self, dim, keepdim, NANMEDIAN, outs)


@operator("mode", accepts=_FREQUENT)
def mode(self, dim=-1, keepdim=False, outs=()):
    """The smallest of those that come most often, and the last place of it."""
    dim = only_dimension(dim, self.dim())
    x = with_dimension(self)
    if not x.shape[dim]:
        raise Decline("a row of no elements")
    kept = (*self.shape[:dim], *[1] * keepdim, *self.shape[dim + 1 :]) if self.dim() else ()
    outs = outputs((self,), [kept] * 2, [self.dtype, torch.int64], outs, accepts=_FREQUENT)
    if outs[0].numel():
        shape = (*x.shape[:dim], *x.shape[dim + 1 :], x.shape[dim])
        values, places = (empty(shape, dtype, self.device).movedim(-1, dim) for dtype in (self.dtype, torch.int64))
        sort_into(x, dim, False, values, places)
        whole = self.dim() and keepdim
        longest_runs(values, places, dim, *(out if whole else out.unsqueeze(dim) for out in outs))
    return outs
