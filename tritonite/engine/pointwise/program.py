"""A program: several pointwise formulas, each on operands and on results of earlier ones, evaluated by one launch.

A result of a step is rounded to the dtype in which the step alone would have stored it, and products and sums of
different steps are not contracted. So a program has the bits of its steps launched one by one, with two exceptions: the
compiler may contract within a formula otherwise than in the formula's own kernel, and a quotient by one element, which
is a product by its inverse there, is a division where a step has made the divisor.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl

from tritonite import dtypes
from tritonite.dtypes import TRITON_DTYPES
from tritonite.engine.iteration import broadcast_shape, contiguous_strides, strides_after_conversion
from tritonite.engine.movement import convert
from tritonite.engine.pointwise.declare import Laid, Pointwise
from tritonite.engine.pointwise.layout import VARIANTS, Operand
from tritonite.engine.pointwise.promotion import (
    Argument,
    ConstantKind,
    Kind,
    TensorKind,
    Typed,
    kernel_types,
    types_of,
)
from tritonite.engine.pointwise.steps import CompiledStep, StepArgument, Steps, evaluate_program
from tritonite.errors import Decline
from tritonite.runtime.symbols import Limits

# Roles of the parameters of a formula that a program can evaluate.
ROLES = frozenset(("promoted", "cast", "own", "exact", "static"))


@dataclass(frozen=True)
class Slot:
    """A value of a program by its index: the tensors come first, then the numbers, then the results of each step."""

    index: int


@dataclass(frozen=True)
class Step:
    """A call of a formula.

    Args:
        kernel: the formula's declaration. Its parameters have one of `ROLES`.
        arguments: for each parameter a `Slot`, or a `ConstantKind`. A number is an argument of one step only.
        dtypes: the dtypes of the results, for a kernel without promoted parameters; else empty.
    """

    kernel: Pointwise
    arguments: tuple[Slot | ConstantKind, ...]
    dtypes: tuple[torch.dtype, ...] = ()


class StepTypes(NamedTuple):
    """The dtypes of a step, and for each tensor argument its position among the parameters and its slot."""

    typed: Typed
    tensors: tuple[tuple[int, int], ...]


class Program(Pointwise):
    """A tensor operator of several formulas, with the tensors and then the numbers of a call as its arguments.

    All stored results have the shape that the tensors broadcast to. Equal arguments of `program` give one object.

    Args:
        tensors: the number of tensors.
        numbers: the number of numbers.
        steps: the formulas in order.
        results: the slots to store.
    """

    def __init__(self, tensors: int, numbers: int, steps: tuple[Step, ...], results: tuple[int, ...]) -> None:
        names = [f"t{i}" for i in range(tensors)] + [f"n{i}" for i in range(numbers)]
        super().__init__("program", evaluate_program, dict.fromkeys(names, "own"), output_dtypes=(None,) * len(results))
        self.tensors, self.steps, self.results = tensors, steps, results

    def _types(self, kinds: tuple[Kind, ...], out_dtypes: tuple[torch.dtype, ...]) -> Typed:
        found = _program_types(self, kinds, torch.get_default_dtype())
        if out_dtypes and out_dtypes != found.results:
            raise Decline(f"outputs of dtypes {out_dtypes}, the results have {found.results}")
        return found

    def _result_strides(
        self, typed: Typed, strided: Mapping[int, Laid], shape: tuple[int, ...], has_scalars: bool, on_cpu: bool
    ) -> tuple[tuple[int, ...], ...]:
        if len(strided) < self.tensors:
            raise Decline("a tensor on another device")
        kinds = tuple([TensorKind(own.dtype, not len(own.shape), False) for own in strided.values()])
        slots: dict[int, Laid] = dict(strided)
        each = _step_types(self, kinds, typed.number_types, torch.get_default_dtype())
        following = len(self.parameters)
        for step, (own, tensors) in zip(self.steps, each, strict=True):
            operands = {i: slots[slot] for i, slot in tensors}
            size = broadcast_shape([value.shape for value in operands.values()])
            for strides, dtype in zip(_strides_of(step.kernel, own, operands, size, on_cpu), own.results, strict=True):
                slots[following] = _Result(size, strides, dtype)
                following += 1
        if any([tuple(slots[i].shape) != shape for i in self.results]):
            raise Decline(f"a result that has not the shape {shape}, to which all tensors broadcast")
        return tuple([tuple(slots[i].stride()) for i in self.results])


def _strides_of(
    kernel: Pointwise, typed: Typed, operands: Mapping[int, Laid], shape: tuple[int, ...], on_cpu: bool
) -> tuple[tuple[int, ...], ...]:
    """Return the strides of a step's results, which it would allocate if it were called alone."""
    row_major = contiguous_strides(shape)
    plain = all([tuple(own.shape) == shape and tuple(own.stride()) == row_major for own in operands.values()])
    if plain and (not typed.with_numbers or 1 not in shape):
        return (row_major,) * len(typed.results)
    if kernel is convert:
        (operand,) = operands.values()
        return (strides_after_conversion(shape, tuple(operand.stride())),)
    return kernel._result_strides(typed, operands, shape, False, on_cpu)


@dataclass(frozen=True)
class _Result:
    """The metadata of a step's result."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def stride(self) -> tuple[int, ...]:
        return self.strides


@functools.lru_cache(maxsize=VARIANTS)
def program(tensors: int, numbers: int, steps: tuple[Step, ...], results: tuple[int, ...]) -> Program:
    """Return the program of these steps, one object for equal arguments."""
    return Program(tensors, numbers, steps, results)


@functools.lru_cache(maxsize=VARIANTS)
def _step_types(
    own: Program, tensors: tuple[TensorKind, ...], numbers: tuple[type, ...], default: torch.dtype
) -> tuple[StepTypes, ...]:
    """Return the dtypes of each step. Raises Decline for dtypes that a step's kernel does not serve."""
    kinds: list[Kind] = [*tensors, *numbers]
    found = []
    for step in own.steps:
        given = tuple([kinds[own.index] if isinstance(own, Slot) else own for own in step.arguments])
        typed = types_of(step.kernel, given, step.dtypes, default)
        operands = [(i, kind) for i, kind in enumerate(given) if isinstance(kind, TensorKind)]
        if not operands:
            raise Decline("a step without tensors")
        zero_dim = all([kind.zero_dim for _, kind in operands])
        slots = [(i, own.index) for i, own in enumerate(step.arguments) if isinstance(own, Slot)]
        found.append(StepTypes(typed, tuple([(i, slot) for i, slot in slots if isinstance(given[i], TensorKind)])))
        kinds += [TensorKind(dtype, zero_dim, False) for dtype in typed.results]
    return tuple(found)


@functools.lru_cache(maxsize=VARIANTS)
def _program_types(own: Program, kinds: tuple[Kind, ...], default: torch.dtype) -> Typed:
    """Return the dtypes of a call of a program, and its kernel's operands."""
    tensors = tuple([kind for kind in kinds if isinstance(kind, TensorKind)])
    numbers = tuple([kind for kind in kinds if isinstance(kind, type)])
    if len(tensors) != own.tensors or any([kind.item for kind in tensors]):
        raise Decline("a number or a tensor on another device in the place of a tensor")
    each = _step_types(own, tensors, numbers, default)
    count = len(kinds)
    number_types: dict[int, str] = {}
    limits: list[tuple[int, Limits]] = []
    stored: list[torch.dtype] = []
    steps: list[tuple[Any, list[StepArgument], tuple[torch.dtype, ...]]] = []
    unrounded: set[int] = set()
    for step, (typed, _) in zip(own.steps, each, strict=True):
        numbered = [(step.arguments[i], held) for i, held in typed.limits]
        limits += [(slot.index, held) for slot, held in numbered if isinstance(slot, Slot)]
        arguments = []
        for argument, parameter in zip(step.arguments, typed.kernel.parameters, strict=True):
            if not isinstance(argument, Slot):
                arguments.append(StepArgument(None, parameter.dtype))
                continue
            if own.tensors <= argument.index < count:
                number_types[argument.index] = typed.kernel.pointers[0][parameter.position]
            elif argument.index >= count and parameter.dtype in (tl.float32, tl.float64):
                unrounded.add(argument.index)
            arguments.append(StepArgument(argument.index, parameter.dtype, parameter.via))
        steps.append((step.kernel.formula, arguments, typed.results))
        stored += typed.results
    compiled, following = [], count
    for formula, arguments, results in steps:
        uncontracted = tuple(
            [r.is_floating_point and r.itemsize >= 4 and following + k in unrounded for k, r in enumerate(results)]
        )
        rounded = tuple([TRITON_DTYPES[r] for r in results])
        compiled.append(CompiledStep(formula, tuple(arguments), rounded, uncontracted))
        following += len(results)
    results = tuple([stored[slot - count] for slot in own.results])
    parameters = [Operand(None, None, Steps(tuple(compiled), own.results), role="program")]
    pointers = []
    for i, kind in enumerate(kinds):
        if isinstance(kind, TensorKind):
            parameters.append(Operand(i, (), TRITON_DTYPES[kind.dtype]))
            pointers.append("*" + dtypes.TRITON_NAMES[kind.dtype])
        else:
            parameters.append(Operand(i, None, tl.float64 if number_types[i] == "fp64" else tl.int64))
            pointers.append(number_types[i])
    itemsizes = [kind.dtype.itemsize for kind in tensors] + [dtype.itemsize for dtype in results]
    kernel = kernel_types(
        evaluate_program,
        tuple(parameters),
        tuple([type(operand.dtype) for operand in parameters]),
        tuple([Operand(j, (), TRITON_DTYPES[dtype]) for j, dtype in enumerate(results)]),
        (tuple(pointers), tuple(["*" + dtypes.TRITON_NAMES[dtype] for dtype in results])),
        max(itemsizes),
        min(itemsizes),
        any([step.kernel.asserting for step in own.steps]),
    )
    operands = [Argument(i, "tensor" if isinstance(kind, TensorKind) else "number") for i, kind in enumerate(kinds)]
    return Typed(results[0], results[0], results, tuple(operands), tuple(limits), True, kernel, numbers)
