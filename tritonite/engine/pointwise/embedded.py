"""Programs within the kernels of other engines: before an operand is used, or after a result is computed.

The numbers of such a program are compile-time constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tritonite.dtypes import TRITON_DTYPES
from tritonite.engine.pointwise.program import Program
from tritonite.engine.pointwise.promotion import Kind, TensorKind
from tritonite.engine.pointwise.steps import Steps, evaluate_program
from tritonite.errors import Decline
from tritonite.language.contraction import uncontracted


@dataclass(frozen=True)
class Embedded:
    """The compile-time form of a program whose tensors are values of another kernel.

    Attributes:
        steps: the formulas.
        operands: for each tensor of the program, the index of its block among the kernel's values.
        dtypes: the Triton dtypes in which these blocks reach the program.
        numbers: the numbers, each with its Triton dtype.
    """

    steps: Steps
    operands: tuple[int, ...]
    dtypes: tuple[Any, ...]
    numbers: tuple[tuple[Any, Any], ...]

    def computes_with(self, slot: int) -> bool:
        """Return whether a step computes with a tensor in float32 or float64."""
        among = (tl.float32, tl.float64)
        return any(own.slot == slot and own.dtype in among for step in self.steps.steps for own in step.arguments)


def embedded(
    program: Program, tensors: Sequence[torch.Tensor], numbers: Sequence[Any], operands: Sequence[int]
) -> Embedded:
    """Return the compile-time form of a program. Raises Decline for a call that the program does not serve."""
    kinds: list[Kind] = [TensorKind(x.dtype, not x.dim(), False) for x in tensors]
    typed = program._types((*kinds, *map(type, numbers)), ())
    if typed.kernel.asserting:
        raise Decline("a formula with assertions")
    for position, limits in typed.limits:
        if not limits.hold(numbers[position - len(tensors)]):
            raise Decline(f"the number {numbers[position - len(tensors)]} is out of range")
    steps, *parameters = typed.kernel.parameters
    dtypes = [own.dtype for own in parameters]
    count = len(tensors)
    return Embedded(
        steps.dtype,
        tuple(operands),
        tuple(dtypes[:count]),
        tuple(zip(map(_plain, numbers), dtypes[count:], strict=True)),
    )


def _plain(number: Any) -> Any:
    return int(number) if type(number) is bool else number


@dataclass(frozen=True)
class ResultProgram:
    """A program of a kernel's result, rounded to `dtype` as in memory, and of further operands.

    `uncontracted` says whether a step computes with the result unrounded.
    """

    embedded: Embedded
    dtype: Any
    uncontracted: bool

    @staticmethod
    def of(
        program: Program, result: torch.Tensor, tensors: Sequence[torch.Tensor], numbers: Sequence[Any]
    ) -> ResultProgram:
        """Return the compile-time form of a program of `result` and `tensors`. Raises Decline as `embedded` does."""
        every, dtype = (result, *tensors), result.dtype
        own = embedded(program, every, numbers, range(len(every)))
        exact = dtype.is_floating_point and dtype.itemsize >= 4
        return ResultProgram(own, TRITON_DTYPES[dtype], exact and own.computes_with(0))


@triton.constexpr_function
def _operand_count(program):
    return len(program.operands)


@triton.constexpr_function
def _operand(program, i):
    return program.operands[i]


@triton.constexpr_function
def _operand_dtype(program, i):
    return program.dtypes[i]


@triton.constexpr_function
def _number_count(program):
    return len(program.numbers)


@triton.constexpr_function
def _number(program, i):
    return program.numbers[i][0]


@triton.constexpr_function
def _number_dtype(program, i):
    return program.numbers[i][1]


@triton.constexpr_function
def _result_count(program):
    return len(program.steps.results)


@triton.jit
def evaluate_embedded(PROGRAM: tl.constexpr, values):
    """Return a tuple of the program's results, from the kernel's values."""
    STEPS: tl.constexpr = PROGRAM.steps
    slots = ()
    for i in tl.static_range(_operand_count(PROGRAM)):
        slots = slots + (values[_operand(PROGRAM, i)].to(_operand_dtype(PROGRAM, i)),)
    for i in tl.static_range(_number_count(PROGRAM)):
        slots = slots + (tl.full((), _number(PROGRAM, i), _number_dtype(PROGRAM, i)),)
    results = evaluate_program(STEPS, slots)
    if _result_count(PROGRAM) == 1:
        results = (results,)
    return results


@triton.jit
def evaluate_result_program(PROGRAM: tl.constexpr, result, operands):
    """Return a tuple of the results of a `ResultProgram`, from the kernel's result and the blocks of the operands."""
    EMBEDDED: tl.constexpr = PROGRAM.embedded
    rounded = result.to(PROGRAM.dtype)
    if PROGRAM.uncontracted:
        rounded = uncontracted(rounded)
    return evaluate_embedded(EMBEDDED, (rounded,) + operands)
