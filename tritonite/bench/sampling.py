"""Benchmark cases of sampling: distributions by element, their gradients, and categories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Shape = tuple[int, ...]
Make = Callable[..., torch.Tensor]

# Small, and larger than any cache; for categories few classes, and one or many rows of a vocabulary.
SHAPES: dict[str, tuple[Shape, ...]] = {
    "sampling": ((64, 64), (4096, 4096)),
    "multinomial": ((64, 64), (1, 128_256), (256, 128_256)),
}


def _positive(make: Make, shape: Shape) -> torch.Tensor:
    """Return positive parameters; for others ATen's kernels abort or never end."""
    return make(*shape).abs().clamp(0.01, 100)


def _beta(make: Make, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Return a probability, a concentration, and the sum of that and another concentration."""
    one, other = (_positive(make, shape) for _ in range(2))
    return make(*shape).sigmoid(), one, one + other


OPERANDS: dict[str, Callable[[Make, Shape], tuple[torch.Tensor, ...]]] = {
    "poisson": lambda make, shape: (_positive(make, shape) * 20,),
    "binomial": lambda make, shape: ((_positive(make, shape) * 50).round(), make(*shape).sigmoid()),
    "_standard_gamma_grad": lambda make, shape: (_positive(make, shape), _positive(make, shape)),
    "_dirichlet_grad": _beta,
}
for _name in ("_standard_gamma", "_sample_dirichlet", "multinomial"):
    OPERANDS[_name] = lambda make, shape: (_positive(make, shape),)


def given(packet: str, shape: Shape) -> dict[str, Callable[[], Any]]:
    """Return arguments, by name, in place of those of test samples."""
    made: dict[str, dict[str, Callable[[], Any]]] = {
        "multinomial": {"num_samples": lambda: 1, "replacement": lambda: False},
    }
    return made.get(packet, {})
