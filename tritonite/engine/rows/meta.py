"""The compile-time parameters of a kernel over rows, in one object."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from dataclasses import dataclass
from typing import Any

import triton.language as tl

# Kinds of operands: one varies along the kept dimensions only, along the reduced ones only, or along both. SEGMENTED
# varies along both, with one element for each segment of a row, as a group norm's weight has one for each channel.
KEPT, REDUCED, BOTH, SEGMENTED = 1, 2, 3, 4


@dataclass(frozen=True)
class RowsMeta:
    """The compile-time parameters of a kernel over rows.

    `Reduction` and `RowTransform` document the functions. Without a `leaf` the inputs are states; without a `project`
    the kernel writes states. Triton's caches identify a function within an object by its name alone, so `__repr__`,
    which the caches use, includes a digest of the functions' sources.
    """

    # The functions of the reduction, the identity of `combine`, the formula of a row operator, and the stages.
    leaf: Any
    combine: Any
    follow: Any
    project: Any
    init: tuple[Any, ...]
    apply: Any = None
    stages: tuple[Any, ...] = ()
    gather: Any = None
    grow: Any = None
    # The count of the call's numbers that `leaf` takes, and that `project` and `apply` take.
    leaf_numbers: int = 0
    numbers: int = 0
    # The dtypes of the state, the kinds of the operands, and the dtypes that operands are converted to.
    states: tuple[Any, ...] = ()
    kinds: tuple[int, ...] = ()
    dtypes: tuple[Any, ...] = ()
    # `leaf` takes the first `leaf_operands` operands, or what a prologue makes of them.
    leaf_operands: int = 1
    # A row has `results` results. `apply` takes the first `applied`; those numbered `written` are stored.
    results: int = 0
    applied: int = 0
    written: tuple[int, ...] = ()
    # `RowSpace.aligned`, and a divisor of the length of a row's segments.
    aligned: int = 1
    segment: int = 1
    # Whether rows start off a vector boundary, and the metadata for their elements outside whole vectors.
    misaligned: bool = False
    edges: Any = None
    # `RowSpace.kept_alignment`, and whether a loop keeps elements that are loaded one by one in registers of their own.
    kept_alignment: int = 1
    scalar_loads: bool = False
    # Whether this is a column reduction whose elements may be combined in the order of a block's layout.
    column_reduction: bool = False
    # Whether a column reduction loads its next block before it combines the present one.
    prefetch: bool = False
    # The elements of a row that stages reduce as one group within a thread, and whether they are contiguous.
    group: int = 1
    consecutive: bool = True
    # The integer type of offsets.
    index: Any = tl.int32
    # The (rows, columns) of a block, and for each of the two whether every block is full.
    block: tuple[int, int] = (1, 1)
    whole: tuple[bool, bool] = (False, False)
    # Whether a program reads one block of each row; and whether that is the row, which fills more than half of it.
    single_block: bool = False
    held: bool = False
    # Whether a thread issues all loads of its block before it uses any.
    loads_first: bool = False
    # Whether each row of a block is within one thread, and whether such rows are contiguous with odd strides.
    row_per_thread: bool = False
    odd_strides: bool = False
    # The programs that share a cooperative row.
    programs_per_row: int = 1
    # The blocks of a program where loops over them are unrolled, else 0.
    unrolled: int = 0
    # The cache modifier of operands that are the same for every row.
    weight_modifier: str = ""
    # Whether reductions combine elements in one order, whatever the layout.
    invariant: bool = False
    # Pointwise programs before and after the formulas (`fusion.py`).
    prologue: Any = None
    epilogue: Any = None

    @property
    def leaf_values(self) -> int:
        """The number of values that `leaf` takes."""
        return self.leaf_operands if self.prologue is None else self.prologue.leaf_values

    @property
    def apply_values(self) -> int:
        """The number of values that `apply` takes."""
        return len(self.kinds) if self.prologue is None else self.prologue.apply_values

    def of_states(self, **changes: Any) -> RowsMeta:
        """Return the metadata of the same reduction over states that other programs have stored."""
        count = len(self.states)
        operands = {"kinds": (BOTH,) * count, "dtypes": self.states, "leaf_operands": count, "aligned": 1}
        functions = {"leaf": None, "follow": self.combine, "stages": (), "gather": None, "grow": None, "prologue": None}
        return dataclasses.replace(self, **{**operands, **functions, "column_reduction": False, **changes})

    @functools.cached_property
    def _digest(self) -> str:
        fields = [getattr(self, field.name) for field in dataclasses.fields(self)]
        nested = [value for stage in self.stages for value in vars(stage).values()]
        sources = [getattr(value, "cache_key", "") for value in (*fields, *nested)]
        return hashlib.sha256(repr((fields, sources)).encode()).hexdigest()[:24]

    def __repr__(self) -> str:
        return f"RowsMeta_{self._digest}"
