"""The execution of a graph's plan in Python, as execution.h runs it in C++. Launches run in Triton's interpreter."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from tritonite.graph.plan import AllocateStep, CallStep, ClearStep, DrawStep, FreeStep, GraphPlan, HoldStep
from tritonite.runtime import contract
from tritonite.runtime.nested import retyped
from tritonite.runtime.plan import CopyStep, LaunchStep, Source, View


def execute(plan: GraphPlan, inputs: Sequence[Any]) -> list[Any]:
    """Run the steps of a plan, and return the graph's outputs. `inputs` are the graph's inputs and constants."""
    return _Execution(plan, inputs).run()


class _Execution:
    def __init__(self, plan: GraphPlan, inputs: Sequence[Any]) -> None:
        self._plan, self._inputs = plan, list(inputs)
        self._buffers: list[Any] = [None] * len(plan.buffers)
        self._allocate((0,))
        self._drawn: list[tuple[Any, Any]] = []

    def run(self) -> list[Any]:
        for step in self._plan.steps:
            if isinstance(step, LaunchStep):
                assert all(isinstance(extent, int) for extent in step.grid)
                step.owner([self._parameter(each) for each in step.parameters], step.grid)
            elif isinstance(step, CallStep):
                self._call(step)
            elif isinstance(step, CopyStep):
                self._view(step.destination).copy_(self._view(step.source))
            elif isinstance(step, ClearStep):
                ctypes.memset(self._view(View(step.source, (1,), (1,), torch.uint8)).data_ptr(), 0, step.bytes)
            elif isinstance(step, DrawStep):
                self._drawn.append(contract.random_state(self._plan.device, step.advance))
            elif isinstance(step, HoldStep):
                self._buffers[step.buffer] = contract.held(self._drawn[step.draw][step.which])
            elif isinstance(step, FreeStep):
                for number in step.buffers:
                    self._buffers[number] = None
                for number in step.inputs:
                    self._inputs[number] = None
            elif isinstance(step, AllocateStep):
                self._allocate(step.buffers)
        return [self._argument(result) if result[0] != "value" else result[1] for result in self._plan.results]

    def _allocate(self, buffers: Sequence[int]) -> None:
        for number in buffers:
            buffer = self._plan.buffers[number]
            assert buffer is not None
            self._buffers[number] = contract.empty_strided(*buffer)

    def _call(self, step: CallStep) -> None:
        args = [self._argument(item) for item in step.args]
        kwargs = {name: self._argument(item) for name, item in step.kwargs.items()}
        returned = step.function(*args, **kwargs)
        for path, number in step.results:
            tensor = returned
            for index in path:
                tensor = tensor[index]
            self._buffers[number] = tensor

    def _parameter(self, parameter: Any) -> Any:
        if parameter[0] == "slot":
            return self._plan.numbers[parameter[1]]
        if parameter[0] == "drawn":
            return self._drawn[parameter[1]][parameter[2]]
        source, dtype = Source(*parameter[:3]), parameter[3]
        size = int(self._base(source).untyped_storage().nbytes() != 0)
        return self._view(View(source, (size,), (1,), dtype))

    def _base(self, source: Source) -> torch.Tensor:
        base: torch.Tensor = self._buffers[source.number] if source.is_buffer else self._inputs[source.number]
        return base

    def _view(self, view: View) -> torch.Tensor:
        base = self._base(view.source)
        start = base.storage_offset() * base.element_size() + view.source.offset
        result = torch.empty(0, dtype=view.dtype, device=base.device)
        return result.set_(base.untyped_storage(), start // view.dtype.itemsize, view.sizes, view.strides)

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, Source):
            return self._base(argument)
        if isinstance(argument, View):
            return self._view(argument)
        if isinstance(argument, list):
            return [self._argument(item) for item in argument]
        if isinstance(argument, tuple):
            return retyped(argument, [self._argument(item) for item in argument])
        return argument
