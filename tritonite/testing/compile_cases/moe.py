"""Mixtures of experts: routers, sorts by expert, exchanges of rows, grouped linear layers, losses of routers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tritonite import dtypes
from tritonite.install import library
from tritonite.testing.compile_cases.cases import TARGETS, Case, compile_cases, launches


@compile_cases("moe")
def mixtures_of_experts(full: bool) -> Iterator[Case]:
    """Operators of mixtures of experts: few experts and many, few tokens and many, narrow and wide rows."""
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64) if full else (torch.bfloat16,)
    for dtype in floats:
        calls = [*_routing(dtype), *_rows(dtype)]
        if dtype is not torch.float64:
            calls += _products(dtype)
        yield from _cases(calls, str(dtype), full)
    yield from _cases(list(_sorting()), "ids", full)


def _cases(calls: list[tuple[str, tuple[Any, ...]]], label: str, full: bool) -> Iterator[Case]:
    for name, arguments in calls:
        for specialization in launches(library.registered()[f"tritonite::{name}"], arguments):
            yield Case(f"{name} of {label}", specialization, tuple(TARGETS) if full else ("sm_90", "gfx942"))


def _routing(dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for tokens, experts, k in ((3, 8, 2), (300, 257, 8), (300, 512, 10)):
        logits, chosen = torch.empty(tokens, experts, dtype=dtype), torch.zeros(tokens, k, dtype=torch.int32)
        grad = torch.empty(tokens, k, dtype=dtypes.opmath(dtype))
        yield "route", (logits, k)
        yield "route", (logits, k, "sigmoid", logits[0])
        for scoring in ("softmax", "sigmoid"):
            for renormalize in (False, True):
                yield "route_backward", (grad, logits, chosen, scoring, renormalize, 1.0)
        for each, mask in ((chosen, None), (chosen, chosen[:, 0]), (None, None)):
            yield "load_balancing_loss", (logits, each, mask)
            factors = grad.new_empty(experts)
            yield "load_balancing_loss_backward", (grad[0, 0], factors, logits, mask, 0 if each is None else k)
    grouped = torch.empty(300, 256, dtype=dtype)
    yield "route", (grouped, 8, "sigmoid", torch.empty(256), 8, 4, True, 2.5)
    yield "route", (grouped[:, :48], 6, "softmax", None, 12, 3, False)


def _rows(dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for tokens, columns, k in ((3, 8, 2), (300, 2880, 8)):
        x, inverse = torch.empty(tokens, columns, dtype=dtype), torch.zeros(tokens, k, dtype=torch.int32)
        y, weights = torch.empty(tokens * k, columns, dtype=dtype), torch.empty(tokens, k)
        yield "permute", (x, inverse, 8)
        for each in (None, weights):
            yield "unpermute", (y, inverse, each)
            yield "unpermute_backward", (x, y, inverse, each, each is not None)
        yield "unpermute_backward", (x, y, inverse, weights, False)


def _products(dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for inputs in (64, 60):
        x, weight = torch.empty(256, inputs, dtype=dtype), torch.empty(8, 96, inputs, dtype=dtype)
        offsets, grad = torch.zeros(8, dtype=torch.int32), torch.empty(256, 96, dtype=dtype)
        yield "grouped_linear", (x, weight, offsets)
        yield "grouped_linear", (x, weight, offsets, weight[..., 0])
        yield "grouped_linear_backward_input", (grad, weight, offsets)
        yield "grouped_linear_backward_weight", (grad, x, offsets)
        yield "grouped_linear_backward_bias", (grad, offsets, dtype)


def _sorting() -> Iterator[tuple[str, tuple[Any, ...]]]:
    for tokens, experts in ((4, 1), (4, 8), (20_000, 8), (20_000, 300)):
        for dtype in (torch.int32, torch.int64):
            ids = torch.zeros(tokens, 8, dtype=dtype)
            yield "moe_align", (ids, experts, 64)
            yield "permute", (torch.empty(tokens, 8), ids, experts)
