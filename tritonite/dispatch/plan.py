"""One call of a host function, recorded as what it allocated, launched and returned."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tritonite import launch

_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
_PACKED = {"fp32": "<f", "fp64": "<d"}
_HOLE = object()
# Where a pointer or result comes from: whether from a buffer, else an argument; its number; an offset in bytes.
Source = tuple[bool, int, int]


@dataclass(frozen=True)
class Slot:
    """A number that a launch takes from the call: the argument it is, how the kernel takes it, and what fits."""

    argument: int
    floating: bool
    bounds: tuple[int, int] | None = None


@dataclass(frozen=True)
class LaunchStep:
    """A launch, with its parameters as ("pointer", source, dtype), ("constant", bits) or ("slot", number)."""

    parameters: tuple[tuple[Any, ...], ...]
    grid: tuple[int, int, int]
    function: int | None = None
    threads: int = 0
    shared: int = 0
    clusters: int = 1
    cooperative: bool = False
    programmatic: bool = False
    host: Callable[[list[Any]], None] | None = None


@dataclass
class Plan:
    """What the native dispatcher repeats for calls of the same key.

    `buffers` are tensors to allocate the like of; `results` are sources, with (sizes, strides) for views.
    """

    device: torch.device
    slots: list[tuple[int, bool, tuple[int, int] | None]] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)
    launches: list[LaunchStep] = field(default_factory=list)
    results: list[tuple[Source, tuple[Sequence[int], Sequence[int]] | None]] = field(default_factory=list)


class Unrecordable(Exception):
    """A call did what no plan can repeat."""


class Recorder(TorchDispatchMode):
    """Watches a host function: allocations and views here, launches through `launch`.

    `leaves` are the call's tensor arguments in order, counted over lists, None for those not given; `arguments` maps
    the positions of a pointwise formula's values to the arguments that they are, for numbers that plans do not hold.
    """

    def __init__(self, leaves: Sequence[torch.Tensor | None], arguments: dict[int, int]) -> None:
        super().__init__()
        self.arguments = arguments
        self.reason = ""
        self._leaves = leaves
        self._plan = Plan(torch.device("cpu"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ALLOCATIONS:
            result = func(*args, **kwargs)
            self._plan.buffers.append(result)
            return result
        if not func.is_view:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            self.reason = self.reason or f"it calls {func}"
        return func(*args, **kwargs)

    def add(
        self,
        signature: dict[str, Any],
        values: Sequence[Any],
        grid: tuple[int, int, int],
        compiled: Any,
        host: Callable[[tuple[Any, ...]], None],
        slots: dict[int, tuple[int, tuple[int, int] | None]] | None = None,
    ) -> None:
        """Note a launch of `values`, which `signature` has the types of. `host` launches in the interpreter.

        `slots` are numbers by their place among the leaves of the values that are not constexpr: their position among
        the values of a pointwise formula, and the bounds they have to keep.
        """
        try:
            self._add(signature, values, grid, compiled, host, slots or {})
        except Unrecordable as error:
            self.reason = self.reason or str(error)

    def _add(self, signature: Any, values: Any, grid: Any, compiled: Any, host: Any, numbers: dict[int, Any]) -> None:
        flat = [pair for pair in _flatten(tuple(signature.values()), tuple(values)) if pair[0] != "constexpr"]
        slots = {
            place: Slot(self.arguments[position], flat[place][0].startswith("fp"), bounds)
            for place, (position, bounds) in numbers.items()
            if position in self.arguments
        }
        parameters: list[tuple[Any, ...]] = []
        for place, (kind, value) in enumerate(flat):
            if isinstance(value, torch.Tensor):
                parameters.append(("pointer", self._source(value), value.dtype))
            elif place in slots:
                slot = slots[place]
                parameters.append(("slot", len(self._plan.slots)))
                self._plan.slots.append((slot.argument, slot.floating, slot.bounds))
            else:
                parameters.append(("constant", _bits(kind, value)))
        if compiled is None:
            template = _hollow(tuple(signature.values()), tuple(values), slots, iter(range(len(flat))))

            def run(given: list[Any]) -> None:
                host(_refill(template, iter(given)))

            kept = tuple(parameter for parameter in parameters if parameter[0] != "constant")
            self._plan.launches.append(LaunchStep(kept, grid, host=run))
            return
        metadata = compiled.metadata
        if getattr(metadata, "global_scratch_size", 0) or getattr(metadata, "profile_scratch_size", 0):
            raise Unrecordable("its kernel wants scratch memory")
        parameters += [("constant", 0), ("constant", 0)]
        step = LaunchStep(
            parameters=tuple(parameters),
            grid=grid,
            function=compiled.function,
            threads=32 * metadata.num_warps,
            shared=metadata.shared,
            clusters=getattr(metadata, "num_ctas", 1),
            cooperative=bool(getattr(metadata, "launch_cooperative_grid", False)),
            programmatic=bool(getattr(metadata, "launch_pdl", False)),
        )
        self._plan.launches.append(step)

    def _source(self, tensor: torch.Tensor) -> Source:
        pointer = tensor.data_ptr()
        for i, buffer in enumerate(self._plan.buffers):
            if buffer is tensor:
                return True, i, 0
        for i, leaf in enumerate(self._leaves):
            if leaf is tensor or (leaf is not None and leaf.data_ptr() == pointer != 0):
                return False, i, 0
        storage = tensor.untyped_storage()._cdata
        for i, buffer in enumerate(self._plan.buffers):
            if buffer.untyped_storage()._cdata == storage:
                return True, i, pointer - buffer.data_ptr()
        owners = [
            i
            for i, leaf in enumerate(self._leaves)
            if leaf is not None and leaf.layout is torch.strided and leaf.untyped_storage()._cdata == storage
        ]
        if len(owners) != 1:
            raise Unrecordable("a pointer of unknown origin")
        leaf = self._leaves[owners[0]]
        assert leaf is not None
        return False, owners[0], pointer - leaf.data_ptr()

    def plan(self, results: Sequence[torch.Tensor]) -> Plan | None:
        """The plan of a call that returned `results`, or None, with `reason` set, where there can be none."""
        if self.reason:
            return None
        try:
            for result in results:
                source = self._source(result)
                base = self._plan.buffers[source[1]] if source[0] else self._leaves[source[1]]
                layout = None if base is result else (tuple(result.shape), result.stride())
                if base is not None and base.dtype != result.dtype:
                    raise Unrecordable("a result of another dtype than what it views")
                self._plan.results.append((source, layout))
        except Unrecordable as error:
            self.reason = str(error)
            return None
        on_device = [leaf.device for leaf in self._leaves if leaf is not None and leaf.device.type != "cpu"]
        self._plan.device = on_device[0] if on_device else torch.device("cpu")
        return self._plan


def record(
    run: Callable[[], tuple[torch.Tensor, ...]], leaves: Sequence[torch.Tensor | None], arguments: dict[int, int]
) -> tuple[tuple[torch.Tensor, ...], Plan | None, str]:
    """(results, plan or None, why there is none) of a call of a host function."""
    recorder = Recorder(leaves, arguments)
    with recorder, launch.recording(recorder):
        results = run()
    return results, recorder.plan(results), recorder.reason


def _flatten(kinds: Any, value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(kinds, tuple):
        for kind, item in zip(kinds, value, strict=True):
            yield from _flatten(kind, item)
    else:
        yield kinds, value


def _hollow(kinds: Any, value: Any, slots: dict[int, Slot], places: Iterator[int]) -> Any:
    """The values with holes for what comes from the call."""
    if isinstance(kinds, tuple):
        return tuple(_hollow(kind, item, slots, places) for kind, item in zip(kinds, value, strict=True))
    if kinds == "constexpr":
        return value
    return _HOLE if next(places) in slots or isinstance(value, torch.Tensor) else value


def _refill(template: Any, given: Iterator[Any]) -> Any:
    if isinstance(template, tuple):
        return tuple(_refill(item, given) for item in template)
    return next(given) if template is _HOLE else template


def _bits(kind: str, value: Any) -> int:
    """What a parameter of a Triton type holds, in the low bytes of 64 bits."""
    if value is None or kind.startswith("*"):
        raise Unrecordable("a pointer that is no tensor")
    if kind in _PACKED:
        return int.from_bytes(struct.pack(_PACKED[kind], value).ljust(8, b"\0"), "little")
    if kind[0] not in "iu":
        raise Unrecordable(f"a parameter of type {kind}")
    return int(value) & (2**64 - 1)
