"""Sorting, selection and unique values: of long rows, and by digits counted in shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tritonite import dtypes, registry
from tritonite.engine.sorting import dense, digit_search, select
from tritonite.testing.compile_cases.cases import (
    ASSEMBLY_KERNELS,
    LARGE,
    Case,
    compile_cases,
    large_inputs,
    launches,
    shared_memory_cases,
)

ASSEMBLY_KERNELS.update(
    kernel.jit
    for kernel in (dense._set_bits, dense._look_up, dense._write_set, digit_search._count_digit, select._select_held)
)


@compile_cases("sorted")
def long_rows(full: bool) -> Iterator[Case]:
    """Rows that several programs sort or select from, and the longest that one program sorts by itself."""
    met: set[Any] = set()
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8)[: None if full else 1]:
        long, short = torch.ones(3, 9000, dtype=dtype), torch.ones(3, 2048, dtype=dtype)
        calls: list[tuple[str, tuple[Any, ...]]] = [
            ("sort", (long,)),
            ("sort", (long.t(), 0, True)),
            ("sort", (short,)),
            *[("topk", (row, k)) for row in (short, long) for k in (1, 50, 900)],
            ("topk", (torch.ones(3, 4096, dtype=dtype), 2048)),
            ("topk", (torch.ones(1, 200000, dtype=dtype), 2048)),
            ("topk", (long, 2100, -1, False)),
            ("kthvalue", (short, 7)),
            ("median.dim", (torch.ones(3, 4096, dtype=dtype), 1)),
            ("kthvalue", (long, 7)),
            ("nanmedian.dim", (long, 1)),
            ("mode", (long,)),
            ("isin.Tensor_Tensor", (long, long)),
            ("_unique2", (long, True, True, True)),
        ]
        for name, arguments in calls:
            for specialization in launches(registry.overloads()[name], arguments):
                # AMD's programs do not wait for each other.
                chosen = ("sm_90", "sm_80", "sm_100")[: 3 if full else 1 if specialization.kernel in met else 2]
                met.add(specialization.kernel)
                yield Case(f"{name} {dtype} of long rows", specialization, chosen)


@compile_cases("shared")
def digits_in_shared_memory(full: bool) -> Iterator[Case]:
    """Selection and unique values of many elements."""
    for dtype, x in large_inputs(full):
        calls: list[tuple[str, tuple[Any, ...]]] = [("median", (x,)), *[("topk", (x, k)) for k in (2048, 5000)]]
        if dtype in dtypes.FULL_FLOATS:
            integers = torch.empty(LARGE, dtype=torch.int32)
            wanted = ((False, False), (True, False), (True, True))
            calls += [("_unique2", (integers, True, *flags)) for flags in wanted]
        else:
            calls += [("_unique2", (x, True, True)), ("_unique2", (x, True, True, True))]
        yield from shared_memory_cases(dtype, calls, full)
