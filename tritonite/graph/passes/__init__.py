"""The passes over a graph of ATen's operators before it is lowered.

A pass is a function that takes a graph module and changes it in place. `EXACT` passes keep the bits of every result.
`FUSING` passes replace several operators by one that computes the same within the resolution of the dtype.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

Pass = Callable[[fx.GraphModule], None]

EXACT: list[Pass] = []
FUSING: list[Pass] = []


def run_passes(module: fx.GraphModule, fuse: bool) -> None:
    """Run all passes over a graph module, those of `FUSING` only with `fuse`."""
    for each in (*EXACT, *(FUSING if fuse else ())):
        each(module)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
