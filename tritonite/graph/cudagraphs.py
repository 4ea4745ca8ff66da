"""Compiled graphs captured as CUDA graphs, by PyTorch's CUDA graph trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends import cudagraphs as own
from torch._inductor.utils import BoxedBool, count_tangents, num_fw_fixed_arguments

from tritonite.graph.compiled import CompiledGraph


class Captures:
    """The capture of a forward and a backward graph, as torch's backend "cudagraphs" does it.

    Each shape is captured once. Inputs with a fixed address, such as parameters, are read in place; others are copied.
    A graph that cannot be captured, such as one that changes its inputs, runs as it is, and so does its backward graph.
    """

    def __init__(self, dynamo_inputs: int) -> None:
        self._dynamo_inputs = dynamo_inputs
        self._captures = BoxedBool(True)
        self._device = 0

    def captured(self, kind: str, compiled: CompiledGraph, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Return a function that captures `compiled`, which runs `graph`, or `compiled` itself."""
        backward = kind == "backward"
        if backward and not self._captures:
            return compiled
        static = range(count_tangents(graph)) if backward else self._static(inputs)
        if skipped := own.check_for_skip(graph, len(static)):
            compiled.uncaptured = skipped
            if not backward:
                BoxedBool.disable(self._captures)
                return compiled
            return _as_backward(compiled, self._device)
        self._device = own.get_device_index(graph)
        options = {
            "device_index": self._device,
            "is_backward": backward,
            "is_inference": kind == "inference",
            "stack_traces": own.get_stack_traces(graph),
            "placeholders": own.get_placeholder_info(graph.graph),
            "mutated_input_idxs": own.find_input_mutations(graph.graph),
        }
        return _capturing(compiled, static, options)

    def _static(self, inputs: Sequence[Any]) -> Sequence[int]:
        """Return the indices of the inputs whose addresses do not change: parameters and buffers."""
        context = torch._guards.TracingContext.try_get()
        if context is not None and context.fw_metadata is not None:
            indices: Sequence[int] = context.fw_metadata.static_input_indices
            return indices
        return range(num_fw_fixed_arguments(self._dynamo_inputs, len(inputs)))


def _capturing(compiled: CompiledGraph, static: Sequence[int], options: dict[str, Any]) -> Callable[..., Any]:
    """Return a function that captures a graph at the first call of each tuple of sizes."""
    function = None

    def run(inputs: list[Any]) -> Any:
        nonlocal function
        if function is None:
            from torch._inductor.cudagraph_trees import cudagraphify_impl

            # Sizes are numbers in a call, by which captures are told apart; when a graph is compiled they are symbols.
            function = cudagraphify_impl(compiled, inputs, static, **options)
        return function(inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _as_backward(compiled: CompiledGraph, device: int) -> Callable[..., Any]:
    """Return a function that tells the tree that the backward pass runs, whose graph is not captured."""
    from torch._inductor.cudagraph_trees import get_manager

    manager = get_manager(device, create_if_none_exists=False)

    def run(inputs: list[Any]) -> list[Any]:
        if manager is not None:
            manager.set_to_running_backward()
        return compiled(inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
