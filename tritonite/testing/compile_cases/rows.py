"""Reductions, softmax, norms and scans of rows that samples are too short for, and in invariant mode."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from tritonite import registry
from tritonite.runtime import contract
from tritonite.testing.compile_cases.cases import TARGETS, Case, compile_cases, launches, recorded_launches


@compile_cases("rows")
def long_rows(full: bool) -> Iterator[Case]:
    """Cooperative rows, unrolled loops, misaligned rows, and 16-bit columns that are loaded one by one."""
    x, weight = torch.empty(2, 2**17), torch.empty(2**17)
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("_softmax", (x, 1, False)),
        ("_log_softmax", (x, 1, False)),
        ("_softmax_backward_data", (x, x, 1, x.dtype)),
        ("_log_softmax_backward_data", (x, x, 1, x.dtype)),
        ("native_layer_norm", (x, weight.shape, weight, weight, 1e-5)),
    ]
    for dtype in (torch.float16, torch.bfloat16):
        x, weight = torch.empty(4, 2**16, dtype=dtype), torch.empty(2**16, dtype=dtype)
        calls.append(("native_layer_norm", (x, weight.shape, weight, weight, 1e-5)))
    for dtype, (rows, length) in itertools.product((torch.float32, torch.bfloat16), ((64, 20_003), (2, 2**17 + 1))):
        x = torch.empty(rows, length, dtype=dtype)
        calls += [("_log_softmax", (x, 1, False)), ("_softmax_backward_data", (x, x, 1, x.dtype))]
    for rows in (4096, 4097):
        x = torch.empty(rows, 129, dtype=torch.bfloat16)
        calls += [("sum.dim_IntList", (x, [0])), ("argmax", (x, 0)), ("count_nonzero.dim_IntList", (x, [0]))]
    for name, arguments in calls:
        for specialization in launches(registry.overloads()[name], arguments, programs=1):
            yield Case(f"{name} of long rows", specialization, ("sm_80", "sm_90", "sm_100") if full else ("sm_90",))


@compile_cases("in_order")
def invariant_rows(full: bool) -> Iterator[Case]:
    """Reductions and scans in invariant mode: rows and columns, of one block and of several."""
    x = torch.empty(96, 5000, dtype=torch.bfloat16)
    short, column, weight = x[:, :64].contiguous(), x.new_empty(5000, 96), x[0].clone()
    short_columns = x.new_empty(70, 3, dtype=torch.float16).t()
    calls: list[tuple[str, tuple[Any, ...]]] = []
    for each, dim in ((x, 1), (short, 1), (column, 0)):
        calls += [("sum.dim_IntList", (each, [dim])), ("_softmax", (each, dim, False)), ("cumsum", (each, dim))]
    calls += [("_softmax", (short_columns, 1, False)), ("logcumsumexp", (column, 0))]
    calls += [("max.dim", (x, 1)), ("logcumsumexp", (short, 1)), ("sum", (x.expand(40, -1, -1),))]
    calls += [("native_layer_norm", (short, [64], weight[:64], weight[:64], 1e-5))]
    for name, arguments in calls:
        with recorded_launches() as found, contract.under(contract.settings_of(invariant=True)):
            registry.overloads()[name](*arguments)
        for specialization in found:
            yield Case(f"{name} in invariant mode", specialization, tuple(TARGETS) if full else ("sm_90",))
