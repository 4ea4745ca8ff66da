"""Calls with pointwise programs before and after them: reductions and row operators of short, long and few rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tritonite import dtypes
from tritonite.engine.gemm import table as tables
from tritonite.engine.gemm.product import product
from tritonite.engine.gemm.work import Epilogue
from tritonite.engine.pointwise.embedded import ResultProgram
from tritonite.graph.fused_call import fused_call
from tritonite.install import library
from tritonite.registry.programs import from_text
from tritonite.testing.compile_cases.cases import KINDS, Case, compile_cases, launches, recorded_launches

_BEFORE = "arithmetic.mul(t0, t1); activation.silu(s0); arithmetic.add(s1, t2, n0) -> s2"
_AFTER = "arithmetic.mul(t0, t1); arithmetic.add(s0, t2, n0) -> s1"
_REDUCTIONS = ("sum.dim_IntList(made, [{dim}], False)", "argmax(made, {dim})", "var.correction(made, [{dim}])")
_ROW_OPERATORS = ("_softmax(made, {dim}, False)", "native_layer_norm(made, [{size}], t0, t0, 1e-05)")


def _parts(call: str, x: torch.Tensor, dim: int, results: int, after: bool) -> tuple[Any, ...]:
    name = str(x.dtype).removeprefix("torch.")
    results_text = ", ".join(["int64" if call.startswith("arg") else name] * results)
    text = f"{call.format(dim=dim, size=x.shape[-1])} -> {results_text}"
    operands = [x[0]] if "t0" in text else []
    # A reduction's result has an element per row.
    read = [x, x[0]] if call in _ROW_OPERATORS else [x.select(dim, 0), x.select(dim, 0)[:1]]
    epilogue: tuple[Any, ...] = (read, [1], _AFTER) if after else ([], [], "")
    return ([x, x, x[:1]], [1], _BEFORE, operands, text, [], *epilogue)


def _calls(x: torch.Tensor) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for dim in (1, 0):
        for i, call in enumerate(_REDUCTIONS):
            after = (i + dim) % 2 == 1
            yield f"{call} {dim}, after it {after}", _parts(call, x, dim, 1, after)
        yield f"softmax {dim}", _parts(_ROW_OPERATORS[0], x, dim, 1, True)
    yield "layer_norm", _parts(_ROW_OPERATORS[1], x, 1, 3, True)


def _operator() -> Any:
    fused_call()
    return library.registered()["tritonite::fused_call"]


@compile_cases("fused_calls")
def fused_calls(full: bool) -> Iterator[Case]:
    """Reductions and row operators with programs, in blocks of every kind."""
    op = _operator()
    targets = ("sm_80", "sm_90", "sm_100", "gfx942", "gfx1100") if full else ("sm_90", "gfx942")
    for dtype in dtypes.FLOATS if full else (torch.float32, torch.bfloat16):
        for rows, columns in ((4096, 64), (4096, 1001), (64, 8192), (2, 2**18), (256, 40000)):
            x = torch.empty((rows, columns), dtype=dtype)
            for label, parts in _calls(x):
                for specialization in launches(lambda *given: op(*given), parts):
                    yield Case(f"{label} of {dtype} {rows} x {columns}", specialization, targets)


def _epilogue(out: torch.Tensor, y: torch.Tensor, row: torch.Tensor) -> Epilogue:
    """Return a program of a result, a matrix and a row as the epilogue of a product."""
    return Epilogue(program=ResultProgram.of(from_text(_BEFORE, 3, 1), out, (y, row), (1,)), more=(y, row))


@compile_cases("fused_calls")
def products_with_programs(full: bool) -> Iterator[Case]:
    """Products with a program after them, by the tables' tiles, in slices of K, and of no or few terms."""
    dtype_of = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
    for kind, names in KINDS.items():
        every = [(size, own) for size, own in tables.every(kind) if size in dtype_of and not own.warp_specialize]
        for i, (size, config) in enumerate(every if full else every[::4]):
            a, b = (torch.empty(1, 512, 512, dtype=dtype_of[size]) for _ in range(2))
            splits = 1 + i % 2
            with recorded_launches() as found:
                product(a, b, torch.empty_like(a), _epilogue(a, a, a[:, :1]), config=config._replace(splits=splits))
            yield Case(f"{config} of {a.dtype} in {splits}", found[-1], names[: 2 if full else 1])
    for inner in (0, 3):
        a, b, out = torch.empty(2, 100, inner), torch.empty(2, inner, 100), torch.empty(2, 100, 100)
        with recorded_launches() as found:
            product(a, b, out, _epilogue(out, out, out[:, :1]))
        yield Case(f"{inner} terms", found[-1], ("sm_90", "gfx942"))


@compile_cases("fused_calls")
def convolutions_with_programs(full: bool) -> Iterator[Case]:
    """Convolutions with a program of a tensor and of channels after them: of several taps, of one, transposed."""
    op = _operator()
    for dtype in dtypes.FLOATS if full else (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        for layout in (torch.contiguous_format, torch.channels_last):
            x = torch.empty((2, 64, 16, 16), dtype=dtype).contiguous(memory_format=layout)
            for taps, transposed in ((3, False), (1, False), (3, True)):
                weight, padding = torch.empty((64, 64, taps, taps), dtype=dtype), taps // 2
                call = f"convolution(t0, t1, None, [1, 1], [{padding}, {padding}], [1, 1], {transposed}, [0, 0], 1)"
                parts: tuple[Any, ...] = (
                    [],
                    [],
                    "",
                    [x, weight],
                    f"{call} -> {name}",
                    [],
                    [x, x.new_empty(64, 1, 1)],
                    [1],
                    _BEFORE,
                )
                for specialization in launches(lambda *given: op(*given), parts):
                    label = f"{taps} taps of {dtype}, {layout}, transposed {transposed}"
                    yield Case(label, specialization, ("sm_80", "sm_90", "gfx942") if full else ("sm_90",))
