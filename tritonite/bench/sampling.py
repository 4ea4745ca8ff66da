"""What is measured of samples by elements, of gradients of theirs, and of categories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Shape = tuple[int, ...]

# Small, and such as no cache holds; of categories one row and several of a vocabulary, and few classes.
SHAPES: dict[str, tuple[Shape, ...]] = {
    "sampling": ((64, 64), (4096, 4096)),
    "multinomial": ((64, 64), (1, 128_256), (256, 128_256)),
}


def given(packet: str, shape: Shape) -> dict[str, Callable[[], Any]]:
    """The arguments of a case that models give."""
    made: dict[str, dict[str, Callable[[], Any]]] = {
        "multinomial": {"num_samples": lambda: 1, "replacement": lambda: False},
    }
    return made.get(packet, {})
