"""Attention by decoding kernels, with dropout, and with windows, soft caps and sinks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from tritonite import devices, registry
from tritonite.engine.attention import wide
from tritonite.engine.attention.backward import attention_backward
from tritonite.engine.attention.dropout import Dropout
from tritonite.engine.attention.forward import attention
from tritonite.engine.attention.problem import Problem
from tritonite.install import library
from tritonite.testing.compile_cases.cases import KINDS, Case, compile_cases, launches

_DTYPES_16 = (torch.float16, torch.bfloat16)
# Products have cases of their own.
_WIDE = {wide.normalize_scores.jit, wide.differentiate_scores.jit}


@compile_cases("decoding")
def decoding(full: bool) -> Iterator[Case]:
    """Attention of few queries over contiguous, packed and paged key-value caches, by one split and by several.

    Some calls have a window, a soft cap and sinks.
    """
    calls = list(_decoding_calls((80, 256) if full else (128,), full))
    devices_of = [(kind, names, False) for kind, names in KINDS.items()] + [("nvidia", ("sm_90", "sm_100"), True)]
    for (label, op, arguments), (kind, names, dependent) in itertools.product(calls, devices_of):
        # float16 and bfloat16 compile alike: without `full` only bfloat16 is launched early.
        if not full and (kind != "nvidia" or dependent != ("bfloat16" in label)):
            continue
        # Devices before sm_89, and AMD's, have no float8_e4m3fn.
        wanted = [name for name in names if "float8" not in label or name in ("sm_90", "sm_100")]
        with mock.patch.object(devices, "has_dependent_launch", lambda device, dependent=dependent: dependent):
            found = launches(op, arguments, kind=kind)
        for specialization in found:
            yield Case(f"{op.overload} {label}", specialization, tuple(wanted if full else wanted[:1]))


def _decoding_calls(sizes: tuple[int, ...], full: bool) -> Iterator[tuple[str, registry.Op, tuple[Any, ...]]]:
    """Yield labelled calls of attention for head sizes."""
    ops = registry.overloads()
    for dtype, size, queries in itertools.product((*_DTYPES_16, torch.float32), sizes, (1, 4, 16)):
        query, key = torch.empty(1, 8, queries, size, dtype=dtype), torch.empty(1, 2, 8192, size, dtype=dtype)
        cpu = ops["_scaled_dot_product_flash_attention_for_cpu"]
        yield f"{dtype} of {queries}x{size}", cpu, (query, key, key, 0.0, queries == 4)
        bias = key[0, 0, :1, :1]
        yield f"{dtype} of {queries}x{size} biased", cpu, (query[:, :2], key, key, 0.0, False, bias)
    fused = library.registered()["tritonite::attention"]
    options: dict[str, tuple[Any, ...]] = {
        "window": (True, 500, None, None, None),
        "cap": (False, None, None, 30.0, None),
        "sinks": (False, None, None, None, torch.empty(8)),
        "window, cap and sinks": (False, 500, 3, 30.0, torch.empty(8)),
    }
    for dtype, size, queries in itertools.product((torch.bfloat16, torch.float32), sizes, (1, 4)):
        query, key = torch.empty(1, 8, queries, size, dtype=dtype), torch.empty(1, 2, 8192, size, dtype=dtype)
        for name, given in options.items():
            if full or (queries == 4 and (dtype is torch.bfloat16 or name == "window, cap and sinks")):
                yield f"{dtype} of {queries}x{size} with {name}", fused, (query, key, key, *given)
    flash = ops["_flash_attention_forward"]
    for dtype, size, queries in itertools.product(_DTYPES_16[1 - full :], sizes, (1, 16)):
        rows, keys = torch.empty(8 * queries, 8, size, dtype=dtype), torch.empty(8192, 2, size, dtype=dtype)
        starts = torch.empty(9, dtype=torch.int32)
        arguments = (rows, keys, keys, starts, starts, queries, 8192, 0.0, queries > 1, False)
        yield f"{dtype} of {queries}x{size} packed", flash, arguments
    paged, write = [library.registered()[f"tritonite::{name}"] for name in ("paged_attention", "reshape_and_cache")]
    for dtype, size, page, tokens in itertools.product((*_DTYPES_16, torch.float32), sizes, (16, 48, 256), (8, 4096)):
        query, slots = torch.empty(tokens, 8, size, dtype=dtype), torch.empty(tokens, dtype=torch.int64)
        table, lengths = torch.empty(8, 64, dtype=torch.int32), torch.empty(8, dtype=torch.int32)
        starts = None if tokens == 8 else torch.empty(9, dtype=torch.int32)
        for cached in (dtype,) if dtype is torch.float32 else (dtype, torch.float8_e4m3fn):
            cache = torch.empty(64, page, 2, size, dtype=cached)
            scales = (None, None) if cached is dtype else (torch.ones(2), torch.ones(2))
            arguments = (query, cache, cache, table, lengths, starts, *scales, 0.1)
            label = f"{dtype} of {tokens}x{size} in pages of {page} {cached}"
            # One page size has a soft cap, a window and sinks, too.
            yield label, paged, (*arguments, 30.0, 1000, torch.empty(8)) if page == 48 else arguments
            yield label, write, (query[:, :2], query[:, :2], cache, cache, slots, *scales)


@compile_cases("dropped")
def dropout(full: bool) -> Iterator[Case]:
    """Attention with dropout, by both mappings of scores to random numbers, with aligned and misaligned rows."""
    sizes, state = (64, 128, 256) if full else (64,), torch.empty(2, dtype=torch.int64)
    for dtype, size, keys in itertools.product((torch.bfloat16, torch.float32)[: 1 + full], sizes, (300, 301)):
        query, key = torch.empty(1, 4, 200, size, dtype=dtype), torch.empty(1, 4, keys, size, dtype=dtype)
        for lanes in (True, False):
            if (lanes and (dtype is torch.float32 or keys == 301)) or not (full or lanes or keys == 301):
                continue
            problem = Problem(query, key, key, None, None, not lanes, 0, "ieee")
            problem = problem._replace(dropout=Dropout(0.5, lanes, 4, state if lanes else None))
            logsumexp = query.new_empty(query.shape[:3])
            for kind, names in KINDS.items() if full else [("nvidia", ("sm_90",))]:
                found = launches(attention, (problem, query, logsumexp), kind=kind)
                arguments = (problem, query, query, logsumexp, (query, key, key))
                found += launches(attention_backward, arguments, kind=kind)
                for specialization in found:
                    label = f"{'lanes' if lanes else 'elements'} of {dtype} {size} over {keys}"
                    yield Case(label, specialization, names)


@compile_cases("windowed")
def windowed(full: bool) -> Iterator[Case]:
    """Attention with a window, a soft cap, sinks and a bias, alone and together, forward and backward."""
    calls: dict[str, dict[str, Any]] = {
        "window": {"causal": True, "diagonal": 100, "window": 200},
        "cap": {"softcap": 30.0},
        "sinks": {"causal": True, "sinks": True},
        "window, cap, sinks and bias": {"causal": True, "window": 200, "softcap": 30.0, "sinks": True, "bias": True},
    }
    sizes = (64, 128, 256) if full else (64,)
    for dtype, size, (name, fields) in itertools.product((torch.bfloat16, torch.float32), sizes, calls.items()):
        if not full and dtype is torch.float32 and name != "window, cap, sinks and bias":
            continue
        query, key = torch.empty(1, 4, 200, size, dtype=dtype), torch.empty(1, 2, 300, size, dtype=dtype)
        given = fields | {
            "sinks": torch.empty(4, dtype=dtype) if "sinks" in fields else None,
            "bias": query.new_empty(1, 4, 200, 300) if "bias" in fields else None,
        }
        problem = Problem(query, key, key, None, None, False, 0, "ieee")._replace(**given)
        logsumexp = query.new_empty(query.shape[:3], dtype=torch.float32)
        for kind, names in KINDS.items() if full else [("nvidia", ("sm_90",))]:
            found = launches(attention, (problem, query, logsumexp), kind=kind)
            partial = None if given["sinks"] is None else torch.empty(1, 4, 4)
            arguments = (problem, query, query, logsumexp, (query, key, key), given["bias"], partial)
            found += launches(attention_backward, arguments, kind=kind)
            for specialization in found:
                yield Case(f"{name} of {dtype} {size}", specialization, names)


@compile_cases("wide")
def wide_heads(full: bool) -> Iterator[Case]:
    """Rows of the scores of wide heads: with and without logsumexp, a causal mask, and biases of both kinds."""
    for dtype in (*_DTYPES_16, torch.float32) if full else (torch.bfloat16,):
        query, key = torch.empty(2, 2, 200, 512, dtype=dtype), torch.empty(2, 2, 300, 512, dtype=dtype)
        logsumexp = torch.empty(2, 2, 224)
        for bias in (None, query.new_empty(2, 2, 200, 300), torch.empty(2, 2, 200, 300, dtype=torch.bool)):
            problem = Problem(query, key, key, bias, None, bias is not None, 0, "ieee")
            for kind, names in KINDS.items() if full else [("nvidia", ("sm_90",)), ("amd", ("gfx942",))]:
                found = launches(wide.attention, (problem, query, logsumexp, "0"), kind=kind)
                found += launches(wide.attention, (problem, query, None, "inf"), kind=kind)
                arguments = (problem, query, query, logsumexp, (query, key, key))
                found += launches(wide.attention_backward, arguments, kind=kind)
                for specialization in found:
                    if specialization.kernel in _WIDE:
                        yield Case(f"{dtype} {bias is not None}", specialization, names)


@compile_cases("windowed")
def heads_of_one_element(full: bool) -> Iterator[Case]:
    """Heads or values of one element in contiguous rows, beside short ones in padded rows: both passes."""
    windows: tuple[dict[str, Any], ...] = ({}, {"causal": True, "diagonal": 260, "window": 6, "softcap": 5.0})
    for dtype, (head, size, apart) in itertools.product(
        (torch.bfloat16, torch.float32), ((1, 7, 15), (1, 1, 2), (7, 1, 1))
    ):
        query, key = torch.empty(2, 4, 40, head, dtype=dtype), torch.empty(2, 2, 300, head, dtype=dtype)
        value, out = torch.empty(2, 2, 300, apart, dtype=dtype)[..., :size], torch.empty(2, 4, 40, size, dtype=dtype)
        logsumexp = torch.empty(2, 4, 40)
        for fields in windows:
            problem = Problem(query, key, value, None, None, False, 0, "ieee")._replace(**fields)
            found = launches(attention, (problem, out, logsumexp), kind="nvidia")
            arguments = (problem, out, out, logsumexp, (query, key, value), None, None)
            found += launches(attention_backward, arguments, kind="nvidia")
            for specialization in found:
                label = (
                    f"{dtype} heads of {head} and values of {size} with a row stride of {apart}, {', '.join(fields)}"
                )
                yield Case(label, specialization, ("sm_90",))
