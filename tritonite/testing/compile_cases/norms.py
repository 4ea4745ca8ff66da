"""Norms with and without a residual, their quantisation, and angles of several planes, at widths of every regime."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from tritonite import dtypes
from tritonite.engine.norm.ring import norm_backward_by_ring
from tritonite.install import library
from tritonite.testing.compile_cases.cases import TARGETS, Case, compile_cases, launches

# Rows that share a program, that a program holds in one chunk and in several, and that several programs share.
_WIDTHS = (64, 1000, 4096, 14_336, 2**16)
# Devices with float8_e4m3fn.
_FLOAT8_TARGETS = ("sm_90", "sm_100")


def _cases(
    calls: list[tuple[str, tuple[Any, ...]]], targets: tuple[str, ...], label: str, **record: Any
) -> Iterator[Case]:
    for name, arguments in calls:
        for specialization in launches(library.registered()[f"tritonite::{name}"], arguments, **record):
            yield Case(f"{name} {label}", specialization, targets)


def _rows(full: bool) -> Iterator[tuple[torch.Tensor, str]]:
    every = (torch.float16, torch.bfloat16, torch.float32)
    for dtype, width in itertools.product(every if full else every[1:2], _WIDTHS):
        yield torch.empty(4, width, dtype=dtype), f"{dtype} of {width}"


def _targets(full: bool, width: int) -> tuple[str, ...]:
    # Wide rows of 16-bit floats stay packed by inline PTX.
    names = [name for name in TARGETS if name.startswith("sm") or width < 2**13]
    return tuple(names if full else names[1:2])


@compile_cases("norms")
def norms(full: bool) -> Iterator[Case]:
    """Norms of one tensor, of a sum by each casting, in place, and their gradients with an offset."""
    for x, label in _rows(full):
        rows, weight = torch.empty(4, dtype=dtypes.opmath(x.dtype)), x[0].clone()
        calls: list[tuple[str, tuple[Any, ...]]] = [
            ("rms_norm", (x, None, weight, 1e-6, 0.0, "llama")),
            ("rms_norm", (x, None, weight, 1e-6, 1.0, "gemma")),
            ("rms_norm", (x, x, weight, 1e-6, 1.0, "llama")),
            ("rms_norm", (x, x, None, 1e-6, 0.0, "gemma")),
            ("rms_norm_backward", (x, None, x, rows, weight, True, 1.0)),
            ("layer_norm", (x, None, weight, None, 1e-5)),
            ("layer_norm_backward", (x, None, x, rows, rows, weight, None, True, False)),
            ("add_rms_norm_", (x, x.clone(), weight, 1e-6, 0.0, "llama")),
        ]
        yield from _cases(calls, _targets(full, x.shape[1]), label)


@compile_cases("norms")
def ring_with_offset(full: bool) -> Iterator[Case]:
    """The gradient of a norm whose weight has an offset, through a ring in shared memory."""
    x, rows = torch.empty(4, 28_664, dtype=torch.bfloat16), torch.empty(4)
    calls: list[tuple[str, tuple[Any, ...]]] = [("rms_norm_backward", (x, x, x, rows, x[0], True, 1.0))]
    cases = list(_cases(calls, ("sm_80", "sm_90", "sm_100") if full else ("sm_90",), "by a ring", programs=8))
    assert cases[0].specialization.kernel is norm_backward_by_ring.jit
    yield from cases


@compile_cases("quantize")
def quantized(full: bool) -> Iterator[Case]:
    """Rows, gated activations and norms in float8 and int8, with scales of every granularity."""
    one = torch.empty(1)
    for x, label in _rows(full):
        weight = x[0].clone()
        kinds = (("token", None), ("block", None), ("tensor", one), ("tensor", None))
        for dtype, (granularity, scale) in itertools.product((torch.float8_e4m3fn, torch.int8), kinds):
            own = dtype, granularity, scale
            calls: list[tuple[str, tuple[Any, ...]]] = [
                ("quantize", (x, *own)),
                ("swiglu_quantize", (x, None, *own)),
                ("rms_norm_quantize", (x, None, weight, 1e-6, 0.0, "llama", *own)),
                ("rms_norm_quantize", (x, x, weight, 1e-6, 1.0, "gemma", *own)),
            ]
            names = _targets(full, x.shape[1])
            if dtype.is_floating_point:
                names = tuple([name for name in names if name in _FLOAT8_TARGETS])
            yield from _cases(calls, names, f"{label} to {dtype} by {granularity}")


@compile_cases("norms")
def planes(full: bool) -> Iterator[Case]:
    """Rotary embeddings by angles of three planes, in either order of sections and of pairs."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32) if full else (torch.bfloat16,):
        heads, angles = torch.empty(2, 5, 4, 128, dtype=dtype), torch.empty(3, 2, 5, 64)
        calls: list[tuple[str, tuple[Any, ...]]] = [
            ("multimodal_rotary_embedding", (heads, heads, angles, angles, [16, 24, 24], pairs, sections, inverse))
            for pairs, sections, inverse in ((False, False, False), (False, True, True), (True, True, False))
        ]
        yield from _cases(calls, tuple(TARGETS) if full else ("sm_90",), f"{dtype}")
