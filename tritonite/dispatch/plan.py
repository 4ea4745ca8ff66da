"""One call of a host function, recorded as what it allocated, launched and returned."""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.tools.tensor_descriptor import TensorDescriptor

from tritonite import launch
from tritonite.devices import nvidia

_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
_PACKED = {"fp32": "<f", "fp64": "<d"}
# Where a pointer or result comes from: whether from a buffer, else an argument; its number; an offset in bytes.
Source = tuple[bool, int, int]


# Of a launch: the bits of a constant, (number of a slot,), (number of a draw, 0 for its seed or 1 for its offset), a
# pointer: (*source, dtype), or a tensor descriptor: (*source, CUDA's encoding of it).
Parameter = int | tuple[int] | tuple[int, int] | tuple[bool, int, int, torch.dtype | bytes]


class LaunchStep(NamedTuple):
    """A launch: on a GPU all its parameters; in the interpreter those that come from the call.

    `owner` is the compiled kernel that `function` belongs to, or what takes the parameters in the interpreter.
    """

    parameters: list[Parameter]
    grid: tuple[int, int, int]
    function: int | None = None
    threads: int = 0
    shared: int = 0
    clusters: int = 1
    cooperative: bool = False
    programmatic: bool = False
    owner: Any = None


@dataclass
class Plan:
    """What the native dispatcher repeats for calls of the same key.

    `slots` are numbers that launches take from the call: the argument, whether as floating point, and bounds to keep;
    `draws` says how far each draw moves the generator on; `buffers` are tensors to allocate the like of; `results` are
    sources, with (sizes, strides) for views; None for one that was not asked for.
    """

    device: torch.device
    slots: list[tuple[int, bool, tuple[int, int] | None]] = field(default_factory=list)
    draws: list[int] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)
    launches: list[LaunchStep] = field(default_factory=list)
    results: list[tuple[Source, tuple[Sequence[int], Sequence[int]] | None] | None] = field(default_factory=list)


class Unrecordable(Exception):
    """A call did what no plan can repeat."""


class Recorder:
    """Notes what a host function allocates, launches and returns.

    `leaves` are the call's tensor arguments in order, counted over lists, None for those not given; `arguments` maps
    the positions of a pointwise formula's values to the arguments that they are, for numbers that plans do not hold.
    """

    def __init__(self, leaves: Sequence[torch.Tensor | None], arguments: dict[int, int]) -> None:
        self.arguments = arguments
        self.reason = ""
        self._leaves = leaves
        self._plan = Plan(torch.device("cpu"))

    def allocated(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note fresh tensors, unless they have been noted."""
        for tensor in tensors:
            if not any(tensor is known for known in self._plan.buffers):
                self._plan.buffers.append(tensor)

    def add(
        self,
        types: Sequence[str],
        values: Sequence[Any],
        grid: tuple[int, int, int],
        compiled: Any,
        host: Callable[[list[Any]], None],
        numbers: dict[int, tuple[int, tuple[int, int] | None]] | None = None,
    ) -> None:
        """Note a launch of `values`, flat and without constexprs, of Triton's `types`.

        `host` launches such values in the interpreter. `numbers` are those of a pointwise formula, by their place among
        the values: their position among the formula's, and the bounds they have to keep.
        """
        if 0 in grid:
            # Triton launches nothing then, and the driver refuses it.
            return
        try:
            self._add(types, values, grid, compiled, host, numbers or {})
        except Unrecordable as error:
            self.unrecordable(str(error))

    def _add(
        self, types: Sequence[str], values: Sequence[Any], grid: Any, compiled: Any, host: Any, numbers: dict[int, Any]
    ) -> None:
        holes: dict[int, Callable[[Any], Any]] = {}
        parameters: list[Parameter] = []
        facts = None if compiled is None else _facts(compiled)
        descriptors = iter(facts.descriptors if facts else ())
        for place, value in enumerate(values):
            if type(value) is int and place not in numbers and value >= 0 and types[place][0] == "i":
                parameters.append(value)
            elif place in numbers and numbers[place][0] in self.arguments:
                position, bounds = numbers[place]
                holes[place] = _as_is
                parameters.append((len(self._plan.slots),))
                self._plan.slots.append((self.arguments[position], types[place].startswith("fp"), bounds))
            elif isinstance(value, torch.Tensor):
                holes[place] = _as_is
                parameters.append((*self._source(value), value.dtype))
            elif isinstance(value, launch.Drawn):
                if facts and types[place] not in ("i64", "u64"):
                    raise Unrecordable("a seed or an offset whose parameter is not declared as tl.int64")
                holes[place] = _as_is
                parameters.append((value.draw, value.which))
            elif isinstance(value, launch.DESCRIPTORS):
                if facts:
                    parameters += self._descriptor(value, next(descriptors, None))
                else:
                    holes[place] = _descriptor_like(value)
                    parameters.append((*self._source(value.base), value.base.dtype))
            else:
                parameters.append(_bits(types[place], value))
        if facts is None:
            template = [None if place in holes else value for place, value in enumerate(values)]

            def run(given: list[Any]) -> None:
                filled = list(template)
                for (place, make), value in zip(holes.items(), given, strict=True):
                    filled[place] = make(value)
                host(filled)

            self._plan.launches.append(LaunchStep([parameters[place] for place in holes], grid, owner=run))
            return
        if facts.profiled:
            raise Unrecordable("its kernel is instrumented by a profiler")
        scratch = self._scratch(facts.scratch * facts.clusters * math.prod(grid)) if facts.scratch else 0
        self._plan.launches.append(LaunchStep([*parameters, scratch, 0], grid, *facts.step, compiled))

    def _scratch(self, size: int) -> Parameter:
        """The global memory that a kernel wants besides its arguments, in bytes: a buffer of the plan's."""
        with _disable_current_modes():
            scratch = torch.empty(size, dtype=torch.uint8, device=self._device())
        self.allocated([scratch])
        return (*self._source(scratch), torch.uint8)

    def _descriptor(self, descriptor: TensorDescriptor, metadata: Any) -> Iterator[Parameter]:
        """What a kernel takes for a tensor descriptor, by Triton's own rule."""
        for part in nvidia.descriptor_parameters(descriptor, metadata):
            if isinstance(part, bytes):
                yield (*self._source(descriptor.base), part)
            elif isinstance(part, torch.Tensor):
                yield (*self._source(part), part.dtype)
            else:
                yield int(part) & (2**64 - 1)

    def draw(self, advance: int) -> int:
        """Note that the call's generator moves on by `advance`. Returns the number of this draw."""
        self._plan.draws.append(advance)
        return len(self._plan.draws) - 1

    def unrecordable(self, reason: str) -> None:
        """Note that no plan can repeat the call; the first reason is kept."""
        self.reason = self.reason or reason

    def _device(self) -> torch.device:
        for tensor in (*self._leaves, *self._plan.buffers):
            if tensor is not None and (device := tensor.device).type != "cpu":
                return device
        return torch.device("cpu")

    def _source(self, tensor: torch.Tensor) -> Source:
        for i, leaf in enumerate(self._leaves):
            if leaf is tensor:
                return False, i, 0
        for i, buffer in enumerate(self._plan.buffers):
            if buffer is tensor:
                return True, i, 0
        pointer = tensor.data_ptr()
        for i, leaf in enumerate(self._leaves):
            if leaf is not None and leaf.data_ptr() == pointer != 0:
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

    def plan(self, results: Sequence[torch.Tensor | None]) -> Plan | None:
        """The plan of a call that returned `results`, or None, with `reason` set, where there can be none."""
        if self.reason:
            return None
        try:
            for result in results:
                if result is None:
                    self._plan.results.append(None)
                    continue
                if not isinstance(result, torch.Tensor):
                    raise Unrecordable("a result that is no tensor")
                source = self._source(result)
                base = self._plan.buffers[source[1]] if source[0] else self._leaves[source[1]]
                if base is result:
                    self._plan.results.append((source, None))
                    continue
                if base is not None and base.dtype != result.dtype:
                    raise Unrecordable("a result of another dtype than what it views")
                self._plan.results.append((source, (tuple(result.shape), result.stride())))
        except Unrecordable as error:
            self.reason = str(error)
            return None
        self._plan.device = self._device()
        return self._plan


class _Facts(NamedTuple):
    """What a compiled kernel asks of its launches; `step` are those fields of a LaunchStep, `scratch` is a block's."""

    step: tuple[int, int, int, int, bool, bool]
    clusters: int
    scratch: int
    profiled: bool
    descriptors: tuple[Any, ...]


@functools.lru_cache(maxsize=8192)
def _facts(compiled: Any) -> _Facts:
    metadata = compiled.metadata
    clusters = getattr(metadata, "num_ctas", 1)
    cooperative, programmatic = (
        bool(getattr(metadata, name, False)) for name in ("launch_cooperative_grid", "launch_pdl")
    )
    return _Facts(
        (compiled.function, 32 * metadata.num_warps, metadata.shared, clusters, cooperative, programmatic),
        clusters,
        getattr(metadata, "global_scratch_size", 0),
        bool(getattr(metadata, "profile_scratch_size", 0)),
        tuple(getattr(metadata, "tensordesc_meta", None) or ()),
    )


class Watch(TorchDispatchMode):
    """Tells a recorder what a host function calls of ATen: allocations and views; all else makes it unrecordable."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ALLOCATIONS:
            result = func(*args, **kwargs)
            self._recorder.allocated([result])
            return result
        if not func.is_view:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            self._recorder.unrecordable(f"it calls {func}")
        return func(*args, **kwargs)


def record(
    run: Callable[[], tuple[torch.Tensor | None, ...]],
    leaves: Sequence[torch.Tensor | None],
    arguments: dict[int, int],
    watch: bool = True,
) -> tuple[tuple[torch.Tensor | None, ...], Plan | None, str]:
    """(results, plan or None, why there is none) of a call of a host function.

    `watch` unless the function is an engine's, which tells of its allocations itself and calls nothing else.
    """
    recorder = Recorder(leaves, arguments)
    outer = launch.swap_recorder(recorder)
    try:
        if watch:
            with Watch(recorder):
                results = run()
        else:
            results = run()
    finally:
        launch.swap_recorder(outer)
    return results, recorder.plan(results), recorder.reason


def _as_is(value: Any) -> Any:
    return value


def _descriptor_like(descriptor: TensorDescriptor) -> Callable[[torch.Tensor], TensorDescriptor]:
    """What makes the same descriptor of another tensor; holds none."""
    fields = {f.name: getattr(descriptor, f.name) for f in dataclasses.fields(descriptor) if f.name != "base"}
    return lambda base: TensorDescriptor(base, **fields)


def _bits(kind: str, value: Any) -> int:
    """What a parameter of a Triton type holds, in the low bytes of 64 bits."""
    if value is None or kind.startswith("*"):
        raise Unrecordable("a pointer that is no tensor")
    if kind in _PACKED:
        return int.from_bytes(struct.pack(_PACKED[kind], value).ljust(8, b"\0"), "little")
    if kind[0] not in "iu":
        raise Unrecordable(f"a parameter of type {kind}")
    return int(value) & (2**64 - 1)
