"""The backend "tritonite" of torch.compile: AOTAutograd's graphs, forward and backward, as compiled graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._dynamo.backends.common import aot_autograd

from tritonite.graph.compiled import CompiledGraph
from tritonite.graph.options import options_of
from tritonite.graph.partition import partition
from tritonite.graph.passes import run_passes
from tritonite.install.override import select


class Backend:
    """The backend of torch.compile. `graphs` has the compiled graphs since the last `torch._dynamo.reset()`."""

    compiler_name = "tritonite"

    def __init__(self) -> None:
        self.graphs: list[CompiledGraph] = []

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

        def compile_graph(kind: str) -> Callable[..., Any]:
            def run(graph: fx.GraphModule, examples: Sequence[Any]) -> Any:
                run_passes(graph, chosen.fuse)
                compiled = CompiledGraph(graph, selected, chosen.shapes)
                self.graphs.append(compiled)
                return compiled

            return run

        return aot_autograd(
            fw_compiler=compile_graph("forward"),
            bw_compiler=compile_graph("backward"),
            inference_compiler=compile_graph("inference"),
            partition_fn=partition,
            decompositions={},
            keep_inference_input_mutations=True,
        )(module, inputs)

    def reset(self) -> None:
        """Forget the compiled graphs."""
        self.graphs.clear()


backend = Backend()
