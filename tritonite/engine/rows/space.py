"""The space of rows of a call: its kept and its reduced dimensions, and the strides of operands over them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl

from tritonite import devices
from tritonite.engine.iteration import INT32_LIMIT, SECTOR, collapse, span
from tritonite.engine.rows.meta import BOTH, KEPT, REDUCED, SEGMENTED
from tritonite.engine.rows.table import ROWS


class RowSpace(NamedTuple):
    """The kept and the reduced dimensions, each group collapsed and fastest first, and the operands' strides.

    `kept` has the strides of the inputs, of the outputs of the inputs' shape, and of the outputs of the kept dimensions
    alone. `reduced` has the strides of the first two. `shapes` leave out the slowest dimension of each group. An
    operand that one stride serves has no others, so that it is read in vectors whatever the others need.

    `aligned` is 1 if rows of all inputs start at 16 bytes, and 0 if nothing is known. Above 1 it is the vector width: a
    divisor of the length of rows, of all strides between them and of the length of their segments. `segment` divides
    the length of segments, for operands of the kind SEGMENTED. `itemsize` is in bytes, of the first input.

    `misaligned` rows start off the vector boundary, and are read in aligned vectors of `aligned` elements. The elements
    before the first and behind the last whole vector are read separately.

    In a column reduction of contiguous columns, `kept_alignment` divides the number of columns and all strides. It is 1
    if 16 divides them, because Triton then finds out itself. If not even 2 divides them, the rows have `odd_strides`.
    16-bit elements without a common divisor, or without contiguous columns, have `scalar_loads`.
    """

    n_kept: int
    n_reduced: int
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    kept: tuple[tuple[tuple[int, ...], ...], ...]
    reduced: tuple[tuple[tuple[int, ...], ...], ...]
    index_strides: tuple[int, ...]
    kinds: tuple[int, ...]
    integer: Any
    itemsize: int
    aligned: int
    segment: int
    misaligned: bool = False
    kept_alignment: int = 1
    scalar_loads: bool = False
    odd_strides: bool = False

    @property
    def inner(self) -> bool:
        """Return whether the reduced dimensions are the contiguous ones, and not the kept dimensions.

        The outputs of the inputs' shape decide, or else the first input that varies along both.
        """
        if self.n_kept == 1:
            return True
        if any(self.reduced[1]) and any(self.kept[1]):
            return self.reduced[1][0][0] <= self.kept[1][0][0]
        full = next((i for i, kind in enumerate(self.kinds) if kind == BOTH), None)
        return full is None or self.reduced[0][full][0] <= self.kept[0][full][0]

    @property
    def full_operands(self) -> int:
        """Number of operands that vary along both kept and reduced dimensions."""
        return self.kinds.count(BOTH) + self.kinds.count(SEGMENTED)

    @property
    def has_weights(self) -> bool:
        """Return whether an operand is the same for every row."""
        return REDUCED in self.kinds

    @property
    def segmented(self) -> bool:
        """Return whether an operand has one element for each segment of a row."""
        repeated = [
            kind in (REDUCED, SEGMENTED) and not own[0] for kind, own in zip(self.kinds, self.reduced[0], strict=True)
        ]
        return self.inner and any(repeated)

    @property
    def vector_width(self) -> int:
        """Elements of the first input in one load of a thread."""
        most = 16 // self.itemsize
        return most if self.aligned == 1 else max(1, min(self.aligned, most))

    @property
    def strides(self) -> tuple[Any, ...]:
        """Strides as the kernels take them: inputs kept and reduced, outputs kept and reduced, row outputs, index."""
        return (self.kept[0], self.reduced[0], self.kept[1], self.reduced[1], self.kept[2], self.index_strides)

    @property
    def sizes(self) -> tuple[int, int]:
        return self.n_kept, self.n_reduced

    @classmethod
    def of(
        cls,
        inputs: tuple[torch.Tensor, ...],
        dims: tuple[int, ...],
        outs: tuple[torch.Tensor, ...],
        kept_outs: tuple[torch.Tensor, ...],
        indexed: bool,
    ) -> RowSpace:
        """Return the space of inputs and `outs` of one shape, reduced over `dims`.

        `kept_outs` have the other dimensions, or all with the reduced ones of size 1. If `indexed`, the space includes
        the strides of an element's row-major index among the reduced dimensions.
        """
        shape = inputs[0].shape
        kept = [d for d in range(len(shape)) if d not in dims]
        full = [tensor.stride() for tensor in (*inputs, *outs)]
        small = [[out.stride(d) for d in kept] if out.dim() == len(shape) else list(out.stride()) for out in kept_outs]
        kept_sizes, kept_strides = collapse([shape[d] for d in kept], [[own[d] for d in kept] for own in full] + small)
        sizes = [shape[d] for d in dims]
        index_steps = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
        reduced_sizes, reduced_strides = collapse(
            sizes, [[own[d] for d in dims] for own in full] + ([index_steps] if indexed else [])
        )
        every = len(full)
        kinds = tuple([KEPT * any(kept_strides[i]) + REDUCED * any(reduced_strides[i]) or KEPT for i in range(every)])
        if 0 in sizes:
            # An empty row is never read, whatever its strides.
            kinds = (BOTH,) * every
        elif kinds[0] == BOTH and reduced_strides[0][0]:
            # An operand of one element a segment has no contiguous elements, and must not keep others from vectors.
            kinds = tuple(
                [SEGMENTED if kind == BOTH and not reduced_strides[i][0] else kind for i, kind in enumerate(kinds)]
            )
        wide = math.prod(shape) >= INT32_LIMIT or any(
            [
                span((*kept_sizes, *reduced_sizes), (*kept_strides[i], *reduced_strides[i])) >= INT32_LIMIT
                for i in range(every)
            ]
        )
        n, n_reduced = len(inputs), math.prod(reduced_sizes)
        row_strides = [own if kind == BOTH else [] for own, kind in zip(kept_strides, kinds, strict=False)]
        kept_strides = [_served(kept_sizes, own) for own in kept_strides]
        reduced_strides = [_served(reduced_sizes, own) for own in reduced_strides]
        # Outputs always need hints: those of a single row vary along the reduced dimensions alone.
        hinted = [i for i in range(every) if kinds[i] == BOTH or i >= n]
        segments = [step for i in hinted for step in reduced_strides[i][1:]]
        segments += reduced_sizes[:1] if segments else []
        space = cls(
            n_kept=math.prod(kept_sizes),
            n_reduced=n_reduced,
            shapes=(tuple(kept_sizes[:-1]), tuple(reduced_sizes[:-1])),
            kept=(_tuples(kept_strides[:n]), _tuples(kept_strides[n:every]), _tuples(kept_strides[every:])),
            reduced=(_tuples(reduced_strides[:n]), _tuples(reduced_strides[n:every])),
            index_strides=tuple(reduced_strides[every]) if indexed else (),
            kinds=kinds[:n],
            integer=tl.int64 if wide else tl.int32,
            itemsize=inputs[0].dtype.itemsize,
            aligned=_alignment([x.dtype.itemsize for x in inputs], row_strides, [math.prod(sizes), *segments]),
            segment=math.gcd(16, reduced_sizes[0]) if SEGMENTED in kinds else 1,
        )
        if not space.inner:
            both = [i for i, kind in enumerate(kinds) if kind == BOTH]
            steps = [step for i in both for step in (*kept_strides[i][1:], *reduced_strides[i])]
            contiguous = kept_sizes and all(kept_strides[i][0] == 1 for i in both)
            divisor = math.gcd(16, kept_sizes[0], *steps) if contiguous else 1
            odd = divisor == 1
            return space._replace(
                kept_alignment=divisor % 16 or 1,
                scalar_loads=space.itemsize == 2 and odd,
                odd_strides=bool(contiguous) and odd,
            )
        if space.n_kept == 1 and not space.aligned:
            # The stride between rows does not matter here. If it is not 1, Triton lays loads out as for several rows of
            # unknown starts.
            space = space._replace(kept=(tuple([(1,)] * n), tuple([(1,)] * (every - n)), space.kept[2]))
        # Strided elements that share a sector: neighbouring threads have to load neighbouring elements.
        gaps = [
            kind == BOTH and own[0] * x.dtype.itemsize < SECTOR and own[0] > 1
            for x, kind, own in zip(inputs, kinds, reduced_strides, strict=False)
        ]
        return space._replace(aligned=0) if any(gaps) else space


def _tuples(strides: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple([tuple(own) for own in strides])


def _served(sizes: Sequence[int], strides: list[int]) -> list[int]:
    """Return an operand's strides over dimensions of these sizes, or the first alone if it serves all of them."""
    steps = zip(sizes, strides, strides[1:], strict=False)
    return strides[:1] if all(step * size == following for size, step, following in steps) else strides


def _alignment(sizes: Sequence[int], strides: Sequence[Sequence[int]], lengths: Sequence[int]) -> int:
    """Return `RowSpace.aligned` of inputs with these element `sizes` and `strides` between rows.

    `lengths` are the length of a row and, if rows have segments, the length of a segment and the strides between these.
    """
    common = math.gcd(16, *lengths, *[step for own in strides for step in own])
    starts = all(step * size % 16 == 0 for size, own in zip(sizes, strides, strict=False) for step in own)
    # A row that starts at 16 bytes may end off that boundary, and a mask of single elements takes scalar loads. In one
    # long row only the last block has a mask.
    device, alone = devices.current, not any(strides)
    long = alone and lengths[0] > ROWS[device.kind].held_tiles * device.row_elements
    if 1 < common < 16 and all(common * size % (16 if long else 4) == 0 for size in sizes):
        return common
    whole = long or not alone or all(common * size % 16 == 0 for size in sizes)
    return 1 if starts and whole else 0
