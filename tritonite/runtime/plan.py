"""A recorded call as data: the buffers to allocate, the steps in order, and the results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tritonite.runtime.symbols import Limits


class Source(NamedTuple):
    """The origin of a pointer or a result.

    Buffer `number` of the plan, or else tensor argument `number` with lists flattened, plus `offset` bytes.
    """

    is_buffer: bool
    number: int
    offset: int


# A parameter of a launch, one of
# - the bits of a constant
# - ("slot", index in Plan.slots)
# - ("drawn", index in Plan.draws, 0 for the seed or 1 for the offset)
# - ("size", index of a data-dependent size)
# - (*source, dtype): a pointer
# - (*source, bytes): a tensor descriptor in CUDA's encoding, whose address a replay replaces
Parameter = int | tuple[str, int] | tuple[str, int, int] | tuple[bool, int, int, torch.dtype | bytes]


class LaunchStep(NamedTuple):
    """Launch a kernel.

    `parameters` are all of the kernel's on a GPU, and those that come from the call in the interpreter. An extent of
    `grid` is a number, or (index of a data-dependent size, elements of a block).

    `function` is the driver's handle, and `owner` the compiled kernel, which keeps the handle valid. In the interpreter
    `function` is None, and a replay calls `owner` with the parameters and the grid. `threads` is the size of a block,
    `shared` its shared memory in bytes. `fills` is the number of a `kept` buffer that the launch writes, or -1.
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
    fills: int = -1


class View(NamedTuple):
    """A tensor over the memory of an argument or a buffer."""

    source: Source
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class ZeroStep(NamedTuple):
    """Set all bytes of a buffer to 0."""

    buffer: int


class CopyStep(NamedTuple):
    """Copy as `destination.copy_(source)` does."""

    destination: View
    source: View


class ReadStep(NamedTuple):
    """Wait on the host for `numbers` int64 values that kernels have written: data-dependent sizes."""

    source: Source
    numbers: int


class Buffer(NamedTuple):
    """Memory to allocate, with the dtype, device, sizes and strides of the tensor `like`.

    `sizes` and `strides` are given if some are data-dependent: each item is a number, or (index of a data-dependent
    size,). A `kept` buffer is used again, without the launches that fill it, by the next replay on the same stream in
    which their parameters are the same.
    """

    like: torch.Tensor
    sizes: tuple[Any, ...] | None = None
    strides: tuple[Any, ...] | None = None
    kept: bool = False


# A result of a call, one of
# - None: a result that was not asked for
# - (source, None): a whole buffer or argument
# - (source, (sizes, strides, dtype)): a view; an item of sizes is a number, or (index of a data-dependent size,)
# - ("size", index of a data-dependent size)
# - ("drawn", index in Plan.draws, 0 for the seed or 1 for the offset): a 0-d tensor on the CPU
# - ("value", a number, a string, ...)
# - ("list", results like these)
Returned = Any


class Slot(NamedTuple):
    """A number of the call that a launch takes or that has limits.

    `argument` is the index in the schema, `item` the index in a list of numbers or -1. `floating` is whether a launch
    takes the number as a float.
    """

    argument: int
    item: int
    floating: bool
    limits: Limits | None


@dataclass
class Plan:
    """The steps that the native dispatcher repeats for calls with one key.

    `draws` is the advance of the generator for each draw. If `lasting` is not "", the first call whose data a kernel
    refuses sends all later calls with this key to ATen, with `lasting` as the reason.
    """

    device: torch.device
    slots: list[Slot] = field(default_factory=list)
    draws: list[int] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    steps: list[LaunchStep | ZeroStep | CopyStep | ReadStep] = field(default_factory=list)
    results: list[Returned] = field(default_factory=list)
    lasting: str = ""

    @property
    def launches(self) -> list[LaunchStep]:
        return [step for step in self.steps if isinstance(step, LaunchStep)]
