"""Launches of a plan in Triton's interpreter: data that names a kernel and its arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tritonite.runtime.interpreter import interpreting, on_host
from tritonite.runtime.nested import nest
from tritonite.runtime.opaque import opaque


@dataclasses.dataclass(frozen=True, eq=False)
class InterpretedCall:
    """A kernel, its parameters, and the arguments that are the same in every launch.

    Args:
        kernel: the function of triton.jit.
        names: the names of the parameters.
        kinds: for each parameter "constexpr" if `values` has its value, nested as tuple arguments are.
        values: the constants, nested alike.
    """

    kernel: Any
    names: tuple[str, ...]
    kinds: tuple[Any, ...]
    values: tuple[Any, ...]

    def arguments(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """Return the arguments by name. `leaves` are those that are no constants, flattened."""
        return dict(zip(self.names, nest(self.kinds, self.values, iter(leaves)), strict=True))

    def __call__(self, leaves: Sequence[Any], grid: tuple[int, ...]) -> None:
        arguments = self.arguments(leaves)
        with interpreting():
            self.kernel.run(grid=grid, warmup=False, **on_host(arguments))


@dataclasses.dataclass(frozen=True, eq=False)
class Remade:
    """A tensor descriptor without its tensor, which would stay alive. A call returns an equal one of another tensor."""

    fields: dict[str, Any]

    @staticmethod
    def like(descriptor: Any) -> Remade:
        names = [field.name for field in dataclasses.fields(descriptor) if field.name != "base"]
        return Remade({name: getattr(descriptor, name) for name in names})

    def __call__(self, base: torch.Tensor) -> TensorDescriptor:
        return TensorDescriptor(base, **self.fields)


class InterpretedLaunch:
    """The owner of a LaunchStep in the interpreter: a call launches with a step's parameters and grid.

    Args:
        template: the leaves of the call, with None in the place of each that a parameter of the step gives.
        holes: for each such leaf, by its index: None for the parameter itself, or the descriptor to make of it.
        call: the kernel.
    """

    def __init__(self, template: list[Any], holes: dict[int, Remade | None], call: InterpretedCall) -> None:
        self.template, self.holes, self.call = template, holes, call

    @opaque
    def __call__(self, given: Sequence[Any], grid: tuple[int, ...]) -> None:
        filled = list(self.template)
        for (i, remade), value in zip(self.holes.items(), given, strict=True):
            filled[i] = value if remade is None else remade(value)
        self.call(filled, grid)
