"""Operators outside ATen: norms after an addition, rotary embeddings, gated activations."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from tritonite import dtypes
from tritonite.engine.norm.ring import norm_backward_by_ring
from tritonite.install import library
from tritonite.runtime import contract
from tritonite.testing.compile_cases.cases import TARGETS, Case, compile_cases, launches, recorded_launches


@compile_cases("fused")
def fused_rows(full: bool) -> Iterator[Case]:
    """Fused operators on rows of several widths: many rows in a program, one, and less than one."""
    for dtype, width in itertools.product(
        (torch.float16, torch.bfloat16, torch.float32, torch.float64) if full else (torch.bfloat16,),
        (64, 1000, 4096, 14_336, 2**16),
    ):
        x, rows = torch.empty(4, width, dtype=dtype), torch.empty(4, dtype=dtypes.opmath(dtype))
        weight, half = x[0].clone(), x[:, : width // 2].contiguous()
        heads, pairs = x.view(4, -1, 8), rows.new_empty(4, 4)
        calls: list[tuple[str, tuple[Any, ...]]] = [
            ("layer_norm", (x, x, weight, weight, 1e-5)),
            ("layer_norm_backward", (x, x, x, rows, rows, weight, weight, True, True)),
            ("rms_norm", (x, x, weight, 1e-6)),
            ("rms_norm_backward", (x, None, x, rows, weight, True)),
            ("rotary_embedding", (heads, heads, pairs, pairs, False, False)),
            ("rotary_embedding_", (heads, None, pairs[:, :3], pairs[:, :3], True)),
            *((f"{name}_and_mul", (x, x)) for name in ("relu", "silu")),
            *((f"{name}_and_mul_backward", (half, x)) for name in ("relu", "silu")),
            *(("gelu_and_mul", (x, None, approximate)) for approximate in ("none", "tanh")),
            *(("gelu_and_mul_backward", (half, x, None, approximate)) for approximate in ("none", "tanh")),
        ]
        for name, arguments in calls:
            for specialization in launches(library.registered()[f"tritonite::{name}"], arguments):
                # Wide rows of 16-bit floats stay packed by inline PTX.
                names = [target for target in TARGETS if target.startswith("sm") or width < 2**13]
                yield Case(f"{name} {dtype} of {width}", specialization, tuple(names if full else names[1:2]))


@compile_cases("rings")
def rings(full: bool) -> Iterator[Case]:
    """Gradients of norms whose rows pass through a ring of buffers in shared memory."""
    for dtype, width in ((torch.float32, 14_336), (torch.float32, 12_012), (torch.bfloat16, 28_664)):
        x, rows = torch.empty(4, width, dtype=dtype), torch.empty(4)
        name: str = "rms_norm_backward"
        arguments: tuple[Any, ...] = (x, None, x, rows, x[0], True)
        if dtype is torch.float32:
            name, arguments = "layer_norm_backward", (x, x, x, rows, rows, x[0], x[0], True, True)
        # A device with few programs, so that four rows are enough for a ring.
        found = launches(library.registered()[f"tritonite::{name}"], arguments, programs=8)
        assert found[0].kernel is norm_backward_by_ring.jit
        targets = ("sm_80", "sm_90", "sm_100") if full else ("sm_90",)
        yield Case(f"{name} {dtype} of {width} by a ring", found[0], targets)


@compile_cases("in_order")
def invariant_norms(full: bool) -> Iterator[Case]:
    """RMS norm after an addition, forward and backward, in invariant mode."""
    x, rows = torch.empty(96, 5000, dtype=torch.bfloat16), torch.empty(96)
    weight = x[0].clone()
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("rms_norm", (x, x, weight, 1e-6)),
        ("rms_norm_backward", (x, None, x, rows, weight, True)),
    ]
    for name, arguments in calls:
        with recorded_launches() as found, contract.under(contract.settings_of(invariant=True)):
            library.registered()[f"tritonite::{name}"](*arguments)
        for specialization in found:
            yield Case(f"{name} in invariant mode", specialization, tuple(TARGETS) if full else ("sm_90",))
