"""Columns that are selected through rows in shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tritonite.testing.compile_cases.cases import Case, compile_cases, large_inputs, shared_memory_cases


@compile_cases("shared")
def selected_columns(full: bool) -> Iterator[Case]:
    """Columns of short rows, and of rows as long as fit."""
    for dtype, x in large_inputs(full):
        calls: list[tuple[str, tuple[Any, ...]]] = [
            ("index_select", (x.view(-1, 1024), 1, torch.zeros(1000, dtype=torch.int32))),
            ("index_select", (x.view(-1, 2**16 // x.itemsize), 1, torch.zeros(8000, dtype=torch.int64))),
        ]
        yield from shared_memory_cases(dtype, calls, full)
