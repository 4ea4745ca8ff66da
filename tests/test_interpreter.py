"""Shorter ways through Triton's interpreter: results, types and errors are those of Triton's own operators."""

import operator

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import tritonite
from tritonite.language import shortcuts
from tritonite.runtime.interpreter import interpreting

pytestmark = [
    pytest.mark.smoke,
    pytest.mark.skipif(tritonite.device != "cpu", reason="kernels are interpreted on the CPU alone"),
]

ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.and_, operator.or_, operator.xor)
COMPARISONS = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)
NUMBERS = (0, 3, -2, 300, 2.5, -0.0, float("nan"), True)
found = []


def note_results(row, column, scalar):
    """Append what each operator makes of blocks that broadcast, scalars, numbers, and another dtype, in both orders."""
    pairs = [(row, other) for other in (row, column, scalar, row.to(tl.float32), scalar.to(tl.int64), *NUMBERS)]
    pairs += [(scalar, scalar), *((scalar, number) for number in NUMBERS)]
    for function in ARITHMETIC + COMPARISONS:
        for one, other in pairs:
            found.extend([outcome(function, one, other), outcome(function, other, one)])


def outcome(function, one, other):
    try:
        result = function(one, other)
    except Exception as error:  # noqa: BLE001 - the kind of error is compared
        return type(error)
    if not isinstance(result, tl.tensor):
        return result
    data = np.asarray(result.handle.data)
    return str(result.type), str(result.dtype), str(data.dtype), data.shape, data.tobytes()


@triton.jit
def _compute(pointer):
    columns = tl.arange(0, 8)
    row = tl.load(pointer + columns[None, :])
    column = tl.load(pointer + columns[:, None])
    note_results(row, column, tl.load(pointer + 3))


def results(x):
    found.clear()
    with interpreting():
        _compute[(1,)](x)
    return list(found)


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64]
    + [torch.float16, torch.bfloat16, torch.float32, torch.float64],
    ids=str,
)
def test_operators_are_tritons(dtype, monkeypatch):
    x = torch.tensor([0, 1, 2, 3, 100, 127, 64, 5]).to(dtype)
    quick = results(x)
    monkeypatch.setattr(shortcuts, "operators", lambda *_: {})
    assert quick == results(x)
    assert sum(isinstance(each, tuple) for each in quick) > len(quick) // 3
