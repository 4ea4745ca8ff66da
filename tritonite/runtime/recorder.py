"""The recorder: notes what a call of a host function does, and makes a plan of the notes."""

from __future__ import annotations

import contextlib
import functools
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes
from triton.tools.tensor_descriptor import TensorDescriptor

from tritonite.devices import nvidia
from tritonite.runtime import compilation, contract, launch
from tritonite.runtime.hollow import DataUnknown, hollow, is_hollow
from tritonite.runtime.interpreted import InterpretedCall, InterpretedLaunch, Remade
from tritonite.runtime.plan import (
    Buffer,
    CopyStep,
    LaunchStep,
    Parameter,
    Plan,
    ReadStep,
    Returned,
    Slot,
    Source,
    View,
    ZeroStep,
)
from tritonite.runtime.symbols import Blocks, Drawn, Number, Size, Symbol
from tritonite.runtime.watch import Watch

# A data-dependent size in a dry recording that goes on: neither 1 nor a multiple of 16.
_ANY_SIZE = 67
_PACKED = {"fp32": "<f", "fp64": "<d"}


class Unrecordable(Exception):
    """Raised for something in a call that no plan can repeat; the message is the reason."""


class Recorder:
    """A note of what a host function allocates, launches, copies, reads and returns.

    Args:
        leaves: the call's tensor arguments in order, with lists flattened, and None for those not given.
        arguments: by the index of a leaf that is a number in a 0-d CPU tensor: (index in the schema, in a list or -1).
        dry: launch, write, allocate and draw nothing.
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
                self._sources.setdefault(id(leaf), Source(False, i, 0))
        self._slots: dict[Slot, int] = {}
        self._limited: list[Number] = []
        self._sizes = 0
        self._fills = -1
        self._shortened: dict[int, tuple[Source, tuple[Any, ...]]] = {}
        self._held: dict[int, Drawn] = {}

    def allocated(self, tensor: torch.Tensor, shape: Sequence[Any] = (), strides: Sequence[Any] = ()) -> None:
        """Note a fresh tensor. `shape` and `strides` are given if some of them are data-dependent."""
        index = len(self._plan.buffers)
        if any(isinstance(extent, Size) for extent in (*shape, *strides)):
            self._plan.buffers.append(Buffer(tensor, _extents(shape), _extents(strides)))
        else:
            self._plan.buffers.append(Buffer(tensor))
        self._sources[id(tensor)] = Source(True, index, 0)

    def zeroed(self, tensor: torch.Tensor) -> None:
        """Note that a fresh tensor is set to 0."""
        self._plan.steps.append(ZeroStep(self._sources[id(tensor)].number))

    def copied(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Note `destination.copy_(source)`."""
        try:
            self._plan.steps.append(CopyStep(self._view(destination), self._view(source)))
        except Unrecordable as error:
            self.unrecordable(str(error))

    @contextlib.contextmanager
    def filling(self, tensor: torch.Tensor) -> Iterator[None]:
        """Note that the launches within the with block alone write a fresh tensor, from the call's arguments."""
        number = self._sources[id(tensor)].number
        self._plan.buffers[number] = self._plan.buffers[number]._replace(kept=True)
        self._fills = number
        try:
            yield
        finally:
            self._fills = -1

    def refuses(self, reason: str) -> None:
        """Note that once a kernel refuses the data of a call, all later calls with its key go to ATen."""
        self._plan.lasting = reason

    def read(self, numbers: torch.Tensor) -> list[Size]:
        """Note that the host reads data-dependent sizes, and read them."""
        try:
            self._plan.steps.append(ReadStep(self._source(numbers), numbers.numel()))
        except Unrecordable as error:
            self.unrecordable(str(error))
        if not self.dry:
            with _disable_current_modes():
                values = numbers.flatten().tolist()
        elif compilation.collector() is None:
            raise DataUnknown
        else:
            # Kernels are not specialised for data-dependent sizes, so any size leads to those that the call needs.
            values = [_ANY_SIZE] * numbers.numel()
        first, self._sizes = self._sizes, self._sizes + len(values)
        return [Size(value, first + i) for i, value in enumerate(values)]

    def shortened(self, result: torch.Tensor, vector: torch.Tensor, count: Size) -> None:
        """Note that a result is the first `count` elements of a fresh vector."""
        self._shortened[id(result)] = self._sources[id(vector)], ((count.index,),)

    def held(self, result: torch.Tensor, number: Drawn) -> None:
        """Note that a result holds a seed or an offset."""
        self._held[id(result)] = number

    def limited(self, number: Number) -> None:
        """Note a number with limits, which replays check even if no kernel takes the number."""
        self._limited.append(number)

    def number(self, tensor: torch.Tensor) -> Number | int | float | bool:
        """Return the number in a 0-d CPU tensor among the arguments, as a symbol."""
        if is_hollow(tensor):
            raise DataUnknown
        with _disable_current_modes():
            value: int | float | bool = tensor.item()
        argument = next((found for i, found in self._arguments.items() if self._leaves[i] is tensor), None)
        if argument is None:
            self.unrecordable("a number in a tensor that is no argument of the call")
            return value
        return Number(value, *argument)

    @property
    def steps(self) -> list[LaunchStep | ZeroStep | CopyStep | ReadStep]:
        """The steps noted so far; allocations are not among them."""
        return self._plan.steps

    def described(self, description: launch.LaunchDescription) -> None:
        """Note the description of a launch, for `explain`."""
        self.descriptions.append(description)

    def add(
        self,
        types: Sequence[str],
        values: Sequence[Any],
        grid: tuple[Any, ...],
        compiled: Any,
        host: InterpretedCall,
    ) -> None:
        """Note a launch.

        Args:
            types: the Triton types of `values`.
            values: the arguments, flattened, without constexprs.
            grid: three extents: numbers or `Blocks`.
            compiled: the compiled kernel, or None in the interpreter and in a dry recording.
            host: the kernel and its constants, for the interpreter.
        """
        if any(type(extent) is int and extent == 0 for extent in grid):
            # Triton launches nothing, and the driver would refuse an empty grid.
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
        holes: dict[int, Remade | None] = {}
        parameters: list[Parameter] = []
        needs = None if compiled is None else _launch_needs(compiled)
        descriptors = iter(needs.descriptors if needs else ())
        for i, value in enumerate(values):
            if isinstance(value, Symbol):
                holes[i] = None
                # Without types, in the interpreter, "*" stands for any.
                parameters.append(self._symbol(value, types[i].strip("*")))
            elif type(value) is int and value >= 0 and types[i][0] == "i":
                parameters.append(value)
            elif isinstance(value, torch.Tensor):
                holes[i] = None
                parameters.append((*self._source(value), value.dtype))
            elif isinstance(value, launch.DESCRIPTORS):
                if needs and not self.dry:
                    parameters += self._descriptor(value, next(descriptors, None))
                else:
                    holes[i] = Remade.like(value)
                    parameters.append((*self._source(value.base), value.base.dtype))
            else:
                parameters.append(_bits(types[i], value))
        extents = tuple((extent.size.index, extent.block) if isinstance(extent, Blocks) else extent for extent in grid)
        if any(isinstance(extent, Symbol) for extent in extents):
            raise Unrecordable("a grid with a symbol that is not in blocks")
        if needs is None:
            template = [None if i in holes else value for i, value in enumerate(values)]
            run = InterpretedLaunch(template, holes, host)
            self._plan.steps.append(LaunchStep([parameters[i] for i in holes], extents, owner=run, fills=self._fills))
            return
        if needs.profiled:
            raise Unrecordable("a kernel that a profiler has instrumented")
        scratch: Parameter = 0
        if needs.scratch:
            if extents != grid:
                raise Unrecordable("a data-dependent grid for a kernel that needs scratch memory")
            scratch = self._scratch(needs.scratch * needs.clusters * math.prod(grid))
        self._plan.steps.append(LaunchStep([*parameters, scratch, 0], extents, *needs.step, compiled, self._fills))

    def _symbol(self, symbol: Symbol, kind: str) -> Parameter:
        """Return the launch parameter for a symbol; `kind` is the Triton type, or "" in the interpreter."""
        floating = kind.startswith("fp") or (not kind and isinstance(symbol.value, float))
        if kind and kind not in ("fp64", "i64", "u64"):
            raise Unrecordable(f"a number of the call for a parameter of type {kind}; declare tl.float64 or tl.int64")
        if isinstance(symbol, Number):
            return "slot", self._slots.setdefault(self._slot(symbol, floating), len(self._slots))
        if floating:
            raise Unrecordable(f"a seed, an offset or a size for a parameter of type {kind}; declare tl.int64")
        if isinstance(symbol, Drawn):
            return "drawn", symbol.draw, symbol.which
        if isinstance(symbol, Size):
            return "size", symbol.index
        raise Unrecordable("an extent of a grid as a kernel's argument")

    @staticmethod
    def _slot(number: Number, floating: bool) -> Slot:
        return Slot(number.argument, number.item, floating, number.limits)

    def _scratch(self, size: int) -> Parameter:
        """Return the parameter for a kernel's global scratch memory of `size` bytes, a buffer of the plan."""
        if self.dry:
            scratch = hollow((size,), (1,), torch.uint8, self._device())
        else:
            with _disable_current_modes():
                scratch = torch.empty(size, dtype=torch.uint8, device=self._device())
        self.allocated(scratch)
        return (*self._source(scratch), torch.uint8)

    def _descriptor(self, descriptor: TensorDescriptor, metadata: Any) -> Iterator[Parameter]:
        """Yield the kernel parameters for a tensor descriptor, as Triton passes them."""
        for part in nvidia.descriptor_parameters(descriptor, metadata):
            if isinstance(part, bytes):
                yield (*self._source(descriptor.base), part)
            elif isinstance(part, torch.Tensor):
                yield (*self._source(part), part.dtype)
            else:
                yield int(part) & (2**64 - 1)

    def draw(self, advance: int) -> int:
        """Note that the call's generator advances by `advance`. Returns the index of this draw."""
        self._plan.draws.append(advance)
        return len(self._plan.draws) - 1

    def watch(self) -> Watch:
        """Return the dispatch mode in which this recorder sees calls of ATen."""
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
                return Source(True, i, pointer and pointer - buffer.like.data_ptr())
        starts, owners = self._arguments_memory
        if pointer and pointer in starts:
            return Source(False, starts[pointer], 0)
        # If several arguments share the storage, the base of the view is unknown.
        if len(owners.get(storage, ())) != 1:
            raise Unrecordable("a pointer into memory that no argument or several arguments own")
        (index,) = owners[storage]
        leaf = self._leaves[index]
        assert leaf is not None
        # A view without elements has no address.
        return Source(False, index, pointer and pointer - leaf.data_ptr())

    @functools.cached_property
    def _arguments_memory(self) -> tuple[dict[int, int], dict[int, list[int]]]:
        """(index of the first tensor argument by address, indices of the tensor arguments by storage)."""
        starts: dict[int, int] = {}
        owners: dict[int, list[int]] = {}
        for i, leaf in enumerate(self._leaves):
            if leaf is not None and leaf.layout is torch.strided:
                starts.setdefault(leaf.data_ptr(), i)
                owners.setdefault(leaf.untyped_storage()._cdata, []).append(i)
        return starts, owners

    def _base(self, source: Source) -> torch.Tensor | None:
        return self._plan.buffers[source.number].like if source.is_buffer else self._leaves[source.number]

    def _is_whole(self, source: Source, result: torch.Tensor) -> bool:
        base = self._base(source)
        if base is result or not source.is_buffer or base is None or source.offset:
            return base is result
        return base.dtype is result.dtype and base.shape == result.shape and base.stride() == result.stride()

    def _view(self, tensor: torch.Tensor) -> View:
        source = self._source(tensor)
        if source.is_buffer and self._plan.buffers[source.number].sizes is not None:
            raise Unrecordable("a view of a tensor with data-dependent sizes")
        if call_has_lazy_bits(tensor):
            raise Unrecordable("a tensor with a lazy conjugation or negation")
        return View(source, tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def plan(self, results: Sequence[Any]) -> Plan | None:
        """Return the plan of a call that returned `results`. If no plan can repeat it, set `reason` and return None."""
        if self.reason:
            return None
        try:
            self._plan.results = [self._returned(result) for result in results]
        except Unrecordable as error:
            self.reason = str(error)
            return None
        for number in self._limited:
            # A launch that takes the number has made a slot with its limits, as an integer or a float.
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
            raise Unrecordable("a number of the call as a result")
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
    """Return whether a tensor has a lazy conjugation or negation."""
    return tensor.is_conj() or tensor.is_neg()


def _extents(sizes: Sequence[Any]) -> tuple[Any, ...]:
    return tuple([(size.index,) if isinstance(size, Size) else size for size in sizes])


class _LaunchNeeds(NamedTuple):
    """Requirements of a compiled kernel's launches.

    `step` has the fields of a LaunchStep from `function` to `programmatic`. `scratch` is in bytes a block.
    `descriptors` is Triton's metadata, one item for each tensor descriptor.
    """

    step: tuple[int, int, int, int, bool, bool]
    clusters: int
    scratch: int
    profiled: bool
    descriptors: tuple[Any, ...]


@functools.lru_cache(maxsize=8192)
def _launch_needs(compiled: Any) -> _LaunchNeeds:
    metadata = compiled.metadata
    clusters = getattr(metadata, "num_ctas", 1)
    cooperative, programmatic = (
        bool(getattr(metadata, name, False)) for name in ("launch_cooperative_grid", "launch_pdl")
    )
    threads = metadata.num_warps * metadata.target.warp_size
    return _LaunchNeeds(
        (compiled.function, threads, metadata.shared, clusters, cooperative, programmatic),
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
    """Run a host function under a recorder. Returns (results, recorder).

    `watch` has the recorder also see calls of torch, which a pointwise formula's host function never makes.
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


def _bits(kind: str, value: Any) -> int:
    """Return a constant's bits for a parameter of Triton type `kind`, in the low bytes of 64 bits."""
    if value is None or kind.startswith("*"):
        raise Unrecordable("a pointer that is not a tensor")
    if kind in _PACKED:
        return int.from_bytes(struct.pack(_PACKED[kind], value).ljust(8, b"\0"), "little")
    if kind[0] not in "iu":
        raise Unrecordable(f"a parameter of type {kind}")
    return int(value) & (2**64 - 1)
