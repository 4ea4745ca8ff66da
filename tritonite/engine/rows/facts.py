"""What a kernel over rows is compiled for, in one object."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from dataclasses import dataclass
from typing import Any

import triton.language as tl

# Whether an operand varies along the kept dimensions, along the reduced ones, or along both; or along both, but with
# one element for all of a part of a row, as a group norm's weights have one for a channel.
KEPT, REDUCED, BOTH, PARTS = 1, 2, 3, 4


@dataclass(frozen=True)
class Facts:
    """Everything that a kernel over rows is compiled for.

    Of the functions `Reduction` and `RowTransform` tell; without a `leaf` the inputs are states, and without `project`
    states are what is written. Triton knows functions within an object by name alone: `__repr__`, which its caches ask,
    has their source in it.
    """

    # The functions, how many of the call's numbers `leaf` and the others take, and `init`, `combine`'s identity.
    leaf: Any
    combine: Any
    follow: Any
    project: Any
    init: tuple[Any, ...]
    apply: Any = None
    stages: tuple[Any, ...] = ()
    gather: Any = None
    grow: Any = None
    leaf_numbers: int = 0
    numbers: int = 0
    # The dtypes of states, the operands' kinds and the dtypes that they are read as, and how many `leaf` takes.
    states: tuple[Any, ...] = ()
    kinds: tuple[int, ...] = ()
    dtypes: tuple[Any, ...] = ()
    folded: int = 1
    # How many results a row has, how many of them `apply` takes, and which are written.
    results: int = 0
    applied: int = 0
    written: tuple[int, ...] = ()
    # `Space.aligned`, what divides the length of rows' parts, and the integers that offsets are computed in.
    aligned: int = 1
    part: int = 1
    # Whether a row begins in the middle of a word of so many elements; and the facts of what is in no whole word.
    shifted: bool = False
    edges: Any = None
    # `Space.beside`; and `Space.one_by_one`, where a loop is to have such elements in registers of their own.
    beside: int = 1
    one_by_one: bool = False
    # Whether rows stand upright, and their elements may be combined in the order of a block's layout; and whether the
    # next block of them is loaded before one is combined.
    upright: bool = False
    ahead: bool = False
    # How many of a row's elements stages group, which a thread has, and whether they are next to each other.
    group: int = 1
    consecutive: bool = True
    index: Any = tl.int32
    # A block, in which of its dimensions no block goes beyond the end, whether a program has one block of a row, and
    # whether that is the whole row, which fills more than half of it; and whether a thread begins all of that block's
    # loads before anything is made of one.
    block: tuple[int, int] = (1, 1)
    whole: tuple[bool, bool] = (False, False)
    once: bool = False
    held: bool = False
    at_once: bool = False
    # Whether each row of a block is in one thread; and whether such rows are next to each other at odd strides.
    in_threads: bool = False
    odd: bool = False
    # How many programs share a row; how many blocks all of them have, if loops over those are unrolled; and the cache
    # modifier for what is the same in every row.
    sharing: int = 1
    unrolled: int = 0
    common: str = ""
    # Whether what is folded is folded in one order, whatever the layout.
    invariant: bool = False

    def of_states(self, **changes: Any) -> Facts:
        """The same reduction for rows of states that other programs have left."""
        count = len(self.states)
        operands = {"kinds": (BOTH,) * count, "dtypes": self.states, "folded": count, "aligned": 1}
        functions = {"leaf": None, "follow": self.combine, "stages": (), "gather": None, "grow": None, "upright": False}
        return dataclasses.replace(self, **{**operands, **functions, **changes})

    @functools.cached_property
    def _digest(self) -> str:
        fields = [getattr(self, field.name) for field in dataclasses.fields(self)]
        nested = [value for stage in self.stages for value in vars(stage).values()]
        sources = [getattr(value, "cache_key", "") for value in (*fields, *nested)]
        return hashlib.sha256(repr((fields, sources)).encode()).hexdigest()[:24]

    def __repr__(self) -> str:
        return f"Facts_{self._digest}"
