"""The passes over a graph of ATen's operators before it is lowered.

A pass is a function that takes a graph module and changes it in place. `EXACT` passes keep the bits of every result.
`FUSING` passes replace several operators by one that computes the same within the resolution of the dtype.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import fx

Pass = Callable[[fx.GraphModule], None]

EXACT: list[Pass] = []
FUSING: list[Pass] = []


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


def run_passes(module: fx.GraphModule, fuse: bool) -> None:
    """Run all passes over a graph module, those of `FUSING` only with `fuse`."""
    for each in (*EXACT, *(FUSING if fuse else ())):
        each(module)
    with checks_kept():
        module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
