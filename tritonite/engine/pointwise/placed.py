"""Operands that a formula reads at places of its own, and what else is no operand in step with the result."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from tritonite.errors import Decline


class Placed(NamedTuple):
    """An operand that the formula reads at places of its own along `dims`, and elsewhere at the result's.

    In its other dimensions it has the result's size, or 1. The formula reads it by `language.indices.read_at`.
    """

    tensor: torch.Tensor
    dims: tuple[int, ...]


def tensor_of(value: Any) -> torch.Tensor:
    tensor: torch.Tensor = value.tensor if type(value) is Placed else value
    return tensor


def as_tuple(value: Any) -> tuple[int, ...]:
    return value if type(value) is tuple else (value,)


def is_aligned(value: Any, how: str, part: int) -> bool:
    """Whether 16 divides an argument of a launch: an address, a stride or an integer."""
    if how in ("tensor", "pointer"):
        return tensor_of(value).data_ptr() % 16 == 0
    if how == "stride":
        return bool(value.tensor.stride(value.dims[part]) % 16 == 0)
    return how == "integer" and as_tuple(value)[part] % 16 == 0


def one_along(dim: int, rank: int) -> list[int]:
    """The strides of an operand that is the coordinate along a dimension."""
    return [int(d == dim % rank) for d in range(rank)]


def strides_in_step(placed: Placed, shape: Sequence[int]) -> list[int]:
    """The strides by which a placed operand moves with the result: 0 along the dimensions that it is placed in."""
    dims = {d % len(shape) for d in placed.dims}
    own = zip(placed.tensor.shape, placed.tensor.stride(), strict=True)
    return [0 if d in dims or size == 1 else stride for d, (size, stride) in enumerate(own)]


def check_placed(placed: Iterable[Placed], shape: Sequence[int]) -> None:
    for tensor, dims in placed:
        if tensor.dim() != len(shape):
            raise Decline("a placed operand of another rank")
        if any(
            size not in (1, shape[d])
            for d, size in enumerate(tensor.shape)
            if d - len(shape) not in dims and d not in dims
        ):
            raise Decline("a placed operand of another shape")
