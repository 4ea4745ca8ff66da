"""What a reduction and a row operator are, and the host functions that operators call.

A reduction is declared as `leaf / combine / project`: what each element contributes to a state, how two states become
one, and what results the last one has. A row operator applies a formula to every element and its row's results, as
softmax does: its `run` finds the `Space` of a call, cuts it into `Blocks`, and launches a kernel with the `Facts` that
it is compiled for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from tritonite import devices
from tritonite.dtypes import TRITON_DTYPES
from tritonite.engine.iteration import SECTOR, is_dense
from tritonite.engine.movement import move
from tritonite.engine.outputs import dimensions, outputs
from tritonite.engine.rows import blocks as choice
from tritonite.engine.rows import cooperative
from tritonite.engine.rows.blocks import Blocks, Traits
from tritonite.engine.rows.facts import BOTH, Facts
from tritonite.engine.rows.kernels import reduce, transform_rows
from tritonite.engine.rows.space import Space
from tritonite.errors import Decline
from tritonite.runtime.contract import empty, empty_strided, settings
from tritonite.runtime.launch import ASSERTING

# The dtype of a state that is an element's index in the reduced dimensions, and the identity's, which is beyond all.
INDEX = "index"
# Above so many elements one that lies across the results' grain is copied first: of fewer another launch takes as long.
_COPIED = 2**17


@dataclass(frozen=True)
class Stage:
    """A fold of a block's rows: `leaf(*values, *results, count)`, `combine` and `finish(folded, *results)`, if any.

    One that is `refining` makes the result before it more exact, which a sum of what adds up without rounding need not.
    """

    init: float | Callable[[torch.dtype], float]
    leaf: Any
    combine: Any
    finish: Any = None
    refining: bool = False

    def computed_in(self, compute: torch.dtype) -> Stage:
        """The stage as kernels take it, with a number for `init`."""
        return dataclasses.replace(self, init=self.init(compute)) if callable(self.init) else self


@dataclass(frozen=True, eq=False)
class Reduction:
    """How a set of elements becomes results, in functions of `triton.jit`.

    Args:
        init: the identity of `combine`, a number for each of the state's values but the index; or a function from the
            dtype computed in to them.
        leaf: the state of one element, from the operands' values, its index where the state has one, and, if
            `parametric`, the call's numbers.
        combine: (*state, *state) -> state, associative and commutative.
        follow: the same where all elements of the second state come after those of the first, if that costs less.
        project: the results, from the state, the count of elements and the numbers; both are float64.
        states: dtypes of the state's values: None for the dtype computed in, INDEX, which comes last, for an index.
        results: how many results there are.
        parametric: whether `leaf` takes the numbers.
        stages: a cheaper way to the state of a block of elements, or of those that a thread has, a fold each.
        gather: the state, from the results of the stages and the count of elements in the block.
        grow: the same for elements that do not lie next to each other, where the state ends with their count:
            (*state without the count, *values, share) -> state without the count, of a set and one more element, whose
            share of both is one scalar for a whole block.
        asserting: the leaf or `project` has assertions, which stop the program.
        ahead: whether a thread has registers for the elements of 32 bits of a next block, where rows stand upright.
    """

    init: tuple[Any, ...] | Callable[[torch.dtype], tuple[Any, ...]]
    leaf: Any
    combine: Any
    project: Any
    states: tuple[torch.dtype | str | None, ...] = (None,)
    results: int = 1
    parametric: bool = False
    stages: tuple[Stage, ...] = ()
    gather: Any = None
    follow: Any = None
    grow: Any = None
    asserting: bool = False
    ahead: bool = True

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        dims: Sequence[int],
        outs: Sequence[torch.Tensor],
        compute: torch.dtype,
        numbers: Sequence[float] = (),
        read: Sequence[torch.dtype] | None = None,
    ) -> None:
        """Reduce `inputs`, of one shape, over `dims` into `outs`, which have the other dimensions, or all with size 1.

        Values are read as `compute` or as the dtypes `read`.
        """
        inputs, outs = tuple(inputs), tuple(outs)
        space = Space.of(inputs, tuple(dims), (), outs, INDEX in self.states)
        if not space.n_kept:
            return
        blocks = choice.for_reduction(space, len(self.states))
        facts = self.facts(space, blocks, compute, numbers, read or [compute] * len(inputs))
        count, padded = float(space.n_reduced), _padded(numbers)
        if blocks.splits == 1:
            self._launch(inputs, outs, space, blocks, facts, count, padded, self.asserting)
            return
        partial = self.states_of_splits(inputs, space, blocks, compute, facts, padded)
        # The states of all splits, in rows of their own.
        strides = (((1,),) * len(partial), ((space.n_kept,),) * len(partial))
        of_states = space._replace(
            n_reduced=blocks.splits,
            shapes=(space.shapes[0], ()),
            kept=(strides[0], (), space.kept[2]),
            reduced=(strides[1], ()),
            kinds=(BOTH,) * len(partial),
            index_strides=(),
            beside=1,
        )
        last = choice.for_states(of_states)
        facts = facts.of_states(**last.facts(of_states))
        self._launch(partial, outs, of_states, last, facts, count, padded, self.asserting)

    @staticmethod
    def _launch(
        inputs: tuple[torch.Tensor, ...],
        outs: tuple[torch.Tensor, ...],
        space: Space,
        blocks: Blocks,
        facts: Facts,
        count: float,
        padded: tuple[Any, Any],
        asserting: bool = False,
    ) -> None:
        reduce[blocks.grid](
            *(inputs, outs, space.shapes, space.strides, space.sizes, blocks.steps, count, *padded),
            FACTS=facts,
            **blocks.options | (ASSERTING if asserting else {}),
        )

    def states_of_splits(
        self,
        inputs: tuple[torch.Tensor, ...],
        space: Space,
        blocks: Blocks,
        compute: torch.dtype,
        facts: Facts,
        padded: tuple[Any, Any],
    ) -> tuple[torch.Tensor, ...]:
        """For each of the state's values a tensor of (splits, n_kept): what the programs that split rows find."""
        shape, device = (blocks.splits, space.n_kept), inputs[0].device
        partial = tuple([empty(shape, dtype, device) for dtype in self._dtypes(space, compute)])
        facts = dataclasses.replace(facts, project=None)
        self._launch(inputs, partial, space, blocks, facts, 0.0, padded, self.asserting)
        return partial

    def _dtypes(self, space: Space, compute: torch.dtype) -> list[torch.dtype]:
        found = {None: compute, INDEX: torch.int64 if space.integer is tl.int64 else torch.int32}
        return [found.get(dtype, dtype) for dtype in self.states]  # type: ignore[arg-type, misc]

    def facts(
        self,
        space: Space,
        blocks: Blocks,
        compute: torch.dtype,
        numbers: Sequence[float],
        read: Sequence[torch.dtype],
    ) -> Facts:
        """What kernels over a space are compiled for, whose operands are read as the dtypes `read`."""
        init = self.init(compute) if callable(self.init) else self.init
        of_blocks = blocks.facts(space)
        of_blocks["ahead"] = of_blocks["ahead"] and (self.ahead or space.itemsize < 4)
        states, invariant = self._dtypes(space, compute), settings().invariant
        # Stages group elements as a layout has them.
        group, consecutive = blocks.groups(space)
        staged = (space.inner or (self.grow is None and (of_blocks["once"] or group > 1))) and not invariant
        return Facts(
            leaf=self.leaf,
            combine=self.combine,
            # Where elements lie in the order of their indices.
            follow=self.follow if self.follow and space.index_strides == (1,) else self.combine,
            project=self.project,
            init=(*init, torch.iinfo(states[-1]).max) if INDEX in self.states else init,
            stages=tuple([stage.computed_in(compute) for stage in self.stages]) if staged else (),
            gather=self.gather if staged else None,
            grow=None if space.inner or invariant else self.grow,
            leaf_numbers=len(numbers) if self.parametric else 0,
            numbers=len(numbers),
            states=tuple([TRITON_DTYPES[dtype] for dtype in states]),
            kinds=space.kinds,
            dtypes=tuple([TRITON_DTYPES[dtype] for dtype in read]),
            folded=len(space.kinds),
            aligned=space.aligned,
            part=space.part,
            shifted=space.shifted,
            beside=space.beside if blocks.rows > 1 else 1,
            one_by_one=space.one_by_one and devices.current.ptx,
            upright=not space.inner and not invariant,
            group=group,
            consecutive=consecutive,
            index=space.integer,
            invariant=invariant,
            **of_blocks,
        )


@dataclass(frozen=True, eq=False)
class RowTransform:
    """A formula over every element and the results of a reduction of its row: `apply(*values, *results, *numbers)`.

    The reduction's leaf takes the first `leaf_inputs` of the operands, or all, and `apply` the first `applied` results.
    With `flushing` what libdevice's functions find may be 0 where it is subnormal.
    """

    reduction: Reduction
    apply: Any
    leaf_inputs: int | None = None
    applied: int | None = None
    flushing: bool = False

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        dims: Sequence[int],
        outs: Sequence[torch.Tensor],
        compute: torch.dtype,
        numbers: Sequence[float] = (),
        row_outs: Sequence[torch.Tensor] = (),
        written: Sequence[int] = (),
    ) -> None:
        """Transform `inputs`, of one shape, into `outs` of that shape, where rows lie along `dims`.

        `row_outs` receive those results of the rows that `written` numbers.
        """
        inputs, outs, row_outs, dims = _with_the_grain(inputs, outs[0]), tuple(outs), tuple(row_outs), tuple(dims)
        reduction, folded = self.reduction, self.leaf_inputs or len(inputs)
        space = Space.of(inputs, dims, outs, row_outs, False)
        if not space.n_kept:
            return
        device = inputs[0].device
        states = len(reduction.states)
        staged = bool(reduction.stages)
        space = choice.by_words(space, (*inputs, *outs), staged)
        traits = Traits(inputs[0].dtype.itemsize, staged, folded, compute, states)
        blocks = choice.for_transform(space, traits)
        given: tuple[torch.Tensor, ...] = ()
        scratch: tuple[torch.Tensor, ...] = ()
        if blocks.sharing > 1:
            scratch = (cooperative.scratch(space.n_kept, states, blocks.sharing, device),)
        in_parts = choice.are_in_parts(space, traits, blocks)
        if blocks.splits > 1 or in_parts:
            shape = [1 if d in dims else size for d, size in enumerate(inputs[0].shape)]
            given = tuple([empty(shape, compute, device) for _ in range(reduction.results)])
            reduction.run(inputs[:folded], dims, given, compute, numbers)
            along = dims
            if in_parts:
                # Parts are rows by themselves, whose weights are one number each.
                along, row_outs, given = _of_parts(inputs, dims, row_outs, given)
            space = Space.of(inputs, along, outs, (*row_outs, *given), False)
            if in_parts:
                blocks = choice.for_parts(space)
            elif blocks.rows == 1:
                space = choice.by_words(space, (*inputs, *outs), staged)
        facts = reduction.facts(space, blocks, compute, numbers, [compute] * len(inputs))
        facts = dataclasses.replace(
            facts,
            apply=self.apply,
            # With the next block loaded ahead: a gradient of softmax by columns of (1024, 65536) takes 205 us for 245.
            upright=False,
            # With few registers, as stages need, more rows are read at a time than a cache keeps until they are again.
            stages=facts.stages if space.inner or facts.once else (),
            folded=folded,
            results=reduction.results,
            applied=self.applied or reduction.results,
            written=tuple(written),
            unrolled=choice.unrolled(space, traits, blocks),
            common=choice.modifier_of_common(space, inputs),
        )
        if space.shifted:
            facts = dataclasses.replace(facts, edges=dataclasses.replace(facts, block=(1, 2 * space.aligned)))
        transform_rows[blocks.grid](
            *(inputs, outs, (row_outs, given, scratch), space.shapes, space.strides, space.sizes, blocks.steps),
            *(float(space.n_reduced), *_padded(numbers)),
            FACTS=facts,
            **blocks.options | (devices.current.flushing if self.flushing else {}),
        )


def _with_the_grain(inputs: Sequence[torch.Tensor], out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The inputs, where they lie across the grain of the results as copies that do not.

    However a program's rows are chosen, of one of the two it would have one element from each sector of memory: a
    gradient of log_softmax over the first dimension of (38, 1325, 38), whose other two are transposed in one operand,
    took 38 us where all of its memory takes 5.4 (H200).
    """
    if out.numel() <= _COPIED or not is_dense(out.shape, out.stride()):
        return tuple(inputs)
    found = []
    for x in inputs:
        if _lies_across(x, out):
            copy = empty_strided(out.shape, out.stride(), x.dtype, x.device)
            move(x, copy)
            x = copy
        found.append(x)
    return tuple(found)


def _lies_across(x: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether what is next to each other in either of two tensors of one shape is in several sectors of the other."""
    dims = [d for d, size in enumerate(out.shape) if size > 1]
    if any(not x.stride(d) for d in dims):
        return False
    own, other = min(dims, key=x.stride), min(dims, key=out.stride)
    return min(x.stride(other) * x.itemsize, out.stride(own) * out.itemsize) >= SECTOR


def _of_parts(inputs: Sequence[torch.Tensor], dims: tuple[int, ...], *of_rows: tuple[torch.Tensor, ...]) -> Any:
    """The dimensions of the parts of rows along `dims`, and tensors of rows as if they were of parts.

    A part is what all operands that are not the same throughout a row have one element for, or more than one.
    """
    sizes, rank = inputs[0].shape, inputs[0].dim()
    along = tuple([d for d in dims if sizes[d] > 1])
    for x in inputs:
        own = tuple([d for d in along if not x.stride(d)])
        along = own if own and len(own) < len(along) else along
    shape = [1 if d in along else size for d, size in enumerate(sizes)]
    kept = tuple([None if d in dims else slice(None) for d in range(rank)])
    return along, *[tuple([(x if x.dim() == rank else x[kept]).expand(shape) for x in each]) for each in of_rows]


def _padded(numbers: Sequence[Any]) -> tuple[Any, Any]:
    """Two numbers for a kernel, which converts them: they are handed on as they are."""
    first, second = (*numbers, 0.0, 0.0)[:2]
    return first, second


def reduced(
    reduction: Reduction,
    inputs: Sequence[torch.Tensor],
    dim: int | Sequence[int] | None,
    keepdim: bool,
    result_dtypes: Sequence[torch.dtype],
    outs: Sequence[torch.Tensor],
    compute: torch.dtype,
    *,
    numbers: Sequence[float] = (),
    read: Sequence[torch.dtype] | None = None,
    empty: bool = True,
    keep_empty: bool = False,
) -> Sequence[torch.Tensor]:
    """The results of a reduction over `dim`, fresh or in `outs`: the host function of most reductions.

    No dimensions stand for all of them, unless `keep_empty`. Declines where ATen must raise an error: for wrong
    dimensions, for outputs of another shape or dtype, and for sets of no elements unless `empty`.
    """
    shape = tuple(inputs[0].shape)
    dims = dimensions(dim, len(shape), keep_empty)
    if not empty and any(shape[d] == 0 for d in dims):
        raise Decline("a set of no elements")
    result = tuple(1 if i in dims else size for i, size in enumerate(shape) if keepdim or i not in dims)
    outs = outputs(inputs, [result] * len(result_dtypes), result_dtypes, outs)
    reduction.run(inputs, dims, outs, compute, numbers, read)
    return outs
