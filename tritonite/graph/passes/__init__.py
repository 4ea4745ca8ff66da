"""The passes over a graph of ATen's operators before it is lowered.

A pass is a function that takes a graph module and the overloads that run as kernels, and changes the graph in place.
`EXACT` passes keep the bits of every result. `FUSING` passes replace several operators by one that computes the same
within the resolution of the dtype: patterns first, then programs within calls of other operators, then programs of the
pointwise operators that are left.

- pointwise.py, regions.py: pointwise operators to programs, and the regions that they consist of
- calls.py: pointwise operators before and after reductions, row operators and products
- constants.py: fake tensors for a graph's constants
- updates.py: updates in place, for graphs by AOTAutograd after all other passes
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import fx

from tritonite.graph.passes.constants import describe_constants

Pass = Callable[[fx.GraphModule, frozenset[str]], None]


def _patterns(module: fx.GraphModule, selected: frozenset[str]) -> None:
    from tritonite.graph.patterns import fuse_patterns

    fuse_patterns(module, selected)


def _calls(module: fx.GraphModule, selected: frozenset[str]) -> None:
    from tritonite.graph.passes.calls import fuse_calls

    fuse_calls(module, selected)


def _programs(module: fx.GraphModule, selected: frozenset[str]) -> None:
    from tritonite.graph.passes.pointwise import fuse_pointwise

    fuse_pointwise(module, selected)


EXACT: list[Pass] = []
FUSING: list[Pass] = [describe_constants, _patterns, _calls, _programs]


@contextlib.contextmanager
def checks_kept() -> Iterator[None]:
    """Keep calls that only raise errors in graphs that torch.fx cleans of dead code within the context.

    Before torch 2.13 it takes the check behind `torch.linalg` for dead code, because nothing uses a result of it.
    """
    check, kept = torch.ops.aten._linalg_check_errors.default, fx.node._side_effectful_functions
    if check in kept:
        yield
        return
    kept.add(check)
    try:
        yield
    finally:
        kept.discard(check)


def run_passes(module: fx.GraphModule, selected: frozenset[str], fuse: bool) -> None:
    """Run all passes over a graph module, those of `FUSING` only with `fuse`."""
    # A trace by make_fx has the results of operators that nothing reads.
    _remove_dead_code(module)
    for each in (*EXACT, *(FUSING if fuse else ())):
        each(module, selected)
    _remove_dead_code(module)
    module.graph.lint()
    module.recompile()


def fuse_joint_graph(module: fx.GraphModule, selected: frozenset[str]) -> None:
    """Replace norms together with their gradients in a joint graph, which AOTAutograd cuts into both passes later.

    A graph with checkpoints stays as it is, because each operator says whether the backward pass computes it again.
    """
    from tritonite.graph.patterns import JOINT_RULES, fuse_patterns

    if any("recompute" in node.meta for node in module.graph.nodes):
        return
    fuse_patterns(module, selected, JOINT_RULES)


def _remove_dead_code(module: fx.GraphModule) -> None:
    with checks_kept():
        module.graph.eliminate_dead_code()
