"""Calls with pointwise programs before and after them: reductions and row operators of short, long and few rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tritonite import dtypes
from tritonite.graph.fused_call import fused_call
from tritonite.install import library
from tritonite.testing.compile_cases.cases import Case, compile_cases, launches

_BEFORE = "arithmetic.mul(t0, t1); activation.silu(s0); arithmetic.add(s1, t2, n0) -> s2"
_AFTER = "arithmetic.mul(t0, t1); arithmetic.add(s0, t2, n0) -> s1"
_REDUCTIONS = ("sum.dim_IntList(made, [{dim}], False)", "argmax(made, {dim})", "var.correction(made, [{dim}])")
_ROW_OPERATORS = ("_softmax(made, {dim}, False)", "native_layer_norm(made, [{size}], t0, t0, 1e-05)")


def _parts(call: str, x: torch.Tensor, dim: int, results: int, after: bool) -> tuple[Any, ...]:
    name = str(x.dtype).removeprefix("torch.")
    results_text = ", ".join(["int64" if call.startswith("arg") else name] * results)
    text = f"{call.format(dim=dim, size=x.shape[-1])} -> {results_text}"
    operands = [x[0]] if "t0" in text else []
    epilogue: tuple[Any, ...] = ([x, x[0]], [1], _AFTER) if after else ([], [], "")
    return ([x, x, x[:1]], [1], _BEFORE, operands, text, [], *epilogue)


def _calls(x: torch.Tensor) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for dim in (1, 0):
        for call in _REDUCTIONS:
            yield f"{call} {dim}", _parts(call, x, dim, 1, False)
        yield f"softmax {dim}", _parts(_ROW_OPERATORS[0], x, dim, 1, True)
    yield "layer_norm", _parts(_ROW_OPERATORS[1], x, 1, 3, True)


@compile_cases("fused_calls")
def fused_calls(full: bool) -> Iterator[Case]:
    """Row operators with programs, in blocks of every kind."""
    fused_call()
    op = library.registered()["tritonite::fused_call"]
    targets = ("sm_80", "sm_90", "sm_100", "gfx942", "gfx1100") if full else ("sm_90", "gfx942")
    for dtype in dtypes.FLOATS if full else (torch.float32, torch.bfloat16):
        for rows, columns in ((4096, 64), (4096, 1001), (64, 8192), (2, 2**18), (256, 40000)):
            x = torch.empty((rows, columns), dtype=dtype)
            for label, parts in _calls(x):
                for specialization in launches(lambda *given: op(*given), parts):
                    yield Case(f"{label} of {dtype} {rows} x {columns}", specialization, targets)
