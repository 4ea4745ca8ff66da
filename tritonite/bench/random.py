"""Benchmark cases of random numbers: fresh tensors, dropout of activations, permutations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Shape = tuple[int, ...]
Make = Callable[..., torch.Tensor]

# Small, one step of decoding, and larger than any cache.
_SIZES: tuple[Shape, ...] = ((64, 64), (16, 8192), (8192, 8192))
# Activations of a language model and of BERT, for dropout.
_ACTIVATIONS: tuple[Shape, ...] = ((64, 64), (8192, 4096), (16_384, 768))
_DROPOUT = ("native_dropout", "_fused_dropout", "rrelu_with_noise", "_masked_scale")
SHAPES: dict[str, tuple[Shape, ...]] = {"random": _SIZES, "randperm": ((64,), (4096,), (2**20,))}
SHAPES |= dict.fromkeys(_DROPOUT, _ACTIVATIONS)
# Operators that use only the shape of their first argument.
_UNREAD = ("uniform", "normal_functional", "log_normal", "exponential", "cauchy", "geometric", "random")
UNREAD = dict.fromkeys((*_UNREAD, "rand_like", "randn_like", "randint_like"), 0)

OPERANDS: dict[str, Callable[[Make, Shape], tuple[torch.Tensor, ...]]] = {
    # Standard deviations must not be negative.
    "normal": lambda make, shape: (make(*shape), make(*shape).abs()),
}


def given(packet: str, shape: Shape, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Return arguments, by name, in place of those of test samples."""

    def count() -> int:
        if dtype is torch.float16 and shape[0] > 2**11:
            raise NotImplementedError(f"float16 has no {shape[0]} distinct integers")
        return shape[0]

    made: dict[str, dict[str, Callable[[], Any]]] = {
        "randperm": {"n": count},
        "rrelu_with_noise": {"training": lambda: True},
        "rrelu_with_noise_functional": {"training": lambda: True},
    }
    return made.get(packet, {})
