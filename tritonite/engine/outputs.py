"""Outputs of host functions: the dimensions a call names, and tensors to write, allocated or given."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch

from tritonite.dtypes import TRITON_DTYPES
from tritonite.engine.iteration import common_device, may_overlap, never_overlaps_itself, same_strides
from tritonite.errors import Decline
from tritonite.runtime.contract import empty, empty_strided


def dimensions(dim: int | Sequence[int] | None, rank: int, keep_empty: bool = False) -> tuple[int, ...]:
    """Return the dimensions that `dim` names, sorted and without negative numbers.

    None and an empty list name all dimensions; with `keep_empty` an empty list names none. Declines for a dimension out
    of range and for one that is named twice.
    """
    given = (dim,) if isinstance(dim, int) else dim
    if given is None or (not len(given) and not keep_empty):
        return tuple(range(rank))
    limit = max(rank, 1)
    if any(not -limit <= d < limit for d in given):
        raise Decline(f"dim {dim} is out of range for a tensor of {rank} dimensions")
    found = sorted(d % limit for d in given)
    if len(set(found)) < len(found):
        raise Decline(f"dim {dim} names a dimension twice")
    return tuple(d for d in found if rank)


def outputs(
    inputs: Sequence[torch.Tensor],
    shapes: Sequence[Sequence[int]],
    result_dtypes: Sequence[torch.dtype],
    outs: Sequence[torch.Tensor],
    in_place: Sequence[torch.Tensor] = (),
    strides: Sequence[int] | None = None,
    accepts: Container[torch.dtype] = TRITON_DTYPES,
) -> Sequence[torch.Tensor]:
    """Allocate contiguous outputs, or check that `outs` can be written and return them.

    Declines for inputs of several devices or of a dtype outside `accepts`; for `outs` of another shape or dtype, with
    elements that overlap, or that overlap an input. An output may be one of the `in_place` inputs. `strides` are those
    of the first output, where it is allocated.
    """
    device, scalars = common_device(inputs, outs)
    if scalars:
        raise Decline("a tensor on another device")
    for tensor in inputs:
        if tensor.dtype not in accepts:
            raise Decline(f"dtype {tensor.dtype}")
    if not outs:
        laid = [strides, *[None] * (len(shapes) - 1)][: len(shapes)]
        return tuple(
            empty(shape, dtype, device) if own is None else empty_strided(shape, own, dtype, device)
            for shape, dtype, own in zip(shapes, result_dtypes, laid, strict=True)
        )
    for i, (out, shape, dtype) in enumerate(zip(outs, shapes, result_dtypes, strict=True)):
        if tuple(out.shape) != tuple(shape) or out.dtype is not dtype:
            raise Decline("output has another shape or dtype")
        if not never_overlaps_itself(out.shape, out.stride()):
            raise Decline("output overlaps itself")
        others = [x for x in inputs if not (any(x is y for y in in_place) and _same_elements(out, x))]
        if any(may_overlap(out, other) for other in (*others, *outs[:i])):
            raise Decline("output overlaps an input")
    return outs


def check_layout(outs: Sequence[torch.Tensor], strides: Sequence[int]) -> None:
    """Decline outputs whose strides are not those of a fresh result: some of ATen's kernels write as if they were."""
    for out in outs:
        if out.dim() != len(strides) or not same_strides(out.shape, out.stride(), strides):
            raise Decline(f"an output with strides {out.stride()}, not {tuple(strides)}")


def _same_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same elements in the same order."""
    same = a.data_ptr() == b.data_ptr() and a.dtype.itemsize == b.dtype.itemsize
    return same and a.shape == b.shape and a.stride() == b.stride()


def is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether a dimension has stride 0, as after `expand`."""
    return 0 in tensor.stride()


def share_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are views of one allocation, overlapping or not."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata
