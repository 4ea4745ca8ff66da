"""Gated delta rule, short convolution and gated RMS norm: every variant of their kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from tritonite import devices, dtypes
from tritonite.engine.delta_rule import problem
from tritonite.fused import delta_rule
from tritonite.install import library
from tritonite.testing.compile_cases.cases import KINDS, TARGETS, Case, compile_cases, launches


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


@compile_cases("delta_rule")
def single_heads(full: bool) -> Iterator[Case]:
    """Passes of one head, and of sizes of 1, whose strides and sizes Triton makes constants."""
    for heads, size in ((1, 16), (2, 1)):
        rows, gates = torch.empty(2, 100, heads, size, dtype=torch.bfloat16), torch.empty(2, 100, heads)
        operands, state = (rows, rows, rows, gates, gates), torch.empty(2, heads, size, size)
        calls: list[tuple[str, tuple[Any, ...]]] = [
            ("chunk_gated_delta_rule", (*operands, state, None, True, True)),
            ("recurrent_gated_delta_rule", (*operands, state, None, True, True)),
            ("gated_delta_rule_backward", (rows, state, *operands, state, None, True)),
        ]
        for name, arguments in calls:
            for specialization in launches(library.registered()[f"tritonite::{name}"], arguments):
                yield Case(f"{name} of {heads} x {size}", specialization, (*TARGETS,) if full else ("sm_90",), True)


@compile_cases("delta_rule")
def short_convolutions(full: bool) -> Iterator[Case]:
    """Convolutions along contiguous tokens and contiguous channels, with and without bias, state and activation."""
    for dtype, width, activation in itertools.product(
        (torch.bfloat16, torch.float16, torch.float32) if full else (torch.bfloat16,),
        (1, 2, 4, 16) if full else (1, 4),
        (None, "silu"),
    ):
        x, weight = torch.empty(2, 96, 200, dtype=dtype), torch.empty(96, width, dtype=dtype)
        bias, state = (weight[:, 0].clone(), x[..., : width - 1].clone()) if activation else (None, None)
        past = torch.empty(2, 96, 16, dtype=dtype)
        calls: list[tuple[str, tuple[Any, ...]]] = [("short_convolution_update", (x[..., 0], past, weight, bias))]
        for each in (x, x.transpose(1, 2).contiguous().transpose(1, 2), x[:, :3, :5], x[..., ::2]):
            rows = each.shape[1]
            given = (weight[:rows], None if bias is None else bias[:rows], activation)
            state_rows = None if state is None else state[:, :rows]
            calls.append(("short_convolution", (each, *given, state_rows)))
            calls.append(("short_convolution_backward", (each, each, *given, state_rows)))
        for name, arguments in calls:
            for specialization in launches(library.registered()[f"tritonite::{name}"], arguments):
                label = f"{name} {dtype} of {width} taps {activation}"
                yield Case(label, specialization, (*TARGETS,) if full else ("sm_90", "gfx942"))


@compile_cases("delta_rule")
def short_convolutions_of_few(full: bool) -> Iterator[Case]:
    """Convolutions of few channels and tokens, whose strides and sizes of 1 Triton makes constants."""
    widths, shapes = (4, 2, 3, 7), ((2, 5, 19), (1, 4, 9), (2, 1, 5), (3, 4, 1), (1, 1, 1))
    every = itertools.product(widths, shapes, (False, True), (None, "silu"))
    for width, (batch, channels, tokens), turned, activation in every:
        if not full and width != widths[0] and (batch, channels) != shapes[0][:2]:
            continue
        x, weight = torch.empty(batch, channels, tokens), torch.empty(channels, width)
        if turned:
            x = torch.empty(batch, tokens, channels).transpose(1, 2)
        for bias, state in ((None, None), (weight[:, 0].clone(), torch.empty(batch, channels, width - 1))):
            calls: tuple[tuple[str, tuple[Any, ...]], ...] = (
                ("short_convolution", (x, weight, bias, activation, state)),
                ("short_convolution_backward", (x, x, weight, bias, activation, state)),
            )
            for name, arguments in calls:
                for specialization in launches(library.registered()[f"tritonite::{name}"], arguments):
                    label = f"{name} of {batch} x {channels} x {tokens}, {width} taps {activation}"
                    yield Case(label, specialization, (*TARGETS,) if full else ("sm_90",))


@compile_cases("delta_rule")
def gated_norms(full: bool) -> Iterator[Case]:
    """Gated norms of rows of several widths: many rows in a program, one, and less than one."""
    for dtype, width, has_weight in itertools.product(
        (torch.float16, torch.bfloat16, torch.float32, torch.float64) if full else (torch.bfloat16,),
        (64, 1000, 4096, 2**16),
        (True, False),
    ):
        x = torch.empty(4, width, dtype=dtype)
        weight, rstd = x[0].clone() if has_weight else None, torch.empty(4, 1, dtype=dtypes.opmath(dtype))
        calls: list[tuple[str, tuple[Any, ...]]] = [
            ("gated_rms_norm", (x, x, weight, 1e-6)),
            ("gated_rms_norm_backward", (x, x, x, weight, rstd, has_weight)),
        ]
        for name, arguments in calls:
            for specialization in launches(library.registered()[f"tritonite::{name}"], arguments):
                yield Case(f"{name} {dtype} of {width}", specialization, (*TARGETS,) if full else ("sm_90",))
