"""Shorter ways through Triton's interpreter: results, types and errors are those of Triton's own operators."""

import operator
from typing import NamedTuple

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language import semantic
from triton.runtime import jit
from triton.runtime.errors import InterpreterError

import tritonite
from tritonite.language import launches, shortcuts
from tritonite.runtime.interpreter import interpreting

pytestmark = [
    pytest.mark.smoke,
    pytest.mark.skipif(tritonite.device != "cpu", reason="kernels are interpreted on the CPU alone"),
]

ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.and_, operator.or_, operator.xor)
COMPARISONS = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)
NUMBERS = (0, 3, -2, 300, 2.5, -0.0, float("nan"), True)
found = []


INDICES = (
    (None,),
    (slice(None), None),
    (None, slice(None), slice(None)),
    (slice(None), slice(None), slice(None)),
    (0,),
)
SELECTIONS = (lambda x, y: tl.where(x > y, x, y), tl.minimum, operator.mod, operator.floordiv, operator.truediv)


def note_results(pointer, row, column, scalar):
    """Append what each operator makes of blocks that broadcast, scalars, numbers, and another dtype, in both orders.

    Append results of indices and of pointer arithmetic, too.
    """
    pairs = [(row, other) for other in (row, column, scalar, row.to(tl.float32), scalar.to(tl.int64), *NUMBERS)]
    pairs += [(scalar, scalar), *((scalar, number) for number in NUMBERS)]
    for function in ARITHMETIC + COMPARISONS + SELECTIONS:
        for one, other in pairs:
            found.extend([outcome(function, one, other), outcome(function, other, one)])
    for block in (row, scalar, pointer + row.to(tl.int32)):
        found.extend([outcome(operator.getitem, block, index) for index in INDICES])
    pointers = pointer, pointer + tl.zeros((8, 1), tl.int32)
    offsets = [x.to(dtype) for x in (row, column, scalar) for dtype in (tl.int8, tl.uint32, tl.int64, tl.float32)]
    pairs = [(one, other) for one in pointers for other in (*offsets, 3, -1, 2.5)]
    found.extend([outcome(operator.add, one, other) for one, other in pairs])


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
    note_results(pointer, row, column, tl.load(pointer + 3))


def results(x):
    found.clear()
    with interpreting():
        _compute[(1,)](x)
    return list(found)


def tritons_own(monkeypatch):
    """Have the interpreter use what these shortcuts replace."""
    kinds = (
        (semantic.TritonSemantic, ("binary_op_type_checking_impl", "broadcast_impl_value")),
        (
            tl.block_type,
            ("to_ir", "with_element_ty"),
        ),
    )
    for owner, names in (*kinds, (jit.ConstexprFunction, ("__call__",))):
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)
    monkeypatch.setattr(shortcuts, "operators", lambda *_: {})
    monkeypatch.setattr(launches, "_known_changes", {})
    monkeypatch.setattr(launches, "execute", launches.EXECUTE)


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64]
    + [torch.float16, torch.bfloat16, torch.float32, torch.float64],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:tl.where with a non-boolean condition")
def test_operators_are_tritons(dtype, monkeypatch):
    x = torch.tensor([0, 1, 2, 3, 100, 127, 64, 5]).to(dtype)
    quick = results(x)
    tritons_own(monkeypatch)
    assert quick == results(x)
    assert sum(isinstance(each, tuple) for each in quick) > len(quick) // 3


class Sizes(NamedTuple):
    n: int
    m: int


@triton.constexpr_function
def _described(*values):
    return repr(values)


@triton.jit
def _take(x, sizes, given, n=5, NAMES: tl.constexpr = "abc", BLOCK: tl.constexpr = 4):
    note(x, sizes, *given, n)
    found.append(_described(NAMES, (sizes.n, 3), tl.constexpr(4), (tl.constexpr(5), (BLOCK,)), [tl.constexpr(6)]))
    if tl.program_id(0) == 2:
        tl.store(x + tl.arange(0, BLOCK), tl.program_id(1) + tl.num_programs(0))


def note(*values):
    for value in values:
        data = value.handle.data if isinstance(value, tl.tensor) else value
        found.append((str(getattr(value, "type", type(value))), str(getattr(data, "dtype", "")), str(data)))


def launches_of(x, given):
    """Return what a kernel sees of its arguments in several launches, and what it stores."""
    found.clear()
    x.zero_()
    kept = []
    with interpreting():
        _take[(3, 2)](x, Sizes(2, 2**33), given)
        kept.append(x.clone())
        _take[lambda meta: (3, 1, meta["BLOCK"])](x, given=(), sizes=Sizes(1, 2), n=7, BLOCK=2, num_warps=4)
        kept.append(x.clone())
        for wrong in (
            lambda: _take[(1,)](x),
            lambda: _take[(1,)](x, 1, 2, 3, 4, 5, 6),
            lambda: _take[(1,) * 4](x, 1, 2),
        ):
            with pytest.raises((TypeError, AssertionError)):
                wrong()
    return [*found, *map(torch.Tensor.tolist, kept)]


def test_launches_are_tritons(monkeypatch):
    x = torch.zeros(8, dtype=torch.int16)
    given = (1, 2**31, 2**40, 2**63, -1, 2.5, None, x[1:], torch.nn.Parameter(x.float()), (x, (3, 2**32)))
    before = dict(vars(tl.tensor)), dict(vars(tl))
    quick = launches_of(x, given)
    assert before == (dict(vars(tl.tensor)), dict(vars(tl)))
    tritons_own(monkeypatch)
    assert quick == launches_of(x, given)


def test_a_launch_restores_the_language_after_an_error():
    @triton.jit
    def fail(x):
        raise ValueError("no")

    before = dict(vars(tl.tensor)), dict(vars(tl)), dict(vars(tl.core))
    with interpreting(), pytest.raises(InterpreterError, match="no"):
        fail[(1,)](torch.zeros(1))
    assert before == (dict(vars(tl.tensor)), dict(vars(tl)), dict(vars(tl.core)))
