"""Kernels over lists of tensors: several dtypes, unaligned addresses, and tables of every capacity."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tritonite import dtypes, registry
from tritonite.testing.compile_cases.cases import Case, compile_cases, launches

# Tensors of a list: one launch of `write_table` of each capacity, and several launches.
_COUNTS = (3, 20, 100, 600)


def _list(dtype: torch.dtype, count: int, offset: int = 0) -> list[torch.Tensor]:
    """Return `count` tensors that begin `offset` elements after an aligned address."""
    return [torch.empty(5000 + offset, dtype=dtype)[offset:] for _ in range(count)]


def _calls(dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield (overload, arguments) of a call for each kind of argument."""
    xs, ys, zs = (_list(dtype, 3) for _ in range(3))
    yield "_foreach_sqrt", (xs,)
    yield "_foreach_add.List", (xs, ys)
    yield "_foreach_add_.List", (_list(dtype, 3, 1), _list(dtype, 3, 1))
    yield "_foreach_mul_.Scalar", (xs, dtype is torch.bool or 2)
    yield "_foreach_mul_.Tensor", (xs, torch.ones((), dtype=dtype))
    yield "_foreach_addcdiv_.ScalarList", (xs, ys, zs, [1.0, 2.0, 3.0])
    yield "_foreach_norm.Scalar", (xs,)


@compile_cases("lists")
def lists(full: bool) -> Iterator[Case]:
    """Calls in every float dtype and of integers, and lists of many tensors."""
    targets = ("sm_80", "sm_90", "sm_100", "gfx942", "gfx1100")
    for dtype in (*dtypes.FLOATS, torch.int32, torch.bool) if full else (torch.bfloat16,):
        for name, arguments in _calls(dtype):
            op = registry.overloads().get(name)
            if op is None or dtype not in op.declaration.accepts:
                continue
            for specialization in launches(op, arguments):
                yield Case(f"{name} {dtype}", specialization, targets)
    for count in _COUNTS:
        xs = _list(torch.float32, count)
        for specialization in launches(registry.overloads()["_foreach_add_.ScalarList"], (xs, [1.0] * count)):
            yield Case(f"_foreach_add_ of {count} tensors", specialization, targets)
