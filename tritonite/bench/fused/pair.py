"""A fused operator beside ATen's composition of the same function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Make = Callable[..., torch.Tensor]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Pair:
    """A fused operator and ATen's composition of the same function.

    Attributes:
        composition: the function in ATen's operators.
        fused: the fused operator.
        operands: makes the tensors, from a function of shapes and the case's shape.
        shapes: (device shapes, host shape, interpreter shape) in place of the family's; None for those.
        dtypes: dtypes of cases in place of the benchmark's; None for those.
    """

    composition: Callable[..., Any]
    fused: Callable[..., Any]
    operands: Callable[[Make, Shape], Sequence[torch.Tensor]]
    shapes: tuple[tuple[Shape, ...], Shape, Shape] | None = None
    dtypes: tuple[torch.dtype, ...] | None = None
