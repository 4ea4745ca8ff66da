"""The recording of a graph for one shape: runs its calls once, and joins their plans to a plan of the graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from tritonite.errors import Decline, Unsupported
from tritonite.graph.interpret import arguments, started
from tritonite.graph.lowered import Call, FusedCalls, Lowered, Value, filled
from tritonite.graph.memory import with_arena
from tritonite.graph.operators import Served, is_view
from tritonite.graph.plan import CallStep, ClearStep, DrawStep, GraphBuffer, GraphPlan, HoldStep, Note
from tritonite.install import direct
from tritonite.install.python import recordable
from tritonite.registry.schema import in_schema_order
from tritonite.runtime import stats
from tritonite.runtime.nested import retyped
from tritonite.runtime.plan import CopyStep, LaunchStep, Parameter, Plan, ReadStep, Source, View, ZeroStep
from tritonite.runtime.recorder import call_has_lazy_bits, record

_TYPES = (torch.Tensor, torch.nn.Parameter)


class Unplannable(Exception):
    """Raised for something in a graph that no plan can describe; the message is the reason."""


class _Rejected(Exception):
    """Raised for a call whose plan cannot be part of a graph's; the message is the reason."""


def record_graph(lowered: Lowered, inputs: list[Any], device: torch.device) -> tuple[list[Any], GraphPlan | str]:
    """Run a graph. Returns (outputs, its plan or the reason why there is none). Takes the inputs out of the list."""
    recorder = GraphRecorder(lowered, device)
    values = started(lowered, inputs)
    recorder.begin(values)
    outputs = recorder.run(lowered, values)
    return outputs, recorder.finish(outputs)


class GraphRecorder:
    """A note of the steps of a graph's calls.

    `origins` has the place in memory of each value that is a tensor, a tuple of places for a tuple of tensors, and None
    for a value without memory. `reason` is why there is no plan, or "".
    """

    def __init__(self, lowered: Lowered, device: torch.device) -> None:
        self.origins: list[Any] = [None] * lowered.values
        self.reason = ""
        self._lowered = lowered
        # Buffer 0 is the arena.
        self._plan = GraphPlan(device, buffers=[GraphBuffer((0,), (1,), torch.uint8, device)])
        self._inputs: list[Any] = []
        # The layout of each input and of each result of a step, by (whether it is a buffer, number).
        self._whole: dict[tuple[bool, int], Any] = {}
        self._written: set[int] = set()
        # Buffers of numbers and tensors that depend on data.
        self._data_dependent: set[int] = set()
        self._draws = 0

    def begin(self, values: list[Any]) -> None:
        """Note the inputs and the constants, which are further inputs of the plan."""
        known = [*range(self._lowered.inputs), *self._lowered.constants]
        for number, index in enumerate(known):
            value = values[index]
            if isinstance(value, torch.Tensor):
                if not _is_plain(value):
                    self.reason = self.reason or "a tensor that is not an ordinary strided one"
                    return
                self.origins[index] = self._base(False, number, value)

    def run(self, lowered: Lowered, values: list[Any]) -> list[Any]:
        """Run calls and note their steps. Returns the outputs."""
        for call in lowered.calls:
            args, kwargs = arguments(call, values)
            values[call.result] = self.call(call, args, kwargs)
            del args, kwargs
            for index in call.last:
                values[index] = None
                self.origins[index] = None
        return [filled(output, values) for output in lowered.outputs]

    def call(self, call: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a call and note its steps."""
        if self.reason:
            return call.function(*args, **kwargs)
        origins = [filled(item, self.origins) for item in call.args]
        named = {name: filled(item, self.origins) for name, item in call.kwargs.items()}
        if call.data_dependent or self._depends_on_data([origins, named]):
            result = call.function(*args, **kwargs)
            self._called(call, call.function, result, (args, kwargs), (origins, named), "sizes depend on data")
            return result
        if isinstance(call.function, FusedCalls):
            return self._fused(call, call.function, args, origins)
        if isinstance(call.function, Served):
            return self._served(call, call.function, (args, kwargs), (origins, named))
        if not isinstance(call.target, OpOverload):
            result = call.function(*args, **kwargs)
            self._python(call, result, (args, kwargs), (origins, named))
            return result
        result = call.function(*args, **kwargs)
        self._called(call, call.function, result, (args, kwargs), (origins, named), "no kernel")
        return result

    def finish(self, outputs: Sequence[Any]) -> GraphPlan | str:
        """Return the plan of a graph that returned `outputs`, or the reason why there is none."""
        if self.reason:
            return self.reason
        for output, value in zip(self._lowered.outputs, outputs, strict=True):
            origin = filled(output, self.origins) if isinstance(output, Value) else None
            if not isinstance(value, torch.Tensor) and origin is None:
                self._plan.results.append(("value", value))
                continue
            if origin is None:
                return "an output without memory of its own"
            dynamic = self._depends_on_data(origin)
            self._plan.results.append(origin if dynamic else self._described(value, origin))
        self._plan.written = tuple(sorted(self._written))
        return with_arena(self._plan)

    def _python(self, call: Call, result: Any, given: Any, origins: Any) -> None:
        """Note a call of a Python function: an item of a tuple, a computation with sizes, a higher-order operator."""
        if call.target is operator.getitem and not isinstance(given[0][0], torch.Tensor):
            self.origins[call.result] = origins[0][0] and origins[0][0][given[0][1]]
            return
        if not any(True for _ in _tensors([result, given])):
            return
        self._called(call, call.function, result, given, origins, "a higher-order operator")

    def _fused(self, call: Call, function: FusedCalls, args: Sequence[Any], origins: Sequence[Any]) -> list[Any]:
        """Run a fused part, or the separate operators if the fused ones decline, and note the steps."""
        noted = len(self._plan.notes)
        try:
            return self._part(call, function.fused, args, origins)
        except Unsupported as unsupported:
            # Steps of the fused part before the operator that declined have written fresh memory only.
            reason = str(unsupported.fields["reason"])
            self._plan.notes[noted:] = [Note(call.name, function.name, 0, reason, False, separate=True)]
        return self._part(call, function.separate, args, origins)

    def _part(self, call: Call, part: Lowered, args: Sequence[Any], origins: Sequence[Any]) -> list[Any]:
        """Run a part of the graph whose inputs are `args`."""
        outer, self.origins = self.origins, [*origins, *[None] * (part.values - part.inputs)]
        try:
            outputs = self.run(part, started(part, list(args)))
            found = [filled(output, self.origins) for output in part.outputs]
        finally:
            self.origins = outer
        self.origins[call.result] = found
        return outputs

    def _served(self, call: Call, function: Served, given: Any, origins: Any) -> Any:
        """Run a call of an operator with a kernel, and note its plan or the call itself."""
        op = function.op
        values = in_schema_order(op.schema, *given)
        if any(isinstance(value, torch.Generator) for value in values):
            result = function(*given[0], **given[1])
            self._called(call, function, result, given, origins, "a generator of the caller's")
            return result
        places = _leaf_origins(op.takes_tensors, values, in_schema_order(op.schema, *origins))
        try:
            results, recorder = record(*recordable(op, values), watch=op.declaration.watched)
        except Decline as decline:
            result = function.declined(decline, *given)
            self._called(call, function.target, result, given, origins, decline.reason)
            return result
        stats.counts_of(op.overload).count_launch()
        if op.written:
            direct.increment_versions(op, *given)
        plain = op.plain(results)
        result = plain[0] if len(plain) == 1 else plain or None
        plan = recorder.plan(results)
        try:
            if plan is None:
                raise _Rejected(recorder.reason)
            found = self._join(plan, places, values)
        except _Rejected as rejected:
            self._called(call, function, result, given, origins, str(rejected))
            return result
        for i in op.written:
            self._writes(in_schema_order(op.schema, *origins)[i])
        self.origins[call.result] = found[0] if len(plain) == 1 else tuple(found)
        self._plan.notes.append(Note(call.name, op.overload, len(plan.launches), "", False))
        return result

    def _join(self, plan: Plan, places: list[Source | None], values: list[Any]) -> list[Any]:
        """Append a call's plan to the graph's. Returns the origins of the results."""
        graph = self._plan
        numbers = []
        for slot in plan.slots:
            number = values[slot.argument] if slot.item < 0 else values[slot.argument][slot.item]
            if isinstance(number, torch.Tensor):
                raise _Rejected("a number in a tensor")
            numbers.append(float(number) if slot.floating else int(number))
        if any(isinstance(step, ReadStep) for step in plan.steps):
            raise _Rejected("it reads numbers from the device")
        if plan.device != graph.device and plan.launches:
            raise _Rejected(f"it runs on {plan.device}")
        first_buffer, first_number, first_draw = len(graph.buffers), len(graph.numbers), self._draws

        def source(is_buffer: bool, number: int, offset: int) -> Source:
            if is_buffer:
                return Source(True, first_buffer + number, offset)
            origin = places[number]
            if origin is None:
                raise _Rejected("a tensor without memory")
            return origin._replace(offset=origin.offset + offset)

        def parameter(given: Any) -> Parameter:
            if isinstance(given, int):
                return given
            if given[0] == "slot":
                return "slot", first_number + given[1]
            if given[0] == "drawn":
                return "drawn", first_draw + given[1], given[2]
            return (*source(*given[:3]), given[3])

        def view(given: View) -> View:
            return given._replace(source=source(*given.source))

        def returned(given: Any) -> Any:
            if given is None or given[0] == "value":
                return None
            if given[0] == "list":
                return [returned(item) for item in given[1]]
            if given[0] == "drawn":
                graph.buffers.append(None)
                steps.append(HoldStep(len(graph.buffers) - 1, first_draw + given[1], given[2]))
                self._whole[True, len(graph.buffers) - 1] = ((), (), torch.int64)
                return Source(True, len(graph.buffers) - 1, 0)
            return source(*given[0])

        steps: list[Any] = [DrawStep(advance) for advance in plan.draws]
        sizes = [buffer.like.untyped_storage().nbytes() for buffer in plan.buffers]
        for step in plan.steps:
            if isinstance(step, LaunchStep):
                steps.append(step._replace(parameters=[parameter(each) for each in step.parameters], fills=-1))
            elif isinstance(step, ZeroStep):
                steps.append(ClearStep(Source(True, first_buffer + step.buffer, 0), sizes[step.buffer]))
            elif isinstance(step, CopyStep):
                steps.append(CopyStep(view(step.destination), view(step.source)))
        for buffer in plan.buffers:
            like = buffer.like
            graph.buffers.append(GraphBuffer(tuple(like.shape), like.stride(), like.dtype, like.device))
        found = [returned(result) for result in plan.results]
        self._draws += len(plan.draws)
        graph.numbers += numbers
        graph.steps += steps
        return found

    def _called(
        self, call: Call, function: Callable[..., Any], result: Any, given: Any, origins: Any, reason: str
    ) -> None:
        """Note a call that a plan makes as it is, or a view."""
        view = is_view(call.target)
        owners: dict[int, tuple[torch.Tensor, Source]] = {}
        try:
            args = [self._argument(item, place, owners) for item, place in zip(given[0], origins[0], strict=True)]
            kwargs = {name: self._argument(item, origins[1][name], owners) for name, item in given[1].items()}
            results: list[tuple[tuple[int, ...], int]] = []
            found = self._found(result, owners, results, (), call.data_dependent)
        except Unplannable as unplannable:
            self.reason = f"{call.name}: {unplannable}"
            return
        name = call.target.name().removeprefix("aten::") if isinstance(call.target, OpOverload) else str(call.target)
        self.origins[call.result] = found
        if view and not results:
            self._plan.notes.append(Note(call.name, name, 0, "", True))
            return
        for place in _mutated(call.target, origins):
            self._writes(place)
        values, places = [*given[0], *given[1].values()], [*origins[0], *origins[1].values()]
        numbers = call.data_dependent or self._numbers_depend(values, places)
        self._plan.steps.append(CallStep(function, tuple(args), kwargs, tuple(results), numbers))
        self._plan.notes.append(Note(call.name, name, 0, reason, False, not isinstance(function, Served)))

    def _argument(self, value: Any, origin: Any, owners: dict[int, tuple[torch.Tensor, Source]]) -> Any:
        """Return an argument of a `CallStep`, and note its tensors in `owners` by their storage."""
        if isinstance(origin, Source) and self._depends_on_data(origin):
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                owners.setdefault(value.untyped_storage()._cdata, (value, origin))
            return origin
        if isinstance(value, torch.Tensor):
            if origin is None:
                raise Unplannable("a tensor without memory")
            owners.setdefault(value.untyped_storage()._cdata, (value, origin))
            return self._described(value, origin)
        if isinstance(value, (list, tuple)) and origin is not None:
            items = [self._argument(item, place, owners) for item, place in zip(value, origin, strict=True)]
            return retyped(value, items) if isinstance(value, tuple) else items
        if isinstance(value, slice) and self._depends_on_data(origin):
            raise Unplannable("a slice by a number that depends on data")
        if isinstance(value, dict) and (self._depends_on_data(origin) or any(True for _ in _tensors(value))):
            raise Unplannable("tensors in a dict")
        return value

    def _found(
        self, result: Any, owners: dict[int, Any], results: list[Any], path: tuple[int, ...], data_dependent: bool
    ) -> Any:
        """Return the origin of a call's result. A fresh tensor becomes a buffer, added to `results`.

        So does every number or tensor that depends on data. The memory behind such a tensor is not shared.
        """
        if isinstance(result, (list, tuple)):
            items = enumerate(result)
            return tuple([self._found(item, owners, results, (*path, i), data_dependent) for i, item in items])
        is_tensor = isinstance(result, torch.Tensor)
        if not is_tensor and not data_dependent:
            return None
        if is_tensor and not _is_plain(result) and not data_dependent:
            raise Unplannable("a result that is not an ordinary strided tensor")
        owner = owners.get(result.untyped_storage()._cdata) if is_tensor and result.layout is torch.strided else None
        if owner is not None:
            tensor, origin = owner
            if not data_dependent and not self._depends_on_data(origin):
                return origin._replace(offset=origin.offset + _start(result) - _start(tensor))
            if origin.is_buffer:
                self._plan.unshared.add(origin.number)
            data_dependent = True
        self._plan.buffers.append(None)
        number = len(self._plan.buffers) - 1
        results.append((path, number))
        if data_dependent:
            self._data_dependent.add(number)
            return Source(True, number, 0)
        origin = self._base(True, number, result)
        owners[result.untyped_storage()._cdata] = result, origin
        return origin

    def _depends_on_data(self, origins: Any) -> bool:
        """Return whether one of the origins is a number or a tensor that depends on data."""
        if isinstance(origins, Source):
            return origins.is_buffer and origins.number in self._data_dependent
        if isinstance(origins, slice):
            return self._depends_on_data((origins.start, origins.stop, origins.step))
        if isinstance(origins, dict):
            return self._depends_on_data(list(origins.values()))
        return isinstance(origins, (list, tuple)) and any(map(self._depends_on_data, origins))

    def _numbers_depend(self, value: Any, origin: Any) -> bool:
        """Return whether a number among some arguments depends on data."""
        if isinstance(value, (list, tuple)) and isinstance(origin, (list, tuple)) and not isinstance(origin, Source):
            return any(map(self._numbers_depend, value, origin))
        return not isinstance(value, torch.Tensor) and self._depends_on_data(origin)

    def _base(self, is_buffer: bool, number: int, tensor: torch.Tensor) -> Source:
        self._whole[is_buffer, number] = (tuple(tensor.shape), tensor.stride(), tensor.dtype)
        return Source(is_buffer, number, 0)

    def _described(self, tensor: torch.Tensor, origin: Source) -> Source | View:
        """Return a `Source` for a whole input or result of a call, or a `View`."""
        layout = (tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if not origin.offset and self._whole.get((origin.is_buffer, origin.number)) == layout:
            return origin
        return View(origin, *layout)

    def _writes(self, origin: Any) -> None:
        """Note that a call writes into an input."""
        for place in origin if isinstance(origin, (list, tuple)) and not isinstance(origin, Source) else [origin]:
            if isinstance(place, Source) and not place.is_buffer:
                self._written.add(place.number)


def _mutated(target: Any, origins: Any) -> Iterator[Any]:
    """Yield the origin of each argument that an operator writes."""
    if isinstance(target, OpOverload):
        for i, argument in enumerate(target._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield origins[0][i] if i < len(origins[0]) else origins[1].get(argument.name)


def _leaf_origins(takes: Sequence[bool], values: Sequence[Any], origins: Sequence[Any]) -> list[Source | None]:
    """Return the origin of each leaf of a call, in the order of `install.python.recordable`."""
    found: list[Source | None] = []
    for given, value, origin in zip(takes, values, origins, strict=True):
        if given:
            listed = isinstance(value, (list, tuple))
            pairs = zip(value, origin, strict=True) if listed else [(value, origin)]
            found += [place if isinstance(item, torch.Tensor) else None for item, place in pairs]
    return found


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether sizes, strides and an offset describe a tensor."""
    return type(tensor) in _TYPES and tensor.layout is torch.strided and not call_has_lazy_bits(tensor)


def _start(tensor: torch.Tensor) -> int:
    """Return the first element's offset in the storage, in bytes."""
    return tensor.storage_offset() * tensor.element_size()
