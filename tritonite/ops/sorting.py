"""sort, topk, kthvalue, median, nanmedian, mode.

nan sorts after all numbers, and zeros of both signs are equal.
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
from tritonite.engine.sorting.large_topk import sorts_few, take_smallest, write_few_smallest
from tritonite.engine.sorting.radix import route, sort_along
from tritonite.engine.sorting.runs import longest_runs
from tritonite.engine.sorting.select import select
from tritonite.engine.sorting.table import slower
from tritonite.errors import Decline
from tritonite.ops import aten
from tritonite.ops.indexing import only_dimension
from tritonite.registry import operator
from tritonite.runtime.contract import decline_if_slower, empty, empty_strided

_SORTED = (*ALL, *UNSIGNED)
# The largest k for which top-k of a row that one program holds costs less than sorting the row.
_MANY = 256
# The largest k for which top-k of a longer row is not better done by radix select.
_MANY_OF_LONG = 1024


def with_dimension(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a view of shape (1,) of a tensor without dimensions."""
    return tensor if tensor.dim() else tensor.unsqueeze(0)


def sort_into(
    x: torch.Tensor, dim: int, descending: bool, values: torch.Tensor | None, indices: torch.Tensor | None
) -> None:
    """Sort along a dimension, stably, and write the values and indices to tensors of the shape of x."""
    x, every = with_dimension(x), [None if into is None else with_dimension(into) for into in (values, indices)]
    if x.numel():
        sort_along(x, dim, Keys.of(x.dtype, descending), *every)


@operator("sort", accepts=_SORTED)
def sort(self, dim=-1, descending=False, stable=None, outs=()):
    """Sort stably, whatever `stable` says. Fresh results have the input's layout."""
    if self.dtype in UNSIGNED and aten.on_gpu():
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
    """Select the k largest or smallest elements. Of equal elements, the one with the lower index comes first."""
    dim = only_dimension(dim, self.dim())
    x = with_dimension(self)
    if not 0 <= k <= x.shape[dim]:
        raise Decline(f"k = {k} in rows of {x.shape[dim]} elements")
    shape = (*self.shape[:dim], k, *self.shape[dim + 1 :]) if self.dim() else ()
    outs = outputs((self,), [shape] * 2, [self.dtype, torch.int64], outs, accepts=NUMBERS)
    if not self.dim() and not k:
        raise Decline("k = 0 of a tensor without dimensions")
    if not outs[0].numel():
        return outs
    values, indices = (with_dimension(out) for out in outs)
    keys, n = Keys.of(self.dtype, descending=largest), x.shape[dim]
    way = route(n, keys)
    few = way == "long" and _MANY_OF_LONG < k <= n // 2 and sorts_few(k, keys)
    decline_if_slower(way == "long" and not few and k > slower(devices.current.kind).top_k)
    if few:
        write_few_smallest(x, dim, k, keys, values, indices)
    elif selection.serves(n, k, keys) and not (way == "held" and k > _MANY):
        selection.write_smallest(x, dim, k, keys, values, indices)
    elif way != "long" or k * 2 > n:
        sort_along(x, dim, keys, values, indices)
    elif not sorted:
        take_smallest(x, dim, k, keys, values, indices)
    else:
        selected = empty(values.shape, self.dtype, self.device)
        selected_indices = empty(values.shape, torch.int32, self.device)
        take_smallest(x, dim, k, keys, selected, selected_indices)
        sort_along(selected, dim, keys, values, indices, selected_indices)
    return outs


def _selected(self, dim, keepdim, rank, mode, outs):
    """Select one element, and its index, of each row."""
    dim = only_dimension(dim, self.dim())
    x = with_dimension(self)
    if not x.shape[dim]:
        raise Decline("rows without elements")
    if rank >= x.shape[dim]:
        raise Decline(f"k = {rank + 1} in rows of {x.shape[dim]} elements")
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
        raise Decline(f"k = {k}, which is below 1")
    return _selected(self, dim, keepdim, k - 1, BY_RANK, outs)


def _median(self, dim, keepdim, mode, outs):
    if dim is not None:
        return _selected(self, dim, keepdim, 0, mode, outs)
    if not (self.numel() or self.dtype.is_floating_point):
        raise Decline("the median of no integers, which would be nan")
    outs = outputs((self,), [()], [self.dtype], outs, accepts=NUMBERS)
    if not self.numel():
        fill(outs[0], math.nan)
        return outs
    x = self.reshape(-1)
    select(x, 0, 0, mode, outs[0].unsqueeze(0), None)
    return outs


@operator("median", accepts=NUMBERS)
def median(self, dim=None, keepdim=False, outs=()):
    """Return the median, the lower of two in the middle; nan if the row has a nan."""
    return _median(self, dim, keepdim, MEDIAN, outs)


@operator("nanmedian", accepts=NUMBERS)
def nanmedian(self, dim=None, keepdim=False, outs=()):
    """Return the median of all elements but nan, the lower of two in the middle."""
    return _median(self, dim, keepdim, NANMEDIAN, outs)


@operator("mode", accepts=ALL)
def mode(self, dim=-1, keepdim=False, outs=()):
    """Return the most frequent element, the smallest of several, and its last index."""
    dim = only_dimension(dim, self.dim())
    x = with_dimension(self)
    if not x.shape[dim]:
        raise Decline("rows without elements")
    kept = (*self.shape[:dim], *[1] * keepdim, *self.shape[dim + 1 :]) if self.dim() else ()
    outs = outputs((self,), [kept] * 2, [self.dtype, torch.int64], outs, accepts=ALL)
    if outs[0].numel():
        shape = (*x.shape[:dim], *x.shape[dim + 1 :], x.shape[dim])
        values, indices = (empty(shape, dtype, self.device).movedim(-1, dim) for dtype in (self.dtype, torch.int64))
        sort_into(x, dim, False, values, indices)
        whole = self.dim() and keepdim
        longest_runs(values, indices, dim, *(out if whole else out.unsqueeze(dim) for out in outs))
    return outs
