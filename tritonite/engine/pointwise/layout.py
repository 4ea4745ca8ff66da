"""What a pointwise kernel is compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

# The most that is kept of each step between the types of a call and its kernel.
VARIANTS = 8192


class Operand(NamedTuple):
    """How the kernels treat a parameter of the formula, or one of its results.

    `kinds` holds a stride kind for each dimension, fastest first: 0 broadcast, 1 unit stride, 2 a stride known at run
    time. It is None for a number, and `position` is None for a compile-time constant, whose value is `dtype`. What is
    read is converted to `through` first, if that is set, and then to `dtype`.

    `role` is "index" for coordinates, "integers" for numbers of the index's type, "pointer" for an operand that the
    formula reads itself, and "" for all others. Of the first two `several` are a tuple in the formula, of the positions
    `parts`; of a pointer those are the positions of its strides along the dimensions that it is placed in, whose kinds
    are `placed`.
    """

    position: Any
    kinds: tuple[int, ...] | None
    dtype: Any
    through: Any = None
    role: str = ""
    parts: tuple[int, ...] = ()
    placed: tuple[Any, ...] = ()
    several: bool = False


@dataclass(frozen=True)
class Layout:
    """Everything of an iteration space that a kernel is compiled for.

    A tile's rows are of dimension 1, or of all dimensions but the fastest if it is `linear`. `coalesced` is whether
    neighbouring threads are to have neighbouring elements, though a thread could have several.
    """

    parameters: tuple[Operand, ...]
    results: tuple[Operand, ...]
    column_mask: bool = True
    row_mask: bool = False
    flat: bool = True
    linear: bool = False
    coalesced: bool = False
