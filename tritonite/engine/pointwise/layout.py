"""The compile-time parameters of a pointwise kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

# Size of the caches of each step between the types of a call and its kernel.
VARIANTS = 8192


class Operand(NamedTuple):
    """A parameter of the formula, or one of its results, as the kernels handle it.

    `kinds` has a stride kind for each dimension, fastest first: 0 for broadcast, 1 for unit stride, 2 for a run-time
    stride. It is None for a number. `position` is the operand's index among the kernel's operands, None for a
    compile-time constant, whose value is `dtype`. A loaded value is converted to `via` first, if set, and then to
    `dtype`.

    `role` is "index" for coordinates, "integers" for numbers of the index type, "pointer" for a gathered operand,
    "program" for the steps of a program, and "" for all others. `components` are the positions of the coordinates, of
    the integers, or of a gathered operand's strides. `component_kinds` are their stride kinds. If `is_tuple`, the
    formula receives a tuple of them.
    """

    position: Any
    kinds: tuple[int, ...] | None
    dtype: Any
    via: Any = None
    role: str = ""
    components: tuple[int, ...] = ()
    component_kinds: tuple[Any, ...] = ()
    is_tuple: bool = False


@dataclass(frozen=True)
class Layout:
    """The compile-time parameters of a kernel over an iteration space.

    A tile has rows of dimension 1, or if `linear`, of all dimensions but the fastest. With `coalesced`, neighbouring
    threads have neighbouring elements, although a thread could load several.
    """

    parameters: tuple[Operand, ...]
    results: tuple[Operand, ...]
    column_mask: bool = True
    row_mask: bool = False
    flat: bool = True
    linear: bool = False
    coalesced: bool = False
