"""Pointwise programs before and after the formulas of rows.

The kernels load the operands of all programs and of the formulas as one list. A prologue makes operands of the
formulas of some of them, and an epilogue makes the outputs of the transformed element and of the last ones.

The epilogue of a reduction makes the outputs of a row's result, and its operands have an element per row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tritonite.dtypes import TRITON_DTYPES
from tritonite.engine.fusing import Prologue, epilogue_of, prologue_of
from tritonite.engine.pointwise.embedded import Embedded, ResultProgram, embedded
from tritonite.engine.rows.meta import RowsMeta
from tritonite.errors import Decline


@dataclass(frozen=True)
class RowPrologue:
    """The values of the formulas, from those in memory.

    Attributes:
        program: the program that makes an operand, or None.
        sources: for each value the index of its operand in memory, or -1 for the program's result.
        dtypes: the Triton dtype that each value is converted to, or None.
        leaf_values, apply_values: the number of values that the reduction takes, and that `apply` takes. The values
            after these are for the epilogue.
    """

    program: Embedded | None
    sources: tuple[int, ...]
    dtypes: tuple[Any, ...]
    leaf_values: int
    apply_values: int


class FusedRows(NamedTuple):
    """The operands in memory and the outputs of a call, and the programs that are fused into it.

    The reduction loads the first `leaf_operands` operands. `further` are the operands of a reduction's epilogue.
    """

    inputs: tuple[torch.Tensor, ...]
    leaf_operands: int
    outs: tuple[torch.Tensor, ...]
    prologue: RowPrologue | None = None
    epilogue: ResultProgram | None = None
    further: tuple[torch.Tensor, ...] = ()

    def meta(self, meta: RowsMeta) -> RowsMeta:
        """Return the parameters of the kernel with the programs."""
        if self.epilogue is not None:
            meta = dataclasses.replace(meta, epilogue=self.epilogue)
        if self.prologue is None:
            return meta
        return dataclasses.replace(
            meta,
            dtypes=tuple([TRITON_DTYPES[x.dtype] for x in self.inputs]),
            leaf_operands=self.leaf_operands,
            scalar_loads=False,
            prologue=self.prologue,
        )


def fused_rows(
    inputs: tuple[torch.Tensor, ...],
    outs: tuple[torch.Tensor, ...],
    leaf_operands: int,
    read: Sequence[torch.dtype],
    transformed: bool = False,
) -> FusedRows:
    """Return the operands and outputs in memory of a call with these, and its programs. Raises Decline.

    Args:
        read: the dtype that each input is converted to.
        transformed: whether `outs` have the shape of `inputs`.
    """
    prologue = next((found for x in inputs[:leaf_operands] if (found := prologue_of(x)) is not None), None)
    epilogue = epilogue_of(outs[0])
    if any(prologue_of(x) is not None for x in inputs[leaf_operands:]) and prologue is None:
        raise Decline("a program whose value is not reduced")
    if any(epilogue_of(out) is not None for out in outs[1:]):
        raise Decline("a program of another result than the first")
    after, further = None, ()
    if epilogue is not None:
        after = ResultProgram.of(epilogue.program, epilogue.result, epilogue.tensors, epilogue.numbers)
        further = tuple([x.expand(epilogue.result.shape) for x in epilogue.tensors])
        outs = (*epilogue.outs, *outs[1:])
    if prologue is None and (epilogue is None or not transformed):
        return FusedRows(inputs, leaf_operands, outs, None, after, further)
    memory: list[torch.Tensor] = []
    program = None if prologue is None else _program_before(prologue, inputs[0].shape, memory)
    sources = _sources(inputs[:leaf_operands], memory)
    loads = len(memory)
    sources += _sources(inputs[leaf_operands:], memory)
    count = len(sources)
    dtypes: list[Any] = [TRITON_DTYPES[dtype] for dtype in read]
    if transformed:
        sources += range(len(memory), len(memory) + len(further))
        dtypes += [None] * len(further)
        memory += further
        further = ()
    before = RowPrologue(program, tuple(sources), tuple(dtypes), leaf_operands, count)
    return FusedRows(tuple(memory), loads, outs, before, after, further)


def _sources(inputs: Sequence[torch.Tensor], memory: list[torch.Tensor]) -> list[int]:
    """Return the index of each input among the operands in memory, -1 for the prologue's, and append the others."""
    found = []
    for x in inputs:
        if prologue_of(x) is not None:
            found.append(-1)
        else:
            found.append(len(memory))
            memory.append(x)
    return found


def _program_before(prologue: Prologue, shape: torch.Size, memory: list[torch.Tensor]) -> Embedded:
    """Append the prologue's tensors to the operands in memory, and return its program.

    The first operand decides the layout of blocks, so it is the widest of those that vary along all dimensions.
    """
    tensors = prologue.tensors
    if all(x.shape != shape for x in tensors):
        raise Decline("a program of which every operand is broadcast")
    order = sorted(range(len(tensors)), key=lambda i: (tensors[i].shape != shape, -tensors[i].dtype.itemsize))
    position = {i: len(memory) + place for place, i in enumerate(order)}
    memory += [tensors[i].expand(shape) for i in order]
    return embedded(prologue.program, tensors, prologue.numbers, [position[i] for i in range(len(tensors))])
