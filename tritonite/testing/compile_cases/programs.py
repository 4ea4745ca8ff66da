"""Programs of pointwise formulas: in several dtypes and layouts, and with numbers and several results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tritonite import dtypes
from tritonite.registry.programs import from_text
from tritonite.testing.compile_cases.cases import Case, compile_cases, launches

_TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942", "gfx1100")
_FLOATS = (
    "arithmetic.mul(t0, t1); activation.gelu(s0, 'tanh'); arithmetic.add(s1, t2, n0); convert(s2, float32) -> s0, s3",
    "convert(t0, float64); arithmetic.add(s0, t1, n0); elementary.rsqrt(s1); convert(s2, bool);"
    " conditional.where(s3, t1, t2) -> s2, s4",
)
_INTEGERS = (
    "arithmetic.mul(t0, t1); arithmetic.remainder(s0, t2); arithmetic.add(s1, t0, n0); convert(s2, float16) -> s1, s3",
)


def _operands(dtype: torch.dtype, layout: str) -> tuple[torch.Tensor, ...]:
    x, y = torch.ones(64, 64, dtype=dtype), torch.ones(64, 64, dtype=dtype)
    return {"contiguous": (x, y, x), "transposed": (x, y.t(), x[0]), "zero_dim": (x[0, 0], y[0, 0], x[0, 0])}[layout]


@compile_cases("programs")
def programs(full: bool) -> Iterator[Case]:
    """Programs in every dtype and layout, or in one dtype of each kind."""
    for dtype in (*dtypes.FLOATS, *dtypes.INTS) if full else (torch.float32, torch.bfloat16, torch.int32):
        for text in _FLOATS if dtype.is_floating_point else _INTEGERS:
            for layout in ("contiguous", "transposed", "zero_dim"):
                arguments: tuple[Any, ...] = (*_operands(dtype, layout), 1)
                for specialization in launches(from_text(text, 3, 1).run, (arguments,)):
                    yield Case(
                        f"{text} of {dtype}, {layout}", specialization, _TARGETS if full else ("sm_90", "gfx942")
                    )
