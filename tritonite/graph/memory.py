"""The memory of a graph's plan: which buffers share an arena, and where."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch._ops import OpOverload

from tritonite.graph.operators import Served
from tritonite.graph.plan import AllocateStep, CallStep, ClearStep, FreeStep, GraphPlan, GraphStep, HoldStep
from tritonite.runtime.nested import retyped
from tritonite.runtime.plan import CopyStep, LaunchStep, Parameter, Source, View

# The alignment of PyTorch's CUDA allocator: an address in the arena is aligned as one of a tensor of its own.
_ALIGNMENT = 512
_Mapping = Callable[[Source], Source]


class Lifetime(NamedTuple):
    """The bytes of a buffer, and its first and last step."""

    buffer: int
    bytes: int
    first: int
    last: int


def with_arena(plan: GraphPlan) -> GraphPlan:
    """Return a plan whose buffers share the arena where no result of the graph, and nobody else, keeps their memory."""
    first, last, last_of_input = dict[int, int](), dict[int, int](), dict[int, int]()
    own = {0} | plan.unshared
    for i, step in enumerate(plan.steps):
        for used in _sources(step):
            if used.is_buffer:
                first.setdefault(used.number, i)
            (last if used.is_buffer else last_of_input)[used.number] = i
        if isinstance(step, CallStep) and not _returns_memory(step.function):
            own |= {used.number for used in _sources(step) if used.is_buffer}
    returned = [used for result in plan.results for used in _sources_in(result)]
    kept = {used.number for used in returned if used.is_buffer}
    kept_inputs = {used.number for used in returned if not used.is_buffer}
    lifetimes = []
    for number, buffer in enumerate(plan.buffers):
        if buffer is None or number in own or number in kept or buffer.device != plan.device:
            continue
        size = 1 + sum((extent - 1) * stride for extent, stride in zip(buffer.sizes, buffer.strides, strict=True))
        size = 0 if 0 in buffer.sizes else size * buffer.dtype.itemsize
        # A buffer that no step touches needs no memory.
        lifetimes.append(Lifetime(number, size, first.get(number, 0), last.get(number, 0)))
    offsets, total = placed(lifetimes)
    moved = _numbers(plan, offsets)

    def source(given: Source) -> Source:
        if not given.is_buffer:
            return given
        if given.number in offsets:
            return Source(True, 0, offsets[given.number] + given.offset)
        return given._replace(number=moved[given.number])

    whole = {moved[i]: buffer[:3] for i, buffer in enumerate(plan.buffers) if buffer is not None and i in moved}
    begun, ended, ended_inputs = _grouped(first), _grouped(last), _grouped(last_of_input)
    steps: list[GraphStep] = []
    for i, step in enumerate(plan.steps):
        fresh = [moved[number] for number in begun.get(i, ()) if number in moved and plan.buffers[number] is not None]
        if fresh:
            steps.append(AllocateStep(tuple(fresh)))
        steps.append(_mapped(step, source, moved, whole))
        freed = tuple(moved[number] for number in ended.get(i, ()) if number in moved and number not in kept)
        freed_inputs = tuple(number for number in ended_inputs.get(i, ()) if number not in kept_inputs)
        if freed or freed_inputs:
            steps.append(FreeStep(freed, freed_inputs))
    untouched = tuple(moved[number] for number in sorted(moved.keys() & kept - first.keys()))
    if untouched:
        steps.append(AllocateStep(untouched))
    arena = plan.buffers[0]
    assert arena is not None
    buffers = [buffer for number, buffer in enumerate(plan.buffers) if number and number not in offsets]
    return dataclasses.replace(
        plan,
        buffers=[arena._replace(sizes=(total,)), *buffers],
        steps=steps,
        results=[_mapped_argument(result, source, whole) for result in plan.results],
        unplanned=sum(_aligned(each.bytes) for each in lifetimes),
    )


def _grouped(steps: dict[int, int]) -> dict[int, list[int]]:
    """Return the numbers of buffers or inputs by step."""
    groups: dict[int, list[int]] = {}
    for number, step in steps.items():
        groups.setdefault(step, []).append(number)
    return groups


def placed(lifetimes: list[Lifetime]) -> tuple[dict[int, int], int]:
    """Return (offsets by buffer, bytes of the arena) such that buffers of overlapping lifetimes do not overlap.

    Large buffers come first, each at the lowest offset that is free throughout its lifetime.
    """
    offsets: dict[int, int] = {}
    done: list[tuple[int, int, Lifetime]] = []
    total = 0
    for each in sorted(lifetimes, key=lambda lifetime: (-lifetime.bytes, lifetime.first)):
        size, begin = _aligned(each.bytes), 0
        for start, end, other in done:
            if other.first > each.last or other.last < each.first:
                continue
            if begin + size <= start:
                break
            begin = max(begin, end)
        offsets[each.buffer] = begin
        if size:
            done.append((begin, begin + size, each))
            done.sort(key=lambda item: item[0])
        total = max(total, begin + size)
    return offsets, total


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _numbers(plan: GraphPlan, offsets: dict[int, int]) -> dict[int, int]:
    """Return the new number of each buffer outside the arena."""
    stay = [number for number in range(1, len(plan.buffers)) if number not in offsets]
    return {number: i for i, number in enumerate(stay, 1)}


def _returns_memory(function: Any) -> bool:
    """Return whether a function keeps no memory of its arguments when it returns, nor uses it on another stream."""
    target = function.target if isinstance(function, Served) else function
    return isinstance(target, OpOverload) and target.namespace in ("aten", "prims", "tritonite")


def _sources(step: GraphStep) -> Iterator[Source]:
    """Yield the memory that a step reads or writes, and the results of a call."""
    if isinstance(step, LaunchStep):
        for parameter in step.parameters:
            if not isinstance(parameter, int) and not isinstance(parameter[0], str):
                yield Source(*parameter[:3])
    elif isinstance(step, CopyStep):
        yield step.destination.source
        yield step.source.source
    elif isinstance(step, ClearStep):
        yield step.source
    elif isinstance(step, HoldStep):
        yield Source(True, step.buffer, 0)
    elif isinstance(step, CallStep):
        for item in (*step.args, *step.kwargs.values()):
            yield from _sources_in(item)
        for _, number in step.results:
            yield Source(True, number, 0)


def _sources_in(argument: Any) -> Iterator[Source]:
    if isinstance(argument, Source):
        yield argument
    elif isinstance(argument, View):
        yield argument.source
    elif isinstance(argument, (list, tuple)):
        for item in argument:
            yield from _sources_in(item)


def _mapped(step: GraphStep, source: _Mapping, moved: dict[int, int], whole: dict[int, Any]) -> GraphStep:
    """Return a step with every source replaced."""

    def view(given: View) -> View:
        return given._replace(source=source(given.source))

    def parameter(given: Parameter) -> Parameter:
        if isinstance(given, int) or isinstance(given[0], str):
            return given
        return (*source(Source(*given[:3])), given[3])

    if isinstance(step, LaunchStep):
        return step._replace(parameters=[parameter(each) for each in step.parameters])
    if isinstance(step, CopyStep):
        return CopyStep(view(step.destination), view(step.source))
    if isinstance(step, ClearStep):
        return step._replace(source=source(step.source))
    if isinstance(step, HoldStep):
        return step._replace(buffer=moved[step.buffer])
    if isinstance(step, CallStep):
        results = tuple((path, moved[number]) for path, number in step.results)
        args = tuple(_mapped_argument(item, source, whole) for item in step.args)
        kwargs = {name: _mapped_argument(item, source, whole) for name, item in step.kwargs.items()}
        return step._replace(args=args, kwargs=kwargs, results=results)
    return step


def _mapped_argument(argument: Any, source: _Mapping, whole: dict[int, Any]) -> Any:
    """Return an argument with every source replaced. A view of all of a buffer becomes the buffer's source."""
    if isinstance(argument, Source):
        return source(argument)
    if isinstance(argument, View):
        place = source(argument.source)
        if place.is_buffer and not place.offset and whole.get(place.number) == argument[1:]:
            return place
        return argument._replace(source=place)
    if isinstance(argument, list):
        return [_mapped_argument(item, source, whole) for item in argument]
    if isinstance(argument, tuple):
        return retyped(argument, [_mapped_argument(item, source, whole) for item in argument])
    return argument
