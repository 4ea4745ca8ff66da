"""Cross entropy of logits and over a linear head: narrow and wide rows, and every term of a loss."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from tritonite import dtypes
from tritonite.engine.cross_entropy import kernels
from tritonite.install import library
from tritonite.testing.compile_cases.cases import TARGETS, Case, compile_cases, launches

# Products over a head have cases of their own.
_OWN = {
    *(kernels.read_rows.jit, kernels.replace_by_gradient.jit, kernels.write_gradient.jit),
    *(kernels.read_slices.jit, kernels.combine_slices.jit),
    *(kernels.finish_losses.jit, kernels.scale_gradient.jit, kernels.add_columns.jit),
}
_PLAIN: tuple[Any, ...] = (0.0, None, 0.0)
_EVERY: tuple[Any, ...] = (0.1, 30.0, 1e-4)


def _calls(dtype: torch.dtype, tokens: int, classes: int, every: bool) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield calls with the plain loss, or with every term, class weights and token scales."""
    size = 64
    logits, target = torch.empty(tokens, classes, dtype=dtype), torch.empty(tokens, dtype=torch.int64)
    rows = torch.empty(tokens, dtype=dtypes.opmath(dtype))
    one, numbers = rows[:1].clone(), _EVERY if every else _PLAIN
    weight, scale = (logits[0].clone(), rows.float()) if every else (None, None)
    operands = (logits, target, weight, scale)
    mean, none = (-100, "mean", *numbers), (-100, "none", *numbers)
    yield "cross_entropy", (*operands, *mean, False, every, every)
    yield "cross_entropy", (*operands, *none, False, every, every)
    saved = (rows, one, one if every else None)
    yield "cross_entropy_backward", (one[0], *operands, *saved, *mean)
    yield "cross_entropy_backward_", (rows, *operands, rows, None, saved[2], *none)
    head = torch.empty(tokens, size, dtype=dtype), torch.empty(classes, size, dtype=dtype)
    given = (*head, target, weight, weight, scale)
    chunks = dtypes.opmath(dtype), tokens // 2
    wanted = (True, True, every)
    yield "linear_cross_entropy", (*given, *mean, *chunks, every, every, *wanted)
    gradients = head[0], head[1].to(rows.dtype), None
    yield "linear_cross_entropy_scaled", (one[0], one if every else None, target, head[1], None, *gradients, -100)
    every_weight = None if weight is None else torch.cat([weight, weight])
    shard = (*head, target, weight, every_weight, classes, 2 * classes)
    yield "linear_cross_entropy_shard", (*shard, *none, tokens // 2, every)


@compile_cases("losses")
def losses(full: bool) -> Iterator[Case]:
    """Cross entropy of rows shorter than a block, of several, and of an odd length; of few long rows by slices."""
    for dtype, (tokens, classes), every in itertools.product(
        (torch.float16, torch.bfloat16, torch.float32, torch.float64) if full else (torch.bfloat16,),
        ((64, 1000), (4096, 32_001), (64, 32_001), (4096, 2**17)),
        (False, True),
    ):
        for name, arguments in _calls(dtype, tokens, classes, every):
            for specialization in launches(library.registered()[f"tritonite::{name}"], arguments):
                targets = tuple(TARGETS) if full else ("sm_90",)
                if specialization.kernel in _OWN:
                    yield Case(f"{name} {dtype} of {tokens}x{classes}", specialization, targets)
