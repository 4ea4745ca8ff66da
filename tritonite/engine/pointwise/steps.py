"""The device function of programs: formulas one after the other, each on operands and on results of earlier ones."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from tritonite import devices
from tritonite.language.contraction import uncontracted


class StepArgument(NamedTuple):
    """An argument of a step's formula.

    Attributes:
        slot: the index of a value, or None for a compile-time constant, which is `dtype`.
        dtype: the Triton dtype in which the value reaches the formula.
        via: a Triton dtype to which the value is converted before that, or None.
    """

    slot: int | None
    dtype: Any
    via: Any = None


class CompiledStep(NamedTuple):
    """A call of a formula, whose results are appended to the slots.

    Attributes:
        formula: a function of `triton.jit`.
        dtypes: the Triton dtype that each result is rounded to.
        uncontracted: for each result, whether a later step computes with it unrounded, in float32 or float64.
    """

    formula: Any
    arguments: tuple[StepArgument, ...]
    dtypes: tuple[Any, ...]
    uncontracted: tuple[bool, ...]


@dataclass(frozen=True)
class Steps:
    """The compile-time form of a program. The first slots are the kernel's operands; `results` are slots to store."""

    steps: tuple[CompiledStep, ...]
    results: tuple[int, ...]

    @functools.cached_property
    def digest(self) -> str:
        """A hash of all steps and of their formulas' source, equal in every process."""
        described = [
            (getattr(own.formula, "cache_key", own.formula.fn.__qualname__), *map(str, own[1:])) for own in self.steps
        ]
        return hashlib.sha256(repr((described, self.results)).encode()).hexdigest()[:24]

    def __repr__(self) -> str:
        # The key of a compiled kernel has this text in the place of the constant.
        return f"Steps({self.digest})"


@triton.constexpr_function
def _step_count(steps):
    return len(steps.steps)


@triton.constexpr_function
def _formula(steps, i):
    return steps.steps[i].formula


@triton.constexpr_function
def _result_count(steps, i):
    return len(steps.steps[i].dtypes)


@triton.constexpr_function
def _result_dtype(steps, i, k):
    return steps.steps[i].dtypes[k]


@triton.constexpr_function
def _is_apart(steps, i, k):
    return steps.steps[i].uncontracted[k]


@triton.constexpr_function
def _stored_count(steps):
    return len(steps.results)


@triton.constexpr_function
def _stored(steps, j):
    return steps.results[j]


def _arguments(slots: Any, step: CompiledStep) -> list[Any]:
    """Return the arguments of a step's formula, converted."""
    values = [own.dtype if own.slot is None else slots[own.slot] for own in step.arguments]
    return [
        value if own.slot is None else value.to(own.dtype if own.via is None else own.via).to(own.dtype)
        for own, value in zip(step.arguments, values, strict=True)
    ]


def _arguments_in_interpreter(slots, steps, i):
    return _arguments(slots, steps.steps[i])


@tl.core.builtin
def _arguments_in_compiler(slots, steps, i, _semantic=None):
    values = []
    for own in steps.value.steps[i.value if isinstance(i, tl.constexpr) else i].arguments:
        if own.slot is None:
            values.append(tl.constexpr(own.dtype))
            continue
        value = slots[own.slot]
        if own.via is not None:
            value = value.to(own.via, _semantic=_semantic)
        values.append(value.to(own.dtype, _semantic=_semantic))
    return tl.tuple(values)


step_arguments = _arguments_in_interpreter if devices.current.interpreted else _arguments_in_compiler


@triton.jit
def evaluate_program(STEPS: tl.constexpr, operands):
    """Evaluate the formulas in order, and round each result to the dtype in which it would be stored."""
    slots = operands
    for i in tl.static_range(_step_count(STEPS)):
        found = _formula(STEPS, i)(*step_arguments(slots, STEPS, i))
        if _result_count(STEPS, i) == 1:
            found = (found,)
        for k in tl.static_range(_result_count(STEPS, i)):
            value = found[k].to(_result_dtype(STEPS, i, k))
            if _is_apart(STEPS, i, k):
                value = uncontracted(value)
            slots = slots + (value,)
    results = ()
    for j in tl.static_range(_stored_count(STEPS)):
        results = results + (slots[_stored(STEPS, j)],)
    if _stored_count(STEPS) == 1:
        results = results[0]
    return results
