"""Assertions, which samples in the interpreter leave to the host."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tritonite.engine.assertion import assert_nonzero
from tritonite.testing.compile_cases.cases import TARGETS, Case, compile_cases, launches


@compile_cases("assertion")
def assertions(full: bool) -> Iterator[Case]:
    """Assertions about floats and bools."""
    for dtype in (torch.float32, torch.bool, torch.int64, torch.bfloat16)[: None if full else 2]:
        for specialization in launches(assert_nonzero, (torch.empty((), dtype=dtype), "an element is 0")):
            yield Case(f"assertion {dtype}", specialization, tuple(TARGETS) if full else ("sm_90", "gfx942"))
