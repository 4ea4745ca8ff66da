"""Symbols: numbers that a plan does not hold, because their values differ between the calls that it serves."""

from __future__ import annotations

import enum
import functools
import math
from typing import Any, NamedTuple

import torch

from tritonite.runtime.nested import retyped


class SlotKind(enum.IntEnum):
    """The part of an argument's number that a key holds, as in state.h of the native dispatcher.

    PINNED: its value, as for arguments that are not numbers. TYPE_ONLY: its type. ZERO_OR_ONE: its type, and whether it
    is 0, 1 or neither. READ_ON_HOST: a tensor on the CPU from which the host function reads numbers; a call with one
    has no key.
    """

    PINNED = 0
    TYPE_ONLY = 1
    ZERO_OR_ONE = 2
    READ_ON_HOST = 3


class Symbol:
    """A number whose value differs between the calls of one plan; `value` is the recorded call's.

    A host function may pass a symbol to kernels. Computing with a symbol or comparing it would decide for all later
    calls, and raises TypeError. A declaration pins the arguments that its host function must look at.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def _refuse(self, *_: Any) -> Any:
        raise TypeError(f"the host function looks at {type(self).__name__}({self.value}), which is not pinned")

    __bool__ = __float__ = __int__ = __index__ = __hash__ = _refuse  # type: ignore[assignment]
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __neg__ = __abs__ = __pow__ = __rpow__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuse


class Limits(NamedTuple):
    """A range of numbers.

    An integer lies in [low, high]. A float is at most `largest` in absolute value; unless `finite`, infinities and nan
    are also in the range. Both are at least `least`.
    """

    low: int
    high: int
    largest: float
    finite: bool = False
    least: float = -math.inf

    def and_(self, other: Limits) -> Limits:
        """Return the intersection of two ranges."""
        low, high, largest = max(self.low, other.low), min(self.high, other.high), min(self.largest, other.largest)
        return Limits(low, high, largest, self.finite or other.finite, max(self.least, other.least))

    def hold(self, value: Any) -> bool:
        """Return whether a number is in the range."""
        if isinstance(value, complex) or value < self.least:
            return False
        if isinstance(value, float):
            return abs(value) <= self.largest or not (self.finite or math.isfinite(value))
        return self.low <= value <= self.high


# -2**63 is left out because its negation is not an int64.
_LEAST, _MOST = 1 - 2**63, 2**63 - 1


@functools.lru_cache(maxsize=64)
def limits_of(dtype: torch.dtype) -> Limits:
    """Return the range of `dtype`, ignoring precision. ATen has no one rule for numbers outside the range."""
    if dtype.is_floating_point:
        largest = torch.finfo(dtype).max
        return Limits(max(_LEAST, -int(largest)), min(_MOST, int(largest)), largest)
    info = torch.iinfo(torch.int64 if dtype is torch.bool else dtype)
    return Limits(info.min, info.max, math.inf)


class Number(Symbol):
    """A number among a call's arguments.

    `argument` is the index in the schema, `item` the index in a list of numbers or -1. If `keyed`, the key says whether
    the number is 0, 1 or neither. A plan serves only numbers within `limits`.
    """

    __slots__ = ("argument", "item", "keyed", "limits")

    def __init__(self, value: bool | int | float, argument: int, item: int = -1, keyed: bool = False) -> None:
        super().__init__(value)
        self.argument, self.item, self.keyed = argument, item, keyed
        self.limits: Limits | None = None


class Drawn(Symbol):
    """The seed (`which` 0) or the offset (1) of the draw number `draw` on the call's generator."""

    __slots__ = ("draw", "which")

    def __init__(self, value: int, draw: int, which: int) -> None:
        super().__init__(value)
        self.draw, self.which = draw, which


class Size(Symbol):
    """A data-dependent size, number `index` of those that the call reads.

    Allowed as a size or stride of `empty_strided`, as a kernel argument declared `tl.int64`, as `blocks` in a grid, and
    as a result.
    """

    __slots__ = ("index",)

    def __init__(self, value: int, index: int) -> None:
        super().__init__(value)
        self.index = index

    def blocks(self, block: int) -> Blocks:
        """Return the number of blocks of `block` elements that cover the size, for a grid."""
        return Blocks(self, block)


class Blocks(Symbol):
    """A data-dependent extent of a grid: ceil(size / block)."""

    __slots__ = ("block", "size")

    def __init__(self, size: Size, block: int) -> None:
        super().__init__(-(-size.value // block))
        self.size, self.block = size, block


def number_type(value: Any) -> type:
    """Return the type of a number: bool, int, float or complex. Allowed for symbols, because the key has the type."""
    return type(value.value) if isinstance(value, Symbol) else type(value)


def zero_or_one(value: Any) -> int | None:
    """Return 0 or 1 if the number equals it, else None. Allowed for numbers declared `pin_zero_or_one`."""
    if isinstance(value, Number) and value.keyed:
        value = value.value
    return 0 if value == 0 else 1 if value == 1 else None


def is_negative_zero(value: Any) -> bool:
    """Return whether a number is -0.0. Allowed for numbers declared `pin_zero_or_one`."""
    value = value_of(value)
    return value == 0 and isinstance(value, float) and math.copysign(1.0, value) < 0


def value_of(value: Any) -> Any:
    """Return a value with symbols replaced by this call's numbers. For launching only, never for decisions."""
    if isinstance(value, Symbol):
        return value.value
    return retyped(value, [value_of(item) for item in value]) if isinstance(value, tuple) else value
