"""`tritonite::pointwise_program`, the operator that a graph has in the place of several pointwise operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tritonite import dtypes
from tritonite.engine.pointwise.program import Program
from tritonite.install import library
from tritonite.registry import Declaration, LibraryFormulas
from tritonite.registry.programs import from_text

NAME = "tritonite::pointwise_program"
# Numbers in the place of symbolic ones, of which a fake call reads the type only.
_EXAMPLES: dict[type, Any] = {torch.SymBool: True, torch.SymInt: 1, torch.SymFloat: 1.0}


def _program(operands: Sequence[torch.Tensor], numbers: Sequence[Any], program: str) -> Program:
    return from_text(program, len(operands), len(numbers))


def _host(values: Sequence[Any], outs: Sequence[torch.Tensor]) -> Sequence[Any]:
    operands, numbers, program = values
    return [list(_program(operands, numbers, program).run((*operands, *numbers)))]


def _fake(operands: Sequence[torch.Tensor], numbers: Sequence[Any], program: str) -> list[torch.Tensor]:
    given = [_EXAMPLES.get(type(number), number) for number in numbers]
    device, fresh = _program(operands, numbers, program).outputs((*operands, *given))
    return [torch.empty_strided(own.shape, own.strides, dtype=own.dtype, device=device) for own in fresh]


_declaration = Declaration(
    packets=(NAME,),
    arguments=("operands", "numbers", "program"),
    optional=frozenset(),
    host=_host,
    family="graph",
    kernels=(),
    accepts=dtypes.ALL,
    promotion="own",
    method="",
    watched=False,
    library=LibraryFormulas(
        f"{NAME.partition('::')[2]}(Tensor[] operands, Scalar[] numbers, str program) -> Tensor[]", _fake
    ),
)


def pointwise_program() -> Any:
    """Return the overload `torch.ops.tritonite.pointwise_program.default`, registered with torch on first use.

    Its arguments are tensors, numbers, and the text of a program (`registry/programs.py`). It returns the list of the
    program's results. It is an operator of inference: it has no gradient.
    """
    library.register([_declaration])
    return library.overload_of(NAME)
