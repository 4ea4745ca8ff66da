"""gather, index_select, take, index: copies of the elements that index tensors select.

An index out of range stops the program, as in ATen's kernels, and nothing is read for it.
"""

from collections.abc import Sequence
from typing import Any

import torch

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
from tritonite.ops import aten
from tritonite.registry import operator
from tritonite.runtime.contract import empty, empty_strided, read


def only_dimension(dim: int, rank: int) -> int:
    """Return a dimension counted from 0; 0 for a tensor without dimensions. Decline a dimension out of range."""
    return (*dimensions(dim, rank), 0)[0]


def check_index(index: torch.Tensor, accepts: Sequence[torch.dtype] = INDEX_DTYPES) -> None:
    """Decline an index tensor of a dtype that is not accepted."""
    if index.dtype not in accepts:
        raise Decline(f"an index of dtype {index.dtype}")


def select(self: torch.Tensor, dim: int, index: torch.Tensor, shape: Sequence[int], outs: Any) -> Any:
    """Select slices of `self` along `dim`, which the dimensions of `index` replace in the result's `shape`."""
    check_index(index)
    outs = outputs((self, index), [shape], [self.dtype], outs, accepts=BITS)
    if not outs[0].numel():
        if aten.on_cpu() and index.numel():
            raise Decline("an index into a tensor without elements, which ATen checks on CPUs")
        return outs
    if not self.shape[dim : dim + 1].numel():
        raise Decline(f"an index into dimension {dim}, which has size 0")
    after = self.dim() - dim - 1
    strides = (*self.stride()[:dim], *[0] * index.dim(), *self.stride()[dim + 1 :])
    own = (*[0] * dim, *index.stride(), *[0] * after)
    read_at(outs[0], self, strides, [index_along(index, own, self, dim)])
    return outs


@operator("index_select", accepts=BITS)
def index_select(self, dim, index, outs=()):
    dim = only_dimension(dim, self.dim())
    if index.dim() > 1 or not (self.dim() or index.numel() == 1):
        raise Decline(f"an index of shape {tuple(index.shape)}, not a vector")
    if aten.on_cpu() and self.dim() < 2 and self.dtype in UNSIGNED:
        raise Decline(f"a vector of dtype {self.dtype}, which ATen does not index on CPUs")
    if not self.dim():
        outs = outputs((self, index), [()], [self.dtype], outs, accepts=BITS)
        check_index(index)
        read_at(outs[0], self, (), [index_along(index.reshape(()), (), self, 0)])
        return outs
    index = index.reshape(-1)
    return select(self, dim, index, (*self.shape[:dim], len(index), *self.shape[dim + 1 :]), outs)


def check_gathered(self: torch.Tensor, dim: int, index: torch.Tensor) -> int:
    """Return the indexed dimension. Decline an index of another rank, or larger than `self` in another dimension."""
    found = only_dimension(dim, self.dim())
    check_index(index)
    if index.numel():
        if max(self.dim(), 1) != max(index.dim(), 1):
            raise Decline(f"an index of {index.dim()} dimensions into a tensor of {self.dim()}")
        if not self.numel():
            raise Decline("an index into a tensor without elements")
        if any(d != found and size > self.shape[d] for d, size in enumerate(index.shape) if self.dim()):
            raise Decline(f"an index of shape {tuple(index.shape)}, larger than {tuple(self.shape)}")
    return found


def without_dimension(tensor: torch.Tensor, dim: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return a tensor's strides over an index of `shape`, with 0 for the indexed dimension."""
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
        raise Decline("an index into a tensor without elements")
    outs = outputs((self, index), [index.shape], [self.dtype], outs, accepts=WITH_COMPLEX)
    linear = linear_index(index, index.stride(), self)
    read_at(outs[0], self, (0,) * index.dim(), [linear], True, IN_RANGE_OF_BOTH_SIGNS)
    return outs


def _between_ones(shape: Sequence[int], strides: Sequence[int], lead: int, trail: int) -> tuple[int, ...]:
    """Return the strides that `Tensor.view` gives a tensor with `lead` sizes of 1 before and `trail` after it."""
    if not shape:
        return (1,) * (lead + trail)
    count, step = 1, strides[-1]
    for d in range(len(shape) - 1, -1, -1):
        count *= shape[d]
        if d and shape[d - 1] != 1 and strides[d - 1] != count * step:
            count, step = 1, strides[d - 1]
    return (*[count * step] * lead, *strides, *[strides[-1]] * trail)


class Indexed:
    """The elements of a tensor that several index tensors select.

    `shape` is the result's, in which the index tensors' dimensions are `row_dims`. `strides` are the tensor's over it,
    0 for `row_dims`. `layout` are the strides of ATen's result. The constructor declines calls for which ATen raises,
    and indices that ATen converts first.
    """

    def __init__(self, self_: torch.Tensor, tensors: Sequence[torch.Tensor | None]) -> None:
        if len(tensors) > self_.dim():
            raise Decline(f"{len(tensors)} indices for {self_.dim()} dimensions")
        dims = [d for d, tensor in enumerate(tensors) if tensor is not None]
        found = [tensor for tensor in tensors if tensor is not None]
        if not dims:
            raise Decline("indices that are all None")
        for tensor in found:
            check_index(tensor)
        adjacent = dims[-1] - dims[0] == len(dims) - 1
        kept = [d for d in range(self_.dim()) if d not in dims]
        before = dims[0] if adjacent else 0
        replaced = broadcast_shape([tensor.shape for tensor in found])
        if 0 not in replaced and any(not self_.shape[d] for d in dims):
            raise Decline("an index into a dimension of size 0")
        sizes, strides = [self_.shape[d] for d in kept], [self_.stride(d) for d in kept]
        self.row_dims = range(before, before + len(replaced))
        self.shape = (*sizes[:before], *replaced, *sizes[before:])
        self.strides = (*strides[:before], *[0] * len(replaced), *strides[before:])
        self.indices: list[Index] = []
        # The operands whose layout ATen's result follows: the tensor, and the index tensors, broadcast and int64.
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
            if aten.on_gpu() and own != first:
                own = list(contiguous_strides(replaced))
            operands.append((shape, _between_ones(replaced, own, len(lead), len(trail))))
        self.operands = operands

    @property
    def layout(self) -> tuple[int, ...]:
        """The strides of a fresh result."""
        return output_strides(self.shape, self.operands, False)


def only_mask(self: torch.Tensor, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the bool mask over the first dimensions if it is the only index, otherwise None."""
    found = [tensor for tensor in tensors if tensor is not None]
    if len(found) != 1 or tensors[0] is None or found[0].dtype is not torch.bool:
        return None
    (mask,) = found
    if not mask.dim() or tuple(mask.shape) != tuple(self.shape[: mask.dim()]):
        raise Decline(f"a mask of shape {tuple(mask.shape)} over {tuple(self.shape)}")
    if mask.dim() + len(tensors) - 1 > self.dim():
        raise Decline(f"{len(tensors)} indices, one a mask of {mask.dim()} dimensions, for {self.dim()} dimensions")
    return mask


def _masked(self: torch.Tensor, mask: torch.Tensor) -> Sequence[torch.Tensor]:
    """Select the elements, or the slices behind the mask's dimensions, where a mask is set."""
    outputs((self, mask), [], [], (), accepts=BITS)
    rest = self.shape[mask.dim() :]
    if self.stride()[mask.dim() :] != contiguous_strides(rest):
        raise Decline(f"slices of strides {self.stride()[mask.dim() :]}, whose layout ATen keeps")
    found = Found(mask, mask.shape, mask.stride())
    (count,) = read(found.total)
    result = empty((count, *rest), self.dtype, self.device)
    if rest.numel() == 1:
        found.move(result, self, self.stride()[: mask.dim()], gathers=True)
    elif rest.numel():
        linear = empty((count,), torch.int64, self.device)
        found.write_linear(linear)
        sizes, (steps,) = row_major(mask.shape, [self.stride()[: mask.dim()]])
        rows = Index(linear, (1,), mask.numel(), tuple(steps), tuple(sizes[:-1]))
        read_rows_at(result, count, self, rest.numel(), rows)
    return (result,)


def _indexed(self: torch.Tensor, indices: Sequence[torch.Tensor | None], outs: Any) -> Any:
    """Select the elements of several index tensors."""
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
    if aten.on_gpu() and self.dtype in UNSIGNED:
        raise Decline(f"dtype {self.dtype}, for which ATen raises on GPUs")


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
