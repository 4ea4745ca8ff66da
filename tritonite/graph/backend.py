"""The backend "tritonite" of torch.compile: AOTAutograd's graphs, forward and backward, as compiled graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd

from tritonite.errors import InvalidOptions, did_you_mean
from tritonite.graph.compiled import DEFAULT_SHAPES, CompiledGraph
from tritonite.graph.partition import partition
from tritonite.graph.passes import run_passes
from tritonite.install.override import Names, select


@dataclass(frozen=True)
class Options:
    """The options of `torch.compile(..., backend="tritonite", options={...})`.

    Args:
        include, exclude: operators that run as Triton kernels, as `enable()` takes them. Default: all verified ones.
        fuse: whether passes replace parts of the graph by fused operators. Results then differ within the resolution of
            the dtype from those of the separate operators.
        cudagraphs: whether each shape is captured as a CUDA graph; on by default in the mode "reduce-overhead".
        shapes: the largest number of plans that a graph keeps.
    """

    include: Names = None
    exclude: Names = None
    fuse: bool = True
    cudagraphs: bool = False
    shapes: int = DEFAULT_SHAPES


_NAMES = tuple(Options.__dataclass_fields__)
_MODES = {None: False, "default": False, "reduce-overhead": True}


def options_of(mode: str | None, options: dict[str, Any] | None) -> Options:
    """Return the options of a call of torch.compile. Raises InvalidOptions for an unknown mode or option."""
    if mode not in _MODES:
        known = ", ".join(repr(each) for each in _MODES if each)
        raise InvalidOptions(reason=f"mode {mode!r} is not one of {known}")
    for name in options or {}:
        if name not in _NAMES:
            hint = did_you_mean(name, _NAMES)
            raise InvalidOptions(reason=f"there is no option {name!r}{hint}; there are {', '.join(_NAMES)}")
    return Options(**{"cudagraphs": _MODES[mode], **(options or {})})


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
