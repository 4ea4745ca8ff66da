"""Pooling with windows that samples do not reach: long loops, whole images, and dimensions beyond 32-bit products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tritonite import registry
from tritonite.testing.compile_cases.cases import TARGETS, Case, compile_cases, launches


def _calls(dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield calls by overload: forward and backward, row-major and channels-last."""
    image = torch.empty(2, 8, 56, 56, dtype=dtype)
    last = image.to(memory_format=torch.channels_last)
    strided = [7, 7], [1, 1], [3, 3]
    for x in (image, last):
        yield "avg_pool2d", (x, *strided, False, False, None)
        yield "avg_pool2d_backward", (x, x, *strided, False, False, None)
        yield "max_pool2d_with_indices", (x, *strided, [1, 1], False)
        indices = torch.empty_like(x, dtype=torch.int64)
        yield "max_pool2d_with_indices_backward", (x, x, *strided, [1, 1], False, indices)
        yield "_adaptive_avg_pool2d", (x, [1, 1])
        yield "adaptive_max_pool2d", (x, [1, 1])
    line = torch.empty(1, 1, 1, 50_000, dtype=dtype)
    yield "_adaptive_avg_pool2d", (line, [1, 49_999])
    yield "_adaptive_avg_pool2d_backward", (line, torch.empty(1, 1, 1, 49_999, dtype=dtype))


@compile_cases("windows")
def windows(full: bool) -> Iterator[Case]:
    """Averages and maxima in each dtype; without `full` in bfloat16 alone."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64) if full else (torch.bfloat16,):
        for name, arguments in _calls(dtype):
            for specialization in launches(registry.overloads()[name], arguments):
                yield Case(f"{name} {dtype}", specialization, tuple(TARGETS) if full else ("sm_90", "gfx942"))
