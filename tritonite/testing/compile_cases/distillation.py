"""Divergences of logits and of linear heads: rows that a program holds, and rows in blocks, of every kind."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from tritonite.dtypes import opmath
from tritonite.engine.divergence.meta import KINDS
from tritonite.install import library
from tritonite.testing.compile_cases.cases import TARGETS, Case, compile_cases, launches


@compile_cases("distillation")
def divergences(full: bool) -> Iterator[Case]:
    """Divergences of narrow and of wide rows, and their gradients."""
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64) if full else (torch.bfloat16,)
    for dtype, width, kind in itertools.product(dtypes, (70, 8192, 128_256), KINDS):
        x, rows = torch.empty(4, width, dtype=dtype), torch.empty(4, dtype=opmath(dtype))
        mask, statistics = torch.empty(4, dtype=torch.bool), rows.new_empty(4, 3)
        strided = torch.empty(width, 4, dtype=dtype).t()
        temperature = 1.0 if "target" in kind else 2.0
        calls: list[tuple[str, tuple[Any, ...]]] = [
            ("divergence", (x, x, mask, kind, 0.5, temperature)),
            ("divergence", (strided, x, None, kind, 0.5, temperature)),
            ("divergence_backward", (rows, x, x, statistics, kind, 0.5, temperature)),
        ]
        for name, arguments in calls[:: 1 if full else 2]:
            for specialization in launches(library.registered()[f"tritonite::{name}"], arguments):
                yield Case(f"{name} {kind} {dtype} of {width}", specialization, tuple(TARGETS) if full else ("sm_90",))


@compile_cases("distillation")
def linear_divergences(full: bool) -> Iterator[Case]:
    """Divergences of linear heads with a cross entropy, with and without a temperature."""
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64) if full else (torch.bfloat16,)
    for dtype, classes, temperature in itertools.product(dtypes, (1000, 32_000), (1.0, 2.0)):
        hidden, weight = torch.empty(64, 128, dtype=dtype), torch.empty(classes, 128, dtype=dtype)
        labels, scales = torch.empty(64, dtype=torch.int64), torch.empty(2, 64, dtype=opmath(dtype))
        bias = weight[:, 0].contiguous()
        heads = hidden, weight, bias, hidden, weight, bias
        arguments = (*heads, labels, scales, "jsd", 0.5, temperature, True, True, True)
        for specialization in launches(library.registered()["tritonite::linear_divergence"], arguments):
            label = f"linear_divergence {dtype} of {classes} at {temperature}"
            yield Case(label, specialization, tuple(TARGETS) if full else ("sm_90",))
