"""Checks and layouts that the linear algebra operators share. ATen raises its own errors for what they decline."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tritonite.dtypes import FULL_FLOATS
from tritonite.engine.iteration import broadcast_shape, contiguous_strides
from tritonite.engine.linalg.table import (
    aten_is_faster,
    check_panels,
    fits_tile,
    linalg_table,
    rotates_whole,
)
from tritonite.engine.outputs import outputs
from tritonite.errors import Decline
from tritonite.runtime.contract import decline_if_slower, empty_strided


def check_matrices(*tensors: torch.Tensor, square: bool = False) -> None:
    """Decline tensors that are no matrices of one dtype, float32 or float64, or not `square`."""
    for x in tensors:
        if x.dim() < 2 or x.dtype not in FULL_FLOATS or x.dtype is not tensors[0].dtype:
            raise Decline(
                f"a tensor of {x.dtype} and {x.dim()} dimensions; matrices of one dtype, float32 or float64, are served"
            )
    if square:
        check_square(tensors[0])


def check_square(tensor: torch.Tensor) -> None:
    """Decline matrices that are not square."""
    if tensor.shape[-1] != tensor.shape[-2]:
        raise Decline(f"matrices of {tensor.shape[-2]} by {tensor.shape[-1]}; square ones are served")


def _decline_if_slower(x: torch.Tensor, method: str, side: int) -> None:
    """Decline a batch of matrices that a tile holds if ATen is faster by a method of the table."""
    decline_if_slower(aten_is_faster(method, side, math.prod(x.shape[:-2]), x.dtype))


def is_blocked(x: torch.Tensor, method: str, panels: bool = False) -> bool:
    """Return whether matrices are divided into blocks because no program holds one.

    ATen is expected to be faster than blocks, and is faster than some tiles: `faster_only` declines both. `panels`
    means that each panel has all rows of a matrix, which bounds their number. A batch without matrices is not divided.
    `method` is one of the table's.
    """
    rows, columns = x.shape[-2:]
    if not math.prod(x.shape[:-2]):
        return False
    if fits_tile(rows, columns, x.dtype):
        _decline_if_slower(x, method, max(rows, columns))
        return False
    if panels:
        check_panels(rows, columns, x.dtype)
    decline_if_slower(True)
    return True


def is_solved_by_blocks(right: torch.Tensor, method: str) -> bool:
    """Return whether right-hand sides have more rows than a program holds, which `faster_only` declines."""
    if right.shape[-2] <= linalg_table().largest:
        _decline_if_slower(right, method, right.shape[-2])
        return False
    decline_if_slower(right.numel() > 0)
    return right.numel() > 0


def blocks_of(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Return memory for a result of a shape: a batch of one dimension of matrices with contiguous columns."""
    count, *sides = math.prod(shape[:-2]), *shape[-2:]
    return empty_strided((count, *sides), matrix_strides((count, *sides)), like.dtype, like.device)


def copy_of_blocks(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of matrices as a batch of one dimension, with contiguous columns."""
    own = blocks_of(x.shape, x)
    own.copy_(one_batch(x))
    return own


def one_batch(x: torch.Tensor) -> torch.Tensor:
    """Return matrices as a batch of one dimension, a copy where the strides demand it."""
    return x.unsqueeze(0) if x.dim() == 2 else x.flatten(0, -3)


def is_rotated_by_blocks(x: torch.Tensor, method: str) -> bool:
    """Return whether Jacobi's methods divide matrices into blocks of columns because no program rotates all.

    ATen is expected to be faster than blocks, and is faster than some tiles: `faster_only` declines both. A batch
    without matrices, and matrices without elements, are not divided.
    """
    rows, columns = x.shape[-2:]
    if not x.numel():
        return False
    if rotates_whole(rows, columns, x.dtype):
        _decline_if_slower(x, method, columns)
        return False
    decline_if_slower(True)
    return True


def refuse_errors(check_errors: bool) -> None:
    """Decline a call that raises an error for matrices without a factorisation: the host would wait for the codes."""
    if check_errors:
        raise Decline("check_errors=True; error codes are returned, not raised")


def matrix_strides(shape: Sequence[int], column_major: bool = True) -> tuple[int, ...]:
    """Return the strides of a fresh batch of matrices, by default with contiguous columns as LAPACK has them."""
    if not column_major or len(shape) < 2:
        return contiguous_strides(shape)
    rank = len(shape)
    strides = list(contiguous_strides(shape))
    strides[rank - 2], strides[rank - 1] = 1, max(shape[rank - 2], 1)
    return tuple(strides)


def broadcast_batch(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return matrices expanded to one batch shape."""
    batch = broadcast_shape([x.shape[:-2] for x in tensors])
    return [x.expand(*batch, *x.shape[-2:]) for x in tensors]


def fresh_or_given(
    inputs: Sequence[torch.Tensor],
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    outs: Sequence[torch.Tensor],
    strides: Sequence[Sequence[int] | None],
) -> Sequence[torch.Tensor]:
    """Return `outputs`, where fresh results have the `strides` of their indices, or are contiguous."""
    if outs:
        return outputs(inputs, shapes, dtypes, outs)
    laid = (*strides, *[None] * (len(shapes) - len(strides)))
    (first,) = outputs(inputs, shapes[:1], dtypes[:1], (), strides=laid[0])
    others = [
        empty_strided(shape, own or contiguous_strides(shape), dtype, first.device)
        for shape, own, dtype in zip(shapes[1:], laid[1:], dtypes[1:], strict=True)
    ]
    return (first, *others)
