"""The backend "tritonite" of torch.compile: AOTAutograd's graphs, forward and backward, as compiled graphs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._dynamo.backends.common import aot_autograd

from tritonite import devices
from tritonite.graph.compiled import CompiledGraph
from tritonite.graph.options import options_of
from tritonite.graph.partition import partition
from tritonite.graph.passes import checks_kept, fuse_joint_graph, run_passes
from tritonite.graph.passes.updates import update_in_place
from tritonite.install.override import select


class Backend:
    """The backend of torch.compile."""

    compiler_name = "tritonite"

    def __init__(self) -> None:
        self._graphs: list[weakref.ref[CompiledGraph]] = []

    @property
    def graphs(self) -> list[CompiledGraph]:
        """The compiled graphs in use, in the order of their compilation."""
        return [graph for reference in self._graphs if (graph := reference()) is not None]

    def __call__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        mode: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Compile a graph of Dynamo's."""
        chosen = options_of(mode, options)
        selected = select(chosen.include, chosen.exclude)
        mine: list[CompiledGraph] = []
        captures = _captures(len(inputs)) if chosen.cudagraphs and devices.current.captures else None

        def compile_graph(kind: str) -> Callable[..., Any]:
            def run(graph: fx.GraphModule, examples: Sequence[Any]) -> Any:
                run_passes(graph, selected, chosen.fuse)
                update_in_place(graph)
                compiled = CompiledGraph(graph, selected, chosen.shapes, kind)
                mine.append(compiled)
                self._graphs = [*filter(lambda reference: reference() is not None, self._graphs), weakref.ref(compiled)]
                return compiled if captures is None else captures.captured(kind, compiled, graph, examples)

            return run

        def cut(joint: fx.GraphModule, inputs: Any, **more: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
            if chosen.fuse:
                fuse_joint_graph(joint, selected)
            return partition(joint, inputs, **more)

        with checks_kept():
            result = aot_autograd(
                fw_compiler=compile_graph("forward"),
                bw_compiler=compile_graph("backward"),
                inference_compiler=compile_graph("inference"),
                partition_fn=cut,
                decompositions={},
                keep_inference_input_mutations=True,
            )(module, inputs)
        # Dynamo wraps the innermost function again, with its attributes.
        getattr(result, "_torchdynamo_orig_callable", result).tritonite_graphs = mine
        return result

    def reset(self) -> None:
        """Forget all graphs, and what CUDA graph trees keep."""
        self._graphs = []
        if devices.current.captures:
            from torch._inductor.cudagraph_trees import reset_cudagraph_trees

            reset_cudagraph_trees()


def graphs_behind(function: Any) -> list[CompiledGraph]:
    """Return the graphs of a function that a backend has returned to Dynamo."""
    while function is not None:
        if (found := getattr(function, "tritonite_graphs", None)) is not None:
            return list(found)
        function = getattr(function, "_torchdynamo_orig_callable", None)
    return []


def _captures(dynamo_inputs: int) -> Any:
    from tritonite.graph.cudagraphs import Captures

    return Captures(dynamo_inputs)


backend = Backend()
