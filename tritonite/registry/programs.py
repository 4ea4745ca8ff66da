"""Declared pointwise operators as steps of programs, and programs as text.

`arithmetic.mul(t0, t1); activation.gelu(s0, 'tanh'); arithmetic.add(s1, t2, n0) -> s2` multiplies two tensors, and adds
a third one and a number n0 as alpha. A formula's name is its family and the name of its function.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tritonite.dtypes import TRITON_DTYPES
from tritonite.engine.movement import check_conversion, convert
from tritonite.engine.pointwise.declare import Pointwise
from tritonite.engine.pointwise.program import ROLES, Program, Slot, Step, program
from tritonite.engine.pointwise.promotion import ConstantKind
from tritonite.errors import Decline
from tritonite.registry.declaration import declarations
from tritonite.registry.op import Op

_CONVERT = "convert"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TRITON_DTYPES}


class Formula(NamedTuple):
    """A step's formula, before slots are known: a value for each parameter, and the dtype that is converted to."""

    kernel: Pointwise
    values: tuple[Any, ...]
    to: torch.dtype | None = None


@functools.lru_cache(maxsize=1)
def formulas() -> dict[str, Pointwise]:
    """Return the formulas that programs may have, by name."""
    found = {_CONVERT: convert}
    for declaration in declarations:
        own = declaration.formula
        if own is not None and ROLES.issuperset(own.parameters.values()):
            found[f"{declaration.family}.{own.formula.fn.__name__}"] = own
    return found


@functools.lru_cache(maxsize=1)
def _names() -> dict[Pointwise, str]:
    return {kernel: name for name, kernel in formulas().items()}


def formula_of(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Formula:
    """Return the formula that a call of an overload launches, and nothing else.

    Tensors among the arguments may be fake. Raises Decline for other operators, and for a call that they decline.
    """
    kernel = op.declaration.formula
    if kernel not in _names() or op.inplace or op.out_names:
        raise Decline(f"{op.overload} is no formula")
    values: Sequence[Any] = op.bind(args, kwargs)[0]
    if op.declaration.prepare is not None:
        values = op.declaration.prepare(*values)
    assert kernel is not None
    return Formula(kernel, tuple(values))


def conversion_of(tensor: torch.Tensor, to: torch.dtype) -> Formula:
    """Return the formula of a conversion. Raises Decline for dtypes that are not converted."""
    if tensor.dtype not in TRITON_DTYPES or to not in TRITON_DTYPES:
        raise Decline(f"a conversion from {tensor.dtype} to {to}")
    check_conversion(tensor.dtype, to)
    return Formula(convert, (tensor, TRITON_DTYPES[to]), to)


def as_text(tensors: int, numbers: int, steps: Sequence[Step], results: Sequence[int]) -> str:
    """Return a program as text, which `from_text` reads."""

    def name(slot: int) -> str:
        if slot < tensors:
            return f"t{slot}"
        return f"n{slot - tensors}" if slot < tensors + numbers else f"s{slot - tensors - numbers}"

    calls = []
    for step in steps:
        given = [name(own.index) if isinstance(own, Slot) else repr(own.value) for own in step.arguments]
        if step.dtypes:
            given[1:] = [str(step.dtypes[0]).removeprefix("torch.")]
        calls.append(f"{_names()[step.kernel]}({', '.join(given)})")
    return f"{'; '.join(calls)} -> {', '.join(map(name, results))}"


@functools.lru_cache(maxsize=4096)
def from_text(text: str, tensors: int, numbers: int) -> Program:
    """Return the program of a text, for this many tensors and numbers. Raises Decline for any other text."""
    try:
        calls, _, stored = text.partition(" -> ")
        steps = tuple([_step(ast.parse(call, mode="eval").body, tensors, numbers) for call in calls.split("; ")])
        results = tuple([_slot(name, tensors, numbers) for name in stored.split(", ")])
    except (AttributeError, IndexError, KeyError, SyntaxError, ValueError) as error:
        raise Decline(f"no program of pointwise formulas: {text!r} ({error!r})") from None
    return program(tensors, numbers, steps, results)


def _step(call: Any, tensors: int, numbers: int) -> Step:
    kernel = formulas()[ast.unparse(call.func)]
    arguments: list[Slot | ConstantKind] = []
    to: tuple[torch.dtype, ...] = ()
    for given in call.args:
        if not isinstance(given, ast.Name):
            value = ast.literal_eval(given)
            arguments.append(ConstantKind(type(value), value))
        elif given.id in _DTYPES:
            to = (_DTYPES[given.id],)
            arguments.append(ConstantKind(type(TRITON_DTYPES[to[0]]), TRITON_DTYPES[to[0]]))
        else:
            arguments.append(Slot(_slot(given.id, tensors, numbers)))
    return Step(kernel, tuple(arguments), to)


def _slot(name: str, tensors: int, numbers: int) -> int:
    return {"t": 0, "n": tensors, "s": tensors + numbers}[name[0]] + int(name[1:])
