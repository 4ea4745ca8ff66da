"""What is measured of random numbers: fresh tensors of models, masks of their activations, and permutations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Shape = tuple[int, ...]
Make = Callable[..., torch.Tensor]

# Small, one step of decoding, and such as no cache holds.
_SIZES: tuple[Shape, ...] = ((64, 64), (16, 8192), (8192, 8192))
# Activations of a language model and of BERT, to which dropout belongs.
_ACTIVATIONS: tuple[Shape, ...] = ((64, 64), (8192, 4096), (16_384, 768))
_DROPOUT = ("native_dropout", "_fused_dropout", "rrelu_with_noise", "_masked_scale")
SHAPES: dict[str, tuple[Shape, ...]] = {"random": _SIZES, "randperm": ((64,), (4096,), (2**20,))}
SHAPES |= dict.fromkeys(_DROPOUT, _ACTIVATIONS)
# Those that take the shape of their first argument alone: fresh tensors like it.
_UNREAD = ("uniform", "normal_functional", "log_normal", "exponential", "cauchy", "geometric", "random")
UNREAD = dict.fromkeys((*_UNREAD, "rand_like", "randn_like", "randint_like"), 0)

OPERANDS: dict[str, Callable[[Make, Shape], tuple[torch.Tensor, ...]]] = {
    # Deviations are not negative.
    "normal": lambda make, shape: (make(*shape), make(*shape).abs()),
}


def given(packet: str, shape: Shape, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """The arguments of a case that samples have in another size, or that models give."""

    def count() -> int:
        if dtype is torch.float16 and shape[0] > 2**11:
            raise NotImplementedError("float16 does not tell so many numbers apart")
        return shape[0]

    made: dict[str, dict[str, Callable[[], Any]]] = {
        "randperm": {"n": count},
        "rrelu_with_noise": {"training": lambda: True},
        "rrelu_with_noise_functional": {"training": lambda: True},
    }
    return made.get(packet, {})
