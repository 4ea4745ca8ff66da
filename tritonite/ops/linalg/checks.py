"""Checks and layouts that the linear algebra operators share. ATen raises its own errors for what they decline."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tritonite.dtypes import FULL_FLOATS
from tritonite.engine.iteration import broadcast_shape, contiguous_strides
from tritonite.engine.linalg.table import aten_is_faster, check_size
from tritonite.errors import Decline
from tritonite.runtime.contract import decline_if_slower


def check_matrices(*tensors: torch.Tensor, square: bool = False) -> None:
    """Decline tensors that are no matrices of one dtype among float32 and float64, or are not square if they must be."""
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


def check_worth(rows: int, columns: int, batch: Sequence[int]) -> None:
    """Decline matrices larger than a tile, and batches for which ATen is expected to be faster."""
    check_size(rows, columns)
    decline_if_slower(aten_is_faster(rows, columns, math.prod(batch)))


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
