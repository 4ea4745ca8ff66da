"""The declaration of reductions and row operators, and the host functions that run them.

A reduction is declared by `leaf`, `combine` and `project`: the state of one element, the state of two sets, and the
results of the last state. A row operator applies a formula to every element and its row's results, as softmax does.
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
from tritonite.engine.rows.blocks import RowBlocks, RowTraits
from tritonite.engine.rows.fusion import FusedRows, fused_rows
from tritonite.engine.rows.kernels import reduce, transform_rows
from tritonite.engine.rows.meta import BOTH, RowsMeta
from tritonite.engine.rows.space import RowSpace
from tritonite.engine.rows.table import ROWS
from tritonite.errors import Decline
from tritonite.runtime.contract import empty, empty_strided, settings
from tritonite.runtime.launch import ASSERTING

# The dtype of a state that is an element's row-major index in the reduced dimensions. Its identity is above all
# indices.
INDEX = "index"


@dataclass(frozen=True)
class Stage:
    """A reduction of a block's rows by `leaf(*values, *results, count)`, `combine` and an optional `finish`.

    `finish` takes the reduced values and the results of earlier stages. A `refining` stage improves the accuracy of the
    stage before it. It is skipped for sums that need no rounding.
    """

    init: float | Callable[[torch.dtype], float]
    leaf: Any
    combine: Any
    finish: Any = None
    refining: bool = False

    def computed_in(self, compute: torch.dtype) -> Stage:
        """Return the stage as kernels take it, with a number for `init`."""
        return dataclasses.replace(self, init=self.init(compute)) if callable(self.init) else self


@dataclass(frozen=True, eq=False)
class Reduction:
    """A map from a set of elements to results, by functions of `triton.jit`.

    Args:
        init: the identity of `combine`: a number for each value of the state except an index, or a function from the
            compute dtype to these numbers.
        leaf: the state of one element, from the operands' values, the element's index if the state has one, and the
            call's numbers if `parametric`.
        combine: (*state, *state) -> state, associative and commutative.
        follow: a cheaper `combine` for a second state whose elements all come after those of the first.
        project: the results, from the state, the count of elements and the numbers; both are float64.
        states: dtypes of the state's values: None for the compute dtype, INDEX, which comes last, for an index.
        results: the number of results.
        parametric: whether `leaf` takes the numbers.
        stages: a cheaper way to the state of a block, or of the elements of a thread, one reduction per stage.
        gather: the state, from the results of the stages and the count of elements in the block.
        grow: the same for a column reduction. It adds one element to a state, whose last value is the count:
            (*state without the count, *values, weight) -> state without the count. `weight` is 1 / count, the same for
            a whole block.
        asserting: whether `leaf` or `project` has assertions, which stop the program.
        prefetch: whether a thread of a column reduction has registers for the next block of 32-bit elements.
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
    prefetch: bool = True

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        dims: Sequence[int],
        outs: Sequence[torch.Tensor],
        compute: torch.dtype,
        numbers: Sequence[float] = (),
        read: Sequence[torch.dtype] | None = None,
    ) -> None:
        """Reduce `inputs`, of one shape, over `dims` into `outs`.

        `outs` have the other dimensions, or all with the reduced ones of size 1. Values are converted to `compute`, or
        to the dtypes `read`.
        """
        read = read or [compute] * len(inputs)
        fused = fused_rows(tuple(inputs), tuple(outs), len(inputs), read)
        inputs, outs = fused.inputs, fused.outs
        rows = (outs, fused.further)
        space = RowSpace.of(inputs, tuple(dims), (), (*outs, *fused.further), INDEX in self.states)
        if not space.n_kept:
            return
        blocks = choice.for_reduction(space, len(self.states))
        meta = fused.meta(self.meta(space, blocks, compute, numbers, read))
        count, padded = float(space.n_reduced), _padded(numbers)
        if blocks.splits == 1:
            self._launch(inputs, rows, space, blocks, meta, count, padded, self.asserting)
            return
        partial = self.states_of_splits(inputs, space, blocks, compute, meta, padded)
        # The space of the stored states: n_kept rows of one element per split.
        strides = (((1,),) * len(partial), ((space.n_kept,),) * len(partial))
        of_states = space._replace(
            n_reduced=blocks.splits,
            shapes=(space.shapes[0], ()),
            kept=(strides[0], (), space.kept[2]),
            reduced=(strides[1], ()),
            kinds=(BOTH,) * len(partial),
            index_strides=(),
            kept_alignment=1,
        )
        last = choice.for_states(of_states)
        meta = meta.of_states(**last.meta_fields(of_states))
        self._launch(partial, rows, of_states, last, meta, count, padded, self.asserting)

    @staticmethod
    def _launch(
        inputs: tuple[torch.Tensor, ...],
        row_tensors: tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]],
        space: RowSpace,
        blocks: RowBlocks,
        meta: RowsMeta,
        count: float,
        padded: tuple[Any, Any],
        asserting: bool = False,
    ) -> None:
        reduce[blocks.grid](
            *(inputs, row_tensors, space.shapes, space.strides, space.sizes, blocks.steps, count, *padded),
            META=meta,
            **blocks.options | (ASSERTING if asserting else {}),
        )

    def states_of_splits(
        self,
        inputs: tuple[torch.Tensor, ...],
        space: RowSpace,
        blocks: RowBlocks,
        compute: torch.dtype,
        meta: RowsMeta,
        padded: tuple[Any, Any],
    ) -> tuple[torch.Tensor, ...]:
        """Return the states of split rows: a tensor of shape (splits, n_kept) for each value of the state."""
        shape, device = (blocks.splits, space.n_kept), inputs[0].device
        partial = tuple([empty(shape, dtype, device) for dtype in self._dtypes(space, compute)])
        meta = dataclasses.replace(meta, project=None, epilogue=None)
        self._launch(inputs, (partial, ()), space, blocks, meta, 0.0, padded, self.asserting)
        return partial

    def _dtypes(self, space: RowSpace, compute: torch.dtype) -> list[torch.dtype]:
        found = {None: compute, INDEX: torch.int64 if space.integer is tl.int64 else torch.int32}
        return [found.get(dtype, dtype) for dtype in self.states]  # type: ignore[arg-type, misc]

    def meta(
        self,
        space: RowSpace,
        blocks: RowBlocks,
        compute: torch.dtype,
        numbers: Sequence[float],
        read: Sequence[torch.dtype],
    ) -> RowsMeta:
        """Return the compile-time parameters of kernels over a space; operands are converted to the dtypes `read`."""
        init = self.init(compute) if callable(self.init) else self.init
        of_blocks = blocks.meta_fields(space)
        of_blocks["prefetch"] = of_blocks["prefetch"] and (self.prefetch or space.itemsize < 4)
        states, invariant = self._dtypes(space, compute), settings().invariant
        # Stages group elements by their layout, which invariant mode must not depend on.
        group, consecutive = blocks.groups(space)
        staged = (space.inner or (self.grow is None and (of_blocks["single_block"] or group > 1))) and not invariant
        return RowsMeta(
            leaf=self.leaf,
            combine=self.combine,
            # Elements of a block are combined in the order of their indices.
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
            # A prologue has operands of its own, whose dtypes `FusedRows.meta` knows.
            dtypes=tuple([TRITON_DTYPES[dtype] for dtype in read]),
            leaf_operands=len(space.kinds),
            aligned=space.aligned,
            segment=space.segment,
            misaligned=space.misaligned,
            kept_alignment=space.kept_alignment if blocks.rows > 1 else 1,
            scalar_loads=space.scalar_loads and devices.current.ptx,
            results=self.results,
            column_reduction=not space.inner and not invariant,
            group=group,
            consecutive=consecutive,
            index=space.integer,
            invariant=invariant,
            **of_blocks,
        )


@dataclass(frozen=True, eq=False)
class RowTransform:
    """A formula over every element and the results of its row's reduction: `apply(*values, *results, *numbers)`.

    `leaf_inputs` is the number of operands that the reduction takes, from the first; None for all. `applied` is the
    number of results that `apply` takes; None for all. With `flushing`, functions of libdevice may flush subnormal
    results to 0.
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
        """Transform rows of `inputs` along `dims` into `outs`; all have one shape.

        `row_outs` receive the results of the rows that `written` numbers.
        """
        row_outs, dims = tuple(row_outs), tuple(dims)
        reduction, leaf_inputs = self.reduction, self.leaf_inputs or len(inputs)
        fused = fused_rows(tuple(inputs), tuple(outs), leaf_inputs, [compute] * len(inputs), transformed=True)
        given_inputs, outs, leaf_operands = tuple(inputs), fused.outs, fused.leaf_operands
        if fused.prologue is None:
            inputs = given_inputs = _along_the_grain(inputs, outs[0])
        else:
            inputs = _all_along_the_grain(fused)
        space = RowSpace.of(inputs, dims, outs, row_outs, False)
        if not space.n_kept:
            return
        device = inputs[0].device
        states = len(reduction.states)
        staged = bool(reduction.stages)
        space = choice.with_aligned_loads(space, (*inputs, *outs), staged)
        traits = RowTraits(inputs[0].dtype.itemsize, staged, leaf_operands, compute, states)
        blocks = choice.for_transform(space, traits)
        given: tuple[torch.Tensor, ...] = ()
        scratch: tuple[torch.Tensor, ...] = ()
        if blocks.programs_per_row > 1:
            scratch = (cooperative.scratch(space.n_kept, states, blocks.programs_per_row, device),)
        segmented = choice.are_segmented(space, traits, blocks)
        if blocks.splits > 1 or segmented:
            shape = [1 if d in dims else size for d, size in enumerate(inputs[0].shape)]
            given = tuple([empty(shape, compute, device) for _ in range(reduction.results)])
            reduction.run(given_inputs[:leaf_inputs], dims, given, compute, numbers)
            along = dims
            if segmented:
                # Segments are rows by themselves, whose weights are one number each.
                along, row_outs, given = _of_segments(inputs, dims, row_outs, given)
            space = RowSpace.of(inputs, along, outs, (*row_outs, *given), False)
            if segmented:
                blocks = choice.for_segments(space)
            elif blocks.rows == 1:
                space = choice.with_aligned_loads(space, (*inputs, *outs), staged)
        meta = fused.meta(reduction.meta(space, blocks, compute, numbers, [compute] * len(inputs)))
        meta = dataclasses.replace(
            meta,
            apply=self.apply,
            # The loop for rows, which loads the next block before it combines the present one, serves columns here too.
            # regressions: softmax_backward_columns_load_ahead
            column_reduction=False,
            # Stages take few registers, so more rows would be in flight than a cache keeps for the second pass.
            stages=meta.stages if space.inner or meta.single_block else (),
            leaf_operands=leaf_operands,
            applied=self.applied or reduction.results,
            written=tuple(written),
            unrolled=choice.unrolled(space, traits, blocks),
            weight_modifier=choice.weight_modifier(space, inputs),
        )
        if space.misaligned:
            meta = dataclasses.replace(meta, edges=dataclasses.replace(meta, block=(1, 2 * space.aligned)))
        transform_rows[blocks.grid](
            *(inputs, outs, (row_outs, given, scratch), space.shapes, space.strides, space.sizes, blocks.steps),
            *(float(space.n_reduced), *_padded(numbers)),
            META=meta,
            **blocks.options | (devices.current.flushing if self.flushing else {}),
        )


def _all_along_the_grain(fused: FusedRows) -> tuple[torch.Tensor, ...]:
    """Return the operands of a call with programs. Decline operands that `_along_the_grain` would copy."""
    if fused.outs[0].numel() > ROWS[devices.current.kind].copied_elements and any(
        _lies_across(x, fused.outs[0]) for x in fused.inputs
    ):
        raise Decline("operands whose contiguous dimension is not the result's")
    return fused.inputs


def _along_the_grain(inputs: Sequence[torch.Tensor], out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the inputs, each replaced by a copy in `out`'s layout if its contiguous dimension is another one.

    Without the copy, any choice of rows reads one of the two layouts at one element per sector. regressions:
    log_softmax_copied_along_the_grain
    """
    if out.numel() <= ROWS[devices.current.kind].copied_elements or not is_dense(out.shape, out.stride()):
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
    """Return whether elements that are contiguous in either of two tensors are a sector or more apart in the other."""
    dims = [d for d, size in enumerate(out.shape) if size > 1]
    if any(not x.stride(d) for d in dims):
        return False
    own, other = min(dims, key=x.stride), min(dims, key=out.stride)
    return min(x.stride(other) * x.itemsize, out.stride(own) * out.itemsize) >= SECTOR


def _of_segments(inputs: Sequence[torch.Tensor], dims: tuple[int, ...], *of_rows: tuple[torch.Tensor, ...]) -> Any:
    """Return the dimensions of the segments of rows along `dims`, then each group of row tensors expanded to segments.

    All operands that vary within a row have either one element or several for a segment.
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
    """Return two numbers for a kernel, which converts them."""
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
    """Return the results of a reduction over `dim`, fresh or in `outs`: the host function of most reductions.

    An empty `dim` stands for all dimensions, unless `keep_empty`. Declines where ATen raises an error: for wrong
    dimensions, for outputs of another shape or dtype, and for empty sets unless `empty`.
    """
    shape = tuple(inputs[0].shape)
    dims = dimensions(dim, len(shape), keep_empty)
    if not empty and any(shape[d] == 0 for d in dims):
        raise Decline(f"reduction of an empty dimension, of shape {shape}, without an identity")
    result = tuple(1 if i in dims else size for i, size in enumerate(shape) if keepdim or i not in dims)
    outs = outputs(inputs, [result] * len(result_dtypes), result_dtypes, outs)
    reduction.run(inputs, dims, outs, compute, numbers, read)
    return outs
