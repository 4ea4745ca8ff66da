"""Binary search in boundaries that a program copies to shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tritonite.engine.searching import search
from tritonite.testing.compile_cases.cases import (
    ASSEMBLY_KERNELS,
    Case,
    compile_cases,
    large_inputs,
    shared_memory_cases,
)

ASSEMBLY_KERNELS.add(search._search_from_shared.jit)


@compile_cases("shared")
def searches(full: bool) -> Iterator[Case]:
    """Searches of many values in few and in many boundaries."""
    for dtype, x in large_inputs(full):
        calls: list[tuple[str, tuple[Any, ...]]] = [
            *[("searchsorted.Tensor", (x[:bounds], x)) for bounds in (1, 2**20)],
            ("searchsorted.Tensor", (x[:100], x.view(2, -1).t(), False, True)),
        ]
        yield from shared_memory_cases(dtype, calls, full)
