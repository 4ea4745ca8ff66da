"""Gathered operands, which a formula reads at indices it computes, and other arguments that are no plain operands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from tritonite.errors import Decline


class Gathered(NamedTuple):
    """An operand that the formula reads at computed indices along `dims`, and at the result's index elsewhere.

    Its other dimensions have the result's size, or 1. The formula reads it by `language.indices.read_at`.
    """

    tensor: torch.Tensor
    dims: tuple[int, ...]


def tensor_of(value: Any) -> torch.Tensor:
    tensor: torch.Tensor = value.tensor if type(value) is Gathered else value
    return tensor


def as_tuple(value: Any) -> tuple[int, ...]:
    return value if type(value) is tuple else (value,)


def is_aligned(value: Any, how: str, component: int) -> bool:
    """Return whether 16 divides an argument of a launch: an address, a stride or an integer."""
    if how in ("tensor", "pointer"):
        return tensor_of(value).data_ptr() % 16 == 0
    if how == "stride":
        return bool(value.tensor.stride(value.dims[component]) % 16 == 0)
    return how == "integer" and as_tuple(value)[component] % 16 == 0


def one_along(dim: int, rank: int) -> list[int]:
    """Return the strides of an operand that is the coordinate along a dimension: 1 there, else 0."""
    return [int(d == dim % rank) for d in range(rank)]


def strides_in_step(operand: Gathered, shape: Sequence[int]) -> list[int]:
    """Return the strides of a gathered operand over the result's dimensions: 0 along those it is gathered in."""
    dims = {d % len(shape) for d in operand.dims}
    own = zip(operand.tensor.shape, operand.tensor.stride(), strict=True)
    return [0 if d in dims or size == 1 else stride for d, (size, stride) in enumerate(own)]


def check_gathered(operands: Iterable[Gathered], shape: Sequence[int]) -> None:
    """Decline gathered operands that have another rank than the result, or another size in its plain dimensions."""
    for tensor, dims in operands:
        if tensor.dim() != len(shape):
            raise Decline(f"gathered operand has {tensor.dim()} dimensions, the result {len(shape)}")
        if any(
            size not in (1, shape[d])
            for d, size in enumerate(tensor.shape)
            if d - len(shape) not in dims and d not in dims
        ):
            raise Decline(f"gathered operand has shape {tuple(tensor.shape)}, the result {tuple(shape)}")
