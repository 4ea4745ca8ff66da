"""A graph's plan for one shape: the steps of all its calls over one table of memory.

Steps and sources are those of a call's plan (`runtime/plan.py`). Buffer 0 is the arena, which holds all memory that no
result of the graph needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tritonite.runtime.plan import CopyStep, LaunchStep, Source


class GraphBuffer(NamedTuple):
    """Memory to allocate: the arena before the first step, other buffers by an `AllocateStep`."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class ClearStep(NamedTuple):
    """Set `bytes` bytes from `source` on to 0."""

    source: Source
    bytes: int


class DrawStep(NamedTuple):
    """Draw a seed and an offset from the device's default generator, which advances by `advance`."""

    advance: int


class HoldStep(NamedTuple):
    """Put a seed (`which` 0) or an offset (1) of draw number `draw` into a fresh 0-d tensor on the CPU."""

    buffer: int
    draw: int
    which: int


class CallStep(NamedTuple):
    """Call a function that no launch can replace, such as an operator of ATen's.

    `args` and `kwargs` have a `View`, or a `Source` for a whole buffer or input, in the place of each tensor. `results`
    has a pair for each fresh tensor that the function returns: the indices that lead to it, and its buffer. `numbers`
    tells whether an argument or a result is a number that depends on data.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[tuple[tuple[int, ...], int], ...]
    numbers: bool = False


class AllocateStep(NamedTuple):
    """Allocate buffers that the next step needs first."""

    buffers: tuple[int, ...]


class FreeStep(NamedTuple):
    """Drop buffers and inputs that no later step needs."""

    buffers: tuple[int, ...]
    inputs: tuple[int, ...]


GraphStep = LaunchStep | CopyStep | ClearStep | DrawStep | HoldStep | CallStep | AllocateStep | FreeStep


class Note(NamedTuple):
    """A call of the graph, for `explain`: its node, its operator and its launches.

    `reason` is why the call has no plan, or ""; `aten` tells whether ATen runs such a call. `separate` tells whether
    the call is a fused part that declined for this reason: notes of its separate operators follow.
    """

    name: str
    operator: str
    launches: int
    reason: str
    view: bool
    aten: bool = False
    separate: bool = False


@dataclass
class GraphPlan:
    """The steps of a graph for one shape.

    Args:
        numbers: numbers of the graph's calls, as launches take them.
        buffers: memory to allocate, None for the result of a step.
        results: for each output, a `Source` for a whole input or buffer, a `View`, or ("value", a number or None).
        written: indices of the inputs that steps write.
        unshared: buffers that stay outside the arena, because a tensor of a data-dependent size is a view of one.
        notes: a note for each call, for `explain`.
        unplanned: bytes that the buffers in the arena would need without sharing.
    """

    device: torch.device
    numbers: list[int | float] = field(default_factory=list)
    buffers: list[GraphBuffer | None] = field(default_factory=list)
    steps: list[GraphStep] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    written: tuple[int, ...] = ()
    unshared: set[int] = field(default_factory=set)
    notes: list[Note] = field(default_factory=list)
    unplanned: int = 0

    @property
    def launches(self) -> int:
        return sum(isinstance(step, LaunchStep) for step in self.steps)

    @property
    def calls(self) -> int:
        return sum(isinstance(step, CallStep) for step in self.steps)

    @property
    def draws(self) -> bool:
        return any(isinstance(step, DrawStep) for step in self.steps)

    @property
    def arena(self) -> int:
        """Bytes of the arena."""
        arena = self.buffers[0]
        assert arena is not None
        return arena.sizes[0]
