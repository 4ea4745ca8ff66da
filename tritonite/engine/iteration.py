"""TensorIterator's algorithm: broadcasting, the order of dimensions, strides of results, overlap, one device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import triton.language as tl

from tritonite import devices
from tritonite.errors import Decline

# Offsets from this value on take 64 bits.
INT32_LIMIT = 2**31 - 2**20
# The bytes of a sector, by which memory is read.
SECTOR = 32


def broadcast_shape(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the shape that `shapes` broadcast to. Declines where they do not, so that ATen raises its own error."""
    rank = max(map(len, shapes))
    result = [1] * rank
    for shape in shapes:
        for i, size in enumerate(shape, rank - len(shape)):
            if size != 1 and result[i] != size:
                if result[i] != 1:
                    raise Decline(f"shapes {', '.join(str(tuple(each)) for each in shapes)} do not broadcast")
                result[i] = size
    return tuple(result)


def expand_strides(shape: Sequence[int], strides: Sequence[int], to: Sequence[int]) -> list[int]:
    """Return the strides of a tensor broadcast to shape `to`: 0 where it repeats."""
    lead = len(to) - len(shape)
    own = [0 if size == 1 and to[lead + i] != 1 else strides[i] for i, size in enumerate(shape)]
    return [0] * lead + own


def fastest_first(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> list[int]:
    """Return the order of dimensions in TensorIterator: by the first operand whose strides differ."""

    def compare(a: int, b: int) -> int:
        for operand in strides:
            if operand[a] == 0 or operand[b] == 0:
                continue
            if operand[a] != operand[b]:
                return -1 if operand[a] < operand[b] else 1
            if shape[a] > shape[b]:
                return 1
        return 0

    order = list(range(len(shape)))[::-1]
    # An insertion sort, because the comparison is ambiguous for broadcast dimensions, and ATen's ties are part of the
    # result.
    for i in range(1, len(order)):
        moving = i
        for j in range(i - 1, -1, -1):
            result = compare(order[j], order[moving])
            if result > 0:
                order[j], order[moving] = order[moving], order[j]
                moving = j
            elif result < 0:
                break
    return order


def contiguous_strides(shape: Sequence[int], order: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return dense strides with dimensions in `order`, fastest first; row-major by default."""
    strides = [0] * len(shape)
    step = 1
    for d in order if order is not None else range(len(shape) - 1, -1, -1):
        strides[d] = step
        step *= max(shape[d], 1) if order is None else shape[d]
    return tuple(strides)


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether elements fill a range of memory without gaps or overlap, in any order of the dimensions."""
    step = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride != step:
            return False
        step *= size
    return True


def strides_after_conversion(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of the converted copy that ATen makes on a CPU before it orders the dimensions."""
    if is_dense(shape, strides):
        return tuple(strides)
    return contiguous_strides(shape, fastest_first(shape, [strides]))


def has_channels_last(tensor: torch.Tensor) -> bool:
    """Return whether the channels of an image or a volume are contiguous, and not its last dimension."""
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    return layout is not None and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=layout)


def in_memory_format(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is row-major or channels-last."""
    return tensor.is_contiguous() or has_channels_last(tensor)


def suggests_channels_last(tensor: torch.Tensor) -> bool:
    """Return whether ATen lays out results for this tensor as channels-last, by its strides, with or without gaps.

    Where sizes of 1 are ambiguous, the answer is that of `Tensor.suggest_memory_format`.
    """
    shape, strides = tensor.shape, tensor.stride()
    if tensor.dim() not in (4, 5) or strides[1] == 0 or 0 in shape:
        return False
    least = 0
    for d in (1, *range(tensor.dim() - 1, 1, -1), 0):
        if strides[d] < least or (d == 0 and least == strides[1]):
            return False
        least = strides[d] * shape[d]
    return True


def format_strides(shape: Sequence[int], channels_last: bool) -> tuple[int, ...]:
    """Return dense strides of an image or a volume, channels-last or row-major."""
    return (_channels_last(shape) if channels_last else None) or contiguous_strides(shape)


def _channels_last(shape: Sequence[int]) -> tuple[int, ...] | None:
    if len(shape) == 4:
        return contiguous_strides(shape, (1, 3, 2, 0))
    if len(shape) == 5:
        return contiguous_strides(shape, (1, 4, 3, 2, 0))
    return None


def same_strides(shape: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    return all(size == 1 or x == y for size, x, y in zip(shape, a, b, strict=True))


def output_strides(
    shape: tuple[int, ...], operands: Sequence[tuple[Sequence[int], Sequence[int]]], has_number: bool
) -> tuple[int, ...]:
    """Return the strides ATen gives a fresh output, for operands of (shape, strides); numbers count as 0-d operands."""
    if not has_number and all(tuple(own) == shape for own, _ in operands):
        row_major = contiguous_strides(shape)
        if 0 in shape or all(same_strides(shape, strides, row_major) for _, strides in operands):
            return row_major
        channels_last = _channels_last(shape)
        if channels_last and all(same_strides(shape, strides, channels_last) for _, strides in operands):
            return channels_last
        first = tuple(operands[0][1])
        if is_dense(shape, first) and all(tuple(strides) == first for _, strides in operands):
            return first
    expanded = [expand_strides(own, strides, shape) for own, strides in operands]
    order = fastest_first(shape, expanded)
    if order == list(range(len(shape)))[::-1]:
        return contiguous_strides(shape)
    return contiguous_strides(shape, order)


def collapse(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Drop dimensions of size 1 and merge those that one stride serves, fastest first; at least one is left."""
    order = [d for d in fastest_first(shape, strides) if shape[d] != 1]
    sizes: list[int] = []
    merged: list[list[int]] = [[] for _ in strides]
    for d in order:
        if sizes and all(own[d] == kept[-1] * sizes[-1] for own, kept in zip(strides, merged, strict=True)):
            sizes[-1] *= shape[d]
            continue
        sizes.append(shape[d])
        for own, kept in zip(strides, merged, strict=True):
            kept.append(own[d])
    if not sizes:
        return [1], [[0] for _ in strides]
    return sizes, merged


def as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a matrix of rows along its last dimension, as a copy if no view has this shape."""
    shape = tensor.shape[:-1].numel(), tensor.shape[-1]
    try:
        return tensor.view(shape)
    except RuntimeError:
        return tensor.contiguous().view(shape)


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return one more than the largest element offset of a strided view."""
    return 1 + sum([(size - 1) * stride for size, stride in zip(shape, strides, strict=True)])


def offset_type(*tensors: torch.Tensor) -> tl.dtype:
    """Return the integer type of offsets that reach all elements of the tensors."""
    wide = any([span(tensor.shape, tensor.stride()) >= INT32_LIMIT for tensor in tensors])
    return tl.int64 if wide else tl.int32


def common_device(tensors: Any, outs: Sequence[torch.Tensor]) -> tuple[torch.device, list[torch.Tensor]]:
    """Return the one device of the tensors, and the 0-d CPU tensors that serve as numbers on another device."""
    kind = devices.current.type
    found: torch.device | None = None
    scalars: list[torch.Tensor] = []
    for value in (*tensors, *outs):
        if value.layout is not torch.strided:
            raise Decline(f"layout {value.layout}")
        own = value.device
        if own.type != kind:
            if own.type == "cpu" and value.dim() == 0 and not any(value is out for out in outs):
                scalars.append(value)
                continue
            raise Decline(devices.elsewhere(own))
        if found is None:
            found = own
        elif found != own:
            raise Decline(f"tensors on {found} and {own}")
    if found is None:
        raise Decline(f"no tensor on a device of type {kind}")
    return found, scalars


def never_overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether each dimension steps over all smaller ones. If not, ATen must decide."""
    reach = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride < reach:
            return False
        reach += (size - 1) * stride
    return True


def may_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether the memory between two tensors' first and last elements is shared."""
    starts = a.data_ptr(), b.data_ptr()
    ends = [
        start + span(tensor.shape, tensor.stride()) * tensor.dtype.itemsize if tensor.numel() else start
        for start, tensor in zip(starts, (a, b), strict=True)
    ]
    return starts[0] < ends[1] and starts[1] < ends[0]


def shares_written_memory(spans: Iterable[tuple[int, int, bool]]) -> bool:
    """Return whether one of the spans that are written shares memory with any other.

    A span is (first address, address after the last byte, whether it is written).
    """
    end = written_end = 0
    for start, stop, written in sorted(spans):
        if start < written_end or (written and start < end):
            return True
        end = max(end, stop)
        written_end = max(written_end, stop) if written else written_end
    return False


def power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is at least n."""
    return 1 << max(n - 1, 0).bit_length()
