"""Recording: notes what a call of a host function does, and makes a plan of the notes."""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes
from triton.tools.tensor_descriptor import TensorDescriptor

from tritonite.devices import nvidia
from tritonite.runtime import contract, launch
from tritonite.runtime.hollow import DataUnknown, hollow, is_hollow
from tritonite.runtime.opaque import opaque
from tritonite.runtime.plan import (
    Buffer,
    CopyStep,
    LaunchStep,
    Parameter,
    Plan,
    ReadStep,
    Returned,
    Source,
    View,
    ZeroStep,
)
from tritonite.runtime.symbols import Blocks, Drawn, Limits, Number, Size, Symbol
from tritonite.runtime.watch import Watch

_PACKED = {"fp32": "<f", "fp64": "<d"}


class Unrecordable(Exception):
    """A call did what no plan can repeat."""


class Recorder:
    """Notes what a host function allocates, launches, copies, reads and returns.

    `leaves` are the call's tensor arguments in order, counted over lists, None for those not given; `arguments` maps
    the leaves that are numbers in CPU tensors to their places in the schema. With `dry` nothing is launched, written,
    allocated or drawn.
    """

    def __init__(
        self,
        leaves: Sequence[torch.Tensor | None],
        arguments: dict[int, tuple[int, int]] | None = None,
        dry: bool = False,
    ) -> None:
        self.reason = ""
        self.dry = dry
        self.watching = False
        self.descriptions: list[launch.LaunchDescription] = []
        self.promotions: list[dict[str, Any]] = []
        self._leaves = leaves
        self._plan = Plan(torch.device("cpu"))
        self._arguments = arguments or {}
        self._sources: dict[int, Source] = {}
        for i, leaf in enumerate(leaves):
            if leaf is not None:
                self._sources.setdefault(id(leaf), (False, i, 0))
        self._slots: dict[tuple[int, int, bool, Limits | None], int] = {}
        self._limited: list[Number] = []
        self._sizes = 0
        self._shortened: dict[int, tuple[Source, tuple[Any, ...]]] = {}
        self._held: dict[int, Drawn] = {}

    def allocated(self, tensor: torch.Tensor, shape: Sequence[Any] = (), strides: Sequence[Any] = ()) -> None:
        """Note a fresh tensor, and its shape and strides where data decides some of them."""
        index = len(self._plan.buffers)
        if any(isinstance(extent, Size) for extent in (*shape, *strides)):
            self._plan.buffers.append(Buffer(tensor, _extents(shape), _extents(strides)))
        else:
            self._plan.buffers.append(Buffer(tensor))
        self._sources[id(tensor)] = (True, index, 0)

    def zeroed(self, tensor: torch.Tensor) -> None:
        """Note that all of a fresh tensor is set to 0."""
        self._plan.steps.append(ZeroStep(self._sources[id(tensor)][1]))

    def copied(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Note a copy."""
        try:
            self._plan.steps.append(CopyStep(self._view(destination), self._view(source)))
        except Unrecordable as error:
            self.unrecordable(str(error))

    def refuses(self, reason: str) -> None:
        """Note that a call whose data a kernel refuses has those after it left to ATen, too."""
        self._plan.lasting = reason

    def read(self, numbers: torch.Tensor) -> list[Size]:
        """Note that the host reads sizes that data decides, and read them."""
        try:
            self._plan.steps.append(ReadStep(self._source(numbers), numbers.numel()))
        except Unrecordable as error:
            self.unrecordable(str(error))
        if self.dry:
            raise DataUnknown
        with _disable_current_modes():
            values = numbers.flatten().tolist()
        first, self._sizes = self._sizes, self._sizes + len(values)
        return [Size(value, first + i) for i, value in enumerate(values)]

    def shortened(self, result: torch.Tensor, vector: torch.Tensor, count: Size) -> None:
        """Note that a result is so many of the elements of a fresh vector."""
        self._shortened[id(result)] = self._sources[id(vector)], ((count.index,),)

    def held(self, result: torch.Tensor, number: Drawn) -> None:
        """Note that a result holds a seed or an offset."""
        self._held[id(result)] = number

    def limited(self, number: Number) -> None:
        """Note that a number of the call keeps its limits, which it has to whether or not a kernel takes it."""
        self._limited.append(number)

    def number(self, tensor: torch.Tensor) -> Number | int | float | bool:
        """The number that a 0-d CPU tensor of the call holds."""
        if is_hollow(tensor):
            raise DataUnknown
        with _disable_current_modes():
            value: int | float | bool = tensor.item()
        place = next((place for i, place in self._arguments.items() if self._leaves[i] is tensor), None)
        if place is None:
            self.unrecordable("a number in a tensor of unknown origin")
            return value
        return Number(value, *place)

    @property
    def steps(self) -> list[LaunchStep | ZeroStep | CopyStep | ReadStep]:
        """What has been noted so far, but for allocations."""
        return self._plan.steps

    def described(self, description: launch.LaunchDescription) -> None:
        """Note what a launch is for people."""
        self.descriptions.append(description)

    def add(
        self,
        types: Sequence[str],
        values: Sequence[Any],
        grid: tuple[Any, ...],
        compiled: Any,
        host: Callable[[list[Any], tuple[int, ...]], None],
    ) -> None:
        """Note a launch of `values`, flat and without constexprs, of Triton's `types`.

        `host` launches such values in the interpreter.
        """
        if any(type(extent) is int and extent == 0 for extent in grid):
            # Triton launches nothing then, and the driver refuses it.
            return
        try:
            self._add(types, values, grid, compiled, host)
        except Unrecordable as error:
            self.unrecordable(str(error))

    def _add(
        self,
        types: Sequence[str],
        values: Sequence[Any],
        grid: tuple[Any, ...],
        compiled: Any,
        host: Any,
    ) -> None:
        holes: dict[int, Callable[[Any], Any]] = {}
        parameters: list[Parameter] = []
        facts = None if compiled is None else _facts(compiled)
        descriptors = iter(facts.descriptors if facts else ())
        for place, value in enumerate(values):
            if isinstance(value, Symbol):
                holes[place] = _as_is
                # In the interpreter types are not always known.
                parameters.append(self._symbol(value, types[place].strip("*")))
            elif type(value) is int and value >= 0 and types[place][0] == "i":
                parameters.append(value)
            elif isinstance(value, torch.Tensor):
                holes[place] = _as_is
                parameters.append((*self._source(value), value.dtype))
            elif isinstance(value, launch.DESCRIPTORS):
                if facts and not self.dry:
                    parameters += self._descriptor(value, next(descriptors, None))
                else:
                    holes[place] = _descriptor_like(value)
                    parameters.append((*self._source(value.base), value.base.dtype))
            else:
                parameters.append(_bits(types[place], value))
        extents = tuple((extent.size.index, extent.block) if isinstance(extent, Blocks) else extent for extent in grid)
        if any(isinstance(extent, Symbol) for extent in extents):
            raise Unrecordable("a grid of a number that is not in blocks")
        if facts is None:
            template = [None if place in holes else value for place, value in enumerate(values)]

            @opaque
            def run(given: list[Any], size: tuple[int, ...]) -> None:
                filled = list(template)
                for (place, make), value in zip(holes.items(), given, strict=True):
                    filled[place] = make(value)
                host(filled, size)

            self._plan.steps.append(LaunchStep([parameters[place] for place in holes], extents, owner=run))
            return
        if facts.profiled:
            raise Unrecordable("its kernel is instrumented by a profiler")
        scratch: Parameter = 0
        if facts.scratch:
            if extents != grid:
                raise Unrecordable("a grid that data decides, of a kernel that wants scratch memory")
            scratch = self._scratch(facts.scratch * facts.clusters * math.prod(grid))
        self._plan.steps.append(LaunchStep([*parameters, scratch, 0], extents, *facts.step, compiled))

    def _symbol(self, symbol: Symbol, kind: str) -> Parameter:
        """The parameter of a kernel that a number is which differs from call to call; `kind` is its Triton type."""
        floating = kind.startswith("fp") or (not kind and isinstance(symbol.value, float))
        if kind and kind not in ("fp64", "i64", "u64"):
            raise Unrecordable("a number of the call whose parameter is not declared as tl.float64 or tl.int64")
        if isinstance(symbol, Number):
            return "slot", self._slots.setdefault(self._slot(symbol, floating), len(self._slots))
        if floating:
            raise Unrecordable("a seed, an offset or a size whose parameter is not declared as tl.int64")
        if isinstance(symbol, Drawn):
            return "drawn", symbol.draw, symbol.which
        if isinstance(symbol, Size):
            return "size", symbol.index
        raise Unrecordable("a grid's extent that a kernel takes")

    @staticmethod
    def _slot(number: Number, floating: bool) -> tuple[int, int, bool, Limits | None]:
        return number.argument, number.item, floating, number.limits

    def _scratch(self, size: int) -> Parameter:
        """The global memory that a kernel wants besides its arguments, in bytes: a buffer of the plan's."""
        if self.dry:
            scratch = hollow((size,), (1,), torch.uint8, self._device())
        else:
            with _disable_current_modes():
                scratch = torch.empty(size, dtype=torch.uint8, device=self._device())
        self.allocated(scratch)
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

    def watch(self) -> Watch:
        """Return the mode in which this recorder sees what is called of ATen."""
        return Watch(self)

    def unrecordable(self, reason: str) -> None:
        """Note that no plan can repeat the call; the first reason is kept."""
        self.reason = self.reason or reason

    def _device(self) -> torch.device:
        for tensor in (*self._leaves, *(buffer.like for buffer in self._plan.buffers)):
            if tensor is not None and (device := tensor.device).type != "cpu":
                return device
        return torch.device("cpu")

    def _source(self, tensor: torch.Tensor) -> Source:
        known = self._sources.get(id(tensor))
        if known is not None:
            return known
        pointer, storage = tensor.data_ptr(), tensor.untyped_storage()._cdata
        for i, buffer in enumerate(self._plan.buffers):
            if buffer.like.untyped_storage()._cdata == storage:
                return True, i, pointer and pointer - buffer.like.data_ptr()
        starts, owners = self._arguments_memory
        if pointer and pointer in starts:
            return False, starts[pointer], 0
        # Of several arguments with one storage it is not known whose view this is.
        if len(owners.get(storage, ())) != 1:
            raise Unrecordable("a pointer of unknown origin")
        (index,) = owners[storage]
        leaf = self._leaves[index]
        assert leaf is not None
        # A view of no elements has no address.
        return False, index, pointer and pointer - leaf.data_ptr()

    @functools.cached_property
    def _arguments_memory(self) -> tuple[dict[int, int], dict[int, list[int]]]:
        """The first argument at each address, and the arguments of each storage."""
        starts: dict[int, int] = {}
        owners: dict[int, list[int]] = {}
        for i, leaf in enumerate(self._leaves):
            if leaf is not None and leaf.layout is torch.strided:
                starts.setdefault(leaf.data_ptr(), i)
                owners.setdefault(leaf.untyped_storage()._cdata, []).append(i)
        return starts, owners

    def _base(self, source: Source) -> torch.Tensor | None:
        return self._plan.buffers[source[1]].like if source[0] else self._leaves[source[1]]

    def _is_whole(self, source: Source, result: torch.Tensor) -> bool:
        base = self._base(source)
        if base is result or not source[0] or base is None or source[2]:
            return base is result
        return base.dtype is result.dtype and base.shape == result.shape and base.stride() == result.stride()

    def _view(self, tensor: torch.Tensor) -> View:
        source = self._source(tensor)
        if source[0] and self._plan.buffers[source[1]].sizes is not None:
            raise Unrecordable("a view of a tensor whose sizes data decides")
        if call_has_lazy_bits(tensor):
            raise Unrecordable("a tensor that is conjugated or negated when it is read")
        return View(source, tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def plan(self, results: Sequence[Any]) -> Plan | None:
        """The plan of a call that returned `results`, or None, with `reason` set, where there can be none."""
        if self.reason:
            return None
        try:
            self._plan.results = [self._returned(result) for result in results]
        except Unrecordable as error:
            self.reason = str(error)
            return None
        for number in self._limited:
            # A launch that takes it has a slot with its limits, as whatever it takes it.
            if not {self._slot(number, floating) for floating in (False, True)} & self._slots.keys():
                self._slots[self._slot(number, isinstance(number.value, float))] = len(self._slots)
        self._plan.slots = list(self._slots)
        self._plan.device = self._device()
        return self._plan

    def _returned(self, result: Any) -> Returned:
        if result is None:
            return None
        if isinstance(result, (list, tuple)):
            return "list", [self._returned(item) for item in result]
        if isinstance(result, Size):
            return "size", result.index
        if isinstance(result, Symbol):
            raise Unrecordable("a number of the call that is returned")
        if not isinstance(result, torch.Tensor):
            return "value", result
        if id(result) in self._held:
            number = self._held[id(result)]
            return "drawn", number.draw, number.which
        if id(result) in self._shortened:
            source, sizes = self._shortened[id(result)]
            return source, (sizes, result.stride(), result.dtype)
        source = self._source(result)
        if self._is_whole(source, result):
            return source, None
        view = self._view(result)
        return source, (view.sizes, view.strides, view.dtype)


def call_has_lazy_bits(tensor: torch.Tensor) -> bool:
    """Whether a tensor is conjugated or negated when it is read."""
    return tensor.is_conj() or tensor.is_neg()


def _extents(sizes: Sequence[Any]) -> tuple[Any, ...]:
    return tuple([(size.index,) if isinstance(size, Size) else size for size in sizes])


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


def record(
    run: Callable[[], Sequence[Any]],
    leaves: Sequence[torch.Tensor | None],
    arguments: dict[int, tuple[int, int]] | None = None,
    watch: bool = True,
    dry: bool = False,
) -> tuple[Sequence[Any], Recorder]:
    """What a call of a host function returns, and the recorder that was told of it.

    `watch` unless the function is an engine's, which tells of its allocations itself and calls nothing else.
    """
    recorder = Recorder(leaves, arguments, dry)
    outer = contract.swap_recorder(recorder)
    try:
        if watch or dry:
            recorder.watching = True
            with Watch(recorder):
                results = run()
        else:
            results = run()
    finally:
        contract.swap_recorder(outer)
    return results, recorder


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
