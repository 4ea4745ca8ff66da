"""A space of rows: its kept and its reduced dimensions, and how operands lie over them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl

from tritonite import devices
from tritonite.engine.iteration import INT32_LIMIT, SECTOR, collapse, span
from tritonite.engine.rows.facts import BOTH, KEPT, PARTS, REDUCED
from tritonite.engine.rows.table import ROWS


class Space(NamedTuple):
    """The kept and the reduced dimensions, each collapsed and fastest first, and the operands' strides over them.

    `kept` and `reduced` hold strides of the inputs, of outputs of the same shape, and of those of the kept dimensions
    alone; `shapes` leave out the slowest dimension of each. An operand that one stride serves has no others, so that it
    is read in vectors whatever others need. Rows of inputs that are `aligned` start at 16 bytes, or at words of
    several elements; where it is above 1 it divides their length, all strides between them, and that of their parts.
    `part` divides the length of the parts, for operands with one element for each. `itemsize` is that of the first
    input's elements. Rows that are `shifted` begin in the middle of words of 16 bytes, `aligned` elements, by which
    they are read but for what is before the first and behind the last that is theirs alone. Of upright rows that are
    next to each other `beside` divides how many, and all strides, where 16 does not, which needs no hint. Where not
    even 2 divides those, such rows are `odd`, and elements of 16 bits are loaded `one_by_one`.
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
    part: int
    shifted: bool = False
    beside: int = 1
    one_by_one: bool = False
    odd: bool = False

    @property
    def inner(self) -> bool:
        """Whether elements that are reduced, and not those that are kept, are next to each other.

        They are in outputs, or else in the first input that varies along both.
        """
        if self.n_kept == 1:
            return True
        if any(self.reduced[1]) and any(self.kept[1]):
            return self.reduced[1][0][0] <= self.kept[1][0][0]
        full = next((i for i, kind in enumerate(self.kinds) if kind == BOTH), None)
        return full is None or self.reduced[0][full][0] <= self.kept[0][full][0]

    @property
    def full_operands(self) -> int:
        """How many operands have an element for every place, or one for parts of every row."""
        return self.kinds.count(BOTH) + self.kinds.count(PARTS)

    @property
    def has_weights(self) -> bool:
        """Whether an operand is the same for every row."""
        return REDUCED in self.kinds

    @property
    def in_parts(self) -> bool:
        """Whether an operand has one element for all of a part of every row."""
        once = [kind in (REDUCED, PARTS) and not own[0] for kind, own in zip(self.kinds, self.reduced[0], strict=True)]
        return self.inner and any(once)

    @property
    def word(self) -> int:
        """How many elements of the first input a thread loads at once."""
        most = 16 // self.itemsize
        return most if self.aligned == 1 else max(1, min(self.aligned, most))

    @property
    def strides(self) -> tuple[Any, ...]:
        """As the kernels take them."""
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
    ) -> Space:
        """The space of inputs and outputs of one shape that is reduced over `dims`.

        `kept_outs` have the other dimensions, or all with size 1. If `indexed`, elements have an index in their row.
        """
        shape = inputs[0].shape
        kept = [d for d in range(len(shape)) if d not in dims]
        full = [tensor.stride() for tensor in (*inputs, *outs)]
        small = [[out.stride(d) for d in kept] if out.dim() == len(shape) else list(out.stride()) for out in kept_outs]
        kept_sizes, kept_strides = collapse([shape[d] for d in kept], [[own[d] for d in kept] for own in full] + small)
        sizes = [shape[d] for d in dims]
        places = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
        reduced_sizes, reduced_strides = collapse(
            sizes, [[own[d] for d in dims] for own in full] + ([places] if indexed else [])
        )
        every = len(full)
        kinds = tuple([KEPT * any(kept_strides[i]) + REDUCED * any(reduced_strides[i]) or KEPT for i in range(every)])
        if 0 in sizes:
            # A row of no elements has none to read, whatever its strides say.
            kinds = (BOTH,) * every
        elif kinds[0] == BOTH and reduced_strides[0][0]:
            # Nothing of theirs is next to each other, so that the others may be read in vectors whatever their strides.
            kinds = tuple(
                [PARTS if kind == BOTH and not reduced_strides[i][0] else kind for i, kind in enumerate(kinds)]
            )
        wide = math.prod(shape) >= INT32_LIMIT or any(
            [
                span((*kept_sizes, *reduced_sizes), (*kept_strides[i], *reduced_strides[i])) >= INT32_LIMIT
                for i in range(every)
            ]
        )
        n, n_reduced = len(inputs), math.prod(reduced_sizes)
        apart = [own if kind == BOTH else [] for own, kind in zip(kept_strides, kinds, strict=False)]
        kept_strides = [_served(kept_sizes, own) for own in kept_strides]
        reduced_strides = [_served(reduced_sizes, own) for own in reduced_strides]
        # Results have hints whatever their kind: those of a single row vary along the reduced dimensions alone.
        hinted = [i for i in range(every) if kinds[i] == BOTH or i >= n]
        parts = [step for i in hinted for step in reduced_strides[i][1:]]
        parts += reduced_sizes[:1] if parts else []
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
            aligned=_alignment([x.dtype.itemsize for x in inputs], apart, [math.prod(sizes), *parts]),
            part=math.gcd(16, reduced_sizes[0]) if PARTS in kinds else 1,
        )
        if not space.inner:
            both = [i for i, kind in enumerate(kinds) if kind == BOTH]
            steps = [step for i in both for step in (*kept_strides[i][1:], *reduced_strides[i])]
            are_neighbours = kept_sizes and all(kept_strides[i][0] == 1 for i in both)
            divisor = math.gcd(16, kept_sizes[0], *steps) if are_neighbours else 1
            single = divisor == 1
            return space._replace(
                beside=divisor % 16 or 1,
                one_by_one=space.itemsize == 2 and single,
                odd=bool(are_neighbours) and single,
            )
        if space.n_kept == 1 and not space.aligned:
            # With a step to the next row its loads are laid out as those of several rows, whose starts nobody knows.
            space = space._replace(kept=(tuple([(1,)] * n), tuple([(1,)] * (every - n)), space.kept[2]))
        # Elements with others between them, in the same sector: threads next to each other have to load them at once.
        beside = [
            kind == BOTH and own[0] * x.dtype.itemsize < SECTOR and own[0] > 1
            for x, kind, own in zip(inputs, kinds, reduced_strides, strict=False)
        ]
        return space._replace(aligned=0) if any(beside) else space


def _tuples(strides: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple([tuple(own) for own in strides])


def _served(sizes: Sequence[int], strides: list[int]) -> list[int]:
    """The strides of an operand over dimensions of these sizes, or the one that serves them all."""
    steps = zip(sizes, strides, strides[1:], strict=False)
    return strides[:1] if all(step * size == following for size, step, following in steps) else strides


def _alignment(sizes: Sequence[int], strides: Sequence[Sequence[int]], parts: Sequence[int]) -> int:
    """`Space.aligned`, of inputs of elements of these `sizes`, and of all operands' strides between rows.

    `parts` are the length of rows and, where those are in several parts, the length of a part and the strides between.
    """
    common = math.gcd(16, *parts, *[step for own in strides for step in own])
    starts = all(step * size % 16 == 0 for size, own in zip(sizes, strides, strict=False) for step in own)
    # A row that starts at 16 bytes may end elsewhere, where a mask of single elements would take loads of them. That
    # matters little in one long row, all of whose blocks but the last have no mask.
    device, alone = devices.current, not any(strides)
    long = alone and parts[0] > ROWS[device.kind].held_tiles * device.row_elements
    if 1 < common < 16 and all(common * size % (16 if long else 4) == 0 for size in sizes):
        return common
    whole = long or not alone or all(common * size % 16 == 0 for size in sizes)
    return 1 if starts and whole else 0
