"""Reading at the places that index tensors tell.

An index out of range stops the program, as in ATen's kernels, and is never read.
"""

from collections.abc import Sequence
from typing import Any

import torch

from tritonite import devices
from tritonite.dtypes import BITS, UNSIGNED, WITH_COMPLEX
from tritonite.engine.indexing.compact import Found
from tritonite.engine.indexing.indices import (
    IN_RANGE_OF_BOTH_SIGNS,
    INDEX_DTYPES,
    Index,
    index_along,
    linear_index,
    row_major,
)
from tritonite.engine.indexing.read import read_at, read_rows_at
from tritonite.engine.iteration import (
    broadcast_shape,
    contiguous_strides,
    expand_strides,
    output_strides,
    strides_after_conversion,
)
from tritonite.engine.outputs import dimensions, outputs
from tritonite.errors import Decline
from tritonite.registry import operator
from tritonite.runtime.contract import empty, empty_strided, read

_ON_CPU = devices.current.type == "cpu"


def only_dimension(dim: int, rank: int) -> int:
    """A dimension from 0; 0 of a tensor without any. Declines for those that there are not."""
    return (*dimensions(dim, rank), 0)[0]


def check_index(index: torch.Tensor, accepts: Sequence[torch.dtype] = INDEX_DTYPES) -> None:
    """Decline an index tensor of another dtype."""
    if index.dtype not in accepts:
        raise Decline(f"an index of dtype {index.dtype}")


def select(self: torch.Tensor, dim: int, index: torch.Tensor, shape: Sequence[int], outs: Any) -> Any:
    """Slices of `self`; `index` takes the place of the dimension that it counts along, with all of its dimensions."""
    check_index(index)
    outs = outputs((self, index), [shape], [self.dtype], outs, accepts=BITS)
    if not outs[0].numel():
        if _ON_CPU and index.numel():
            raise Decline("places in what has no elements, which ATen looks at on CPUs")
        return outs
    if not self.shape[dim : dim + 1].numel():
        raise Decline("an index into no elements")
    after = self.dim() - dim - 1
    strides = (*self.stride()[:dim], *[0] * index.dim(), *self.stride()[dim + 1 :])
    own = (*[0] * dim, *index.stride(), *[0] * after)
    read_at(outs[0], self, strides, [index_along(index, own, self, dim)])
    return outs


@operator("index_select", accepts=BITS)
def index_select(self, dim, index, outs=()):
    dim = only_dimension(dim, self.dim())
    if index.dim() > 1 or not (self.dim() or index.numel() == 1):
        raise Decline("an index that is no vector")
    if _ON_CPU and self.dim() < 2 and self.dtype in UNSIGNED:
        raise Decline(f"one dimension of dtype {self.dtype}, which ATen has not on CPUs")
    if not self.dim():
        outs = outputs((self, index), [()], [self.dtype], outs, accepts=BITS)
        check_index(index)
        read_at(outs[0], self, (), [index_along(index.reshape(()), (), self, 0)])
        return outs
    index = index.reshape(-1)
    return select(self, dim, index, (*self.shape[:dim], len(index), *self.shape[dim + 1 :]), outs)


def check_gathered(self: torch.Tensor, dim: int, index: torch.Tensor) -> int:
    """The dimension along which an index of as many dimensions as `self` counts, no longer than it in any other."""
    found = only_dimension(dim, self.dim())
    check_index(index)
    if index.numel():
        if max(self.dim(), 1) != max(index.dim(), 1):
            raise Decline("an index of another number of dimensions")
        if not self.numel():
            raise Decline("an index into no elements")
        if any(d != found and size > self.shape[d] for d, size in enumerate(index.shape) if self.dim()):
            raise Decline("an index that is longer than the tensor")
    return found


def without_dimension(tensor: torch.Tensor, dim: int, shape: Sequence[int]) -> tuple[int, ...]:
    """A tensor's strides over an index of `shape`, which counts along one of its dimensions."""
    strides = tensor.stride() if tensor.dim() else (0,)
    return tuple([0 if d == dim else stride for d, stride in enumerate(strides)][: len(shape)])


@operator("gather", accepts=WITH_COMPLEX)
def gather(self, dim, index, sparse_grad=False, outs=()):
    dim = check_gathered(self, dim, index)
    outs = outputs((self, index), [index.shape], [self.dtype], outs, accepts=WITH_COMPLEX)
    strides = without_dimension(self, dim, index.shape)
    read_at(outs[0], self, strides, [index_along(index, index.stride(), self, dim)])
    return outs


@operator("take", accepts=WITH_COMPLEX)
def take(self, index, outs=()):
    check_index(index, (torch.int64,))
    if index.numel() and not self.numel():
        raise Decline("an index into no elements")
    outs = outputs((self, index), [index.shape], [self.dtype], outs, accepts=WITH_COMPLEX)
    counted = linear_index(index, index.stride(), self)
    read_at(outs[0], self, (0,) * index.dim(), [counted], True, IN_RANGE_OF_BOTH_SIGNS)
    return outs


def _between_ones(shape: Sequence[int], strides: Sequence[int], lead: int, trail: int) -> tuple[int, ...]:
    """The strides of a tensor with so many sizes of 1 before it and behind it, as `Tensor.view` gives them."""
    if not shape:
        return (1,) * (lead + trail)
    count, step = 1, strides[-1]
    for d in range(len(shape) - 1, -1, -1):
        count *= shape[d]
        if d and shape[d - 1] != 1 and strides[d - 1] != count * step:
            count, step = 1, strides[d - 1]
    return (*[count * step] * lead, *strides, *[strides[-1]] * trail)


class Indexed:
    """A tensor under several index tensors: the space of its elements that they tell of.

    `shape` is the result's, of which indices tell in the `row_dims`, `strides` are the tensor's over it, 0 there, and
    `layout` are the strides that ATen gives a result. Declines what ATen refuses, and what it converts first.
    """

    def __init__(self, self_: torch.Tensor, tensors: Sequence[torch.Tensor | None]) -> None:
        if len(tensors) > self_.dim():
            raise Decline("too many indices")
        dims = [d for d, tensor in enumerate(tensors) if tensor is not None]
        found = [tensor for tensor in tensors if tensor is not None]
        if not dims:
            raise Decline("no index")
        for tensor in found:
            check_index(tensor)
        adjacent = dims[-1] - dims[0] == len(dims) - 1
        kept = [d for d in range(self_.dim()) if d not in dims]
        before = dims[0] if adjacent else 0
        replaced = broadcast_shape([tensor.shape for tensor in found])
        if 0 not in replaced and any(not self_.shape[d] for d in dims):
            raise Decline("an index into no elements")
        sizes, strides = [self_.shape[d] for d in kept], [self_.stride(d) for d in kept]
        self.row_dims = range(before, before + len(replaced))
        self.shape = (*sizes[:before], *replaced, *sizes[before:])
        self.strides = (*strides[:before], *[0] * len(replaced), *strides[before:])
        self.indices: list[Index] = []
        # What ATen lays the result out by: the tensor, and its index tensors, broadcast and made int64.
        operands: list[tuple[Sequence[int], Sequence[int]]] = [(self.shape, self.strides)]
        lead, trail = [0] * before, [0] * (len(kept) - before)
        shape = (*[1] * before, *replaced, *[1] * len(trail))
        first: Sequence[int] = ()
        for d, tensor in zip(dims, found, strict=True):
            own = expand_strides(tensor.shape, tensor.stride(), replaced)
            self.indices.append(index_along(tensor, (*lead, *own, *trail), self_, d))
            if tensor.dtype is torch.int32:
                own = list(strides_after_conversion(replaced, own))
            first = first or own
            if not _ON_CPU and own != first:
                own = list(contiguous_strides(replaced))
            operands.append((shape, _between_ones(replaced, own, len(lead), len(trail))))
        self.operands = operands

    @property
    def layout(self) -> tuple[int, ...]:
        """The strides of a fresh result."""
        return output_strides(self.shape, self.operands, False)


def only_mask(self: torch.Tensor, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The mask of bools over the first dimensions that is the only index, if it is."""
    found = [tensor for tensor in tensors if tensor is not None]
    if len(found) != 1 or tensors[0] is None or found[0].dtype is not torch.bool:
        return None
    (mask,) = found
    if not mask.dim() or tuple(mask.shape) != tuple(self.shape[: mask.dim()]):
        raise Decline("a mask of another shape")
    if mask.dim() + len(tensors) - 1 > self.dim():
        raise Decline("more indices than dimensions")
    return mask


def _masked(self: torch.Tensor, mask: torch.Tensor) -> Sequence[torch.Tensor]:
    """The elements, or slices of several dimensions, where a mask is set."""
    outputs((self, mask), [], [], (), accepts=BITS)
    rest = self.shape[mask.dim() :]
    if self.stride()[mask.dim() :] != contiguous_strides(rest):
        raise Decline("slices that are not contiguous, whose layout ATen keeps")
    found = Found(mask, mask.shape, mask.stride())
    (count,) = read(found.total)
    result = empty((count, *rest), self.dtype, self.device)
    if rest.numel() == 1:
        found.move(result, self, self.stride()[: mask.dim()], gathers=True)
    elif rest.numel():
        places = empty((count,), torch.int64, self.device)
        found.write_linear(places)
        sizes, (steps,) = row_major(mask.shape, [self.stride()[: mask.dim()]])
        counted = Index(places, (1,), mask.numel(), tuple(steps), tuple(sizes[:-1]))
        read_rows_at(result, count, self, rest.numel(), counted)
    return (result,)


def _indexed(self: torch.Tensor, indices: Sequence[torch.Tensor | None], outs: Any) -> Any:
    """The elements that several index tensors tell of."""
    indexed = Indexed(self, indices)
    inputs = (self, *(i.tensor for i in indexed.indices))
    if not outs:
        outputs(inputs, [], [], (), accepts=BITS)
        outs = (empty_strided(indexed.shape, indexed.layout, self.dtype, self.device),)
    outs = outputs(inputs, [indexed.shape], [self.dtype], outs, accepts=BITS)
    read_at(outs[0], self, indexed.strides, indexed.indices, True, IN_RANGE_OF_BOTH_SIGNS)
    return outs


def _refuse_unsigned(self):
    """Decline dtypes that ATen's kernel for several indices lacks on GPUs."""
    if not _ON_CPU and self.dtype in UNSIGNED:
        raise Decline(f"dtype {self.dtype}, which ATen refuses on GPUs")


@operator("index", accepts=BITS)
def index(self, indices, outs=()):
    _refuse_unsigned(self)
    mask = only_mask(self, indices)
    if mask is not None and not outs:
        return _masked(self, mask)
    return _indexed(self, indices, outs)


@operator("_unsafe_index", accepts=BITS)
def unsafe_index(self, indices, outs=()):
    _refuse_unsigned(self)
    return _indexed(self, indices, outs)
