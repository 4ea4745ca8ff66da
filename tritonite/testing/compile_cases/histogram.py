"""Histograms whose bins a program counts in shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tritonite import dtypes
from tritonite.engine import histogram
from tritonite.testing.compile_cases.cases import (
    ASSEMBLY_KERNELS,
    LARGE,
    Case,
    compile_cases,
    large_inputs,
    shared_memory_cases,
)

ASSEMBLY_KERNELS.add(histogram._count.jit)


@compile_cases("shared")
def histograms(full: bool) -> Iterator[Case]:
    """Counts of few and of many elements, and sums of weights."""
    for dtype, x in large_inputs(full):
        calls: list[tuple[str, tuple[Any, ...]]] = []
        if dtype in dtypes.FULL_FLOATS:
            calls += [("histc", (x[:1000], 100)), ("histc", (x, 100, 0, 1))]
            calls += [("bincount", (torch.empty(LARGE, dtype=torch.int64), x))]
        elif not dtype.is_floating_point:
            calls += [("bincount", (x,))]
        yield from shared_memory_cases(dtype, calls, full)
