"""Gated delta rule, short convolution and gated RMS norm: every variant of their kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from tritonite import devices
from tritonite.engine.delta_rule import problem
from tritonite.fused import delta_rule
from tritonite.install import library
from tritonite.testing.compile_cases.cases import KINDS, Case, compile_cases, launches


@compile_cases("delta_rule")
def delta_rules(full: bool) -> Iterator[Case]:
    """Passes of small, usual and large heads, with and without states, with the blocks of both kinds of devices."""
    for dtype, (key_size, value_size), normalize in itertools.product(
        (torch.bfloat16, torch.float16, torch.float32) if full else (torch.bfloat16, torch.float32),
        ((128, 128), (20, 24), (256, 256)) if full else ((128, 128), (20, 24)),
        (False, True),
    ):
        query, value = torch.empty(2, 100, 2, key_size, dtype=dtype), torch.empty(2, 100, 4, value_size, dtype=dtype)
        gates, state = torch.empty(2, 100, 4), torch.empty(2, 4, key_size, value_size)
        operands = (query, query, value, gates, gates.to(dtype))
        states: tuple[Any, ...] = (state,) if normalize else (None,)
        calls: list[tuple[str, tuple[Any, ...]]] = [
            ("chunk_gated_delta_rule", (*operands, *states, None, normalize, normalize)),
            ("recurrent_gated_delta_rule", (*operands, *states, None, normalize, normalize)),
            ("recurrent_gated_delta_rule_", (*operands, state, None, normalize)),
            ("gated_delta_rule_backward", (value, *states, *operands, *states, None, normalize)),
        ]
        for name, arguments in calls:
            for kind in ("nvidia", "amd"):
                names = KINDS[kind] if full else KINDS[kind][:1]
                # Exact float32 products, as NVIDIA's devices with TMA have them.
                precision = "bf16x6" if dtype is torch.float32 and kind == "nvidia" else "ieee"
                with (
                    mock.patch.dict(problem.TABLE, {devices.current.kind: problem.TABLE[kind]}),
                    mock.patch.object(delta_rule, "dot_precision", lambda *_, precision=precision: precision),
                ):
                    found = launches(library.registered()[f"tritonite::{name}"], arguments)
                for specialization in found:
                    yield Case(f"{name} {dtype} of {key_size} x {value_size}", specialization, names, True)
