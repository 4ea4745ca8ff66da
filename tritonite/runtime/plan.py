"""A recorded call as data: the buffers to allocate, the steps in order, and the results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tritonite.runtime.symbols import Limits

# Where a pointer or result comes from: whether from a buffer, else an argument; its number; an offset in bytes.
Source = tuple[bool, int, int]
# Of a launch: the bits of a constant, ("slot", number), ("drawn", number of a draw, 0 for its seed or 1 for its
# offset), ("size", number of a size read from data), a pointer: (*source, dtype), or a tensor descriptor: (*source,
# CUDA's encoding of it).
Parameter = int | tuple[str, int] | tuple[str, int, int] | tuple[bool, int, int, torch.dtype | bytes]


class LaunchStep(NamedTuple):
    """A launch: on a GPU all its parameters; in the interpreter those that come from the call.

    An extent of `grid` is a number, or (number of a size read from data, elements of a block). `owner` is the compiled
    kernel that `function` belongs to, or what takes the parameters and the grid in the interpreter.
    """

    parameters: list[Parameter]
    grid: tuple[int | tuple[int, int], ...]
    function: int | None = None
    threads: int = 0
    shared: int = 0
    clusters: int = 1
    cooperative: bool = False
    programmatic: bool = False
    owner: Any = None


class View(NamedTuple):
    """A tensor over the memory of an argument or a buffer."""

    source: Source
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class ZeroStep(NamedTuple):
    """All bytes of a buffer become 0."""

    buffer: int


class CopyStep(NamedTuple):
    """What `destination.copy_(source)` does."""

    destination: View
    source: View


class ReadStep(NamedTuple):
    """The host waits for so many int64 `numbers` that kernels have written."""

    source: Source
    numbers: int


class Buffer(NamedTuple):
    """Memory to allocate, the like of a tensor; `sizes` and `strides` where data decides some of them.

    Of those an item is a number, or (number of a size read from data,).
    """

    like: torch.Tensor
    sizes: tuple[Any, ...] | None = None
    strides: tuple[Any, ...] | None = None


# What a call returns: None for what was not asked for, a source with a view's (sizes, strides, dtype) or None for the
# whole, ("size", number of a size read from data), ("drawn", number of a draw, 0 for its seed or 1 for its offset) in a
# tensor on the CPU, ("value", a number, a string ...), or ("list", items like these). Of a view's sizes an item is a
# number, or (number of a size read from data,).
Returned = Any


@dataclass
class Plan:
    """What the native dispatcher repeats for calls of the same key.

    `slots` are numbers of the call that launches take or that have limits to keep: the argument, the place in a list or
    -1, whether as floating point, and the limits; `draws` says how far each draw moves the generator on. Calls of a key
    are ATen's for the reason `lasting`, unless that is "", from the first on whose data a kernel refuses.
    """

    device: torch.device
    slots: list[tuple[int, int, bool, Limits | None]] = field(default_factory=list)
    draws: list[int] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    steps: list[LaunchStep | ZeroStep | CopyStep | ReadStep] = field(default_factory=list)
    results: list[Returned] = field(default_factory=list)
    lasting: str = ""

    @property
    def launches(self) -> list[LaunchStep]:
        return [step for step in self.steps if isinstance(step, LaunchStep)]
